"""Finds rows that are not independent samples; each group of rows counts as one sample.

:func:`find_groups` applies the most certain reason first: rows with the same value of the user's
key, equal rows, near copies, then rows in series. Series are of two kinds: windows over a series
that share values, anywhere in the file (:func:`overlapping_windows`), and consecutive rows that are
similar, as frames of a film are (:func:`film_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.groups import Groups, Overlaps, components
from offramp.calibration.data.row_values import LEAST_SHARE, LEAST_VALUES, IntArray, RowValues
from offramp.calibration.groups.sketch import (
    Float32Array,
    RowSketch,
    near_copies,
    sketch,
    typical_distance,
)

_LEAST_COPIES: Final = 0.001
"""Nearly equal rows are joined only if at least this share of all rows has a near copy: fewer do
not change a certificate, and large sets of pictures contain some."""


def find_groups(dataset: Dataset, *, within: float) -> Groups:
    """Partition the rows of a data set into groups that count as one sample each.

    Each step joins representatives that the step before left: rows with the same number in
    ``dataset.group``, equal rows, nearly equal rows (:mod:`.sketch`), overlapping windows, and
    similar consecutive rows. The same data produce the same groups. With ``within`` 0 only the
    first two steps run: the user asserts that other rows are independent.
    """
    groups = _named(dataset, Groups.singletons(len(dataset)))
    rows = sketch(dataset)
    groups = _equal(rows, groups)
    return groups if within == 0 else _in_series(rows, _near(rows, groups, within))


def _named(dataset: Dataset, groups: Groups) -> Groups:
    if dataset.group is None:
        return groups
    return groups.joined(dataset.group, "{:,} are in the group of another (--group)")


def _equal(rows: RowSketch, groups: Groups) -> Groups:
    """Join groups that contain equal rows."""
    order = np.argsort(rows.whole, kind="stable")
    same = np.flatnonzero(rows.whole[order[1:]] == rows.whole[order[:-1]])
    number = groups.number[order]
    label = components(len(groups), number[same], number[same + 1])
    return groups.joined(label, "{:,} are duplicates of another")


def _near(rows: RowSketch, groups: Groups, within: float) -> Groups:
    chosen = groups.representative
    if not rows.position.shape[1]:
        return groups
    label = near_copies(rows.position[chosen], rows.fixed[chosen], within)
    joined = groups.joined(label, "{:,} are nearly the same as another")
    return joined if len(groups) - len(joined) >= _LEAST_COPIES * groups.rows else groups


def _in_series(rows: RowSketch, groups: Groups) -> Groups:
    windows = overlapping_windows(rows, groups.representative)
    if windows is not None:
        reason = "{:,} overlap with another, as windows do"
        overlaps = Overlaps(window=groups.number, values=windows.values)
        joined = groups.joined(windows.label, reason, shared=windows.shared)
        groups = groups if joined is groups else replace(joined, overlaps=overlaps)
    label = film_blocks(rows.position[groups.representative])
    return groups.joined(label, "{:,} resemble the row before or after them, as in a film")


_FAR_LAGS: Final = (23, 29, 37, 43, 53, 61)
"""Lags that measure the distance between rows of one neighbourhood of the file; primes, so that a
period in the file divides at most one of them."""
_COMPARED_LAGS: Final = (67, 71, 73)
"""Lags whose distances are compared with those of lag 1, to decide whether the order matters."""
_NEAR: Final = 0.7
"""Two rows are similar if their distance is below this share of the neighbourhood's distance, which
means a correlation above 1/2."""
_LEAST_EXCESS: Final = 0.1
"""Rows are a film only if the share of rows that are similar to the next row exceeds the share
expected by chance by at least this much."""
_LEAST_ROWS: Final = 4 * max(_COMPARED_LAGS)
_DECAYED: Final = 0.9
"""Share of the largest distance at which rows of a film no longer count as similar."""
_BLOCK_LAGS: Final = 2
"""Length of a block, as a multiple of the lag at which similarity has decayed: the row in the
middle of a block is then at this lag from both ends."""

_LEAST_PAIRS: Final = 8
"""Smallest number of pairs from which a median distance is computed."""


def film_blocks(position: Float32Array) -> IntArray:
    """Label blocks of consecutive similar rows, int64[rows]; other rows get separate labels.

    Rows are similar if the distance to the next one is below 0.7 of the distances to rows 23 to 61
    places away. Distances between random rows are no measure: in a file sorted by class the next
    row is nearer than a random one, but so is the 61st, and the samples are as independent as in
    any other order. Rows count as a film only if they are similar to the next row more often (by a
    tenth of all rows) than to the 70th, since in data of few dimensions rows are also similar by
    chance. Rows that have only one number, and are sorted by it, are no film.

    A run of similar rows is one block, or several if it is longer than twice the lag at which the
    distance reaches nine tenths of its largest value: a long film of one scene has several parts
    that are not similar, and each counts as a sample.
    """
    rows = len(position)
    single = np.arange(rows)
    if rows < _LEAST_ROWS or _is_sorted(position):
        return single
    around = _neighbourhood(position)
    near = _alike(position, around, 1)
    by_chance = np.mean([_alike(position, around, lag).mean() for lag in _COMPARED_LAGS])
    noise = 5 * np.sqrt(0.5 / rows)
    if near.mean() - by_chance < max(_LEAST_EXCESS, noise):
        return single
    one, next_but_one = np.flatnonzero(near), np.flatnonzero(_alike(position, around, 2))
    run = components(
        rows,
        np.concatenate([one, next_but_one, next_but_one]),
        np.concatenate([one + 1, next_but_one + 1, next_but_one + 2]),
    )
    return _cut(run, _BLOCK_LAGS * _decay_lag(position, run))


def _is_sorted(position: Float32Array) -> bool:
    """Return whether positions only rise or only fall in a direction, or have no direction."""
    steps = np.diff(position, axis=0)
    return bool(((steps >= 0).all(axis=0) | (steps <= 0).all(axis=0)).any() or not steps.shape[1])


def _neighbourhood(position: Float32Array) -> NDArray[np.float64]:
    """Return the distance of each row to others of its neighbourhood, float64[rows].

    It is the smaller of the median distances to rows before and after it: where a file changes from
    one class to the next, rows on one side are of the same class.
    """
    apart = np.full((2, len(_FAR_LAGS), len(position)), np.inf)
    for place, lag in enumerate(_FAR_LAGS):
        apart[0, place, :-lag] = apart[1, place, lag:] = _apart(position, lag)
    found: NDArray[np.float64] = np.median(apart, axis=1).min(axis=0)
    return found


def _apart(position: Float32Array, lag: int) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.linalg.norm(position[:-lag] - position[lag:], axis=1)
    return found


def _alike(position: Float32Array, around: NDArray[np.float64], lag: int) -> NDArray[np.bool_]:
    """Return whether each row is similar to the one ``lag`` places later, bool[rows − lag]."""
    limit = _NEAR * np.minimum(around[:-lag], around[lag:])
    found: NDArray[np.bool_] = _apart(position, lag) < limit
    return found


def _decay_lag(position: Float32Array, run: IntArray) -> int:
    """Return the lag from which a run's rows are no longer similar, or the number of rows."""
    lags = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
    lags += [128 * 2**k for k in range(int(np.log2(max(len(run) / 512, 1))) + 1)]
    known = {}
    for lag in lags:
        together = run[:-lag] == run[lag:]
        if np.count_nonzero(together) >= _LEAST_PAIRS:
            known[lag] = float(np.median(_apart(position, lag)[together]))
    largest = min(max(known.values()), typical_distance(position))
    return next((lag for lag, apart in known.items() if apart >= _DECAYED * largest), len(run))


def _cut(run: IntArray, length: int) -> IntArray:
    """Cut runs into blocks of about equal length, at least ``length`` if the run is that long."""
    label = np.empty(len(run), np.int64)
    starts = np.append(np.flatnonzero(np.diff(run, prepend=-1)), len(run))
    count = 0
    for start, end in pairwise(starts.tolist()):
        blocks = max((end - start) // length, 1)
        label[start:end] = count + np.arange(end - start) * blocks // (end - start)
        count += blocks
    return label


_MOST_BY_CHANCE: Final = 0.05
"""If random rows have a larger median share of values in common, values do not show overlaps."""
_MOST_LEFT: Final = 0.1
"""Joining ends when representatives have at most this mean share of values in common."""
_ROUNDS: Final = 6
"""Largest number of rounds that join windows. Each round about halves the number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowLabels:
    """Labels of overlapping windows, and their shared values."""

    label: IntArray
    """[rows]: the part of the series that each window belongs to."""
    shared: NDArray[np.float64]
    """[rows]: share of each window's values that windows of other parts have too."""
    values: RowValues


def overlapping_windows(rows: RowSketch, chosen: IntArray) -> WindowLabels | None:
    """Label windows over a series that overlap, anywhere in the file.

    The value with the smallest hash is often the same in a window and its neighbours, with a
    probability that grows with the overlap (Broder 1997). Windows with the same such value
    therefore get one label: they are one part of the series. Further rounds join parts, until their
    representatives have little in common. Values must distinguish rows: the result is ``None`` if
    random rows share more than a twentieth of their values, as pictures of 256 shades do. Windows
    must share three tenths of their values, and at least eight.
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
    """Return the values of some rows, numbered by their index in ``chosen``.

    A value that occurs in more rows than overlapping windows can have in common is left out.
    ``None`` if random rows have some of the other values in common.
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
    by_chance = float(np.median(known.shares(one, other, len(chosen), least=1)))
    return None if by_chance > _MOST_BY_CHANCE else known


def _by_least_value(values: RowValues, count: int) -> IntArray:
    """Label overlapping rows alike if their smallest value is the same; int64[count], from 0 on."""
    row, first = np.unique(values.row, return_index=True)
    least = values.value[first]
    order = np.argsort(least, kind="stable")
    same = np.flatnonzero(least[order[1:]] == least[order[:-1]])
    one, other = row[order[same]], row[order[same + 1]]
    near = values.shares(one, other, count) >= LEAST_SHARE
    _, label = np.unique(components(count, one[near], other[near]), return_inverse=True)
    return label.astype(np.int64)


def _shared_outside(label: IntArray, values: RowValues) -> NDArray[np.float64]:
    """Return the share of each row's values that rows of other labels have too."""
    group = label[values.row]
    order = np.lexsort((group, values.value))
    value, group, row = values.value[order], group[order], values.row[order]
    same = value[1:] == value[:-1]
    number = np.cumsum(np.append(True, ~same)) - 1
    mixed = np.zeros(len(label) if not len(number) else number[-1] + 1, np.bool_)
    mixed[number[1:][same & (group[1:] != group[:-1])]] = True
    outside = np.bincount(row, weights=mixed[number], minlength=len(label))
    return np.asarray(outside / np.maximum(np.bincount(row, minlength=len(label)), 1))
