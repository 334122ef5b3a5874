"""The recursion over splits and devices (E3 3.2.3, fig. 6), vectorised over device counts.

Given the largest period of a stage, the number of replicas that a split needs is known for each
type. Then one of two sums over the splits can be minimised. One is the latency, for all counts of
devices. The other is the number of devices of one type, for all counts of the other types, which is
a far smaller grid. This number shows whether a period is possible at all; the latency is computed
only where a limit on latency or cost may bind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.stage_times import SplitTimes

ROUNDING: Final = 1e-9
"""Relative tolerance: rounding errors must not add a replica."""


class DeviceGrid:
    """All combinations of device counts of each type, up to a budget, as one flat axis."""

    def __init__(self, budget: tuple[int, ...]) -> None:
        shape = tuple(count + 1 for count in budget)
        self.size = int(np.prod(shape))
        self.counts = np.stack(np.unravel_index(np.arange(self.size), shape), axis=1)
        """[size, types]: counts of devices at each index of the flat axis."""
        strides = np.array([int(np.prod(shape[k + 1 :])) for k in range(len(shape))], np.int64)
        most = max(budget, default=0)
        self.before = np.full((len(budget), most + 1, self.size), self.size)
        """[types, count, size]: index with ``count`` fewer devices of the type; ``size`` if
        impossible."""
        for kind, stride in enumerate(strides):
            for count in range(budget[kind] + 1):
                there = self.counts[:, kind] >= count
                self.before[kind, count, there] = np.flatnonzero(there) - count * stride


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """The links of a cluster between types, by the class of the sending type.

    Types with the same links form one class. The recursion needs to know only the class of the
    device type that runs the split before.
    """

    class_of: NDArray[np.int64]
    """Number of the class of each device type, [types]."""
    bytes_per_s: NDArray[np.float64]
    """[classes, types]: bandwidth of the link from a class to a type."""
    latency_s: NDArray[np.float64]
    """[classes, types]: latency of the link from a class to a type, in seconds."""

    @staticmethod
    def of(cluster: Cluster) -> Links:
        """Group the types of a cluster by their links."""
        names = [kind.name for kind in cluster.types]
        rows = [
            tuple((link.bytes_per_s, link.latency_s) for link in sent)
            for sent in ([cluster.link_between(a, b) for b in names] for a in names)
        ]
        classes = list(dict.fromkeys(rows))
        table = np.array(classes)
        return Links(
            class_of=np.array([classes.index(row) for row in rows]),
            bytes_per_s=table[..., 0],
            latency_s=table[..., 1],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Steps:
    """Splits that a period allows, sorted by their end; each has a start and a later end border."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    source: NDArray[np.int64]
    """Class of the device type that runs the split before; 0 at the model's start."""
    kind: NDArray[np.int64]
    replicas: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    bounds: NDArray[np.int64]
    """[K + 2]: index of the first step that ends at each border; K is the number of segments."""


class SplitSearch:
    """Search of the plans of one batch size, with a bound on the period of each stage.

    In shapes, K is the number of segments.
    """

    def __init__(
        self, model: ModelFacts, cluster: Cluster, times: SplitTimes, arrival_rps: float
    ) -> None:
        self.times = times
        self.budget = tuple(kind.count for kind in cluster.types)
        self._borders, self._links = model.segments, Links.of(cluster)
        size = times.batch_size
        shares = model.shares
        self.fill_s = (size - 1) / 2 / (shares * arrival_rps)
        """[K]: mean time at each border until a batch is full, in seconds."""
        self.need_s = times.seconds[:, :-1] * (shares / size)[None, :, None]
        """[types, K, K + 1]: seconds that a single replica needs, for a split from one border to
        another, for each row that enters the model."""
        crossing = np.array([0.0, *(model.crossing_bytes(k) for k in range(1, model.segments))])
        each_s = crossing[None, None, :] / self._links.bytes_per_s[:, :, None]
        self.link_period_s = each_s * shares
        """[classes, types, K]: seconds that the link into each border is busy for each row that
        enters the model."""
        self.link_s = each_s * size + self._links.latency_s[:, :, None]
        """[classes, types, K]: seconds that a batch takes on that link."""
        self._before_s, self._behind_s = self._least_latencies()
        eliminated = int(np.argmax(self.budget))
        self.eliminated = eliminated
        """Type whose number of devices is minimised where latency does not matter: the type with
        the most devices."""

    def periods(self, above: float, below: float) -> NDArray[np.float64]:
        """Return the possible periods of splits and links between two bounds, ascending."""
        counts = np.arange(1, max(self.budget) + 1)
        finite = [need[np.isfinite(need)] for need in self.need_s]
        found = [
            (need[:, None] / counts[None, :most]).ravel()
            for need, most in zip(finite, self.budget, strict=True)
        ]
        every = np.concatenate([*found, self.link_period_s[:, :, 1:].ravel()])
        return np.unique(every[(every > above) & (every < below)])

    def steps(self, period_s: float, latency_s: float = np.inf) -> _Steps:
        """Return the splits that a period allows, with the number of replicas that they need.

        Splits are omitted if no plan that contains them can meet the latency, with any number of
        devices.
        """
        with np.errstate(invalid="ignore"):
            wanted = np.ceil(self.need_s / period_s * (1 - ROUNDING))
        replicas = np.where(np.isfinite(wanted), np.maximum(wanted, 1.0), np.inf)
        fits = replicas <= np.array(self.budget)[:, None, None]
        end, start, kind = np.nonzero(fits.transpose(2, 1, 0))
        classes = len(self._links.bytes_per_s)
        source = np.tile(np.arange(classes), len(start))
        start, end, kind = (np.repeat(array, classes) for array in (start, end, kind))
        allowed = np.where(
            start > 0,
            self.link_period_s[source, kind, start] <= period_s * (1 + ROUNDING),
            source == 0,
        )
        linked_s = np.where(start > 0, self.link_s[source, kind, start], 0.0)
        took_s = self.times.longest_s[kind, start, end] + self.fill_s[start] + linked_s
        allowed &= self._before_s[start] + took_s + self._behind_s[end] <= latency_s
        start, end, kind, source = (array[allowed] for array in (start, end, kind, source))
        return _Steps(
            start=start,
            end=end,
            source=source,
            kind=kind,
            replicas=replicas[kind, start, end].astype(np.int64),
            latency_s=took_s[allowed],
            bounds=np.searchsorted(end, np.arange(self._borders + 2)),
        )

    def begin(self, grid: DeviceGrid) -> NDArray[np.float64]:
        """Return the initial table, [K + 1, classes, size + 1]: 0 at border 0, else infinite."""
        table = np.full((self._borders + 1, len(self._links.bytes_per_s), grid.size + 1), np.inf)
        table[0, :, :-1] = 0.0
        return table

    def extend(
        self,
        grid: DeviceGrid,
        steps: _Steps,
        before: NDArray[np.float64],
        *,
        counting: bool,
        once: bool,
    ) -> NDArray[np.float64]:
        """Extend the plans of a table by exactly one split (``once``), or by any number.

        ``before`` and the result are tables as :meth:`begin` returns them. Their values are the
        smallest counts of the eliminated type if ``counting``, else the lowest latencies.
        """
        after = before if not once else np.full_like(before, np.inf)
        classes, width = before.shape[1:]
        kinds = self._links.class_of[steps.kind]
        taken = np.where(counting & (steps.kind == self.eliminated), 0, steps.replicas)
        added = steps.latency_s
        if counting:
            added = np.where(steps.kind == self.eliminated, steps.replicas, 0.0)
        base = (steps.start * classes + steps.source) * width
        flat = before.reshape(-1)
        for end in range(1, self._borders + 1):
            here = slice(steps.bounds[end], steps.bounds[end + 1])
            if here.start == here.stop:
                continue
            at = grid.before[steps.kind[here], taken[here]]
            values = np.take(flat, at + base[here, None]) + added[here, None]
            for number in range(classes):
                mine = values if classes == 1 else values[kinds[here] == number]
                if len(mine):
                    after[end, number, :-1] = mine.min(axis=0)
        if counting:
            after[after > self.budget[self.eliminated]] = np.inf
        return after

    def trace(
        self,
        grid: DeviceGrid,
        steps: _Steps,
        layers: Sequence[NDArray[np.float64]],
        place: int,
        *,
        counting: bool,
    ) -> list[tuple[int, int, int, int]]:
        """Return the splits of the best plan, in order, as (start, end, type, replicas).

        The plan is traced back from the model's end. ``layers`` are the tables after 0, 1 … splits,
        or one table for any number of splits; ``place`` is the index on the grid.
        """
        kinds = self._links.class_of[steps.kind]
        found: list[tuple[int, int, int, int]] = []
        end, number = self._borders, int(layers[-1][self._borders, :, place].argmin())
        while end:
            before = layers[-1 - len(found) - 1] if len(layers) > 1 else layers[0]
            here = np.arange(steps.bounds[end], steps.bounds[end + 1])
            here = here[kinds[here] == number]
            alike = counting & (steps.kind[here] == self.eliminated)
            taken = np.where(alike, 0, steps.replicas[here])
            at = grid.before[steps.kind[here], taken, place]
            added = steps.latency_s[here]
            if counting:
                added = np.where(alike, steps.replicas[here], 0.0)
            least = int((before[steps.start[here], steps.source[here], at] + added).argmin())
            step, place = int(here[least]), int(at[least])
            found.append(
                (int(steps.start[step]), end, int(steps.kind[step]), int(steps.replicas[step]))
            )
            end, number = int(steps.start[step]), int(steps.source[step])
        return found[::-1]

    def least_latency_s(self) -> float:
        """Return the lowest latency of any plan, with any number of devices."""
        return float(self._before_s[-1])

    def _least_latencies(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the lowest latency before and after every border, without links; [K + 1] each."""
        fastest_s = self.times.longest_s.min(axis=0)
        fastest_s[:-1] += self.fill_s[:, None]
        before_s, behind_s = (np.full(self._borders + 1, np.inf) for _ in range(2))
        before_s[0] = behind_s[-1] = 0.0
        for end in range(1, self._borders + 1):
            before_s[end] = (before_s[:end] + fastest_s[:end, end]).min()
            start = self._borders - end
            behind_s[start] = (fastest_s[start, start + 1 :] + behind_s[start + 1 :]).min()
        return before_s, behind_s

    def latency_of(self, splits: Sequence[tuple[int, int, int, int]]) -> float:
        """Return the total seconds of the stages, waits and links of splits."""
        total_s, sender = 0.0, 0
        for start, end, kind, _ in splits:
            total_s += float(self.times.longest_s[kind, start, end] + self.fill_s[start])
            total_s += float(self.link_s[sender, kind, start]) if start else 0.0
            sender = int(self._links.class_of[kind])
        return total_s
