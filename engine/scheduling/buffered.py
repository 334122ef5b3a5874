"""Survivors that wait at a split until they are fused into a fuller batch (E3 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.base import Piece, Rows
from offramp.engine.scheduling.queue import PATIENCE_S
from offramp.engine.scheduling.rowset import RowSet, concatenate


@dataclass(slots=True, eq=False)
class ParkedBatch:
    """The survivors of a batch, or those of them that still wait."""

    number: int
    samples: RowSet
    positions: Rows
    """[n]: their rows in the batch as it was parked."""
    patience_s: float
    """Until when those that have no deadline are given."""

    def __len__(self) -> int:
        """Samples that wait."""
        return len(self.positions)

    @property
    def due_s(self) -> NDArray[np.float64]:
        """[n]: deadlines, or as long as a request without one is given; never, once answered."""
        due_s = np.minimum(self.samples.deadlines_s, self.patience_s)
        return np.where(self.samples.answered, np.inf, due_s)

    def split(self, leaving: NDArray[np.bool_]) -> tuple[ParkedBatch, ParkedBatch]:
        """Part it into those that leave and those that stay."""
        return self._part(np.flatnonzero(leaving)), self._part(np.flatnonzero(~leaving))

    def _part(self, rows: Rows) -> ParkedBatch:
        samples, positions = self.samples.take(rows), self.positions[rows]
        return ParkedBatch(self.number, samples, positions, self.patience_s)


@dataclass(slots=True, eq=False)
class ParkedLane:
    """Samples of one signature before one stage: at most a few batches' worth."""

    signature: Hashable
    batches: list[ParkedBatch] = field(default_factory=list)
    size: int = 0
    due_s: float = float("inf")
    """When its most urgent sample is due, or earlier."""

    def add(self, parked: ParkedBatch) -> None:
        """Append a batch."""
        self.batches.append(parked)
        self.size += len(parked)
        self.due_s = min(self.due_s, float(parked.due_s.min()))

    def replace(self, batches: list[ParkedBatch]) -> None:
        """Hold these instead."""
        self.batches, self.size, self.due_s = [], 0, float("inf")
        for parked in batches:
            if len(parked):
                self.add(parked)

    def most_urgent(self, limit: int) -> list[NDArray[np.bool_]]:
        """Which samples of each batch are among the ``limit`` to serve first."""
        due_s = np.concatenate([parked.due_s for parked in self.batches])
        priorities = np.concatenate([parked.samples.priorities for parked in self.batches])
        chosen = np.zeros(self.size, np.bool_)
        chosen[np.lexsort((due_s, -priorities))[:limit]] = True
        return np.split(chosen, np.cumsum([len(parked) for parked in self.batches])[:-1])


@dataclass(slots=True)
class ParkedQueue:
    """What waits before one stage."""

    lanes: dict[Hashable, ParkedLane] = field(default_factory=dict)
    size: int = 0
    """Samples that wait."""
    deadline_s: float = float("inf")
    """The first deadline among them, or earlier."""
    discarded: list[int] = field(default_factory=list)
    """Parked batches of which nothing waits any more; whoever keeps their tensors empties it."""

    def park(self, samples: RowSet, signature: Hashable, number: int, now_s: float) -> None:
        """Add the survivors of a batch."""
        count = len(samples.requests)
        lane = self.lanes.get(signature)
        if lane is None:
            lane = self.lanes[signature] = ParkedLane(signature)
        lane.add(ParkedBatch(number, samples, np.arange(count), now_s + PATIENCE_S))
        self.size += count
        self.deadline_s = min(self.deadline_s, float(samples.deadlines_s.min()))

    def fullest(self) -> ParkedLane:
        """The lane that holds most; there must be one."""
        return max(self.lanes.values(), key=lambda lane: lane.size)

    def most_urgent(self) -> ParkedLane:
        """The lane whose first sample is due first; there must be one."""
        return min(self.lanes.values(), key=lambda lane: lane.due_s)

    def take(self, lane: ParkedLane, limit: int) -> tuple[RowSet, tuple[Piece, ...]]:
        """Take up to ``limit`` samples of a lane, most urgent first, batch after batch."""
        if lane.size <= limit:
            taken, staying = lane.batches, []
        else:
            chosen = lane.most_urgent(limit)
            parts = [p.split(c) for p, c in zip(lane.batches, chosen, strict=True)]
            taken = [leaving for leaving, _ in parts if len(leaving)]
            staying = [rest for _, rest in parts if len(rest)]
        samples = concatenate([parked.samples for parked in taken])
        self._replace(lane, staying)
        return samples, tuple(Piece(parked.number, parked.positions) for parked in taken)

    def remove(self, request: int) -> list[RowSet]:
        """Remove the samples of a request that wait for their answer; gives them."""
        return self._drop(lambda s: (s.requests == request) & ~s.answered)

    def expire(self, now_s: float) -> list[RowSet]:
        """Remove what can no longer be answered in time; gives it."""
        if now_s < self.deadline_s:
            return []
        dropped = self._drop(lambda samples: samples.deadlines_s <= now_s)
        firsts = (
            float(parked.samples.deadlines_s.min())
            for lane in self.lanes.values()
            for parked in lane.batches
        )
        self.deadline_s = min(firsts, default=float("inf"))
        return dropped

    def _drop(self, which: Callable[[RowSet], NDArray[np.bool_]]) -> list[RowSet]:
        dropped: list[RowSet] = []
        for lane in list(self.lanes.values()):
            parts = [parked.split(which(parked.samples)) for parked in lane.batches]
            dropped += [leaving.samples for leaving, _ in parts if len(leaving)]
            if sum(len(leaving) for leaving, _ in parts):
                self._replace(lane, [rest for _, rest in parts if len(rest)])
        return dropped

    def _replace(self, lane: ParkedLane, staying: list[ParkedBatch]) -> None:
        left = {parked.number for parked in staying}
        self.discarded += [p.number for p in lane.batches if p.number not in left]
        self.size -= lane.size
        lane.replace(staying)
        self.size += lane.size
        if not lane.size:
            del self.lanes[lane.signature]
