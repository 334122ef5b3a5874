"""Rows that follow each other in a series: windows that overlap, and frames of films."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.groups.copies import typical_distance
from offramp.calibration.groups.groups import IntArray, components
from offramp.calibration.groups.sketch import Float32Array, RowSketch

_FAR_LAGS: Final = (23, 29, 37, 43, 53, 61)
"""Lags that say how far apart rows of one neighbourhood of the file are; primes, so that no period
meets several of them."""
_COMPARED_LAGS: Final = (67, 71, 73)
"""Lags whose distances are compared with those of lag 1, to find whether the order matters."""
_NEAR: Final = 0.7
"""Share of the neighbourhood's distance below which two rows are alike: a correlation above 1/2."""
_LEAST_EXCESS: Final = 0.1
"""Share of the rows that must be like the next one, beyond those that are so by chance."""
_LEAST_ROWS: Final = 4 * max(_COMPARED_LAGS)
_DECAYED: Final = 0.9
"""Share of the largest distance at which rows of a film count as no longer alike."""
_BLOCK_LAGS: Final = 2
"""Length of a block, in lags at which the likeness has decayed: the row in its middle is so far
from both of its ends."""

_LEAST_VALUES: Final = 8
"""Values that two windows must have in common at least, and pairs that a median is taken of."""
_LEAST_SHARE: Final = 0.3
"""Share of the values of the shorter of two windows that they must have in common."""
_MOST_BY_CHANCE: Final = 0.05
"""Median share that random rows may have in common, where values say which rows overlap."""
_ROUNDS: Final = 2
"""Rounds of joining windows. One gives stretches of half a window, a second one of about a whole
one; each halves the number of samples."""


def film_blocks(position: Float32Array) -> IntArray:
    """Label blocks of consecutive rows that are alike, int64[rows]; single rows otherwise.

    Rows are alike if the distance to the next one is below 0.7 of the distances to rows some 23 to
    61 places away. Why not of distances between random rows: in a file that is sorted by class the
    next row is nearer than a random one, but so is the 61st, and the samples are as independent as
    in any other order. Rows count as a film only if they are like the next one more often (by a
    tenth of all rows) than they are like the 70th, which happens by chance in data of few
    dimensions, and unless they are sorted by the only number that they have. A run of alike rows is one block, or several where it is longer than twice the lag
    at which the distance has reached nine tenths of its largest value: a film of one scene gives
    as many samples as it has stretches that no longer resemble each other.
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
    """Whether rows rise or fall throughout along any direction, or have none."""
    steps = np.diff(position, axis=0)
    return bool(((steps >= 0).all(axis=0) | (steps <= 0).all(axis=0)).any() or not steps.shape[1])


def _neighbourhood(position: Float32Array) -> NDArray[np.float64]:
    """Return how far each row is from others of its neighbourhood, float64[rows]."""
    rows = len(position)
    apart = np.full((2 * len(_FAR_LAGS), rows), np.nan)
    for place, lag in enumerate(_FAR_LAGS):
        apart[2 * place, :-lag] = apart[2 * place + 1, lag:] = _apart(position, lag)
    found: NDArray[np.float64] = np.nanmedian(apart, axis=0)
    return found


def _apart(position: Float32Array, lag: int) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.linalg.norm(position[:-lag] - position[lag:], axis=1)
    return found


def _alike(position: Float32Array, around: NDArray[np.float64], lag: int) -> NDArray[np.bool_]:
    """Whether each row is like the one ``lag`` places on, bool[rows − lag]."""
    limit = _NEAR * np.minimum(around[:-lag], around[lag:])
    found: NDArray[np.bool_] = _apart(position, lag) < limit
    return found


def _decay_lag(position: Float32Array, run: IntArray) -> int:
    """Return the lag from which on rows of a run are no longer alike; beyond all where none is."""
    lags = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
    lags += [128 * 2**k for k in range(int(np.log2(max(len(run) / 512, 1))) + 1)]
    known = {}
    for lag in lags:
        together = run[:-lag] == run[lag:]
        if np.count_nonzero(together) >= _LEAST_VALUES:
            known[lag] = float(np.median(_apart(position, lag)[together]))
    largest = min(max(known.values()), typical_distance(position))
    return next((lag for lag, apart in known.items() if apart >= _DECAYED * largest), len(run))


def _cut(run: IntArray, length: int) -> IntArray:
    """Cut runs into blocks of about equal length, at least ``length`` where the run is so long."""
    label = np.empty(len(run), np.int64)
    starts = np.append(np.flatnonzero(np.diff(run, prepend=-1)), len(run))
    count = 0
    for start, end in pairwise(starts.tolist()):
        blocks = max((end - start) // length, 1)
        label[start:end] = count + np.arange(end - start) * blocks // (end - start)
        count += blocks
    return label


def overlapping_windows(
    rows: RowSketch, chosen: IntArray
) -> tuple[IntArray, NDArray[np.float64]] | None:
    """Label windows over a series which overlap, wherever in the file they are.

    Windows have most of their values in common, at other places. The value of a window with the
    smallest hash is that of its neighbours too, more likely the more they overlap (Broder 1997); so
    equal ones label a stretch of the series, and a second round joins stretches. Values must tell
    rows apart: where random rows have more than a twentieth of theirs in common, as pictures of 256
    shades have, the result is ``None``. Windows must have three tenths of their values in common,
    and at least eight.

    Returns:
        int64[chosen] labels, and the share of each row's values that rows of other labels have too.
    """
    known = _telling_values(rows, chosen)
    if known is None:
        return None
    label, joined = np.arange(len(chosen)), known
    for _ in range(_ROUNDS):
        found = _by_least_value(joined, len(label))
        label, joined = found[label], joined.renamed(found)
    return label, _shared_outside(label, known)


class _Values(NamedTuple):
    """Values that rows, or groups of rows, have: sorted by row, then value, each once."""

    row: IntArray
    value: NDArray[np.uint64]

    def renamed(self, row: IntArray) -> _Values:
        """Give rows other numbers; the values of those with the same number are united."""
        found = row[self.row]
        order = np.lexsort((self.value, found))
        found, value = found[order], self.value[order]
        new = np.append(True, (np.diff(found) != 0) | (value[1:] != value[:-1]))
        return _Values(found[new], value[new])

    def shares(self, first: IntArray, second: IntArray, count: int) -> NDArray[np.float64]:
        """Return the share of values that pairs of rows have in common, float64[pairs].

        0 where fewer than eight are. ``count`` is the number of all rows.
        """
        starts = np.searchsorted(self.row, np.arange(count + 1))
        sizes = np.diff(starts)
        pair, value = [], []
        for side in (first, second):
            size = sizes[side]
            place = np.repeat(starts[side] - np.cumsum(size) + size, size) + np.arange(size.sum())
            pair.append(np.repeat(np.arange(len(side)), size))
            value.append(self.value[place])
        pairs, values = np.concatenate(pair), np.concatenate(value)
        order = np.lexsort((values, pairs))
        pairs, values = pairs[order], values[order]
        twice = (pairs[1:] == pairs[:-1]) & (values[1:] == values[:-1])
        common = np.bincount(pairs[1:][twice], minlength=len(first))
        smaller = np.maximum(np.minimum(sizes[first], sizes[second]), 1)
        return np.where(common >= _LEAST_VALUES, common / smaller, 0.0)


def _telling_values(rows: RowSketch, chosen: IntArray) -> _Values | None:
    """Return the values of some rows, numbered by their place in ``chosen``.

    Those that occur in more rows than windows over a series can have them in common are left out.
    ``None`` if random rows have some in common.
    """
    place = np.full(len(rows.whole), -1)
    place[chosen] = np.arange(len(chosen))
    kept = place[rows.value_row] >= 0
    row, value = place[rows.value_row[kept]], rows.value[kept]
    if len(chosen) < 2 or not len(row):
        return None
    _, number, counts = np.unique(value, return_inverse=True, return_counts=True)
    rare = counts[number] <= max(rows.width, _LEAST_VALUES)
    if not rare.any():
        return None
    known = _Values(row[rare], value[rare])
    rng = np.random.default_rng(4)
    one = rng.integers(0, len(chosen), 500)
    other = (one + rng.integers(1, len(chosen), 500)) % len(chosen)
    by_chance = float(np.median(known.shares(one, other, len(chosen))))
    return None if by_chance > _MOST_BY_CHANCE else known


def _by_least_value(values: _Values, count: int) -> IntArray:
    """Join rows whose least value is the same and which overlap; int64[count], from 0 on."""
    row, first = np.unique(values.row, return_index=True)
    least = values.value[first]
    order = np.argsort(least, kind="stable")
    same = np.flatnonzero(least[order[1:]] == least[order[:-1]])
    one, other = row[order[same]], row[order[same + 1]]
    near = values.shares(one, other, count) >= _LEAST_SHARE
    _, label = np.unique(components(count, one[near], other[near]), return_inverse=True)
    return label.astype(np.int64)


def _shared_outside(label: IntArray, values: _Values) -> NDArray[np.float64]:
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
