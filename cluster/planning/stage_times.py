"""The time of every possible split on every type of device, with the exits that save time.

E3's T(i..j, c, B) = sum of P(k, c, B_k) (3.2, fig. 6), and its wrapper (3.4): an exit inside a
split is off if its check costs more time than the smaller batch saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, ModelFacts
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.goal import PlanningGoal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """Seconds of all splits at one batch size; border k, from 0 to K, is before segment k."""

    batch_size: int
    seconds: NDArray[np.float64]
    """[types, K + 1, K + 1]: seconds between two borders, for a batch that is full at the first.
    Infinite if the weights do not fit, or if the second border is not after the first."""
    longest_s: NDArray[np.float64]
    """[types, K + 1, K + 1]: ``seconds`` if no row of the batch leaves inside the split."""
    last_exit: NDArray[np.int64]
    """[types, K + 1, K + 1]: border of the last exit that is on between the two borders; the first
    border if no exit is on between them."""
    unsplit_s: NDArray[np.float64]
    """[types]: seconds of the unmodified model, without exits."""

    def exits_between(self, device: int, start: int, end: int) -> list[int]:
        """Return the borders inside a split whose exits are on, in depth order."""
        found: list[int] = []
        while (border := int(self.last_exit[device, start, end])) != start:
            found.append(border)
            end = border
        return found[::-1]


def check_times(model: ModelFacts, cluster: Cluster) -> None:
    """Raise PlanError if a cluster's times belong to another model."""
    last = max(model.exit_names, default=-1)
    for kind in cluster.types:
        segments, exits = len(kind.times.segments_s), len(kind.times.exits_s)
        if segments != model.segments or exits <= last:
            raise PlanError(
                f"device type {kind.name!r:.40} has times of {segments} segments and {exits} "
                f"exits, expected {model.segments} and more than {last} for this model; use times "
                "of the same bundle"
            )


def split_times(
    model: ModelFacts, cluster: Cluster, batch_size: int, goal: PlanningGoal
) -> SplitTimes:
    """Choose the exits inside every possible split, and predict its time.

    Without the wrapper all exits are on, as in most of the paper's evaluation; only the whole model
    may always run without exits. Segments that the goal refuses have infinite time.
    """
    tables = [kind.times for kind in cluster.types]
    seconds, longest_s, last_exit = _times_of(model, tables, batch_size, wrapper=goal.wrapper)
    unsplit_s = np.array(
        [float(table.segments_s[model.begins :, batch_size].sum()) for table in tables]
    )
    if model.weight_bytes:
        before = np.concatenate([[0.0], np.cumsum(model.weight_bytes)])
        memory = np.array([kind.memory_bytes for kind in cluster.types])
        needed = before[None, :] - before[:, None]
        seconds[needed[None] > memory[:, None, None]] = np.inf
        longest_s[needed[None] > memory[:, None, None]] = np.inf
        unsplit_s[before[-1] - before[model.begins] > memory] = np.inf
    for number, kind in enumerate(cluster.types):
        for name, first, last in goal.refused:
            if name == kind.name:
                seconds[number, : first + 1, last + 1 :] = np.inf
                longest_s[number, : first + 1, last + 1 :] = np.inf
                unsplit_s[number] = np.inf if model.begins <= first else unsplit_s[number]
    return SplitTimes(
        batch_size=batch_size,
        seconds=seconds,
        longest_s=longest_s,
        last_exit=last_exit,
        unsplit_s=unsplit_s,
    )


def _times_of(
    model: ModelFacts, tables: Sequence[DeviceTimes], batch_size: int, *, wrapper: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return seconds between borders, their maximum, and the last exit; [types, K + 1, K + 1] each.

    It is a recursion over the exits inside a split. The time after the last exit, and the share of
    rows there, depend only on that exit.
    """
    count = model.segments
    exit_at, shares = model.exit_at, np.append(model.shares, 0.0)
    sizes = batch_size * shares[None, :] / shares[:-1, None]
    fixed = np.full((1, count + 1), float(batch_size))
    legs = np.stack([_legs(times, sizes, exit_at) for times in tables])
    full = np.stack([_legs(times, fixed, exit_at)[0] for times in tables])
    best, longest = (np.full((len(tables), count + 1, count + 1), np.inf) for _ in range(2))
    last = np.zeros(best.shape, np.int64)
    kinds = np.arange(len(tables))[:, None]
    for end in range(1, count + 1):
        starts = np.arange(end)
        inside = np.flatnonzero(exit_at[:end] >= 0)
        direct = legs[:, starts, starts, end][..., None]
        total = np.concatenate(
            [direct, best[:, :end, inside] + legs[:, :end, inside, end]], axis=-1
        )
        if len(inside) and (not wrapper or (end < count and exit_at[end] < 0)):
            # At an end without an exit, the same number of rows remain as after the last exit
            # before it.
            total[:, : inside[-1], :-1] = np.inf
        taken = total.argmin(axis=-1)
        best[:, :end, end] = total.min(axis=-1)
        before = np.where(taken == 0, starts, np.append(0, inside)[taken])
        until = np.where(taken == 0, 0.0, longest[kinds, starts, before])
        longest[:, :end, end], last[:, :end, end] = until + full[kinds, before, end], before
    return best, longest, last


def _legs(
    times: DeviceTimes, sizes: NDArray[np.float64], exit_at: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return seconds between two borders, with the exit at the second: [starts, K + 1, K + 1].

    ``sizes`` [starts, K + 1] is the mean number of rows that remain after a border, of a batch that
    is full at its start. Times of fractional sizes are interpolated between whole sizes.
    """
    until = np.concatenate([np.zeros((1, times.segments_s.shape[1])), times.segments_s]).cumsum(0)
    low = np.minimum(sizes.astype(np.int64), times.max_batch_size)
    part = np.where(low < times.max_batch_size, sizes - low, 0.0)[..., None]
    high = np.minimum(low + 1, times.max_batch_size)
    ends = until.T  # [sizes + 1, K + 1]
    cost = np.zeros_like(ends)
    borders = np.flatnonzero(exit_at >= 0)
    cost[:, borders] = times.exits_s[exit_at[borders]].T
    total = ends + cost
    from_border = np.arange(len(exit_at))[None, :]
    begun = ends[low, from_border] * (1 - part[..., 0]) + ends[high, from_border] * part[..., 0]
    legs: NDArray[np.float64] = total[low] * (1 - part) + total[high] * part - begun[..., None]
    return legs


def seconds_with(
    times: DeviceTimes,
    model: ModelFacts,
    borders: Sequence[int],
    batch_size: int,
    *,
    ends_with_exit: bool,
) -> tuple[float, float]:
    """Return the seconds of a split with known exits: with forecast shares, and if no row leaves.

    ``borders`` are its start, the exits inside that are on, and its end. The rows after an exit are
    those that remain after all exits up to this one.
    """
    shares, exit_at = model.shares, model.exit_at
    mean_s = longest_s = 0.0
    for start, end in itertools.pairwise(borders):
        size = batch_size * shares[start] / shares[borders[0]]
        rows = times.segments_s[start:end].sum(0)
        if end != borders[-1] or ends_with_exit:
            rows = rows + times.exits_s[exit_at[end]]
        mean_s += float(np.interp(size, np.arange(len(rows)), rows))
        longest_s += float(rows[batch_size])
    return mean_s, longest_s
