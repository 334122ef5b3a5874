"""The end of an exit as served: its answer in the source model's form, and how sure it is of it.

The confidence is computed in the graph, as :mod:`.answers.principal_values` has it: a few
operators there cost a tenth of as many calls of numpy between two stages. PAME's count threshold
(5.3) is the choice of which of the principal values it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper

from offramp.bundle import Answer, TensorSpec
from offramp.compiler.common.parts import PartBuilder
from offramp.compiler.exits.certainty import add_certainty
from offramp.engine.answers.principal_values import HIGHEST, ROUNDING, stride_of

CONFIDENCE = "confidence"
"""Name of the output with the confidence, after the exit's prefix."""


def exit_prefix(candidate: int) -> str:
    """Return the prefix of all names in a candidate's exit, unique in the joined graph."""
    return f"offramp_exit_{candidate:02d}/"


def end_classes(
    part: PartBuilder, scores: str, answer: Answer, dtype: str, weights: Sequence[float] = ()
) -> None:
    """Answer one class of several by logits [b, classes]; how sure, the answer's criterion says.

    ``scores`` has to be named for the answer already where the form is logits of float32.
    ``weights`` are those of the criterion ``learned``.
    """
    # Whatever has the answer's type gets its name: a Cast to the same type would be carried out.
    names = {answer.form: answer.output} if dtype == "float32" else {}
    probabilities = part.add("Softmax", [scores], names.get("probabilities", ""), axis=-1)
    criterion = "probability" if answer.criterion.on_host else answer.criterion.name
    add_certainty(
        part,
        probabilities,
        answer.classes,
        name=CONFIDENCE,
        criterion=criterion,
        weights=weights,
    )
    given = {"logits": scores, "probabilities": probabilities}.get(answer.form, "")
    if answer.form == "log-probabilities":
        given = part.add("LogSoftmax", [scores], names.get(answer.form, ""), axis=-1)
    _in_its_type(part, given, answer, dtype)


def end_labels(part: PartBuilder, scores: str, answer: Answer, dtype: str, share: float) -> None:
    """Answer a yes or no for each label by logits [b, labels]."""
    named = answer.output if dtype == "float32" and answer.form == "probabilities" else ""
    chance = part.add("Sigmoid", [scores], named)
    sure = _bounded(part, _decided(part, chance))  # NaN is as unsure as can be
    add_confidence(part, sure, share, places=answer.classes)
    given = chance if answer.form == "probabilities" else scores
    _in_its_type(part, given, answer, dtype)


def end_values(part: PartBuilder, scores: str, answer: Answer, dtype: str) -> None:
    """Answer values by scores [b, values + 1], of which the last is the logit of being right."""
    last = answer.classes
    sizes = part.weight("sizes", np.array([last, 1], np.int64))
    named = answer.output if dtype == "float32" else ""
    values, sure = part.add_all("Split", [scores, sizes], [named, ""], axis=1)
    chance = part.add("Sigmoid", [sure])
    part.add("Reshape", [chance, part.weight("flat", np.array([-1], np.int64))], CONFIDENCE)
    _in_its_type(part, values, answer, dtype)


def _in_its_type(part: PartBuilder, given: str, answer: Answer, dtype: str) -> None:
    if dtype != "float32":
        onnx_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        part.add("Cast", [given], answer.output, to=onnx_type)


def add_principal(
    part: PartBuilder, scores: str, answer: Answer, shape: tuple[int | str, ...]
) -> tuple[str, int | None]:
    """Add the principal values [b, n] of an answer; gives them, and n where it is fixed.

    ``scores`` are float32 of ``shape``: [b, classes], [b, labels], [b, tokens, classes], [b,
    classes, height, width] or heat maps [b, key points, height, width]: the answer, or what its
    classes are picked from.
    """
    soft = answer.form == "probabilities"
    match answer.task.kind:
        case "classification":
            largest = _largest(part, scores, 1, soft=soft)
            column = part.weight("column", np.array([-1, 1], np.int64))
            return _bounded(part, part.add("Reshape", [largest, column])), 1
        case "multi-label":
            chance = scores if soft else part.add("Sigmoid", [scores])
            return _bounded(part, _decided(part, chance)), answer.classes
        case "token-classification":
            tokens = shape[1]
            largest = _largest(part, scores, 2, soft=soft)
            return _bounded(part, largest), tokens if isinstance(tokens, int) else None
        case "segmentation":
            height, width = shape[2:]
            count = None
            if isinstance(height, int) and isinstance(width, int):
                step = stride_of(height, width)
                count = math.ceil(height / step) * math.ceil(width / step)
                if step > 1:
                    scores = part.add("Slice", [scores, *_every(part, step)])
            largest = _largest(part, scores, 1, soft=soft)
            return _bounded(part, _flattened(part, largest)), count
        case "pose":
            maps = part.weight("maps", np.array([0, 0, -1], np.int64))
            places = part.add("Reshape", [scores, maps])
            highest = part.weight("highest", np.array([HIGHEST], np.int64))
            values, _ = part.add_all("TopK", [places, highest], ["", ""], axis=2)
            count = answer.classes * HIGHEST
            return _bounded(part, _flattened(part, values)), count
        case kind:
            raise ValueError(f"answers of {kind} do not say how sure they are")


def _flattened(part: PartBuilder, values: str) -> str:
    return part.add("Reshape", [values, part.weight("rows", np.array([0, -1], np.int64))])


def _decided(part: PartBuilder, chance: str) -> str:
    """Add the probability of what is decided, yes or no, of that of yes."""
    one = part.weight("one", np.array(1, np.float32))
    return part.add("Max", [chance, part.add("Sub", [one, chance])])


def _largest(part: PartBuilder, scores: str, axis: int, *, soft: bool) -> str:
    """Add the largest probability along an axis.

    Of logits it is exp(0) / sum exp(x − max): ONNX Runtime's Softmax is slow along any axis but the
    last, and took a fifth of a small bridge.
    """
    if soft:
        return part.reduce("ReduceMax", scores, axis)
    largest = part.reduce("ReduceMax", scores, axis, keepdims=True)
    axes = part.weight("axes", np.array([axis], np.int64))
    shares = part.add("Exp", [part.add("Sub", [scores, largest])])
    return part.add("Reciprocal", [part.add("ReduceSum", [shares, axes], keepdims=0)])


def add_counts(part: PartBuilder, mask: TensorSpec) -> str:
    """Add 1 for every token that a mask says counts, and 0 for others: float32 [b, tokens]."""
    zero = part.weight("nothing", np.array(0, mask.dtype))
    counts = part.add("Not", [part.add("Equal", [mask.name, zero])])
    return part.add("Cast", [counts], to=TensorProto.FLOAT)


def add_confidence(
    part: PartBuilder, principal: str, share: float, *, places: int | None, mask: str | None = None
) -> str:
    """Add the value [b] that a share of principal values [b, n] reach, named ``CONFIDENCE``.

    ``places`` is n, where it is fixed; ``mask`` [b, n], a float32 tensor, says which count.
    """
    if mask is None and share == 1:
        smallest = part.reduce("ReduceMin", principal, 1)
        zero = part.weight("zero", np.array(0, np.float32))
        return part.add("Max", [smallest, zero], CONFIDENCE)
    flat = part.weight("flat", np.array([-1], np.int64))
    if mask is None and places is not None:
        taken = max(math.ceil(share * places - ROUNDING), 1)
        from_below = places - taken + 1
        # The fewer are sorted, the better: nearly all of the values have to be reached.
        from_above = taken <= from_below
        sorted_ = taken if from_above else from_below
        count = part.weight("count", np.array([sorted_], np.int64))
        names = ["", ""]
        ordered, _ = part.add_all(
            "TopK", [principal, count], names, axis=1, largest=int(from_above)
        )
        last = part.weight("last", np.array([sorted_ - 1], np.int64))
        return part.add("Reshape", [part.add("Gather", [ordered, last], axis=1), flat], CONFIDENCE)
    size = part.add("Shape", [principal])
    width = part.add("Gather", [size, part.weight("second", np.array([1], np.int64))], axis=0)
    one = part.weight("one", np.array(1, np.float32))
    if mask is None:
        counted = part.add("Cast", [width], to=TensorProto.FLOAT)  # [1]
        rows = part.add("Gather", [size, part.weight("first", np.array([0], np.int64))], axis=0)
        counted = part.add("Expand", [counted, rows])
        counted = part.add("Reshape", [counted, part.weight("column", np.array([-1, 1], np.int64))])
    else:
        axis = part.weight("axis", np.array([1], np.int64))
        counted = part.add("ReduceSum", [mask, axis], keepdims=1)
        # What does not count is below all that does.
        absent = part.add("Sub", [mask, one])
        principal = part.add("Add", [part.add("Mul", [principal, mask]), absent])
    wanted = part.add("Mul", [counted, part.weight("share", np.array(share, np.float32))])
    wanted = part.add("Sub", [wanted, part.weight("rounding", np.array(_STEP, np.float32))])
    wanted = part.add("Max", [part.add("Ceil", [wanted]), one])
    position = part.add("Cast", [part.add("Sub", [wanted, one])], to=TensorProto.INT64)
    ordered, _ = part.add_all("TopK", [principal, width], ["", ""], axis=1)
    taken_value = part.add("GatherElements", [ordered, position], axis=1)
    bounded = part.add("Max", [taken_value, part.weight("zero", np.array(0, np.float32))])
    return part.add("Reshape", [bounded, flat], CONFIDENCE)


_STEP = 1e-3
"""That a share of a number of tokens, in float32, may be above the whole number that it is."""


def _bounded(part: PartBuilder, values: str) -> str:
    """Take NaN for 0, and bound by 0 and 1."""
    bad = part.add("IsNaN", [values])
    zero = part.weight("zero", np.array(0, np.float32))
    one = part.weight("one", np.array(1, np.float32))
    return part.add("Clip", [part.add("Where", [bad, zero, values]), zero, one])


def _every(part: PartBuilder, step: int) -> list[str]:
    """Starts, ends, axes and steps of a Slice that takes every so many rows and columns."""
    ends = [np.iinfo(np.int64).max] * 2
    numbers = {"starts": [0, 0], "ends": ends, "axes": [2, 3], "steps": [step, step]}
    return [part.weight(name, np.array(v, np.int64)) for name, v in numbers.items()]
