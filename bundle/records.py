"""The records of a bundle: answers of all exits on the calibration data, and losses by class.

A policy that disagrees with the model on 1 % of the answers may lose every answer of a class that
the model predicts for 1 % of the samples: fraud, a defect, a disease. So disagreement is counted by
class, and a separate bound may be certified for each class (Learn then Test with several risks:
:class:`offramp.certify.Stratum`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.npz import ArrayForm, read_npz
from offramp.bundle.schema.answers import MOST_LABELS, Answer
from offramp.bundle.schema.manifest import Manifest
from offramp.bundle.schema.policy import NEVER, ExitPolicy
from offramp.certify import IntArray, Stratum, allowed_errors, binomial_cdf, first_exit

TUNE, CERTIFY = 1, 2
"""Values of ``split`` in the records: samples that thresholds are tuned on, and samples that
nothing was trained or tuned on."""

_RECORD_FORMS: Final = {
    "confidence": ArrayForm(dtype="float32", ndim=2),
    "prediction": ArrayForm(dtype="int32", ndim=2),
    "final_prediction": ArrayForm(dtype="int32", ndim=1),
    "final_confidence": ArrayForm(dtype="float32", ndim=1),
    "split": ArrayForm(dtype="uint8", ndim=1),
    "label": ArrayForm(dtype="int64", ndim=1, optional=True),
    "copies": ArrayForm(dtype="int64", ndim=1, optional=True),
}
_MOST_RECORDS_BYTES: Final = 2**32


def parse_records(content: bytes, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Parse records (see :meth:`.Bundle.records`); ValueError if they do not fit the manifest."""
    records = read_npz(io.BytesIO(content), max_bytes=_MOST_RECORDS_BYTES, expected=_RECORD_FORMS)
    _check_records(records, manifest)
    return records


def no_records() -> dict[str, NDArray[Any]]:
    """Return records without samples, for a bundle that was made without data and has no exits."""
    forms = {name: form for name, form in _RECORD_FORMS.items() if not form.optional}
    return {name: np.zeros((0,) * form.ndim, form.dtype) for name, form in forms.items()}


def _check_records(records: Mapping[str, NDArray[Any]], manifest: Manifest) -> None:
    """Raise ValueError for records that do not fit this model's exits and classes."""
    exits, samples, answer = len(manifest.exits), len(records["split"]), manifest.answer
    bound = answer.task.code_bound(answer.classes)
    for name, array in records.items():
        shape = (exits, samples) if _RECORD_FORMS[name].ndim == 2 else (samples,)
        if array.shape != shape:
            raise ValueError(f"{name!r} is of shape {list(array.shape)}, expected {list(shape)}")
    for name in ("confidence", "final_confidence"):
        if not ((records[name] >= 0) & (records[name] <= 1)).all():
            raise ValueError(f"{name!r} has values that are not in [0, 1]")
    for name in ("prediction", "final_prediction"):
        if not ((records[name] >= 0) & (records[name] < bound)).all():
            raise ValueError(f"{name!r} has values that are not among the {bound} codes of answers")
    if "copies" in records and not (records["copies"] >= 1).all():
        raise ValueError(
            "'copies' has values below 1, expected the number of equal rows that each sample "
            "represents"
        )
    if not np.isin(records["split"], (TUNE, CERTIFY)).all():
        raise ValueError(f"'split' has values other than {TUNE} (tune) and {CERTIFY} (certify)")
    for which, purpose in ((TUNE, "tune"), (CERTIFY, "certify")):
        if not (records["split"] == which).any():
            raise ValueError(
                f"'split' has no sample to {purpose} on ({which}), expected at least one"
            )


TOO_MUCH: Final = 10
"""Multiple of the bound above which a class's share of lost answers causes a warning."""
_SURE: Final = 0.01
"""Probability of a warning although no class loses more than the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoss:
    """A class: samples that the model puts in it, and how many of them exits answer differently."""

    number: int
    """Index of the class, or of the label in a set of labels."""
    samples: int
    lost: int
    """Samples that an exit answers unlike the model."""

    @property
    def share(self) -> float:
        """Share of the samples whose answer is lost."""
        return self.lost / self.samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Members:
    """Pairs of a class and a sample that the model puts in it; a label set gives several pairs."""

    classes: IntArray
    samples: IntArray


def has_classes(answer: Answer) -> bool:
    """Return whether codes of recorded answers determine classes or labels."""
    kind = answer.task.kind
    return kind == "classification" or (kind == "multi-label" and answer.classes <= MOST_LABELS)


def _members(answer: Answer, codes: NDArray[np.integer[Any]]) -> _Members:
    if answer.task.kind == "classification":
        return _Members(classes=codes.astype(np.int64), samples=np.arange(len(codes)))
    given = (codes[:, None] >> np.arange(answer.classes)) & 1
    samples, classes = np.nonzero(given)
    return _Members(classes=classes, samples=samples)


def count_losses(
    answer: Answer, codes: NDArray[np.integer[Any]], differs: NDArray[np.bool_]
) -> tuple[ClassLoss, ...]:
    """Count losses for each class that the model predicts; the largest share of losses first.

    ``codes`` [samples] are the model's answers (:mod:`~offramp.engine.answers.agreement`),
    ``differs`` [samples] marks the samples that exits answer differently. Empty for tasks without
    classes.
    """
    if not has_classes(answer):
        return ()
    members = _members(answer, codes)
    samples = np.bincount(members.classes, minlength=answer.classes)
    lost = np.bincount(members.classes[differs[members.samples]], minlength=answer.classes)
    found = [
        ClassLoss(number=int(number), samples=int(samples[number]), lost=int(lost[number]))
        for number in np.flatnonzero(samples)
    ]
    return tuple(sorted(found, key=lambda loss: (-loss.share, loss.number)))


def count_label_losses(
    answer: Answer, labels: NDArray[np.integer[Any]] | None, differs: NDArray[np.bool_]
) -> tuple[ClassLoss, ...]:
    """Count losses by the data's labels instead of the model's classes, for classification.

    ``labels`` is [samples]; the result is empty without them. Labels that are not classes of the
    model are left out.
    """
    if labels is None or answer.task.kind != "classification":
        return ()
    known = (labels >= 0) & (labels < answer.classes)
    return count_losses(answer, labels[known], differs[known])


def losses_on_records(
    answer: Answer, policy: ExitPolicy, records: Mapping[str, NDArray[Any]]
) -> tuple[ClassLoss, ...]:
    """Return a policy's losses by class on the certify split of a bundle's records."""
    certify = records["split"] == CERTIFY
    confidence, final = records["confidence"][:, certify], records["final_prediction"][certify]
    thresholds = np.full(len(confidence), NEVER)
    for active in policy.active:
        thresholds[active.exit] = active.threshold
    answers = np.concatenate([records["prediction"][:, certify], final[None]])
    given = answers[first_exit(confidence, thresholds), np.arange(len(final))]
    return count_losses(answer, final, given != final)


def harmed(losses: Sequence[ClassLoss], max_disagreement: float) -> tuple[ClassLoss, ...]:
    """Return the classes that almost surely lose much more than the bound on all answers.

    The lost share of such a class is above :data:`TOO_MUCH` times the bound. So many losses would
    also be unlikely for a class that loses no more than the bound; this test is corrected for the
    number of classes.
    """
    return tuple(
        loss
        for loss in losses
        if loss.share > TOO_MUCH * max_disagreement
        and 1 - binomial_cdf(loss.lost - 1, loss.samples, max_disagreement) < _SURE / len(losses)
    )


def describe_harm(loss: ClassLoss, max_disagreement: float) -> str:
    """Return the warning about a class, without its full stop."""
    return (
        f"of the {loss.samples:,} samples that the model gives class {loss.number}, {loss.lost:,} "
        f"({loss.share:.1%}) are answered differently, which the bound of {max_disagreement:.3g} "
        "on all answers together allows; bound each class with --max-class-disagreement"
    )


def class_strata(
    answer: Answer,
    codes: NDArray[np.integer[Any]],
    *,
    max_disagreement: float | None,
    confidence_level: float,
) -> tuple[Stratum, ...]:
    """Return the classes that have enough samples for a separate bound to be certified.

    With ``max_disagreement`` ``None`` no class is bounded. See :func:`uncertified` for the others.
    """
    if max_disagreement is None:
        return ()
    members = _members(answer, codes)
    order = np.argsort(members.classes, kind="stable")
    numbers, starts = np.unique(members.classes[order], return_index=True)
    rows = np.split(members.samples[order], starts[1:])
    return tuple(
        Stratum(name=f"class {number}", rows=of_class, max_disagreement=max_disagreement)
        for number, of_class in zip(numbers.tolist(), rows, strict=True)
        if allowed_errors(len(of_class), max_disagreement, confidence_level) >= 0
    )


def uncertified(
    answer: Answer,
    losses: Sequence[ClassLoss],
    *,
    max_disagreement: float,
    confidence_level: float,
) -> tuple[int, ...]:
    """Return the classes with too few samples for a separate bound to be certified."""
    samples = {loss.number: loss.samples for loss in losses}
    return tuple(
        number
        for number in range(answer.classes)
        if not samples.get(number)
        or allowed_errors(samples[number], max_disagreement, confidence_level) < 0
    )
