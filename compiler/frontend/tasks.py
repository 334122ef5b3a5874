"""Which task a model is for: asked by the user, or inferred from how its graph ends."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from offramp.bundle import Answer, AnswerForm, AnswerTask, TaskKind
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import AskedTask
from offramp.compiler.graphs.graph import Operator
from offramp.compiler.graphs.shapes import BATCH, TensorType
from offramp.compiler.graphs.tail import SIGMOIDS

_log = logging.getLogger(__name__)

_INTEGERS: Final = frozenset({"int64", "int32", "uint8", "int8", "uint16", "int16", "uint32"})


_HEAT_MAPS: Final = re.compile(
    r"(?i:(?<![a-z])heat|heat_?map|key_?point|landmark)|(?<![A-Za-z])(?i:pose)(?![a-z])|Pose(?![a-z])"
)
"""What heat maps are called, and a Transpose is not."""


def find_kind(
    asked: AskedTask, shape: tuple[int | str, ...], last: Operator | None, *, are_labels: bool
) -> TaskKind:
    """Infer the task from the shape of the answer and the operator that it ends with.

    ``are_labels`` says that this is an activation that gives each column a yes or no.
    """
    if asked.kind != "auto":
        return asked.kind
    kind: TaskKind = "classification"
    if are_labels:
        kind = "multi-label"
    elif len(shape) == 3:
        kind = "segmentation" if last is not None and last.kind == "ArgMax" else kind
        kind = "token-classification" if kind == "classification" else kind
    elif len(shape) == 4:
        kind = "segmentation"
    if kind != "classification":
        heat = "; heat maps are --task pose" if kind == "segmentation" else ""
        how = f" and ends with {last.kind}" if last is not None else ""
        sizes = ", ".join(map(str, shape))
        _log.info("The answer [%s]%s: the task is %s%s.", sizes, how, kind, heat)
    return kind


def warn_of_heat_maps(output: str, shape: tuple[int | str, ...], ends: Iterable[Operator]) -> None:
    """Say so where what was taken for classes of pixels looks like heat maps.

    ``ends`` are the operators that the answer comes of, the last one first. Channels that each end
    with a Sigmoid do not compete for a pixel, as classes do.
    """
    ends = list(ends)
    named = next((n for n in (output, *(op.name for op in ends)) if _HEAT_MAPS.search(n)), None)
    if named is not None:
        why = f"{named!r} is what heat maps are called"
    elif ends and ends[0].kind in SIGMOIDS:
        why = f"it ends with {ends[0].kind}, so that channels do not compete for a pixel"
    else:
        return
    _log.warning(
        "The answer %r [%s] is taken for classes of pixels (segmentation), but %s: if each channel "
        "shows where a key point is, add --task pose; else --task segmentation ends this warning.",
        output,
        ", ".join(map(str, shape)),
        why,
    )


def describe_answer(
    name: str, tensor: TensorType, task: AnswerTask, *, form: AnswerForm, picked: TensorType | None
) -> Answer:
    """Describe an answer of another task than classification; ModelError if it does not fit.

    ``picked`` is what a last ArgMax reads: where there is one, the answer is numbers of classes.
    """
    kind = task.kind
    axis = 2 if kind == "token-classification" else 1
    shape, dtype = tensor.shape or (), tensor.dtype
    scores = (picked.shape or ()) if picked is not None else shape
    dense = len(scores) == _RANKS[kind]
    fits = dense and bool(shape) and shape[0] == BATCH
    if picked is not None:
        fits = fits and kind in _NUMBERED and shape == (*scores[:axis], *scores[axis + 1 :])
        fits = fits and dtype in _INTEGERS
    else:
        fits = fits and tensor.is_floating
    least = 2 if kind in _NUMBERED else 1
    size = scores[axis] if dense else None
    if not fits or not isinstance(size, int) or size < least:
        sizes = ", ".join(map(str, shape)) if tensor.shape is not None else "unknown"
        raise ModelError(
            f"output {name!r} is {dtype} [{sizes}], expected {_EXPECTED[kind]} for --task {kind}, "
            f"of a fixed number of at least {least}; name another --task, or end the model there"
        )
    return Answer(output=name, classes=size, form=form, task=task)


_RANKS: Final[dict[TaskKind, int]] = {
    "classification": 2,
    "multi-label": 2,
    "regression": 2,
    "token-classification": 3,
    "segmentation": 4,
    "pose": 4,
}
"""Dimensions of an answer before its classes are picked."""
_NUMBERED: Final = frozenset({"token-classification", "segmentation"})
_EXPECTED: Final[dict[TaskKind, str]] = {
    "classification": "floating-point [batch, classes]",
    "multi-label": "floating-point [batch, labels]",
    "token-classification": "floating-point [batch, tokens, classes]",
    "segmentation": "floating-point [batch, classes, height, width]",
    "pose": "floating-point heat maps [batch, key points, height, width]",
    "regression": "floating-point [batch, values]",
}
