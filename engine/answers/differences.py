"""Differences between values and expected values, relative to the scale of each element.

All checks that compare a model with a derived one, or rows in different batches, use this module.
The effect of rounding depends on an element's own size. One entry of −10⁹, which masks a class,
must not hide differences in the other classes; infinities and NaN are right where the other side
has the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.engine.answers.agreement import agreement_of

_APART: Final = 5
"""Smallest gap, in powers of two, by which a group of magnitudes counts as apart from smaller
ones."""
_BEYOND: Final = 64.0
"""Multiple of the median column's size above which columns do not set the scale of others."""

_ELEMENTS: Final = {"classification": "class", "multi-label": "label"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The magnitudes that differences of a tensor's elements are measured by.

    An element's scale is that of its column (class, feature or channel): the column's largest
    magnitude, without values far above the others, such as those that a mask sets in some samples.
    The scale of such a value is its own magnitude. Columns of small values have at least the scale
    of ordinary ones, because rounding errors come from sums that all columns share. Values up to 1
    are not separated: if none exceeds 1, the largest value is the scale of all.
    """

    ordinary: float
    """Scale of ordinary columns: at least the scale of each of them."""
    by_column: NDArray[np.float64]
    """[columns]: scale of each column; a single element if all columns have the same scale."""
    apart_above: NDArray[np.float64]
    """[columns]: larger magnitudes are their own scale."""

    @classmethod
    def fixed(cls, scale: float) -> Scales:
        """Use one scale for all elements."""
        one = np.array([scale])
        return cls(ordinary=scale, by_column=one, apart_above=np.array([np.inf]))

    @classmethod
    def of(cls, values: NDArray[Any]) -> Scales:
        """Determine scales from values [n, …]; more samples give better scales."""
        columns = _columns(values)
        sizes = np.where(np.isfinite(columns), np.abs(columns), 0.0).reshape(len(columns), -1)
        largest = float(sizes.max(initial=0.0))
        if not largest:
            return cls.fixed(1.0)
        least = min(1.0, largest)
        tops = _tops(sizes, least)
        known = np.sort(tops[tops > 0])
        ordinary = float(_first_group(known)[-1])
        return cls(
            ordinary=ordinary,
            by_column=np.maximum(tops, ordinary),
            apart_above=np.where(tops > 0, tops, ordinary),
        )

    def at(self, wanted: NDArray[Any]) -> NDArray[np.float64]:
        """Return the scale of every element of ``wanted``, in its shape."""
        columns = _columns(wanted)
        shape = (-1, *(1,) * (columns.ndim - 1))
        own = np.where(np.isfinite(columns), np.abs(columns), 0.0)
        own[own <= self.apart_above.reshape(shape)] = 0.0
        found = np.maximum(own, self.by_column.reshape(shape))
        return np.moveaxis(found, 0, _axis(wanted)).reshape(wanted.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference between two tensors."""

    share: float
    """The difference as a share of the element's scale; infinite where the shapes differ, or only
    one side is NaN or infinite."""
    worst: str = ""
    """Description of the element; empty where nothing differs."""

    def describe(self) -> str:
        """Return share and element, as in ``the answers differ by …``."""
        return f"{self.share:.1e}: {self.worst}" if self.worst else f"{self.share:.1e}"


def compare(
    found: NDArray[Any],
    wanted: NDArray[Any],
    *,
    scales: Scales | None = None,
    answer: Answer | None = None,
) -> Difference:
    """Return the largest difference between ``found`` and ``wanted``, relative to its scale.

    By default, ``scales`` are those of ``wanted``; scales of more samples are better. With
    ``answer``, both are answers [b, …] of that model, and must decide alike: a different decision
    counts as a difference of half the margin by which ``wanted`` prefers its own decision, relative
    to the winning values.
    """
    if found.shape != wanted.shape:
        return Difference(share=math.inf, worst=f"shape {_sized(found)}, expected {_sized(wanted)}")
    actual, right = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.asarray(np.abs(actual - right))
    apart[(actual == right) | (np.isnan(actual) & np.isnan(right))] = 0.0
    apart[np.isnan(apart)] = np.inf
    if not apart.any():
        return Difference(share=0.0)
    sizes = (scales or Scales.of(right)).at(right)
    shares = apart / sizes
    place = np.unravel_index(int(np.argmax(shares)), shares.shape)
    difference = Difference(
        share=float(shares[place]),
        worst=(
            f"{actual[place]:.6g} instead of {right[place]:.6g} "
            f"({_named(place, answer)}; its scale is {sizes[place]:.3g})"
        ),
    )
    decided = None if answer is None else _decisions(actual, right, answer)
    return difference if decided is None or decided.share <= difference.share else decided


def relative_difference(
    found: NDArray[Any], wanted: NDArray[Any], scales: Scales | None = None
) -> float:
    """Return :attr:`Difference.share` of :func:`compare`."""
    return compare(found, wanted, scales=scales).share


def _decisions(
    found: NDArray[np.float64], wanted: NDArray[np.float64], answer: Answer
) -> Difference | None:
    """Compare the decisions of answers; ``None`` if they are not scores."""
    if (margins := agreement_of(answer).margins(found, wanted)) is None:
        return None
    lead, winning = (np.nan_to_num(array, nan=0.0, neginf=0.0) for array in margins)
    shares = lead / 2 / np.maximum(np.abs(winning), Scales.of(winning.reshape(-1, 1)).ordinary)
    row = np.unravel_index(int(np.argmax(shares)), shares.shape)[0]
    return Difference(
        share=float(shares.max(initial=0.0)),
        worst=f"another decision for sample {row}, by {float(shares.max(initial=0.0)):.1e} of the "
        "values that decide",
    )


def _tops(sizes: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Return each column's largest size that is not apart from the smaller ones (:data:`_APART`).

    ``sizes`` are [columns, n], the result is [columns]: at least ``least``, but 0 for a column of
    zeros, because zeros do not determine a scale.
    """
    _, powers = np.frexp(np.maximum(sizes, least))
    lowest = int(powers.min())
    width = int(powers.max()) - lowest + 1
    places = powers - lowest + np.arange(len(sizes))[:, None] * width
    taken = np.bincount(places[sizes > 0], minlength=len(sizes) * width).reshape(-1, width) > 0
    # The last power of each group: the next ones are all unused.
    ahead = np.pad(taken, ((0, 0), (0, _APART)))
    empty = [~ahead[:, i : i + width] for i in range(1, _APART)]
    ends = taken & np.logical_and.reduce(empty)
    bound = np.ldexp(1.0, np.argmax(ends, axis=1) + lowest)
    below = np.where(sizes < bound[:, None], sizes, 0.0).max(axis=1, initial=0.0)
    tops: NDArray[np.float64] = np.where(taken.any(axis=1), np.maximum(below, least), 0.0)
    return tops


def _first_group(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ascending sizes before the first that is far above the others."""
    _, powers = np.frexp(sizes)
    (gaps,) = np.nonzero(np.diff(powers) >= _APART)
    group = sizes[: gaps[0] + 1] if gaps.size else sizes
    alike: NDArray[np.bool_] = group <= _BEYOND * group[(len(group) - 1) // 2]
    return group[alike]


def _axis(values: NDArray[Any]) -> int:
    """Return the axis of classes, features or channels."""
    return values.ndim - 1 if values.ndim < 4 else 1


def _columns(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values as [columns, …]; one-dimensional values are one column."""
    wide = values.astype(np.float64, copy=False)
    if wide.ndim < 2:
        return wide.reshape(1, -1)
    return np.moveaxis(wide, _axis(wide), 0)


def _named(place: tuple[Any, ...], answer: Answer | None) -> str:
    """Return the name of an element, such as ``sample 3, class 1``."""
    row, *others = map(int, place) if place else (0,)
    kind = "value" if answer is None else _ELEMENTS.get(answer.task.kind, "value")
    where = others[0] if len(others) == 1 else others
    return f"sample {row}, {kind} {where}" if others else f"sample {row}"


def _sized(array: NDArray[Any]) -> str:
    return str(list(array.shape))
