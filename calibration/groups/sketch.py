"""Compact sketches of rows for comparing them with each other, and the search for near copies.

:func:`sketch` keeps a few facts of every row: hashes, a short position (random projections of its
numbers), some values. :func:`near_copies` compares positions and gives one label to rows that are
nearer to each other than independent samples are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.groups import components
from offramp.calibration.data.row_values import IntArray

UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]

DIRECTIONS: Final = 32
"""Dimensions of a position. Random projections keep distances within about 12 % (Johnson and
Lindenstrauss 1984)."""
VALUES: Final = 64
"""Approximate number of values that are kept of a row."""
_SAMPLED_ROWS: Final = 256
"""Number of rows from which the scale of each number is estimated, in chunks."""
_CHUNK_ROWS: Final = 16
_LEAST_SCALE, _LEAST_SCALE_OF_MANY = 0.25, 1.0
"""Smallest scale of a number, as a share of the median scale: for rows with one dimension, and with
more (pictures, sound). A pixel that is nearly always black must not make two shots of one scene
different, while the columns of a table have separate scales."""
_BATCH_NUMBERS: Final = 2**22
_RUN: Final = 8
"""Number of consecutive integers that form one value: single integers occur everywhere, phrases do
not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSketch:
    """Facts about all rows, which need little memory even if the rows are large."""

    whole: UInt64Array
    """[rows]: hash of all inputs; equal rows have equal hashes."""
    fixed: UInt64Array
    """[rows]: hash of everything that cannot be nearly equal: ids, texts, flags, positions of
    NaN."""
    position: Float32Array
    """[rows, directions]: random projection of all measured numbers, each divided by its scale; no
    directions if no number is measured."""
    value_row: NDArray[np.int64]
    """[values]: row of each value that is kept, rising."""
    value: UInt64Array
    """[values]: hashes of values; equal values have equal hashes in all rows. Within a row hashes
    rise, and each occurs once."""
    value_place: NDArray[np.int64]
    """[values]: position of each value in its row."""
    width: int
    """Number of values in a row, over all inputs."""


def sketch(dataset: Dataset) -> RowSketch:
    """Return facts about all rows; all rows are read once, and a few of them twice."""
    rows = len(dataset)
    first = dataset.take(slice(1))
    measured = {name: array for name, array in first.items() if _is_measured(array)}
    width = max(sum(array[0].size for array in first.values()), 1)
    projections = _projections(dataset, measured)
    whole, fixed = np.empty(rows, np.uint64), np.zeros(rows, np.uint64)
    position = np.zeros((rows, DIRECTIONS if measured else 0), np.float32)
    values: list[_PlacedValues] = []
    size = max(_BATCH_NUMBERS // width, 1)
    for start in range(0, rows, size):
        batch = dataset.take(slice(start, start + size))
        part = slice(start, start + len(next(iter(batch.values()))))
        whole[part] = _hashes(list(batch.values()))
        others = [array for name, array in batch.items() if name not in measured]
        for name, projection in projections.items():
            finite, flags = _finite(batch[name])
            others += [] if flags is None else [flags]
            position[part] += projection.of(finite)
        if others:
            fixed[part] = _hashes(others)
        row, value, place = _values(batch)
        values.append((row + start, value, place))
    return RowSketch(
        whole=whole,
        fixed=fixed,
        position=position,
        value_row=np.concatenate([row for row, _, _ in values]),
        value=np.concatenate([value for _, value, _ in values]),
        value_place=np.concatenate([place for _, _, place in values]),
        width=width,
    )


def _is_measured(array: NDArray[Any]) -> bool:
    """Return whether numbers may be nearly equal: floats, and integers of 8 and 16 bits.

    These integers are images and sound. Longer ones are mostly ids, and id 7 is no nearer to 8 than
    to 9,000.
    """
    return array.dtype.kind == "f" or (array.dtype.kind in "iu" and array.dtype.itemsize <= 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Projection:
    """Random signs for the numbers of an input, and the shift and factor to a common scale."""

    centre: Float32Array
    """Value that is subtracted from each number, [numbers]."""
    factor: Float32Array
    """Factor of each number after the subtraction, [numbers]."""
    signs: NDArray[np.int8]
    """Random signs, [numbers, directions]."""

    def of(self, rows: NDArray[Any]) -> Float32Array:
        """Project rows [rows, …] to [rows, directions]."""
        flat = (rows.reshape(len(rows), -1) - self.centre).astype(np.float32) * self.factor
        found: Float32Array = np.zeros((len(rows), DIRECTIONS), np.float32)
        for start in range(0, flat.shape[1], 2**16):
            part = slice(start, start + 2**16)
            found += flat[:, part] @ self.signs[part].astype(np.float32)
        return found


def _projections(dataset: Dataset, measured: Mapping[str, NDArray[Any]]) -> dict[str, _Projection]:
    rng = np.random.default_rng(0)  # independent of the user's seed: groups are facts of the data
    count = min(_SAMPLED_ROWS, len(dataset))
    sampled = np.sort(rng.choice(len(dataset), count, replace=False))
    found = {}
    for name in measured:
        part, _ = _finite(dataset.column(name, sampled))
        flat = part.reshape(count, -1).astype(np.float64)
        least = _LEAST_SCALE if part.ndim < 3 else _LEAST_SCALE_OF_MANY
        scale = _scales(flat[rng.permutation(count)], least)
        bits = rng.integers(0, 2, (flat.shape[1], DIRECTIONS), np.int8)
        found[name] = _Projection(
            centre=np.median(flat, axis=0).astype(part.dtype if part.dtype.kind == "f" else "f4"),
            factor=(1 / scale).astype(np.float32),
            signs=2 * bits - 1,
        )
    return found


def _scales(flat: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Return each number's spread, float64[numbers], at least ``least`` times the median spread.

    It is the median of the standard deviations of chunks, which a few outliers do not change; it is
    their mean if most chunks have no spread, as for a number that is rarely set.
    """
    chunks = np.array_split(flat, max(len(flat) // _CHUNK_ROWS, 1))
    spread = np.stack([chunk.std(axis=0) for chunk in chunks])
    scale = np.median(spread, axis=0)
    scale = np.where(scale > 0, scale, spread.mean(axis=0))
    typical = float(np.median(scale[scale > 0])) if (scale > 0).any() else 1.0
    found: NDArray[np.float64] = np.maximum(scale, least * typical)
    return found


def _finite(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int8] | None]:
    """Replace values that are not finite by 0; return flags of the replaced values, or ``None``."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array, None
    flags = (np.isnan(array) + 2 * np.isposinf(array) + 4 * np.isneginf(array)).astype(np.int8)
    return np.where(flags == 0, array, array.dtype.type(0)), flags


def _hashes(arrays: list[NDArray[Any]]) -> UInt64Array:
    """Hash the rows of some arrays together, uint64[rows]."""
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    found = np.empty(len(contiguous[0]), np.uint64)
    for row in range(len(found)):
        digest = hashlib.blake2b(digest_size=8)
        for array in contiguous:
            digest.update(array[row].tobytes())
        found[row] = int.from_bytes(digest.digest(), "little")
    return found


_PlacedValues: TypeAlias = tuple[NDArray[np.int64], UInt64Array, NDArray[np.int64]]


def _values(batch: Mapping[str, NDArray[Any]]) -> _PlacedValues:
    """Return rows, hashes and positions of values; equal values have equal hashes.

    Values are single floats, and every run of eight integers. In each row the values with the
    smallest hashes are kept, so that two rows tend to keep the same common values.
    """
    rows, hashes, places, before = [], [], [], 0
    width = sum(array[0].size for array in batch.values())
    limit = np.uint64(2**64 - 1) if width <= VALUES else np.uint64(2**64 // width * VALUES)
    for array in batch.values():
        if array.dtype.kind not in "fiu" or array[0].size < 2:
            continue
        hashed = _mixed(_bits(array.reshape(len(array), -1)))
        row, column = np.nonzero(hashed <= limit)
        rows.append(row)
        hashes.append(hashed[row, column])
        places.append(before + column)
        before += hashed.shape[1]
    if not rows or not any(map(len, rows)):
        return np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64)
    row, place = np.concatenate(rows).astype(np.int64), np.concatenate(places).astype(np.int64)
    value = np.concatenate(hashes)
    order = np.lexsort((place, value, row))
    again = (row[order][1:] == row[order][:-1]) & (value[order][1:] == value[order][:-1])
    once = order[np.append(True, ~again)]
    return row[once], value[once], place[once]


def _bits(flat: NDArray[Any]) -> UInt64Array:
    if flat.dtype.kind == "f":
        return flat.astype(np.float64).view(np.uint64)
    codes = _mixed(flat.astype(np.int64).view(np.uint64))
    length = max(codes.shape[1] - _RUN + 1, 1)
    found = np.zeros((len(codes), length), np.uint64)
    for place in range(min(_RUN, codes.shape[1])):
        found = found * np.uint64(0x9E3779B97F4A7C15) + codes[:, place : place + length]
    return found


def _mixed(bits: UInt64Array) -> UInt64Array:
    """Mix 64 bits well (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


_PAIRS: Final = 4096
"""Number of random pairs whose median distance is the typical distance."""
_ASKED, _FEWEST_ASKED, _COMPARED = 256, 64, 2**24
"""Largest and smallest number of rows whose distances to all other rows are computed. The number is
reduced if there would be more than ``_COMPARED`` pairs."""
_STEPS_OF_TWO: Final = 2
"""Number of steps from a distance at which pairs are counted to twice that distance."""
_STEPS: Final = 34
_MOST_GROWTH: Final = 0.25
"""If the pairs within a distance are copies, doubling the distance adds at most this share of
pairs. For numbers spread over one dimension the share is 1 (twice as many pairs); over more
dimensions it is larger."""
_LEAST_PAIRS: Final = 20
_WIDE: Final = 4.0
"""Number of dimensions from which on two rows are not near each other by chance."""
_MOST_SHARE: Final = 0.05
"""Largest mean number of copies of a row, as a share of all rows: larger groups are classes."""
_TABLES, _CELL_DIRECTIONS, _CELL_WIDTH = 10, 8, 6.0
"""Number of hash tables, directions that each divides space by, width of cells in distances."""
_AT_ONCE: Final = 2**22
"""Largest number of differences that are in memory together."""


def typical_distance(position: Float32Array) -> float:
    """Return the median distance of random pairs of rows; 0 for fewer than two rows."""
    if len(position) < 2:
        return 0.0
    rng = np.random.default_rng(1)
    one = rng.integers(0, len(position), _PAIRS)
    other = (one + rng.integers(1, len(position), _PAIRS)) % len(position)
    return float(np.median(np.linalg.norm(position[one] - position[other], axis=1)))


def near_copies(position: Float32Array, fixed: UInt64Array, within: float) -> IntArray:
    """Label rows that are nearer to each other than independent samples are, int64[rows].

    No two of the rows are equal. Two are nearly equal if they have the same ``fixed`` hash and
    their distance is at most the result of :func:`_copy_distance`, which is at most ``within``
    times the typical distance.
    """
    scale = typical_distance(position)
    limit = 0.0 if not scale else _copy_distance(position / scale, within)
    if not limit:
        return np.arange(len(position))
    return components(len(position), *_near_pairs(position / scale, fixed, limit))


def _copy_distance(position: Float32Array, within: float) -> float:
    """Return the largest distance, up to ``within``, that copies have and other rows do not.

    Copies with noise form pairs at the distance of the noise, and then no more over a wide range of
    distances. Samples of a continuous distribution do not: the number of pairs within a distance
    grows at least in proportion to it (their correlation dimension is at least 1; Grassberger and
    Procaccia 1983). So there is a gap above the distance of copies, even in data of few dimensions
    that are so dense that single distances are no evidence. The result is 0 if there is no gap. In
    many dimensions independent rows are never near, so there may be a gap although no pair was
    found below it: the search that follows then finds rare copies. Groups that contain a large
    share of the rows are not copies but tight classes.
    """
    distances = 2 * within / 2 ** (np.arange(_STEPS) / _STEPS_OF_TWO)
    pairs, drawn = _count_pairs(position, distances)
    wide = _is_wide(position)
    most = max(_MOST_SHARE * len(position), 1) * drawn
    for distance, near, around in zip(
        distances[_STEPS_OF_TWO:], pairs[_STEPS_OF_TWO:], pairs, strict=False
    ):
        growth = around - near
        gap = near >= _LEAST_PAIRS and growth <= _MOST_GROWTH * near
        if near <= most and (gap or (wide and not growth)):
            return float(distance)
    return 0.0


def _is_wide(position: Float32Array) -> bool:
    """Return whether rows spread over many dimensions.

    The number of dimensions is the participation ratio of the variances along the principal axes.
    """
    variances = np.linalg.eigvalsh(np.cov(position, rowvar=False))
    return bool(variances.sum() ** 2 >= _WIDE * (variances**2).sum())


def _count_pairs(
    position: Float32Array, distances: NDArray[np.float64]
) -> tuple[NDArray[np.int64], int]:
    """Count the pairs of a row with any other row within each of some falling distances.

    The first rows of the pairs are a random choice; their number is returned too.
    """
    rng = np.random.default_rng(2)
    rows = len(position)
    most = min(max(_COMPARED // rows, _FEWEST_ASKED), _ASKED, rows)
    drawn = rng.choice(rows, most, replace=False)
    counts = np.zeros(len(distances), np.int64)
    size = max(_AT_ONCE // max(position.size, 1), 1)
    for start in range(0, len(drawn), size):
        some = drawn[start : start + size]
        squares = ((position[some][:, None] - position[None]) ** 2).sum(axis=2)
        squares[np.arange(len(some)), some] = np.inf
        apart = np.sqrt(squares[squares <= distances[0] ** 2])
        counts += np.searchsorted(np.sort(apart), distances, side="right")
    return counts, len(drawn)


def _near_pairs(
    position: Float32Array, fixed: UInt64Array, limit: float
) -> tuple[IntArray, IntArray]:
    """Return the pairs within ``limit``, or enough of them to connect the same rows.

    Locality-sensitive hashing (Datar, Immorlica, Indyk, Mirrokni 2004): rows in one cell of a
    random grid are candidates, and consecutive candidates of a cell are compared. With a
    probability of about one in a thousand, the two rows of a pair share no cell in any table.
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
