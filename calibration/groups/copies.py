"""Rows that are equal, or so near to each other that one was made of the other."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.groups import components
from offramp.calibration.data.row_values import IntArray
from offramp.calibration.groups.sketch import Float32Array, UInt64Array

_PAIRS: Final = 4096
"""Random pairs that the typical distance is the median of."""
_ASKED, _FEWEST_ASKED, _COMPARED = 256, 64, 2**24
"""Rows whose distances to all others are looked at: at most, and at least where all pairs would be
more than so many."""
_STEPS_OF_TWO: Final = 2
"""Steps in which a distance at which pairs are counted doubles."""
_STEPS: Final = 34
_MOST_GROWTH: Final = 0.25
"""Further pairs, as a share, within twice a distance, if those within it are copies. Numbers that
spread over one dimension bring 1 (twice as many pairs), over more dimensions more."""
_LEAST_PAIRS: Final = 20
_WIDE: Final = 4.0
"""Dimensions from which on chance brings no two rows near each other."""
_MOST_SHARE: Final = 0.05
"""Share of all rows that are copies of a row on average, at most: larger groups are classes."""
_TABLES, _CELL_DIRECTIONS, _CELL_WIDTH = 10, 8, 6.0
"""Hash tables, the directions that each cuts space by, and how wide cells are in distances."""
_AT_ONCE: Final = 2**22
"""Numbers of differences that are held at once."""


def typical_distance(position: Float32Array) -> float:
    """Return the median distance of random pairs of rows; 0 if there are no two."""
    if len(position) < 2:
        return 0.0
    rng = np.random.default_rng(1)
    one = rng.integers(0, len(position), _PAIRS)
    other = (one + rng.integers(1, len(position), _PAIRS)) % len(position)
    return float(np.median(np.linalg.norm(position[one] - position[other], axis=1)))


def near_copies(position: Float32Array, fixed: UInt64Array, within: float) -> IntArray:
    """Label rows that are nearer to each other than independent samples come, int64[rows].

    No two of the rows are equal. Two are nearly equal where they have the same ``fixed`` hash, and
    their distance is at most ``within`` of the typical one, at most what :func:`_copy_distance`
    finds.
    """
    scale = typical_distance(position)
    limit = 0.0 if not scale else _copy_distance(position / scale, within)
    if not limit:
        return np.arange(len(position))
    return components(len(position), *_near_pairs(position / scale, fixed, limit))


def _copy_distance(position: Float32Array, within: float) -> float:
    """Return the largest distance, up to ``within``, that copies have and other rows do not.

    Copies with noise make pairs at the distance of the noise, and then no more over a wide range
    of distances. Samples of a continuous spread do not: pairs within a distance grow at least in
    proportion to it (their correlation dimension is at least 1; Grassberger and Procaccia 1983).
    So there is a gap above the distance of copies, also where data of few dimensions are so dense
    that single distances say nothing. 0 where there is none. In many dimensions independent rows
    are never near, so that there the gap may be above no pair at all: rare copies are then found
    by the search that follows. Groups that hold a large share of the rows are no copies but tight
    classes.
    """
    distances = 2 * within / 2 ** (np.arange(_STEPS) / _STEPS_OF_TWO)
    pairs, asked = _count_pairs(position, distances)
    wide = _is_wide(position)
    most = max(_MOST_SHARE * len(position), 1) * asked
    for distance, near, around in zip(
        distances[_STEPS_OF_TWO:], pairs[_STEPS_OF_TWO:], pairs, strict=False
    ):
        growth = around - near
        gap = near >= _LEAST_PAIRS and growth <= _MOST_GROWTH * near
        if near <= most and (gap or (wide and not growth)):
            return float(distance)
    return 0.0


def _is_wide(position: Float32Array) -> bool:
    """Whether rows spread over many dimensions, by the variances along the principal axes.

    The number of dimensions is their participation ratio.
    """
    variances = np.linalg.eigvalsh(np.cov(position, rowvar=False))
    return bool(variances.sum() ** 2 >= _WIDE * (variances**2).sum())


def _count_pairs(
    position: Float32Array, distances: NDArray[np.float64]
) -> tuple[NDArray[np.int64], int]:
    """Count pairs of some rows with all others within each distance, falling; and those rows."""
    rng = np.random.default_rng(2)
    rows = len(position)
    most = min(max(_COMPARED // rows, _FEWEST_ASKED), _ASKED, rows)
    asked = rng.choice(rows, most, replace=False)
    counts = np.zeros(len(distances), np.int64)
    size = max(_AT_ONCE // max(position.size, 1), 1)
    for start in range(0, len(asked), size):
        some = asked[start : start + size]
        squares = ((position[some][:, None] - position[None]) ** 2).sum(axis=2)
        squares[np.arange(len(some)), some] = np.inf
        apart = np.sqrt(squares[squares <= distances[0] ** 2])
        counts += np.searchsorted(np.sort(apart), distances, side="right")
    return counts, len(asked)


def _near_pairs(
    position: Float32Array, fixed: UInt64Array, limit: float
) -> tuple[IntArray, IntArray]:
    """Find the pairs within ``limit``, or enough of them to connect the rows that are.

    Locality-sensitive hashing (Datar, Immorlica, Indyk, Mirrokni 2004): rows in one cell of a
    random grid are candidates, and those that follow each other in it are compared. A pair shares
    a cell of one of the tables but for one time in a thousand.
    """
    rng = np.random.default_rng(3)
    first, second = [], []
    for _ in range(_TABLES):
        along = position @ rng.standard_normal((position.shape[1], _CELL_DIRECTIONS))
        cells = np.floor(along / (_CELL_WIDTH * limit) + rng.random(_CELL_DIRECTIONS))
        order = np.lexsort((along[:, 0], *cells.T, fixed))
        for step in (1, 2, 3):
            one, other = order[:-step], order[step:]
            apart = np.linalg.norm(position[one] - position[other], axis=1)
            near = (apart <= limit) & (fixed[one] == fixed[other])
            first.append(one[near])
            second.append(other[near])
    return np.concatenate(first), np.concatenate(second)
