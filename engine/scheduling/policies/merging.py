"""Policies under which survivors wait at a split and are merged into fuller batches."""

from __future__ import annotations

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.buffered import BufferedBucket
from offramp.engine.scheduling.points import OperatingPoints
from offramp.engine.scheduling.policies.batching import BatchFormer
from offramp.engine.scheduling.policy_protocol import Choice, Merge, Waiting

SLACK = 0.2
"""Share that is added to the time that buffered samples still need (E3 4)."""
CROWD = 4
"""If samples for this number of largest batches wait at a split, its fullest bucket runs, full or
not. With many batch keys, no bucket may ever become full, and waiting samples use memory."""


class Refill:
    """Survivors wait at a split until the batch is full again (E3 3.3 and 4).

    A stream serves, in this order: a split that can fill a batch, the deepest first; a split whose
    most urgent sample has just enough time left; new samples; and without new samples, the split
    with the largest number of samples. A stream never stays idle to wait for a fuller batch. E3
    assigns each split its own devices; here every stream serves all splits, so that none is idle
    while another has work.
    """

    name = "refill"

    def __init__(self, points: OperatingPoints, max_batch_size: int, streams: int = 1) -> None:
        self._max_batch_size = max_batch_size
        self._latencies = points.latencies
        self._former = BatchFormer(max_batch_size, points.latencies, streams)

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Merge a full or urgent batch, else start new samples, else merge any batch."""
        occupied = [s for s in reversed(range(len(waiting.buffered))) if waiting.buffered[s].size]
        for stage in occupied:
            size = waiting.buffered[stage].size
            if size >= self._max_batch_size:
                bucket = waiting.buffered[stage].fullest()
                if bucket.size >= self._max_batch_size or size >= CROWD * self._max_batch_size:
                    return Merge(stage, bucket, self._max_batch_size)
        for stage in occupied:
            bucket = waiting.buffered[stage].most_urgent()
            if bucket.due_s - self._needed_s(stage, bucket) <= now_s:
                return Merge(stage, bucket, self._max_batch_size, urgent=True)
        fresh = waiting.ready(now_s)
        if isinstance(fresh, Bucket):
            return self._former.form(waiting.queue, fresh, now_s)
        if occupied:
            stage = max(occupied, key=lambda s: waiting.buffered[s].size)
            return Merge(stage, waiting.buffered[stage].fullest(), self._max_batch_size)
        return fresh

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:  # noqa: ARG002
        """Continue only with a batch that is still full."""
        return survivors >= self._max_batch_size

    def _needed_s(self, stage: int, bucket: BufferedBucket) -> float:
        size, variant = min(bucket.size, self._max_batch_size), bucket.variant
        last = self._latencies.last(variant)
        return self._latencies.span_s(stage, last, size, variant) * (1 + SLACK)


class Rebatch(Refill):
    """A batch is split only where that pays (dynamic rebatching; DREX, arXiv 2512.15705).

    If b′ of b rows leave, refilling their places saves their share of t_d, the time of the rest of
    the model. It costs c, the time of merging (measured while serving). Refilling pays if b′ > (c /
    t_d) · b. Otherwise the survivors continue alone.
    """

    name = "rebatch"

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:
        """Continue with a batch if refilling it would gain less than its measured cost."""
        rest_s = self._latencies.span_s(stage + 1, self._latencies.stages - 1, before)
        if survivors >= self._max_batch_size:
            return True
        return (before - survivors) * rest_s <= self._latencies.merging_s * before
