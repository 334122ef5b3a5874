"""Survivors that wait at a split until they are merged into a fuller batch (E3 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.decisions import Piece, Rows, RowSet, concatenate
from offramp.engine.scheduling.queue import PATIENCE_S


@dataclass(slots=True, eq=False)
class BufferedBatch:
    """The survivors of a batch that still wait at a split."""

    number: int
    samples: RowSet
    positions: Rows
    """[n]: row numbers of the samples in the batch when it was buffered."""
    patience_s: float
    """Assumed due time of samples without a deadline."""
    due_s: NDArray[np.float64] = field(init=False)
    """[n]: the deadline, or ``patience_s`` without one; infinity once answered."""
    first_due_s: float = field(init=False)

    def __post_init__(self) -> None:
        due_s = np.minimum(self.samples.deadlines_s, self.patience_s)
        self.due_s = np.where(self.samples.answered, np.inf, due_s)
        self.first_due_s = min(self.due_s.tolist(), default=np.inf)

    def __len__(self) -> int:
        return len(self.positions)

    def split(self, leaving: NDArray[np.bool_]) -> tuple[BufferedBatch, BufferedBatch]:
        """Separate the leaving samples from the staying ones."""
        return self._part(np.flatnonzero(leaving)), self._part(np.flatnonzero(~leaving))

    def _part(self, rows: Rows) -> BufferedBatch:
        samples, positions = self.samples.take(rows), self.positions[rows]
        return BufferedBatch(self.number, samples, positions, self.patience_s)


@dataclass(slots=True, eq=False)
class BufferedBucket:
    """The samples of one batch key and variant that wait before one stage.

    At most a few batches.
    """

    batch_key: Hashable
    variant: int = 0
    """Variant of the samples; different variants have different weights, and cannot share a batch.
    """
    batches: list[BufferedBatch] = field(default_factory=list)
    size: int = 0
    due_s: float = float("inf")
    """Lower bound of the times at which its samples are due."""

    def add(self, buffered: BufferedBatch) -> None:
        """Append a batch of buffered samples to the bucket."""
        self.batches.append(buffered)
        self.size += len(buffered)
        self.due_s = min(self.due_s, buffered.first_due_s)

    def replace(self, batches: list[BufferedBatch]) -> None:
        """Hold these batches instead."""
        self.batches, self.size, self.due_s = [], 0, float("inf")
        for buffered in batches:
            if len(buffered):
                self.add(buffered)

    def most_urgent(self, limit: int) -> list[NDArray[np.bool_]]:
        """Return for each batch a mask of its samples that are among the ``limit`` most urgent."""
        due_s = np.concatenate([buffered.due_s for buffered in self.batches])
        priorities = np.concatenate([buffered.samples.priorities for buffered in self.batches])
        chosen = np.zeros(self.size, np.bool_)
        chosen[np.lexsort((due_s, -priorities))[:limit]] = True
        return np.split(chosen, np.cumsum([len(buffered) for buffered in self.batches])[:-1])


@dataclass(slots=True)
class BufferedQueue:
    """The samples that wait before one stage, in buckets by batch key and variant."""

    buckets: dict[tuple[Hashable, int], BufferedBucket] = field(default_factory=dict)
    size: int = 0
    """Number of waiting samples."""
    deadline_s: float = float("inf")
    """Lower bound of the waiting samples' deadlines."""
    discarded: list[int] = field(default_factory=list)
    """Numbers of buffered batches that have no waiting samples any more. A scheduler has one list
    for all its queues; the scheduler empties it."""

    def buffer(
        self, samples: RowSet, batch_key: Hashable, number: int, now_s: float, variant: int = 0
    ) -> None:
        """Add the survivors of a batch."""
        count = len(samples.requests)
        bucket = self.buckets.get((batch_key, variant))
        if bucket is None:
            bucket = self.buckets[batch_key, variant] = BufferedBucket(batch_key, variant)
        bucket.add(BufferedBatch(number, samples, np.arange(count), now_s + PATIENCE_S))
        self.size += count
        self.deadline_s = min(self.deadline_s, float(samples.deadlines_s.min()))

    def fullest(self) -> BufferedBucket:
        """Return the bucket with the most samples; there must be one."""
        return max(self.buckets.values(), key=lambda bucket: bucket.size)

    def most_urgent(self) -> BufferedBucket:
        """Return the bucket whose first sample is due first; there must be one."""
        return min(self.buckets.values(), key=lambda bucket: bucket.due_s)

    def take(self, bucket: BufferedBucket, limit: int) -> tuple[RowSet, tuple[Piece, ...]]:
        """Take up to ``limit`` samples of a bucket, most urgent first, batch by batch."""
        if bucket.size <= limit:
            taken, staying = bucket.batches, []
        else:
            taken, staying = [], list[BufferedBatch]()
            for buffered, chosen in zip(bucket.batches, bucket.most_urgent(limit), strict=True):
                count = np.count_nonzero(chosen)
                if 0 < count < len(buffered):
                    leaving, rest = buffered.split(chosen)
                    taken.append(leaving)
                    staying.append(rest)
                else:
                    (taken if count else staying).append(buffered)
        samples = concatenate([buffered.samples for buffered in taken])
        self._replace(bucket, staying)
        return samples, tuple(Piece(buffered.number, buffered.positions) for buffered in taken)

    def remove(self, request: int) -> list[RowSet]:
        """Remove and return the unanswered samples of a request."""
        return self._drop(lambda s: (s.requests == request) & ~s.answered)

    def expire(self, now_s: float) -> list[RowSet]:
        """Remove and return samples whose deadline has passed."""
        if now_s < self.deadline_s:
            return []
        dropped = self._drop(lambda samples: samples.deadlines_s <= now_s)
        firsts = (
            float(buffered.samples.deadlines_s.min())
            for bucket in self.buckets.values()
            for buffered in bucket.batches
        )
        self.deadline_s = min(firsts, default=float("inf"))
        return dropped

    def _drop(self, which: Callable[[RowSet], NDArray[np.bool_]]) -> list[RowSet]:
        dropped: list[RowSet] = []
        for bucket in list(self.buckets.values()):
            parts = [buffered.split(which(buffered.samples)) for buffered in bucket.batches]
            dropped += [leaving.samples for leaving, _ in parts if len(leaving)]
            if sum(len(leaving) for leaving, _ in parts):
                self._replace(bucket, [rest for _, rest in parts if len(rest)])
        return dropped

    def _replace(self, bucket: BufferedBucket, staying: list[BufferedBatch]) -> None:
        left = {buffered.number for buffered in staying}
        self.discarded += [p.number for p in bucket.batches if p.number not in left]
        self.size -= bucket.size
        bucket.replace(staying)
        self.size += bucket.size
        if not bucket.size:
            del self.buckets[bucket.batch_key, bucket.variant]
