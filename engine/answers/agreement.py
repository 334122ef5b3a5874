"""Comparison of answers for each task, and the codes that are recorded.

All decisions, tests and promises use one number per answer, its *code*: the answers of an exit and
of the model's end agree if their codes are equal. Where agreement means equality (of classes or of
label sets), the code identifies the answer. Where it means nearness, the end's code is
:data:`AGREED`, and an exit's is :data:`AGREED` or :data:`DIFFERED`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.bundle.schema.answers import MOST_LABELS, AnswerTask, TaskKind
from offramp.engine.answers.principal_values import ROUNDING

Codes = NDArray[np.int32]
AGREED: Final = 1
DIFFERED: Final = 0
HALF: Final = 0.5
"""Probability from which a label is assigned."""


class Agreement(ABC):
    """Compares answers of one task, of b samples each."""

    def __init__(self, answer: Answer) -> None:
        """Take the manifest's description of the answer."""
        self.answer = answer
        self.task: AnswerTask = answer.task

    @abstractmethod
    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the part of answers [b, …] that is compared, [b, …]."""

    @abstractmethod
    def agree(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> NDArray[np.bool_]:
        """Return whether reduced answers agree with those of the model's end, [b].

        ``mask`` [b, tokens] is the mask of the task, where it has one.
        """

    def decided(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which answers [b, …] decide anything: those without NaN and infinities, [b].

        Where the largest of several scores decides, −∞ excludes its class, as a mask does; one
        class must be left.
        """
        return _all_of(np.isfinite(values))

    def margins(
        self, ours: NDArray[Any], ends: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return, in the end's scores, how far its decisions lead ours, and the winning scores.

        ``ours`` (an exit's) and ``ends`` (the model's end's) are whole answers [b, …]; both results
        are [b, decisions]. ``None`` if answers are not scores.
        """
        del ours, ends
        return None

    def codes(self, ends: NDArray[Any]) -> Codes:
        """Return the codes [b] of the model's own reduced answers."""
        return np.full(len(ends), AGREED, np.int32)

    def codes_against(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> Codes:
        """Return the codes [b] of an exit's reduced answers, given the model's own."""
        return np.where(self.agree(ours, ends, mask), AGREED, DIFFERED).astype(np.int32)

    def mask_in(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
        """Return the task's mask from the inputs of a batch; ``None`` without one."""
        return None if self.task.mask is None else inputs[self.task.mask]


class Equality(Agreement):
    """Answers that agree if they are equal: the code identifies the answer."""

    def agree(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> NDArray[np.bool_]:
        """Return whether the codes are equal, [b]."""
        del mask
        same: NDArray[np.bool_] = self.codes(ours) == self.codes(ends)
        return same

    def codes_against(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> Codes:
        """Return the codes of ``ours``, which do not depend on the model's answers."""
        del ends, mask
        return self.codes(ours)


class ClassAgreement(Equality):
    """Agreement of answers that are one class of several; the code is the class number."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the class of the largest value."""
        classes: NDArray[np.intp] = values.argmax(axis=1)
        return classes

    def decided(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether the largest score is finite, [b]; NaN and +∞ are refused."""
        return _all_of(np.isfinite(values.max(axis=1)))

    def margins(self, ours: NDArray[Any], ends: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Compare the end's scores of the end's class and of our class."""
        return _lead(ours, ends)

    def codes(self, ends: NDArray[Any]) -> Codes:
        """Return the numbers of the classes, int32[b]."""
        return ends.astype(np.int32, copy=False)


class LabelAgreement(Equality):
    """Agreement of label sets; the code is the set's number, or a checksum if labels are many."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return whether each sample has each label, [b, labels]."""
        given: NDArray[np.bool_] = values >= self._bounds(values)
        return given

    def decided(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which answers have no NaN, [b]; an infinite logit is a sure yes or no."""
        return _all_of(~np.isnan(values))

    def margins(self, ours: NDArray[Any], ends: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return twice the distance of scores from the bound, where the labels differ."""
        other = self.reduce(ours) != self.reduce(ends)
        return np.where(other, 2 * np.abs(ends - self._bounds(ends)), 0.0), ends

    def _bounds(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values from which labels are assigned, in the type of the answers."""
        bound = HALF if self.answer.form == "probabilities" else 0.0
        return np.asarray(self.answer.thresholds or bound, values.dtype)

    def codes(self, ends: NDArray[Any]) -> Codes:
        """Return a code for each set of labels, [b]."""
        if ends.shape[1] <= MOST_LABELS:
            powers = np.left_shift(1, np.arange(ends.shape[1]), dtype=np.int64)
            numbers: Codes = (ends * powers).sum(axis=1).astype(np.int32)
            return numbers
        packed = np.packbits(ends, axis=1)
        sums = [zlib.crc32(row.tobytes()) & 0x7FFFFFFF for row in packed]
        return np.array(sums, np.int64).astype(np.int32)


class PlaceAgreement(Agreement):
    """Agreement of classes at all *places* (tokens or pixels): a share of them must be equal."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the classes [b, places], in the smallest sufficient type."""
        classes = values if self.answer.form == "classes" else values.argmax(axis=self._axis)
        narrow = np.uint8 if self.answer.classes <= np.iinfo(np.uint8).max else np.int32
        return classes.reshape(len(values), -1).astype(narrow)

    def decided(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether the largest score is finite at every place, [b]."""
        scores = values if self.answer.form == "classes" else values.max(axis=self._axis)
        return _all_of(np.isfinite(scores))

    def margins(
        self, ours: NDArray[Any], ends: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Compare the end's scores of the end's class and of our class at each place."""
        if self.answer.form == "classes":
            return None
        return _lead(*(np.moveaxis(scores, self._axis, -1) for scores in (ours, ends)))

    @property
    def _axis(self) -> int:
        return -1 if self.task.kind == "token-classification" else 1

    def agree(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> NDArray[np.bool_]:
        """Return whether enough places are equal, [b]; places excluded by the mask do not count."""
        same = ours == ends
        if mask is None:
            equal, places = np.count_nonzero(same, axis=1), same.shape[1]
        else:
            counts = mask != 0
            equal = np.count_nonzero(same & counts, axis=1)
            places = np.count_nonzero(counts, axis=1)
        enough: NDArray[np.bool_] = equal >= self.task.share * np.asarray(places) - ROUNDING
        return enough


class PoseAgreement(Agreement):
    """Agreement of heat maps: each one's key point is the position of its largest value."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return row, column, and the map's longer side, [b, key points, 3]."""
        count, points, height, width = values.shape
        places = values.reshape(count, points, height * width).argmax(axis=2)
        rows, columns = np.divmod(places, width)
        side = np.full_like(rows, max(height, width))
        return np.stack([rows, columns, side], axis=2).astype(np.int32)

    def decided(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether the largest value is finite in every map, [b]."""
        return _all_of(np.isfinite(values.max(axis=(2, 3))))

    def margins(self, ours: NDArray[Any], ends: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Compare the end's values at the positions of both key points in each map."""
        return _lead(*(maps.reshape(*maps.shape[:2], -1) for maps in (ours, ends)))

    def agree(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> NDArray[np.bool_]:
        """Return whether enough key points are near each other (PCK), [b]."""
        del mask
        apart = np.hypot(*np.moveaxis(ours[..., :2] - ends[..., :2], 2, 0))
        near = apart <= self.task.within * ends[..., 2] + ROUNDING
        enough: NDArray[np.bool_] = (
            np.count_nonzero(near, axis=1) >= self.task.share * near.shape[1] - ROUNDING
        )
        return enough


class ValueAgreement(Agreement):
    """Agreement of values: every value must be near that of the model's end."""

    def reduce(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values, [b, values]."""
        return values.astype(np.float32, copy=False).reshape(len(values), -1)

    def agree(
        self, ours: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None = None
    ) -> NDArray[np.bool_]:
        """Return whether the largest difference is within the bound, [b]; NaN is near nothing."""
        del mask
        with np.errstate(invalid="ignore"):
            apart = np.abs(ours - ends).max(axis=1)
        near: NDArray[np.bool_] = apart <= self.task.within
        return near


def _all_of(found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether all elements of each row of [b, …] are true, [b]."""
    every: NDArray[np.bool_] = np.asarray(found.reshape(len(found), -1).all(axis=1))
    return every


def _lead(ours: NDArray[Any], ends: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return how far the end's choice leads ours in the end's scores, and the score of that choice.

    Scores are [b, …, choices].
    """
    winning = ends.max(axis=-1)
    chosen = np.take_along_axis(ends, ours.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    with np.errstate(invalid="ignore"):
        return winning - chosen, winning


_BY_KIND: Final[Mapping[TaskKind, type[Agreement]]] = {
    "classification": ClassAgreement,
    "multi-label": LabelAgreement,
    "token-classification": PlaceAgreement,
    "segmentation": PlaceAgreement,
    "pose": PoseAgreement,
    "regression": ValueAgreement,
    "other": ValueAgreement,
}


def agreement_of(answer: Answer) -> Agreement:
    """Return the comparison for a model's answers."""
    return _BY_KIND[answer.task.kind](answer)
