"""Waiting samples, sorted, in buckets: samples of one bucket can share a batch."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

from offramp.engine.scheduling.decisions import Key, Submission


class Queueable(Protocol):
    """An item that may be consumed while it is queued."""

    left: int
    """Amount of the item that is left; at 0 the item is consumed, and is skipped."""


_T = TypeVar("_T", bound=Queueable)


class SortedQueue(Generic[_T]):
    """A priority queue: O(1) for items that arrive in order, O(log n) for others.

    Requests with equal time limits arrive in the order of their deadlines, so nearly all are
    appended to a deque; only requests out of this order are pushed on a heap. Consumed items are
    removed when they reach the front, or all together when they are the majority. Memory stays
    proportional to the number of items left.
    """

    def __init__(self) -> None:
        self._in_order: deque[tuple[Key, _T]] = deque()
        self._heap: list[tuple[Key, _T]] = []
        self._left = 0

    def push(self, key: Key, item: _T) -> None:
        """Add an item that is not consumed."""
        in_order = self._in_order
        if not in_order or key > in_order[-1][0]:
            in_order.append((key, item))
        else:
            heapq.heappush(self._heap, (key, item))
        self._left += 1
        if len(in_order) + len(self._heap) > 2 * self._left + 64:
            self._compact()

    def used_up(self, count: int = 1) -> None:
        """Record that items were consumed."""
        self._left -= count

    def head(self) -> tuple[Key, _T] | None:
        """Return the key and item of the first item left; ``None`` if there is none."""
        in_order, heap = self._in_order, self._heap
        while in_order and not in_order[0][1].left:
            in_order.popleft()
        while heap and not heap[0][1].left:
            heapq.heappop(heap)
        if heap and (not in_order or heap[0] < in_order[0]):
            return heap[0]
        return in_order[0] if in_order else None

    def _compact(self) -> None:
        self._in_order = deque(entry for entry in self._in_order if entry[1].left)
        self._heap = [entry for entry in self._heap if entry[1].left]
        heapq.heapify(self._heap)


class TakenSamples(NamedTuple):
    """Adjacent samples of a submission that were taken from a bucket."""

    submission: Submission
    first: int
    size: int


class Bucket:
    """The samples of one batch key that wait for stage 0, most urgent first."""

    def __init__(self, batch_key: Hashable, *, aged: bool) -> None:
        """Start empty; ``aged`` must be true if :meth:`oldest_s` will be used."""
        self.batch_key = batch_key
        self.size = 0
        """Number of waiting samples."""
        self.latest_s = 0.0
        """Upper bound of the times at which the waiting samples are due."""
        self.lowest_priority = 0
        """Lower bound of the waiting samples' priorities."""
        self._by_urgency: SortedQueue[Submission] = SortedQueue()
        self._by_age: SortedQueue[Submission] | None = SortedQueue() if aged else None
        # Marks of BucketIndex:
        self.ready = False
        self.timed = False
        self.bound: Key = ()
        self.stamp = -1

    def push(self, submission: Submission) -> None:
        """Add a submission, whose key is already set."""
        key, priority = submission.key, submission.priority
        self._by_urgency.push(key, submission)
        if self._by_age is not None:
            self._by_age.push((submission.submitted_s, key[-1]), submission)
        if not self.size:
            self.latest_s, self.lowest_priority = key[1], priority
        else:
            self.latest_s = max(self.latest_s, key[1])
            self.lowest_priority = min(self.lowest_priority, priority)
        self.size += submission.left

    def forget(self, submission: Submission) -> None:
        """Remove the remaining samples of a submission from the count."""
        self.size -= submission.left
        submission.left = 0
        self._used_up(1)

    def take(self, limit: int, requests: int) -> list[TakenSamples]:
        """Take up to ``limit`` samples of up to ``requests`` requests, most urgent first."""
        taken, exhausted = list[TakenSamples](), 0
        while self.size and limit > 0 and len(taken) < requests:
            submission = self.most_urgent()
            left = submission.left
            count = left if left <= limit else limit
            taken.append(TakenSamples(submission, submission.samples - left, count))
            submission.left = left - count
            self.size -= count
            limit -= count
            exhausted += count == left
        self._used_up(exhausted)
        return taken

    def _used_up(self, submissions: int) -> None:
        self._by_urgency.used_up(submissions)
        if self._by_age is not None:
            self._by_age.used_up(submissions)

    def most_urgent(self) -> Submission:
        """Return the submission to serve first; the bucket must not be empty."""
        head = self._by_urgency.head()
        assert head is not None, "an empty bucket has no most urgent submission"
        return head[1]

    def oldest_s(self) -> float:
        """Return the submission time of the oldest waiting sample; the bucket must not be empty."""
        assert self._by_age is not None, "this bucket does not track ages"
        head = self._by_age.head()
        assert head is not None, "an empty bucket has no oldest submission"
        return head[1].submitted_s


class BucketIndex:
    """Index that finds the bucket for the next batch, in O(log buckets).

    A bucket is ready once it holds a ``full`` batch, or once its oldest sample has waited for
    ``max_delay_s``; among the ready ones, the bucket with the most urgent sample is served. A heap
    keeps a lower bound of each ready bucket's key; a bound that is too low is corrected when it
    reaches the top.
    """

    def __init__(self, *, full: int, max_delay_s: float) -> None:
        self._full = full
        self._max_delay_s = max_delay_s
        self._ready: list[tuple[Key, int, Bucket]] = []
        self._ready_limit = 64
        self._timers: list[tuple[float, int, Bucket]] = []
        self._timers_limit = 64
        self._stamps = itertools.count()

    def flush(self) -> None:
        """Treat all waiting samples as ready, from now on."""
        self._max_delay_s = 0.0
        timers, self._timers = self._timers, []
        for _, _, bucket in timers:
            bucket.timed = False
            self._make_ready(bucket)

    def pushed(self, bucket: Bucket, key: Key) -> None:
        """Record that a submission with this key was added to the bucket."""
        if bucket.ready:
            if key < bucket.bound:
                self._bound(bucket, key)
        elif self._max_delay_s <= 0.0 or bucket.size >= self._full:
            self._make_ready(bucket)
        else:
            self._time(bucket)

    def taken(self, bucket: Bucket) -> None:
        """Record that a batch was taken from the bucket; the rest may become ready again."""
        if self._max_delay_s <= 0.0 or not bucket.ready:
            return
        bucket.ready = False
        if bucket.size >= self._full:
            self._make_ready(bucket)
        elif bucket.size:
            self._time(bucket)

    def next(self, now_s: float) -> Bucket | float:
        """Return the bucket to serve, or the time when one is ready (infinity if none waits)."""
        timers = self._timers
        while timers and timers[0][0] <= now_s:
            _, _, bucket = heapq.heappop(timers)
            bucket.timed = False
            if bucket.ready or not bucket.size:
                continue
            if bucket.oldest_s() + self._max_delay_s <= now_s:
                self._make_ready(bucket)
            else:
                self._time(bucket)
        return self._most_urgent() or (timers[0][0] if timers else float("inf"))

    def _most_urgent(self) -> Bucket | None:
        heap = self._ready
        while heap:
            bound, stamp, bucket = heap[0]
            if stamp != bucket.stamp or not bucket.ready:
                heapq.heappop(heap)
            elif not bucket.size:
                bucket.ready = False
                heapq.heappop(heap)
            else:
                key = bucket.most_urgent().key
                if key == bound:
                    return bucket
                bucket.bound = key
                heapq.heapreplace(heap, (key, stamp, bucket))
        return None

    def _make_ready(self, bucket: Bucket) -> None:
        if bucket.size and not bucket.ready:
            bucket.ready = True
            self._bound(bucket, bucket.most_urgent().key)

    def _bound(self, bucket: Bucket, key: Key) -> None:
        bucket.bound, bucket.stamp = key, next(self._stamps)
        heapq.heappush(self._ready, (key, bucket.stamp, bucket))
        if len(self._ready) > self._ready_limit:
            for _, _, other in self._ready:
                other.ready = other.ready and other.size > 0
            self._ready = [i for i in self._ready if i[2].ready and i[1] == i[2].stamp]
            heapq.heapify(self._ready)
            self._ready_limit = 2 * len(self._ready) + 64

    def _time(self, bucket: Bucket) -> None:
        """Set the bucket's timer; an existing timer stays: it expires early, then is set again."""
        if not bucket.timed:
            bucket.timed = True
            due_s = bucket.oldest_s() + self._max_delay_s
            heapq.heappush(self._timers, (due_s, next(self._stamps), bucket))
            if len(self._timers) > self._timers_limit:
                for _, _, other in self._timers:
                    other.timed = other.size > 0 and not other.ready
                self._timers[:] = [item for item in self._timers if item[2].timed]
                heapq.heapify(self._timers)
                self._timers_limit = 2 * len(self._timers) + 64
