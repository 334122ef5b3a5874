"""Decoders that answer with one token: the model is reduced to the logits of a few tokens.

A decoder [batch, tokens, vocabulary] that answers yes or no needs no cache, and only two logits:
those of the words yes and no at the last position. Checking exits against 128,000 words at every
layer made exits of Llama slower than the model at batch 1 (E3, 5.1.3); against two words the cost
is negligible. The reduced model's answer is [batch, answers]. It equals the logits of the answer
tokens that the original model computes at the last token that is not padding. This is tested on
generated prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle import TensorSpec
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.common.tensors import array_of
from offramp.compiler.frontend.answer import keep_answer
from offramp.compiler.frontend.decoder_cache import (
    check_no_fused_cache,
    drop_cache,
    is_cache,
    read_past,
)
from offramp.compiler.frontend.preparation import remove_unused
from offramp.compiler.graphs.graph import (
    Dataflow,
    Operator,
    constant_tensor,
    copied,
    default_opset,
    integer,
    refill,
    rename_tensor,
    sort_operators,
)
from offramp.compiler.graphs.index_flow import IndexRange, required_ranges
from offramp.compiler.graphs.row_wise import ELEMENTWISE, RowWise, Size
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.shapes import annotate, declared_types, dtype_name, forget_shapes
from offramp.engine.answers.differences import compare

_log = logging.getLogger(__name__)

_LOGITS = "logits"
"""Name that exporters of decoders use for the output."""
_SEEN_THROUGH = ELEMENTWISE | {"Reshape", "Slice"}
"""Operators that may follow the projection (a MatMul or Gemm) to the vocabulary."""


def answer_with_tokens(proto: onnx.ModelProto, tokens: Sequence[int], answer: str | None) -> None:
    """Reduce a decoder, in place, to its logits of some tokens at the last position that counts.

    ``tokens`` are the columns of the answer, in order; ``answer`` names the output if it is not
    ``logits``. ModelError if the tokens are not distinct ids of the vocabulary, if the model has no
    such output or has a fused cache, or if the reduced model answers differently.
    """
    _check_distinct(tokens)
    check_no_fused_cache(proto)
    _name_sizes(proto)
    prompts = find_prompts(proto)
    keep_answer(proto, _find_output(proto, answer))
    output = proto.graph.output[0].name
    remove_unused(proto)
    _check_rank(proto, output)
    made = make_prompts(proto, prompts)
    wanted = source_answers(proto, made, tokens)  # before the graph changes
    dropped = drop_cache(proto, prompts.tokens)
    _share_size(proto, prompts)
    remove_unused(proto)
    # Types are inferred on a copy: the model's stated shapes are no longer true after this.
    stated = copied(proto)
    forget_shapes(stated.graph)
    annotate(stated)
    _Reduction(proto, declared_types(stated), prompts, output).reduce(tokens)
    del stated
    difference = check_equal(proto, made, wanted)
    _log.info(
        "%s is reduced to the logits of tokens %s after the last one%s; equal on %d prompts of "
        "%d lengths (largest difference %.1e of its scale)",
        output,
        ", ".join(map(str, tokens)),
        f", without {dropped} inputs of a cache" if dropped else "",
        sum(map(len, wanted)),
        len({batch.width for batch in made}),
        difference,
    )
    if prompts.mask is None:
        _log.info("no input is a mask: the last position answers, so prompts end there")


def _check_distinct(tokens: Sequence[int]) -> None:
    if len(tokens) < 2:
        raise ModelError(
            f"--answer-tokens {','.join(map(str, tokens))}: {len(tokens)} token, expected two or "
            "more to choose between, such as those of yes and no"
        )
    twice = [t for i, t in enumerate(tokens) if t in tokens[:i]]
    if twice:
        raise ModelError(
            f"--answer-tokens: {twice[0]} is named twice; each token is a separate answer, name "
            "it once"
        )


def _name_sizes(proto: onnx.ModelProto) -> None:
    for info in proto.graph.input:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = f"{info.name}_{axis}"


def _find_output(proto: onnx.ModelProto, answer: str | None) -> str | None:
    """Return the output that ``answer`` names, else ``logits``, else the only one but caches."""
    if answer is not None:
        return answer
    names = [info.name for info in proto.graph.output]
    if _LOGITS in names:
        return _LOGITS
    others = [name for name in names if not is_cache(name)]
    return others[0] if len(others) == 1 else None


def _check_rank(proto: onnx.ModelProto, output: str) -> None:
    found = proto.graph.output[0]
    shape = found.type.tensor_type.shape
    if found.type.tensor_type.HasField("shape") and len(shape.dim) != 3:
        sizes = ", ".join(d.dim_param or str(d.dim_value) for d in shape.dim)
        raise ModelError(
            f"output {output!r} has shape [{sizes}], expected [batch, tokens, "
            "vocabulary] for --answer-tokens: export the decoder with its logits, or name their "
            "output by --answer; a model that answers [batch, classes] needs no --answer-tokens"
        )


def _share_size(proto: onnx.ModelProto, prompts: PromptInputs) -> None:
    """Give mask and positions the length of the prompts; they may also have counted a past."""
    infos = {info.name: info for info in proto.graph.input}
    sizes = infos[prompts.tokens].type.tensor_type.shape.dim
    for name, info in infos.items():
        shape = info.type.tensor_type.shape.dim
        if name == prompts.mask or (len(shape) == 2 and not shape[1].HasField("dim_value")):
            shape[1].CopyFrom(sizes[1])


class _Reduction:
    """A decoder's graph, the end of which is being reduced to the logits of some tokens."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        types: Mapping[str, Any],
        prompts: PromptInputs,
        output: str,
    ) -> None:
        self._graph, self._types, self._prompts = proto.graph, types, prompts
        self._opset = default_opset(proto)
        self._output = output
        self._flow = Dataflow(proto.graph)
        self._weights = {t.name: t for t in proto.graph.initializer}
        found = (constant_tensor(node) for node in proto.graph.node)
        self._weights |= {tensor.name: tensor for tensor in found if tensor is not None}
        self._nodes: list[onnx.NodeProto] = []
        shape = types[prompts.tokens].shape
        self._sizes: tuple[Size, Size] = (shape[0], shape[1])
        self._rows = RowWise(self._flow, types, self._sizes, self._small_values())
        self._behind = self._rows.upstream(self._output)

    def reduce(self, tokens: Sequence[int]) -> None:
        """Keep only the last token before the graph's end, and only the logits of the answers."""
        columns = self._columns_of(tokens)
        last = self._last_token()
        gathered: dict[str, str] = {}
        replaced: dict[str, onnx.NodeProto] = {}
        for op in self._flow.operators:
            if op.writes and op.writes[0] in self._behind:
                replaced[op.writes[0]] = self._for_one(op, columns, gathered, last, len(tokens))
        refill(
            self._graph.node,
            [replaced.get(node.output[0], node) for node in self._graph.node] + self._nodes,
        )
        self._finish(len(tokens))

    def _columns_of(self, tokens: Sequence[int]) -> dict[tuple[str, str], str]:
        """Reduce constants from the projection to the output to the columns of the answer tokens.

        Returns the name of each new constant, by the first output of the operator that reads it and
        the name of the original constant.
        """
        vocabulary = self._rows.width(self._output)
        pending, done = [self._output], set[str]()
        changed: dict[tuple[str, str], str] = {}
        while pending:
            tensor = pending.pop()
            op = self._flow.producers.get(tensor)
            if op is None or op.writes[0] not in self._behind:
                raise ModelError(self._no_projection(op))
            if op.writes[0] in done:
                continue
            done.add(op.writes[0])
            if op.kind in {"MatMul", "Gemm"}:
                axis = 0 if op.kind == "Gemm" and integer(op.proto, "transB") else 1
                second, *bias = op.proto.input[1:]
                changed[op.writes[0], second] = self._taken(second, axis, tokens)
                wide = [b for b in bias if b and self._rows.width(b) == vocabulary]
                changed |= {(op.writes[0], b): self._taken(b, -1, tokens) for b in wide}
            elif op.kind in _SEEN_THROUGH:
                wide = [t for t in op.reads if self._rows.width(t) == vocabulary]
                shapes = op.reads[1:] if op.kind in {"Reshape", "Slice"} else ()
                pending += [t for t in wide if t in self._flow.variable and t not in shapes]
                fixed = [t for t in wide if t not in self._flow.variable and t not in shapes]
                changed |= {(op.writes[0], t): self._taken(t, -1, tokens) for t in fixed}
            else:
                raise ModelError(self._no_projection(op))
        self._ends = frozenset(done)
        return changed

    def _no_projection(self, op: Operator | None) -> str:
        found = "nothing" if op is None else op.label
        return (
            f"output {self._output!r} has no projection to the vocabulary that can be cut: found "
            f"{found}, expected a MatMul or Gemm with constant weights, and only element by "
            "element after it; export the decoder with its logits as the output, in float32 or "
            "float16"
        )

    def _taken(self, tensor: str, axis: int, tokens: Sequence[int]) -> str:
        """Keep only the columns of some tokens in a constant, which may be stored or computed."""
        ids, name = np.array(tokens, np.int64), f"{tensor}/tokens"
        while name in self._weights:
            name += "'"
        if tensor in self._weights:
            value = array_of(self._weights[tensor]).take(ids, axis)
            return self._constant(name, value)
        maker = self._flow.producers[tensor].proto
        if maker.op_type == "Transpose":
            given = {a.name: helper.get_attribute_value(a) for a in maker.attribute}
            order = given.get("perm") or list(range(len(self._types[tensor].shape)))[::-1]
            inner = self._taken(maker.input[0], order[axis], tokens)
            return self._add("Transpose", [inner], name, perm=order)
        return self._add("Gather", [tensor, self._constant(f"{name}/ids", ids)], name, axis=axis)

    def _last_token(self) -> str:
        """Add the position of each sample's last token that counts, int64 [batch, 1, 1]."""
        prefix, mask = f"{self._output}/last", self._prompts.mask
        read = mask or self._prompts.tokens
        self._add("Shape", [read], f"{prefix}/shape")
        one = self._constant(f"{prefix}/1", np.array(1, np.int64))
        length = self._add("Gather", [f"{prefix}/shape", one], f"{prefix}/length")
        zero = self._constant(f"{prefix}/0", np.array(0, np.int64))
        target = self._constant(f"{prefix}/target", np.array([-1, 1, 1], np.int64))
        if mask is None:
            place = self._add("Sub", [length, one], f"{prefix}/place")
            front = self._constant(f"{prefix}/front", np.array([0], np.int64))
            batch = self._add("Gather", [f"{prefix}/shape", front], f"{prefix}/batch")
            places = self._add("Expand", [place, batch], f"{prefix}/places")
            return self._add("Reshape", [places, target], f"{prefix}/index")
        places = self._add("Range", [zero, length, one], f"{prefix}/places")
        # In single precision, as not every runtime reduces integers; exact up to 16 million.
        counted = self._add("Cast", [mask], f"{prefix}/mask", to=TensorProto.FLOAT)
        numbers = self._add("Cast", [places], f"{prefix}/numbers", to=TensorProto.FLOAT)
        weighted = self._add("Mul", [counted, numbers], f"{prefix}/weighted")
        axes = {"axes": [1]} if self._opset < 18 else {}
        along = [] if axes else [self._constant(f"{prefix}/axes", np.array([1], np.int64))]
        top = self._add("ReduceMax", [weighted, *along], f"{prefix}/top", keepdims=1, **axes)
        place = self._add("Cast", [top], f"{prefix}/place", to=TensorProto.INT64)
        return self._add("Reshape", [place, target], f"{prefix}/index")

    def _for_one(
        self,
        op: Operator,
        columns: Mapping[tuple[str, str], str],
        gathered: dict[str, str],
        last: str,
        answers: int,
    ) -> onnx.NodeProto:
        """Return an operator, changed to run on only one token of each sample."""
        node = copied(op.proto)
        for i, tensor in enumerate(node.input):
            if (op.writes[0], tensor) in columns:
                node.input[i] = columns[op.writes[0], tensor]
            elif self._is_border(tensor) and not (i and op.kind == "Reshape"):
                if tensor not in gathered:
                    gathered[tensor] = self._add(
                        "GatherND", [tensor, last], f"{tensor}/last", batch_dims=1
                    )
                node.input[i] = gathered[tensor]
        if op.kind == "Reshape":
            flat = self._rows.rows_of(op.writes[0]) == "flat"
            width = answers if op.writes[0] in self._ends else self._rows.width(op.writes[0])
            target = np.array([-1, width] if flat else [-1, 1, width], np.int64)
            node.input[1] = self._constant(f"{op.writes[0]}/one_token", target)
        return node

    def _is_border(self, tensor: str) -> bool:
        """Return whether a tensor has all tokens, and is read where only one token is needed."""
        maker = self._flow.producers.get(tensor)
        inside = maker is not None and maker.writes[0] in self._behind
        return not inside and self._rows.rows_of(tensor) is not None

    def _finish(self, answers: int) -> None:
        """Give the answer [batch, answers] the output's old name, and remove outdated shapes."""
        graph, inner = self._graph, f"{self._output}/one_token"
        rename_tensor(graph, self._output, inner)
        axis = self._constant(f"{self._output}/axis", np.array([1], np.int64))
        squeeze = helper.make_node("Squeeze", [inner, axis], [self._output], name=self._output)
        graph.node.append(squeeze)
        forget_shapes(graph)
        kind = graph.output[0].type.tensor_type.elem_type
        batch = self._sizes[0]
        refill(graph.output, [helper.make_tensor_value_info(self._output, kind, [batch, answers])])
        sort_operators(graph)

    def _small_values(self) -> dict[str, NDArray[Any]]:
        small = (t for t in self._weights.values() if np.prod(t.dims, dtype=np.int64) <= 8)
        return {tensor.name: array_of(tensor) for tensor in small}

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        tensor = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        self._graph.initializer.append(tensor)
        return name

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output


_WIDTHS = (3, 8, 13)
"""Lengths in tokens that the batches of test prompts are padded to."""
_PROMPTS = 6
"""Number of test prompts in a batch."""
_NAMED = 4
"""Largest number of tokens that a message names."""
_LOOKED_AT = 1000
"""Number of samples whose last tokens are read in the search for padding."""
_A_RUN = 3
"""Number of equal tokens at the end of a prompt that count as padding."""


class PromptInputs(NamedTuple):
    """Inputs of a decoder that hold prompts."""

    tokens: str
    """Name of the input with token ids [batch, tokens], or with embeddings [batch, tokens,
    width]."""
    mask: str | None
    """Name of the input [batch, tokens] that is 1 where a token counts; ``None`` if there is
    none."""


class PromptBatch(NamedTuple):
    """A batch of prompts, padded to one length."""

    feeds: Mapping[str, NDArray[Any]]
    """Arrays by input; if the model takes a past, it has length 0."""
    last: NDArray[np.intp]
    """Position of the last token that counts, for each prompt."""
    width: int
    """Length in tokens that the prompts are padded to."""


def find_prompts(proto: onnx.ModelProto) -> PromptInputs:
    """Find the input with the tokens, and the mask; ModelError if no input holds tokens."""
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
    """Raise DataError for prompts that end with padding if no input is a mask.

    Without a mask the model answers at the last position, even if that is padding. Prompts count as
    padded if several of the first samples end with repetitions of the same token, and the number of
    repetitions differs.
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
                    f"{runs[0]} to {runs[-1]} times, and no input is a mask of the tokens that "
                    "count; export the decoder with attention_mask, or use prompts of one length"
                )


def make_prompts(proto: onnx.ModelProto, inputs: PromptInputs) -> list[PromptBatch]:
    """Make batches of random prompts of several lengths, padded on the right and on the left.

    Without a mask all prompts of a batch have the same length.
    """
    rng = np.random.default_rng(0)
    infos = {info.name: info.type.tensor_type.shape.dim for info in proto.graph.input}
    ranges = required_ranges(proto, Dataflow(proto.graph))
    batch, tokens, *_ = infos[inputs.tokens]
    count = batch.dim_value if batch.HasField("dim_value") else _PROMPTS
    widths = (tokens.dim_value,) if tokens.HasField("dim_value") else _WIDTHS
    return [
        _padded(proto, inputs, ranges, mask, rng)
        for width in widths
        for mask in _masks(rng, count, width, several=inputs.mask is not None)
    ]


def _masks(
    rng: np.random.Generator, count: int, width: int, *, several: bool
) -> Iterator[NDArray[np.int64]]:
    """Yield masks [count, width] of prompts that are padded at the end or at the beginning."""
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
    ranges: Mapping[str, IndexRange],
    mask: NDArray[np.int64],
    rng: np.random.Generator,
) -> PromptBatch:
    count, width = mask.shape
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
            legal = ranges.get(name)
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
    """Return, for each batch, the logits [prompts, tokens] of some tokens at the last position.

    ModelError if the model fails, if its output has another form, or if the vocabulary lacks a
    token.
    """
    output = proto.graph.output[0].name
    found = []
    for batch, values in zip(batches, _run(proto, batches), strict=True):
        shape = list(values[output].shape)
        if values[output].ndim != 3 or shape[1] != batch.width:
            raise ModelError(
                f"output {output!r} has shape {shape} for {len(batch.last)} prompts of "
                f"{batch.width} tokens, expected [batch, tokens, vocabulary]: export the decoder "
                "with the logits of all positions, or name their output by --answer"
            )
        outside = [token for token in tokens if not 0 <= token < shape[2]]
        if outside:
            raise ModelError(
                f"--answer-tokens: {', '.join(map(str, outside[:_NAMED]))} is not a token of the "
                f"model, expected ids from 0 to {shape[2] - 1}; ask the model's tokenizer for the "
                "ids of the answers"
            )
        rows = np.arange(len(batch.last))[:, None]
        found.append(values[output][rows, batch.last[:, None], np.array(tokens)])
    return found


def check_equal(
    proto: onnx.ModelProto, batches: Sequence[PromptBatch], wanted: Sequence[NDArray[Any]]
) -> float:
    """Compare the output of a reduced model with the answers of the original model.

    Returns the largest relative difference; ModelError if rounding cannot explain that difference.
    """
    output, allowed = proto.graph.output[0].name, rounding_of(proto).batches
    worst = 0.0
    for values, right in zip(_run(proto, batches), wanted, strict=True):
        difference = compare(values[output], right)
        if not difference.share <= allowed:
            raise ModelError(
                "the reduced logits of the answers' tokens differ from the model's by "
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
