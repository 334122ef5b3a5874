"""Estimates times of a model's parts from timed rounds: source, segments, heads, switches of stage.

A switch from one stage to the next is called the *border* after an exit. Nothing here runs or reads
anything; :mod:`offramp.calibration.measure.profiling` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.timing import Rounds

FloatArray = NDArray[np.float64]

_HUBER = 1.345
"""Deviation, in robust standard deviations, from which on an observation has less weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneTimes:
    """Measured times of the source model and of its segments, in milliseconds."""

    batch_sizes: tuple[int, ...]
    source_ms: tuple[float, ...]
    """Time of the source model: median over rounds, by batch size."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch sizes], scaled to sum to ``source_ms``. In a cascade the segments of the
    quantised model sum to its time, and the last is ``source_ms``."""
    source_widths: tuple[float, ...] = ()
    """Half of the interval of ``source_ms``, as a share of it, by batch size."""
    segment_widths: tuple[float, ...] = ()
    """Half of the widest interval of a segment, as a share of ``source_ms``, by batch size."""
    rounds: tuple[int, ...] = ()
    """Number of rounds, by batch size."""
    disturbed: tuple[str, ...] = ()
    """Disturbances of the machine during the measurement."""


def backbone_of(
    rounds: Sequence[Rounds], batch_sizes: Sequence[int], *, is_cascade: bool = False
) -> BackboneTimes:
    """Estimate times from timed rounds; each round times the source model, then its segments.

    ``rounds`` are by batch size. In a cascade each round times the source model, the quantised
    model, and the segments of the quantised model.
    """
    wholes = [of_size.base() for of_size in rounds]
    columns = []
    for of_size, whole in zip(rounds, wholes, strict=True):
        shares = np.array([ratio.value for ratio in of_size.ratios()])
        if is_cascade:
            front_ms, shares = whole.value * shares[0], shares[1:]
            columns.append([*(front_ms * shares / shares.sum()).tolist(), whole.value])
        else:
            columns.append((whole.value * shares / shares.sum()).tolist())
    return BackboneTimes(
        batch_sizes=tuple(batch_sizes),
        source_ms=tuple(whole.value for whole in wholes),
        segments_ms=tuple(zip(*columns, strict=True)),
        source_widths=tuple(whole.half_width / whole.value for whole in wholes),
        segment_widths=tuple(widest_ratio([of_size]) for of_size in rounds),
        rounds=tuple(of_size.count for of_size in rounds),
    )


def heads_of(rounds: Sequence[Rounds]) -> list[list[float]]:
    """Estimate the heads' times in ms, [heads][batch sizes].

    Times are at least 0, and never fall with the batch size. ``rounds`` has one item for each batch
    size; each item has the times of an empty graph, then those of each head.
    """
    beyond = np.array([[d.value for d in of_size.differences()] for of_size in rounds])
    return [rising(row).tolist() for row in beyond.T]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of the borders between stages, and the uncertainty of the time that all exits add."""

    stages_ms: tuple[tuple[float, ...], ...]
    """[exits][batch sizes]: at least 0, from one cost model for all batch sizes and exits
    (:func:`fit_borders`)."""
    added_widths: tuple[float, ...]
    """Half of the interval of the time that all exits add, as a share of the source's, by batch
    size."""
    rounds: tuple[int, ...]
    """Number of rounds, by batch size."""
    disturbed: tuple[str, ...] = ()
    """Disturbances of the machine during the measurement."""


def stages_of(
    rounds: Sequence[Rounds],
    batch_sizes: Sequence[int],
    sets: Sequence[Sequence[int]],
    sample_bytes: FloatArray,
    exits_ms: Sequence[Sequence[float]],
    *,
    front_ms: Sequence[Sequence[float]] = (),
) -> StageCosts:
    """Estimate the costs of borders: switches from one stage to the next, after an exit.

    ``rounds``, by batch size, time the source model, then sets of active exits; the first set is
    all exits. ``sample_bytes``, float64[exits], is the size of the tensors that cross each exit's
    border, per sample; ``exits_ms`` [exits][batch sizes] are the times of the heads. In a cascade,
    ``front_ms`` [sets][batch sizes] is the time of the part of the quantised model that runs before
    the source model with each active set.
    """
    source_ms = np.array([of_size.base().value for of_size in rounds])
    ratios = [of_size.ratios() for of_size in rounds]
    columns = range(len(batch_sizes))
    heads = np.array([[sum(exits_ms[e][c] for e in set_) for set_ in sets] for c in columns])
    beyond = np.array([[r.value - 1 for r in row] for row in ratios]) * source_ms[:, None] - heads
    if front_ms:
        beyond -= np.array(front_ms).T
    costs = fit_borders(beyond, batch_sizes, sets, sample_bytes, source_ms)
    by_size = [costs.at(size, sample_bytes).tolist() for size in batch_sizes]
    return StageCosts(
        stages_ms=tuple(zip(*by_size, strict=True)),
        added_widths=tuple(row[0].half_width for row in ratios),
        rounds=tuple(of_size.count for of_size in rounds),
    )


def sets_of_exits(exits: int) -> list[tuple[int, ...]]:
    """Return sets of exits whose times separate costs of calls and tensors: all, early, late."""
    everything = tuple(range(exits))
    if exits < 2:
        return [everything] if exits else []
    return [everything, everything[: exits // 2], everything[exits // 2 :]]


def widest_ratio(rounds: Sequence[Rounds]) -> float:
    """Return the largest half width of a ratio to the first system, over all batch sizes."""
    return max((e.half_width for of_size in rounds for e in of_size.ratios()), default=0.0)


def rising(values: FloatArray) -> FloatArray:
    """Return the nearest sequence that never falls and is never negative: float64[batch sizes].

    A quantity that grows with the batch is estimated at all sizes together (pool adjacent
    violators). So an estimate below 0 at one size lowers its neighbours, instead of being cut off:
    cutting off single values would make their mean too large.
    """
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, n), (right, m) = pools[-2:]
            pools[-2:] = [((left * n + right * m) / (n + m), n + m)]
    row = np.concatenate([[value] * count for value, count in pools])
    result: FloatArray = np.maximum(row, 0.0)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderCosts:
    """Cost of a border: a part for the call, and a part for the tensors that cross it."""

    call_ms: float
    """Time of a call of the backend and an exit check, independent of the tensors."""
    ms_per_byte: float
    """Time of layout changes, copies and lost fusions, per byte of the tensors."""

    def at(self, batch_size: int, sample_bytes: FloatArray) -> FloatArray:
        """Predict the milliseconds of borders from the bytes of a sample that cross them."""
        return self.call_ms + self.ms_per_byte * batch_size * sample_bytes


def fit_borders(
    added_ms: FloatArray,
    batch_sizes: Sequence[int],
    sets: Sequence[Sequence[int]],
    sample_bytes: FloatArray,
    scale_ms: FloatArray,
) -> BorderCosts:
    """Fit :class:`BorderCosts` to the time that sets of exits add at all batch sizes.

    Weighted least squares, with the constraint that no cost is negative, and with Huber's weights,
    so that a batch size that was disturbed throughout does not decide.

    ``added_ms``, float64[batch sizes, active sets of exits], is the time beyond the source model
    and the heads; noise can make it negative. ``sample_bytes`` is as in :func:`stages_of`;
    ``scale_ms``, float64[batch sizes], is the source model's time, to which noise is proportional.
    """
    calls = [len(set_) for set_ in sets]
    crossing = [float(sample_bytes[list(set_)].sum()) for set_ in sets]
    design = np.array([[n, size * c] for size in batch_sizes for n, c in zip(calls, crossing,
                       strict=True)], np.float64)  # fmt: skip
    weights = np.repeat(1.0 / scale_ms, len(sets))
    observed = added_ms.ravel()
    trust = np.ones_like(weights)
    for _ in range(20):
        found = _least_squares(design, observed, weights * np.sqrt(trust))
        off = np.abs(weights * (observed - design @ found))
        deviation = max(float(np.median(off)) / 0.6745, 1e-9)
        trust = 1.0 / np.maximum(off / (_HUBER * deviation), 1.0)
    return BorderCosts(call_ms=float(found[0]), ms_per_byte=float(found[1]))


def _least_squares(design: FloatArray, observed: FloatArray, weights: FloatArray) -> FloatArray:
    """Solve for coefficients of at least 0, by trying every set of zero coefficients."""
    best, least = np.zeros(design.shape[1]), np.inf
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    weighted = design / scale * weights[:, None]
    for used in product((True, False), repeat=design.shape[1]):
        columns = np.flatnonzero(used)
        found = np.zeros(design.shape[1])
        if len(columns):
            solved, *_ = np.linalg.lstsq(weighted[:, columns], observed * weights, rcond=None)
            found[columns] = solved
        loss = float(((weighted @ found - observed * weights) ** 2).sum())
        if (found >= 0).all() and loss < least:
            best, least = found / scale, loss
    return best
