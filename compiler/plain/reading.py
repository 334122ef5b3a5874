"""Reading a model to serve it without exits; requirements of exits are not checked.

Whether samples may share a batch is tested on random inputs, because there is no data. Samples of
several magnitudes are run one by one, all together, and a few together. If it cannot be verified
that samples do not affect each other, every sample is served in a separate batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import Answer, AnswerTask, TensorSpec
from offramp.compiler.common.errors import ModelError, listed
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.export.nesting import METADATA
from offramp.compiler.frontend.answer import LISTED, find_answer, output_type, settle_output
from offramp.compiler.frontend.batch import fixed_size, free_batch, rename_batch
from offramp.compiler.frontend.passes import (
    ANNOTATE,
    CONVERT,
    FIX_BAKED_SIZES,
    GIVE_COLUMN,
    KEEP_ANSWER,
    KNOW_OPERATORS,
    NAME_OPERATORS,
    REFUSE_CACHE,
    REMOVE_UNUSED,
    SETTLE_INPUTS,
    UNLIST_WEIGHTS,
    ModelDraft,
    PassError,
    prepare,
)
from offramp.compiler.frontend.preparation import specs
from offramp.compiler.frontend.source_file import load_source
from offramp.compiler.graphs.graph import copied, default_opset, refill
from offramp.compiler.graphs.row_mixing import scaled_by_batch
from offramp.compiler.graphs.runtime import GraphRunner, describe_shapes, random_inputs
from offramp.compiler.graphs.shapes import BATCH, FLOATING, annotate
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weights import WeightFile
from offramp.engine.answers.differences import compare
from offramp.engine.common.environment import available_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class UnslicedModel:
    """A model to serve without exits, and whether its samples may share a batch."""

    source: SourceModel
    """The model; its batch size is symbolic, if that is possible."""
    fixed: int | None
    """Batch size that the file fixes; ``None`` if it is symbolic in the file."""
    no_batching: str
    """Reason why samples must not share a batch; empty if they may."""
    notes: tuple[str, ...]
    """Messages for users about the model, for instance where it differs from its file."""
    stated: tuple[onnx.ValueInfoProto, ...]
    """Types of inner tensors that the file states; empty if the file fixes the batch size."""

    def graph(self) -> onnx.ModelProto:
        """Return the graph as it is served, with all inputs that the file declares.

        The graph states types of inner tensors only where the file does: ONNX Runtime fuses
        operators by known shapes, and more known shapes would change the rounding of answers.
        """
        served = copied(self.source.as_declared())
        refill(served.graph.value_info, self.stated)
        return served


def read_plain(
    path: Path,
    *,
    answer: str | None = None,
    task: TaskOptions | None = None,
    weights: WeightFile | None = None,
) -> UnslicedModel:
    """Read a model; ``answer`` names the output to serve, if there are several.

    With ``weights``, large weights are moved into that file, and the model may be of any size.

    The graph is not simplified: it computes the same as the file, bit for bit, unless its opset was
    converted or its batch was fixed.

    Raises:
        ModelError: The file is missing, not an ONNX model, or cannot be served; the message begins
            with ``path``.
    """
    proto, digest = load_source(path, weights)
    try:
        return _read(proto, path, digest, answer, task or TaskOptions())
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (
        ValueError,
        LookupError,
        TypeError,
        PassError,
    ) as error:  # the ONNX checker accepts such files
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise ModelError(
            f"{path}: contradicts itself ({reason}); export the model again"
        ) from error


def _read(
    proto: onnx.ModelProto, path: Path, digest: str, answer: str | None, asked: TaskOptions
) -> UnslicedModel:
    notes: list[str] = []
    draft = ModelDraft(proto=proto, answer=answer, note=notes.append)
    prepare(draft, (KNOW_OPERATORS, UNLIST_WEIGHTS, REFUSE_CACHE))
    draft.answer, chosen = _choose_output(draft.proto, answer)
    notes += chosen
    if any(entry.key.startswith(METADATA) for entry in proto.metadata_props):
        notes.append(
            "the file was exported from a bundle, with its exits inside: their "
            "answers are not audited; serve the bundle instead"
        )
    prepare(draft, (CONVERT, KEEP_ANSWER, GIVE_COLUMN, REMOVE_UNUSED, SETTLE_INPUTS))
    fixed = fixed_size(draft.proto)
    prepare(draft, (FIX_BAKED_SIZES,))
    stated = () if fixed else tuple(map(copied, draft.proto.graph.value_info))
    draft.proto, no_batching = _freed(draft.proto, fixed)
    prepare(draft, (NAME_OPERATORS, ANNOTATE))
    proto = draft.proto
    found = _describe(proto, asked)
    return UnslicedModel(
        source=SourceModel(
            proto=proto,
            name=path.stem,
            inputs=_in_batches(specs(proto, [info.name for info in proto.graph.input])),
            outputs=_in_batches(specs(proto, [found.output])),
            original_sha256=digest,
            opset=default_opset(proto),
            answer=replace(found, flat=draft.flat),
            unread=draft.unread,
        ),
        fixed=fixed,
        no_batching=no_batching,
        notes=tuple(notes),
        stated=stated,
    )


def _choose_output(proto: onnx.ModelProto, answer: str | None) -> tuple[str | None, list[str]]:
    """Return the output to serve, and notes on the choice; ModelError if the user must name it.

    A single output is served even if ``answer`` has another name, because a server uses one name
    for all its files.
    """
    if len(proto.graph.output) == 1:
        (only,) = (output.name for output in proto.graph.output)
        unused = f"--answer {answer} is not used: the only output is {only!r}"
        return only, [] if answer in (None, only) else [unused]
    answer = settle_output(proto, answer)
    if answer is not None or len(proto.graph.output) < 2:
        return answer, []
    outputs = {o.name: output_type(o) for o in proto.graph.output}
    scores = [name for name, found in outputs.items() if found in FLOATING]
    names = [f"{name} ({found})" for name, found in outputs.items()]
    raise ModelError(
        f"{len(outputs)} outputs ({listed(names, LISTED)}), but only one can be served; name it, "
        f"for instance --answer {(scores or [*outputs])[0]}"
    )


def _freed(proto: onnx.ModelProto, fixed: int | None) -> tuple[onnx.ModelProto, str]:
    """Make the batch size symbolic, and check whether samples may share a batch.

    Returns the model, and the reason why samples may not; empty if they may. A model whose batch
    size is fixed at 1 and cannot be made symbolic is returned unchanged, with that reason.
    ModelError if samples cannot run one by one either.
    """
    trial = copied(proto)
    try:
        free_batch(trial)
    except ModelError as error:
        if fixed is None:
            rename_batch(proto.graph)
        elif fixed != 1:
            raise
        annotate(proto)
        if not gives_rows(proto):
            raise
        return proto, str(error)
    return trial, find_mixing(trial)


def _describe(proto: onnx.ModelProto, asked: TaskOptions) -> Answer:
    """Describe the model's answer, whether exits support its task or not."""
    output = proto.graph.output[0]
    shape = output.type.tensor_type.shape
    if shape.dim:  # a size that the file fixes at 1 is also the batch
        shape.dim[0].dim_param = BATCH
    try:
        return find_answer(proto, asked)
    except ModelError:
        if asked.kind != "auto":
            raise
    return Answer(output=output.name, classes=1, form="values", task=AnswerTask(kind="other"))


def _in_batches(found: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Name the first size ``batch``, even if it is fixed at 1: larger requests are split later."""
    return tuple(replace(spec, shape=(BATCH, *spec.shape[1:])) for spec in found)


Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"

_ROWS: Final = 5
_BATCHES: Final = 4
"""Number of random batches to try."""
_MAGNITUDES: Final = (1.0, 0.1, 30.0, 0.0, -3.0)
"""Factors that the rows of floating-point inputs are multiplied by. Extreme rows show whether a
model scales values by the batch."""
_ALLOWED: Final = 1e-3
"""Largest difference that counts as rounding, relative to the scale of the row's own values.
Rounding may be larger than usual for rows whose large inner values cancel out."""
_SECONDS: Final = 10.0
"""Time in seconds after which no further random batch is run."""


def find_mixing(proto: onnx.ModelProto) -> str:
    """Return why samples must not share a symbolic batch; empty if they may.

    These checks run the model on values; the checks of :func:`.free_batch` must have passed.
    """
    if operators := scaled_by_batch(proto):
        number, first = len(operators), operators[0].label
        return f"{number} operators round by the range of the whole batch, such as {first}"
    runner = GraphRunner(proto, available_cores())
    allowed = max(rounding_of(proto).batches, _ALLOWED)
    began_s, compared, failure = time.monotonic(), 0, ""
    for feeds in _made(proto):
        if compared and time.monotonic() - began_s > _SECONDS:
            break
        try:
            alone = [runner.run(_rows(feeds, [row])) for row in range(_ROWS)]
        except RuntimeError as error:
            failure = f"{describe_shapes(_rows(feeds, [0]))}: {error}"
            continue
        compared += 1
        if reason := _apart(runner, feeds, alone, allowed):
            return reason
    if compared:
        return ""
    return (
        f"it cannot be verified that samples do not change each other's answers, as random inputs "
        f"fail ({failure})"
    )


def gives_rows(proto: onnx.ModelProto) -> bool:
    """Return whether a model's answer has one row for each sample, for one or several samples."""
    for count in (1, 3):
        feeds = random_inputs(proto, count)
        rows = len(next(iter(feeds.values())))  # one row if the batch is fixed
        try:
            outputs = GraphRunner(proto).run(feeds).values()
        except RuntimeError:
            continue
        if any(output.ndim == 0 or len(output) != rows for output in outputs):
            return False
    return True


def _made(proto: onnx.ModelProto) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield batches of :data:`_ROWS` random rows, all of one magnitude or of several."""
    for seed in range(_BATCHES):
        feeds = random_inputs(proto, _ROWS, seed=seed)
        if seed % 2:
            feeds = {name: _spread(array) for name, array in feeds.items()}
        yield feeds


def _spread(array: NDArray[Any]) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating):
        return array
    factors = np.array(_MAGNITUDES).reshape(-1, *(1,) * (array.ndim - 1))
    spread: NDArray[Any] = (array * factors).astype(array.dtype)
    return spread


def _apart(runner: GraphRunner, feeds: Arrays, alone: Sequence[Arrays], allowed: float) -> str:
    """Describe a difference between answers to rows in one batch and alone; empty without one."""
    for chosen in ([*range(_ROWS)], [_ROWS - 1, 0], [2, 3, 1]):
        try:
            together = runner.run(_rows(feeds, chosen))
        except RuntimeError as error:
            return f"{len(chosen)} samples do not run in one batch: {error}"
        for name, values in together.items():
            for place, row in enumerate(chosen):  # each by its own scale: others may be larger
                difference = compare(values[place : place + 1], alone[row][name])
                if not difference.share <= allowed:
                    return (
                        f"samples change each other's answers: output {name!r} of a random "
                        f"sample in a batch of {len(chosen)} differs from its output in a batch "
                        f"of 1, by {difference.describe()}"
                    )
    return ""


def _rows(arrays: Arrays, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
    return {name: array[list(rows)] for name, array in arrays.items()}
