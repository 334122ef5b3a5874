"""Made prompts of a decoder, by which its reduced form is compared with the model as given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.frontend.decoder_cache import is_cache, read_past
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.index_flow import required_ranges
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.shapes import dtype_name
from offramp.engine.answers.differences import compare

_WIDTHS = (3, 8, 13)
"""Lengths that batches of prompts are padded to."""
_PROMPTS = 6
"""Prompts of a batch."""
_NAMED = 4
"""Tokens that a message names at most."""
_LOOKED_AT = 1000
"""Samples whose ends are looked at."""
_A_RUN = 3
"""So many times the same token at the end is padding, and no prompt's own."""


class PromptInputs(NamedTuple):
    """The inputs of a decoder that hold prompts."""

    tokens: str
    """[batch, tokens] of ids, or [batch, tokens, width] of what stands for them."""
    mask: str | None
    """[batch, tokens], 1 where a token counts."""


class PromptBatch(NamedTuple):
    """Some prompts, padded to one length."""

    feeds: Mapping[str, NDArray[Any]]
    """By input; a past of length 0 among them, where the model takes one."""
    last: NDArray[np.intp]
    """By prompt, the place of its last token that counts."""
    width: int
    """Length that they are padded to."""


def find_prompts(proto: onnx.ModelProto) -> PromptInputs:
    """Find the input with the tokens, and the mask; ModelError if no input can be the former."""
    ranks = {
        info.name: len(info.type.tensor_type.shape.dim)
        for info in proto.graph.input
        if not is_cache(info.name)
    }
    masks = [name for name, rank in ranks.items() if rank == 2 and "mask" in name.lower()]
    others = [name for name in ranks if name not in masks and "position" not in name.lower()]
    ids = [name for name in others if ranks[name] == 2 and "type" not in name.lower()]
    embedded = [name for name in others if ranks[name] == 3]
    if not ids and not embedded:
        raise ModelError(
            f"no input is [batch, tokens] of ids; the inputs are {', '.join(ranks) or 'none'}; "
            "export a decoder that takes input_ids"
        )
    return PromptInputs((ids or embedded)[0], masks[0] if masks else None)


def check_lengths(inputs: Sequence[TensorSpec], data: Dataset) -> None:
    """Refuse prompts that end with padding, by a DataError, where no input is a mask.

    The last position answers then, whatever stands there. Padding is taken to be a token that many
    times in a row, and differently often, ends the first samples.
    """
    if any("mask" in spec.name.lower() and len(spec.shape) == 2 for spec in inputs):
        return
    specs = [s for s in inputs if len(s.shape) == 2 and "position" not in s.name.lower()]
    for spec in specs:
        ids = data.column(spec.name, slice(_LOOKED_AT))
        ends = np.argmax(ids[:, ::-1] != ids[:, -1:], axis=1)
        ends[(ids == ids[:, -1:]).all(axis=1)] = ids.shape[1]
        padded = ends >= _A_RUN
        for token in np.unique(ids[padded, -1]):
            runs = np.unique(ends[padded & (ids[:, -1] == token)])
            if len(runs) > 1:
                raise DataError(
                    f"prompts differ in length: `{spec.name}` ends with the token {token} "
                    f"{runs[0]} to {runs[-1]} times, and no input is a mask that says which tokens "
                    "count; export the decoder with attention_mask, or give prompts of one length"
                )


def make_prompts(proto: onnx.ModelProto, inputs: PromptInputs) -> list[PromptBatch]:
    """Make random prompts of several lengths, padded on the right and on the left.

    Without a mask all of a batch have one length.
    """
    rng = np.random.default_rng(0)
    infos = {info.name: info.type.tensor_type.shape.dim for info in proto.graph.input}
    batch, tokens, *_ = infos[inputs.tokens]
    count = batch.dim_value if batch.HasField("dim_value") else _PROMPTS
    widths = (tokens.dim_value,) if tokens.HasField("dim_value") else _WIDTHS
    return [
        _padded(proto, inputs, mask, rng)
        for width in widths
        for mask in _masks(rng, count, width, several=inputs.mask is not None)
    ]


def _masks(
    rng: np.random.Generator, count: int, width: int, *, several: bool
) -> Iterator[NDArray[np.int64]]:
    """Yield masks [count, width] of prompts that end, or begin, with padding."""
    if not several:
        yield np.ones((count, width), np.int64)
        return
    lengths = rng.integers(1, width + 1, count)
    lengths[0] = width
    right = (np.arange(width) < lengths[:, None]).astype(np.int64)
    yield right
    yield np.ascontiguousarray(right[:, ::-1])


def _padded(
    proto: onnx.ModelProto,
    inputs: PromptInputs,
    mask: NDArray[np.int64],
    rng: np.random.Generator,
) -> PromptBatch:
    count, width = mask.shape
    graph = Dataflow(proto.graph)
    feeds: dict[str, NDArray[Any]] = {}
    for info in proto.graph.input:
        name, dims = info.name, info.type.tensor_type.shape.dim
        dtype = np.dtype(dtype_name(info.type.tensor_type.elem_type))
        sizes = [count, width, *(max(d.dim_value, 1) for d in dims[2:])][: len(dims)]
        if is_cache(name):
            past = read_past(info)
            shape = list(past.sizes)
            shape[past.batch_axis] = count
            value: NDArray[Any] = np.zeros(shape)
        elif name == inputs.mask:
            value = mask
        elif name == inputs.tokens and not np.issubdtype(dtype, np.floating):
            legal = required_ranges(proto, graph).get(name)
            value = legal.draw(rng, sizes) if legal else rng.integers(0, 2, sizes)
        elif np.issubdtype(dtype, np.floating):
            value = rng.standard_normal(sizes)
        elif "position" in name.lower():
            value = np.maximum(mask.cumsum(axis=1) - 1, 0)
        else:
            value = np.zeros(sizes)
        feeds[name] = value.astype(dtype)
    last: NDArray[np.intp] = (mask * np.arange(width)).max(axis=1)
    return PromptBatch(feeds, last, width)


def source_answers(
    proto: onnx.ModelProto, batches: Sequence[PromptBatch], tokens: Sequence[int]
) -> list[NDArray[Any]]:
    """Give the logits of some tokens behind the last one: by batch, [prompts, tokens].

    ModelError if the model fails, its one output has another form, or the tokens are not in it.
    """
    output = proto.graph.output[0].name
    found = []
    for batch, values in zip(batches, _run(proto, batches), strict=True):
        shape = list(values[output].shape)
        if values[output].ndim != 3 or shape[1] != batch.width:
            raise ModelError(
                f"output {output!r} has shape {shape} for {len(batch.last)} prompts of "
                f"{batch.width} tokens, expected [batch, tokens, vocabulary]: export the decoder "
                "with the logits of all places, or name their output by --answer"
            )
        outside = [token for token in tokens if not 0 <= token < shape[2]]
        if outside:
            raise ModelError(
                f"--answer-tokens: {', '.join(map(str, outside[:_NAMED]))} is no token of the "
                f"model, expected ids from 0 to {shape[2] - 1}; ask the model's tokenizer for the "
                "ids of the answers"
            )
        rows = np.arange(len(batch.last))[:, None]
        found.append(values[output][rows, batch.last[:, None], np.array(tokens)])
    return found


def check_equal(
    proto: onnx.ModelProto, batches: Sequence[PromptBatch], wanted: Sequence[NDArray[Any]]
) -> float:
    """Compare a reduced model's one output with what the source answers.

    Gives the largest relative difference; ModelError if it is more than rounding.
    """
    output, allowed = proto.graph.output[0].name, rounding_of(proto).batches
    worst = 0.0
    for values, right in zip(_run(proto, batches), wanted, strict=True):
        difference = compare(values[output], right)
        if not difference.share <= allowed:
            raise ModelError(
                "the logits of the answers' tokens alone differ from the model's by "
                f"{difference.describe()}; {allowed:.0e} is allowed. This is a defect, report it "
                "with the model"
            )
        worst = max(worst, difference.share)
    return worst


def _run(
    proto: onnx.ModelProto, batches: Sequence[PromptBatch]
) -> Iterator[Mapping[str, NDArray[Any]]]:
    try:
        runner = GraphRunner(proto)
        for batch in batches:
            yield runner.run(batch.feeds)
    except RuntimeError as error:
        raise ModelError(
            f"the decoder fails on random prompts; ONNX Runtime says: {error}"
        ) from error
