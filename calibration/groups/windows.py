"""Windows over a series that overlap: they have values in common, at other places of the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.groups import components
from offramp.calibration.data.row_values import LEAST_SHARE, LEAST_VALUES, IntArray, RowValues
from offramp.calibration.groups.sketch import RowSketch

_MOST_BY_CHANCE: Final = 0.05
"""Median share that random rows may have in common, where values say which rows overlap."""
_MOST_LEFT: Final = 0.1
"""Mean share of values that representatives may have in common with others."""
_ROUNDS: Final = 6
"""Rounds of joining windows at most. Each about halves the number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowLabels:
    """What is known of windows that overlap."""

    label: IntArray
    """[rows]: the stretch of the series that each window belongs to."""
    shared: NDArray[np.float64]
    """[rows]: share of each window's values that windows of other stretches have too."""
    values: RowValues


def overlapping_windows(rows: RowSketch, chosen: IntArray) -> WindowLabels | None:
    """Label windows over a series which overlap, wherever in the file they are.

    The value of a window with the smallest hash is that of its neighbours too, more likely the more
    they overlap (Broder 1997); so equal ones label a stretch of the series. Further rounds join
    stretches, until those that stand for them have little in common. Values must tell rows apart:
    where random rows have more than a twentieth of theirs in common, as pictures of 256 shades
    have, the result is ``None``. Windows must have three tenths of their values in common, and at
    least eight.
    """
    known = _telling_values(rows, chosen)
    if known is None:
        return None
    label, joined = np.arange(len(chosen)), known
    shared = np.zeros(len(chosen))
    for _ in range(_ROUNDS):
        found = _by_least_value(joined, int(label.max()) + 1)
        if found.max() == label.max():
            break
        label, joined = found[label], joined.renamed(found)
        shared = _shared_outside(label, known)
        if _left(label, shared, known) <= _MOST_LEFT:
            break
    return WindowLabels(label=label, shared=shared, values=known)


def _left(label: IntArray, shared: NDArray[np.float64], known: RowValues) -> float:
    """Return the mean share of values that representatives have in common with each other."""
    order = np.lexsort((shared, label))
    first = order[np.append(True, np.diff(label[order]) != 0)]
    stands = np.zeros(len(label), np.bool_)
    stands[first] = True
    kept = stands[known.row]
    return float(_shared_outside(np.arange(len(label)), known.some(kept))[first].mean())


def _telling_values(rows: RowSketch, chosen: IntArray) -> RowValues | None:
    """Return the values of some rows, numbered by their place in ``chosen``.

    Those that occur in more rows than windows over a series can have them in common are left out.
    ``None`` if random rows have some in common.
    """
    place = np.full(len(rows.whole), -1)
    place[chosen] = np.arange(len(chosen))
    kept = place[rows.value_row] >= 0
    row, value, where = place[rows.value_row[kept]], rows.value[kept], rows.value_place[kept]
    if len(chosen) < 2 or not len(row):
        return None
    _, number, counts = np.unique(value, return_inverse=True, return_counts=True)
    rare = counts[number] <= max(rows.width, LEAST_VALUES)
    if not rare.any():
        return None
    known = RowValues(row, value, where).some(rare)
    rng = np.random.default_rng(4)
    one = rng.integers(0, len(chosen), 500)
    other = (one + rng.integers(1, len(chosen), 500)) % len(chosen)
    by_chance = float(np.median(known.shares(one, other, len(chosen))))
    return None if by_chance > _MOST_BY_CHANCE else known


def _by_least_value(values: RowValues, count: int) -> IntArray:
    """Join rows whose least value is the same and which overlap; int64[count], from 0 on."""
    row, first = np.unique(values.row, return_index=True)
    least = values.value[first]
    order = np.argsort(least, kind="stable")
    same = np.flatnonzero(least[order[1:]] == least[order[:-1]])
    one, other = row[order[same]], row[order[same + 1]]
    near = values.shares(one, other, count) >= LEAST_SHARE
    _, label = np.unique(components(count, one[near], other[near]), return_inverse=True)
    return label.astype(np.int64)


def _shared_outside(label: IntArray, values: RowValues) -> NDArray[np.float64]:
    """Return the share of each row's values which rows of other labels have too."""
    group = label[values.row]
    order = np.lexsort((group, values.value))
    value, group, row = values.value[order], group[order], values.row[order]
    same = value[1:] == value[:-1]
    number = np.cumsum(np.append(True, ~same)) - 1
    mixed = np.zeros(len(label) if not len(number) else number[-1] + 1, np.bool_)
    mixed[number[1:][same & (group[1:] != group[:-1])]] = True
    outside = np.bincount(row, weights=mixed[number], minlength=len(label))
    return np.asarray(outside / np.maximum(np.bincount(row, minlength=len(label)), 1))
