"""Consecutive rows that are alike: frames of films, and series that change slowly."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.groups import components
from offramp.calibration.data.row_values import IntArray
from offramp.calibration.groups.copies import typical_distance
from offramp.calibration.groups.sketch import Float32Array

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

_LEAST_PAIRS: Final = 8
"""Pairs that a median distance is taken of, at least."""


def film_blocks(position: Float32Array) -> IntArray:
    """Label blocks of consecutive rows that are alike, int64[rows]; single rows otherwise.

    Rows are alike if the distance to the next one is below 0.7 of the distances to rows some 23 to
    61 places away. Why not of distances between random rows: in a file that is sorted by class the
    next row is nearer than a random one, but so is the 61st, and the samples are as independent as
    in any other order. Rows count as a film only if they are like the next one more often (by a
    tenth of all rows) than they are like the 70th, which happens by chance in data of few
    dimensions, and unless they are sorted by the only number that they have.

    A run of alike rows is one block, or several where it is longer than twice the lag at which the
    distance has reached nine tenths of its largest value: a film of one scene gives as many samples
    as it has stretches that no longer resemble each other.
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
    """Return how far each row is from others of its neighbourhood, float64[rows].

    It is the smaller of the median distances to rows before and behind it: at the border of two
    classes the rows of one side are of the same class.
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
        if np.count_nonzero(together) >= _LEAST_PAIRS:
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
