"""The bounded queue in front of stage 0: earliest deadline first within a priority."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.buckets import Bucket, BucketIndex, SortedQueue, TakenSamples
from offramp.engine.scheduling.decisions import (
    DropCause,
    Dropped,
    RowSet,
    SchedulerFullError,
    Submission,
    uniform,
)

PATIENCE_S = 1.0
"""Assumed time limit of requests without a deadline, in seconds. It is used only to order requests:
those without a deadline are never refused as late, and are not overtaken for ever."""
_NEVER = float("inf")
_RANKS = 8
"""Largest absolute priority in counts by priority; a larger priority counts as this one. Clients
choose priorities, so their number is unbounded."""
_KEPT_BUCKETS = 64
"""Largest number of empty buckets that are kept for later samples. Clients choose batch keys, so
their number is unbounded."""


class SampleQueue:
    """The samples that wait for stage 0, in buckets by batch key; O(log n) per request.

    At most ``capacity`` samples wait, and at most ``max_delay_s`` for a fuller batch; a bucket with
    a ``full`` batch does not wait.
    """

    def __init__(self, capacity: int, *, full: int, max_delay_s: float = 0.0) -> None:
        self._capacity = capacity
        self.size = 0
        """Number of waiting samples."""
        self._buckets: dict[Hashable, Bucket] = {}
        self._index = BucketIndex(full=full, max_delay_s=max_delay_s)
        self._by_request: dict[int, Submission] = {}
        self._aged = max_delay_s > 0.0
        self._by_deadline: SortedQueue[Submission] = SortedQueue()
        self.first_deadline_s = _NEVER
        """Lower bound of all deadlines: no sample expires before this time."""
        self._by_rank = [0] * (2 * _RANKS + 1)
        """Number of waiting samples by priority."""
        self._sequence = 0
        self.arrived = 0
        """Number of samples that were ever queued."""
        self._started = 0

    def holds(self, request: int) -> bool:
        """Return whether samples of a request wait."""
        return request in self._by_request

    def ahead(self, priority: int) -> int:
        """Return the number of waiting samples with this priority or a higher one."""
        return sum(self._by_rank[_rank(priority) :])

    def push(self, submission: Submission, now_s: float) -> None:
        """Queue all samples of a submission, or none; SchedulerFullError if they do not fit."""
        count, deadline_s = submission.samples, submission.deadline_s
        if self.size + count > self._capacity:
            raise SchedulerFullError(
                f"{count} samples do not fit: {self.size} of {self._capacity} wait"
            )
        bucket = self._buckets.get(submission.batch_key)
        if bucket is None:
            bucket = self._open_bucket(submission.batch_key)
        self._sequence += 1
        patient = deadline_s == _NEVER
        order_s = now_s + PATIENCE_S if patient else deadline_s
        submission.key = key = (-submission.priority, order_s, self._sequence)
        submission.left, submission.submitted_s = count, now_s
        bucket.push(submission)
        if not patient:
            self._by_deadline.push((deadline_s, self._sequence), submission)
            self.first_deadline_s = min(self.first_deadline_s, deadline_s)
        self._by_request[submission.request] = submission
        self.size += count
        self._by_rank[_rank(submission.priority)] += count
        self.arrived += count
        self._index.pushed(bucket, key)

    def remove(self, request: int, cause: DropCause) -> Dropped | None:
        """Remove the remaining samples of a request; ``None`` if none wait."""
        submission = self._by_request.pop(request, None)
        if submission is None:
            return None
        dropped = Dropped(request, submission.left, cause, feasible=submission.feasible)
        self.size -= submission.left
        self._by_rank[_rank(submission.priority)] -= submission.left
        bucket = self._buckets[submission.batch_key]
        bucket.forget(submission)
        if submission.deadline_s != _NEVER:
            self._by_deadline.used_up()
        if not bucket.size:
            self._index.taken(bucket)
        return dropped

    def expire(self, now_s: float) -> Sequence[Dropped]:
        """Remove samples whose deadline has passed."""
        if now_s < self.first_deadline_s:
            return ()
        expired = []
        while self.next_expiry_s() <= now_s:
            _, submission = self._by_deadline.head() or (None, None)
            assert submission is not None
            dropped = self.remove(submission.request, DropCause.EXPIRED)
            assert dropped is not None
            expired.append(dropped)
        self.first_deadline_s = self.next_expiry_s()
        return expired

    def next_expiry_s(self) -> float:
        """Return the time of the next deadline; infinity if there is none."""
        head = self._by_deadline.head()
        return _NEVER if head is None else float(head[0][0])

    def ready(self, now_s: float) -> Bucket | float:
        """Return the bucket for the next batch, or the time when one is ready (infinity: none)."""
        return self._index.next(now_s) if self.size else _NEVER

    def take(self, bucket: Bucket, limit: int, requests: int = 2**31) -> RowSet:
        """Take up to ``limit`` samples of up to ``requests`` requests, most urgent first."""
        taken, timed = bucket.take(limit, requests), 0
        for submission, _, size in taken:
            self.size -= size
            self._by_rank[_rank(submission.priority)] -= size
            if not submission.left:
                del self._by_request[submission.request]
                timed += submission.deadline_s != _NEVER
        self._by_deadline.used_up(timed)
        self._index.taken(bucket)
        first = self._started
        self._started += sum(size for _, _, size in taken)
        return _rowset(taken, np.arange(first, self._started))

    def flush(self) -> None:
        """Stop waiting for fuller batches, from now on."""
        self._index.flush()

    def _open_bucket(self, batch_key: Hashable) -> Bucket:
        if len(self._buckets) >= _KEPT_BUCKETS + len(self._by_request):
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.size}
        bucket = self._buckets[batch_key] = Bucket(batch_key, aged=self._aged)
        return bucket


def _rank(priority: int) -> int:
    return _RANKS + max(-_RANKS, min(priority, _RANKS))


def _rowset(taken: list[TakenSamples], sample_ids: NDArray[np.int64]) -> RowSet:
    requests = np.array([submission.request for submission, _, _ in taken], np.int64)
    deadlines_s = np.array([submission.deadline_s for submission, _, _ in taken])
    firsts = [first for _, first, _ in taken]
    sizes = [size for _, _, size in taken]
    ranks = [submission.priority for submission, _, _ in taken]
    # Nearly always every request is one sample of the default priority: that needs fewer arrays.
    priorities = np.array(ranks, np.int64) if any(ranks) else uniform(len(taken), value=0)
    in_time = [submission.feasible for submission, _, _ in taken]
    feasible = uniform(len(taken), value=True) if all(in_time) else np.array(in_time)
    if max(sizes) == 1:
        rows = np.array(firsts, np.int64) if any(firsts) else uniform(len(taken), value=0)
        answered = uniform(len(taken), value=False)
        return RowSet(requests, rows, deadlines_s, priorities, sample_ids, answered, feasible)
    return RowSet(
        np.repeat(requests, sizes),
        np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, sizes, strict=True)]),
        np.repeat(deadlines_s, sizes),
        np.repeat(priorities, sizes),
        sample_ids,
        uniform(len(sample_ids), value=False),
        np.repeat(feasible, sizes),
    )
