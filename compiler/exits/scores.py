"""The scores that heads imitate: the tensor of the model, and its scale, measured on data.

The activation may be one operator of the graph, or several: a softmax may be an Exp, a sum and a
division. So every tensor through which all of the answer's data passes is measured on training
samples. Heads imitate the first tensor that holds probabilities. The operators after that tensor
become the tail of every exit (:mod:`offramp.compiler.graphs.tail`). If no tensor holds
probabilities, heads imitate the answer itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import Answer, AnswerForm, AnswerTask, TaskKind
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import run_over
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.graphs.graph import Dataflow, copied, serialised
from offramp.compiler.graphs.shapes import TensorType, declared_types
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.tail import (
    SIGMOIDS,
    Tail,
    activation_of,
    cut_tail,
    dominators,
    find_activation,
    find_bounds,
    find_thresholds,
    keeps_columns,
    keeps_unbounded,
    keeps_values,
    operators_between,
)
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.common.environment import available_cores

_log = logging.getLogger(__name__)

Values = Mapping[str, NDArray[Any]]
MEASURED_SAMPLES: Final = 256
"""Largest number of training samples that tensors are measured on."""
_EXACT: Final = 1e-3
"""Largest difference of a sum of probabilities from 1, in single precision."""
_COARSE: Final = 0.02
"""Largest difference of a sum of probabilities from 1, in half precision or with 8 bits."""
_HARD: Final = 0.15
"""Largest difference of a HardSigmoid or a rounded sigmoid from a sigmoid."""
_SAME: Final = 1e-4
"""Largest difference at which two values count as equal, as a share of the values' range."""
_REPRODUCED: Final = 0.99
"""The smallest share of the model's answers that a tail must reproduce. It is below 1 because two
sessions may round a value differently that is halfway between two steps of a quantised answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreScale:
    """Meaning of the values of a tensor [batch, k], whose columns are classes or labels."""

    tensor: str
    form: AnswerForm
    kind: TaskKind
    """Classification if exactly one column is right for a sample; multi-label if each column is a
    yes or no."""


def resolve_scores(model: SourceModel, train: Dataset, *, user_requested: bool) -> SourceModel:
    """Find the scores that heads imitate, and complete the model's answer by measuring them.

    ``user_requested`` is true if the user named the task.

    Raises:
        ModelError: It is unclear whether an answer is one class or several labels, or no exit can
            imitate the scale of the answer's values.
        VerificationError: The tail does not reproduce the model's answers.
        DataError: The model fails on a sample.
    """
    if model.answer.task.kind not in ("classification", "multi-label"):
        return model
    flow, types = model.flow, declared_types(model.proto)
    if _ends_with_activation(model, flow):
        return model
    chain = [name for name in dominators(flow, model.answer.output) if _is_matrix(types.get(name))]
    values = _measure(model.proto, dict.fromkeys([*chain, model.answer.output]), train)
    scale = read_scale(flow, types, chain, values)
    if scale is None:
        return _imitating(model, flow, chain, values, user_requested=user_requested)
    _check_kind(model, flow, scale, values, user_requested=user_requested)
    form = _form_alone(model, flow, scale)
    if form is not None:
        return replace(model, answer=replace(model.answer, form=form))
    scores, levels = _scores_of(model, flow, chain, scale, values)
    classes = values[scores].shape[1]
    form = scale.form if scores == scale.tensor else "logits"
    taught = Answer(output=scores, classes=classes, form=form, task=AnswerTask(kind=scale.kind))
    tail = cut_tail(model.proto, flow, taught, model.answer.output, takes_levels=levels)
    return _ending(model, tail, values, scale=scale)


def _ends_with_activation(model: SourceModel, flow: Dataflow) -> bool:
    """Return whether the graph shows that the answer is an activation, unchanged afterwards."""
    soft = find_activation(model.proto, flow, model.answer.output)
    if soft is None or (soft.kind in SIGMOIDS) != (model.answer.task.kind == "multi-label"):
        return False
    return keeps_values(operators_between(flow, soft.writes[0], model.answer.output))


def _form_alone(model: SourceModel, flow: Dataflow, scale: ScoreScale) -> AnswerForm | None:
    """Return the form of an answer that an activation computes; ``None`` for other answers.

    A logarithm after a softmax counts as LogSoftmax, which never returns -infinity.
    """
    if scale.kind != model.answer.task.kind:
        return None
    between = operators_between(flow, scale.tensor, model.answer.output)
    if keeps_values(between):
        return scale.form
    logarithm = scale.kind == "classification" and [op.kind for op in between] == ["Log"]
    return "log-probabilities" if logarithm and scale.form == "probabilities" else None


def _scores_of(
    model: SourceModel, flow: Dataflow, chain: Sequence[str], scale: ScoreScale, values: Values
) -> tuple[str, bool]:
    """Find the input of an activation, before that input was rounded or clipped.

    Returns the name of the tensor, and whether it is rounded or clipped before the activation. If
    no input is found, the tensor is the activation's output.
    """
    before, nearest, levels = chain[chain.index(scale.tensor) + 1 :], scale.tensor, False
    for name in before:
        if not _activates(values[name], values[scale.tensor], scale):
            break
        if nearest != scale.tensor:
            between = operators_between(flow, name, nearest)
            if all(keeps_unbounded(op, model.proto) for op in between):
                break
            levels = scale.kind == "classification"
        nearest = name
    return nearest, levels


def _activates(scores: NDArray[Any], found: NDArray[Any], scale: ScoreScale) -> bool:
    """Return whether the activation of ``scores`` equals ``found``, up to rounding."""
    if scores.shape != found.shape:
        return False
    scores = scores.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if scale.kind == "multi-label":
            made = 1 / (1 + np.exp(-scores))
        else:
            made = np.exp(scores - scores.max(axis=1, keepdims=True))
            made /= made.sum(axis=1, keepdims=True)
        wanted = np.exp(found) if scale.form == "log-probabilities" else found
    apart = float(np.abs(made - wanted).max())
    return apart <= (_HARD if scale.kind == "multi-label" else _COARSE)


def read_scale(
    flow: Dataflow, types: Mapping[str, TensorType], chain: Sequence[str], values: Values
) -> ScoreScale | None:
    """Find the first tensor that holds probabilities; ``chain`` has the answer first."""
    for place in range(len(chain) - 1, -1, -1):
        name, op = chain[place], activation_of(flow, types, chain[place])
        found = values[name].astype(np.float64)
        if op is not None and op.kind in SIGMOIDS:
            return ScoreScale(tensor=name, form="probabilities", kind="multi-label")
        coarse = values[name].dtype != np.float32 and values[name].dtype != np.float64
        within = _COARSE if coarse else _EXACT
        if _sums_to_one(found, within) and not (op is None and _are_picks(found)):
            return ScoreScale(tensor=name, form="probabilities", kind="classification")
        with np.errstate(over="ignore"):
            if found.shape[1] > 1 and _sums_to_one(np.exp(found), within):
                return ScoreScale(tensor=name, form="log-probabilities", kind="classification")
        before = (values[other] for other in chain[place + 1 :])
        if any(_is_sigmoid_of(found, other) for other in before):
            return ScoreScale(tensor=name, form="probabilities", kind="multi-label")
    return None


def _is_matrix(tensor: TensorType | None) -> bool:
    if tensor is None or tensor.shape is None or len(tensor.shape) != 2:
        return False
    return tensor.is_floating and isinstance(tensor.shape[1], int)


def _measure(proto: onnx.ModelProto, names: Mapping[str, None], train: Dataset) -> Values:
    some = train.subset(np.arange(min(len(train), MEASURED_SAMPLES), dtype=np.intp))
    wider, given = copied(proto), {output.name for output in proto.graph.output}
    wider.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in given)
    source = serialised(wider)
    batches = [found for _, found in run_over(source, [*names], some, threads=available_cores())]
    columns = zip(*batches, strict=True)
    return {name: np.concatenate(of) for name, of in zip(names, columns, strict=True)}


def _sums_to_one(found: NDArray[np.float64], within: float) -> bool:
    if found.shape[1] < 2 or not np.isfinite(found).all() or found.min() < -within:
        return False
    return bool(np.abs(found.sum(axis=1) - 1).max() <= within)


def _are_picks(found: NDArray[np.float64]) -> bool:
    """Return whether all values are 0 or 1, as after a Hardmax, whose scores come before it."""
    return bool(np.isin(found, (0.0, 1.0)).all())


def _is_sigmoid_of(found: NDArray[np.float64], scores: NDArray[Any]) -> bool:
    if found.shape != scores.shape or found.min() < 0 or found.max() > 1:
        return False
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-scores.astype(np.float64)))
    return bool(np.abs(found - expected).max() <= _SAME)


def _check_kind(
    model: SourceModel, flow: Dataflow, scale: ScoreScale, values: Values, *, user_requested: bool
) -> None:
    """Raise ModelError if the scores show another task than the graph does, or no task."""
    answer, found = model.answer, values[model.answer.output].astype(np.float64)
    if user_requested or (scale.kind == "classification" and answer.classes > 1):
        return
    between = operators_between(flow, scale.tensor, answer.output)
    by_column = keeps_columns(between) and values[scale.tensor].shape == found.shape
    if answer.task.kind == "multi-label" and (by_column or answer.classes == 1):
        return
    sums = found.sum(axis=1)
    constant = np.ptp(sums) <= _COARSE * max(np.ptp(found), np.abs(sums).max())
    shared = values[scale.tensor].shape[1] in (1, answer.classes)  # not [1 - p, p] of each label
    if answer.task.kind == "classification" and constant and shared and not by_column:
        return
    raise _asking(answer, found, f"{scale.tensor!r}, which it results from, is a sigmoid")


def _asking(answer: Answer, found: NDArray[np.float64], why: str) -> ModelError:
    return ModelError(
        f"output {answer.output!r} holds numbers from {found.min():.3g} to {found.max():.3g}, and "
        f"{why}: its {answer.classes} columns may be the probabilities of one class of several, or "
        "a yes or no each. Add --task classification or --task multi-label"
    )


def _imitating(
    model: SourceModel,
    flow: Dataflow,
    chain: Sequence[str],
    values: Values,
    *,
    user_requested: bool,
) -> SourceModel:
    """Return the model for heads that imitate its answer, or the logits before clipping."""
    answer = model.answer
    found = values[answer.output].astype(np.float64)
    picks = answer.task.kind == "classification" and len(chain) > 1 and _are_picks(found)
    if np.ptp(found) == 0 or found.min() < -_EXACT or not np.isfinite(found).all() or picks:
        return _bounded(model, flow, chain, values)
    shares, sums = _sums_to_one(found, _COARSE), found.sum(axis=1)
    if shares and answer.task.kind == "classification":
        return replace(model, answer=replace(answer, form="probabilities"))
    if answer.classes > 1 and not shares and np.ptp(sums) <= _EXACT * sums.max():
        raise ModelError(
            f"the values of output {answer.output!r} are not negative and sum to {sums[0]:.6g} for "
            "every sample, as probabilities do on another scale, but no operator was found "
            "that computes probabilities; end the model at its probabilities or logits"
        )
    if found.max() > 1 + _EXACT:
        return _bounded(model, flow, chain, values)
    if not user_requested:
        raise _asking(answer, found, "no Softmax or Sigmoid was found that they result from")
    labels = AnswerTask(kind="multi-label")
    taught = Answer(output=answer.output, classes=answer.classes, form="probabilities", task=labels)
    if answer.task.kind == "multi-label":
        return replace(model, answer=replace(answer, form="probabilities"))
    tail = cut_tail(model.proto, flow, taught, answer.output)
    scale = ScoreScale(tensor=answer.output, form="probabilities", kind="multi-label")
    return _ending(model, tail, values, scale=scale)


def _bounded(
    model: SourceModel, flow: Dataflow, chain: Sequence[str], values: Values
) -> SourceModel:
    """Return the model for heads that imitate the logits before these are clipped or rounded."""
    answer = model.answer
    for after, scores in zip([*chain[-2::-1]], [*chain[:0:-1]], strict=True):
        between = operators_between(flow, scores, after)
        if all(keeps_unbounded(op, model.proto) for op in between):
            continue
        classes = values[scores].shape[1]
        kind: TaskKind = "multi-label" if classes == 1 else answer.task.kind
        taught = Answer(output=scores, classes=classes, form="logits", task=AnswerTask(kind=kind))
        levels = kind == "classification"
        tail = cut_tail(model.proto, flow, taught, answer.output, takes_levels=levels)
        return _ending(model, tail, values)
    return model


def _ending(
    model: SourceModel, tail: Tail, values: Values, *, scale: ScoreScale | None = None
) -> SourceModel:
    """Return the model with a tail that was verified, and with measurements of its answer."""
    answer = model.answer
    scores, wanted = values[tail.taught.output], values[answer.output]
    within = max(_SAME, rounding_of(model.proto).chained)
    _verify(answer, tail, scores, wanted, within=within)
    tail = replace(tail, bounds=None if scale is None else find_bounds(tail, wanted))
    form = "logits" if scale is None else _form_at_end(answer, scale, values)
    has_scale = answer.task.kind == "multi-label" and form != "probabilities"
    thresholds = find_thresholds(tail, wanted) if has_scale else ()
    settled = replace(answer, form=form, tail=tail.kinds, thresholds=thresholds)
    _log.info(
        "Exits end as the model does: scores at %s (%s), then %s.",
        tail.taught.output,
        tail.taught.describe(),
        ", ".join(tail.kinds) or "nothing",
    )
    return replace(model, answer=settled, tail=tail)


def _verify(
    answer: Answer, tail: Tail, scores: NDArray[Any], wanted: NDArray[Any], *, within: float
) -> None:
    """Compare the results of the tail, computed from the model's scores, with the model's answers.

    Two values are equal if they differ by at most ``within``, as a share of the range of their
    class. Ranges of single classes are used so that a masked class does not hide differences in the
    others.
    """
    given = tail.apply(scores).astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(given - wanted.astype(np.float64))
    finite = np.ma.masked_invalid(wanted.astype(np.float64))
    allowed = within * np.ma.filled(finite.max(axis=0) - finite.min(axis=0), 0)
    same = (apart <= allowed) | (given == wanted)
    if same.mean() < _REPRODUCED:
        raise VerificationError(
            f"the operators from {tail.taught.output!r} to output {answer.output!r} reproduce "
            f"{same.mean():.1%} of the model's values, expected {_REPRODUCED:.0%}: exits cannot "
            "end as the model does. End the model at its probabilities or logits, and report this "
            "with the model"
        )


def _form_at_end(answer: Answer, scale: ScoreScale, values: Values) -> AnswerForm:
    """Return the activation's form if the answers equal its results; ``values`` otherwise."""
    given, wanted = values[scale.tensor], values[answer.output]
    if scale.form == "log-probabilities" and answer.task.kind == "multi-label":
        return "values"
    task = answer.task if given.shape == wanted.shape else AnswerTask(kind=scale.kind)
    told = confidence_of(given, scale.form, task)
    read = confidence_of(wanted, scale.form, answer.task)
    in_range = scale.form != "probabilities" or (wanted.min() >= 0 and wanted.max() <= 1)
    return scale.form if in_range and np.abs(told - read).max() <= _COARSE else "values"
