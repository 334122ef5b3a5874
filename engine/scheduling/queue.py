"""The bounded queue in front of stage 0: earliest deadline first within a priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from offramp.engine.scheduling.base import (
    DropCause,
    Dropped,
    SchedulerFullError,
    Submission,
)


@dataclass(slots=True, eq=False)
class _Entry:
    """A submission, less the samples that were taken already."""

    submission: Submission
    submitted_s: float
    taken: int = 0
    gone: bool = False

    @property
    def left(self) -> int:
        return 0 if self.gone else self.submission.count - self.taken


@dataclass(frozen=True, slots=True)
class Taken:
    """Neighbouring samples of one request, taken from the queue."""

    submission: Submission
    first: int
    count: int


_Key = tuple[int, float, int]
_Heap = list[tuple[_Key, _Entry]]


@dataclass(slots=True)
class SampleQueue:
    """Samples by signature; O(log n) per request.

    Entries are removed lazily: one that was cancelled or has expired stays in its heap until it
    surfaces, but its samples stop counting at once.
    """

    capacity: int
    """Most samples that wait."""
    size: int = 0
    """Samples that wait now."""
    _heaps: dict[Hashable, _Heap] = field(default_factory=dict)
    _by_request: dict[int, _Entry] = field(default_factory=dict)
    _by_age: deque[_Entry] = field(default_factory=deque)
    _by_deadline: list[tuple[float, int, _Entry]] = field(default_factory=list)
    _sequence: int = 0

    def push(self, submission: Submission, now_s: float) -> None:
        """Queue all samples of a submission, or none.

        Raises:
            SchedulerFullError: There is no room.
        """
        if self.size + submission.count > self.capacity:
            raise SchedulerFullError(
                f"{submission.count} samples do not fit: {self.size} of {self.capacity} wait"
            )
        entry = _Entry(submission, now_s)
        self._sequence += 1
        key = (-submission.priority, submission.deadline_s, self._sequence)
        heapq.heappush(self._heaps.setdefault(submission.signature, []), (key, entry))
        self._by_request[submission.request] = entry
        self._by_age.append(entry)
        if submission.deadline_s != float("inf"):
            item = (submission.deadline_s, self._sequence, entry)
            heapq.heappush(self._by_deadline, item)
        self.size += submission.count
        self._compact()

    def remove(self, request: int, cause: DropCause) -> Dropped | None:
        """Remove what is left of a request; ``None`` if nothing of it waits."""
        entry = self._by_request.pop(request, None)
        if entry is None:
            return None
        dropped = Dropped(request, entry.left, cause)
        self.size -= entry.left
        entry.gone = True
        return dropped

    def expire(self, now_s: float) -> Iterator[Dropped]:
        """Remove what can no longer be answered in time."""
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            _, _, entry = heapq.heappop(self._by_deadline)
            if entry.left:
                dropped = self.remove(entry.submission.request, DropCause.EXPIRED)
                assert dropped is not None
                yield dropped

    def oldest_s(self) -> float:
        """When the sample that waits longest was submitted; infinity if none waits."""
        while self._by_age and not self._by_age[0].left:
            self._by_age.popleft()
        return self._by_age[0].submitted_s if self._by_age else float("inf")

    def next_expiry_s(self) -> float:
        """When the next deadline passes; infinity if there is none."""
        while self._by_deadline and not self._by_deadline[0][2].left:
            heapq.heappop(self._by_deadline)
        return self._by_deadline[0][0] if self._by_deadline else float("inf")

    def largest_batch(self, limit: int) -> int:
        """Samples that one batch could hold now, up to ``limit``."""
        if len(self._heaps) == 1:
            return min(self.size, limit)
        best = 0
        for heap in self._heaps.values():
            total = 0
            for _, entry in heap:
                total += entry.left
                if total >= limit:
                    return limit
            best = max(best, total)
        return best

    def take(self, limit: int) -> list[Taken]:
        """Take up to ``limit`` samples of the most urgent signature, most urgent first."""
        self._drop_exhausted()
        if not self._heaps:
            return []
        signature = min(self._heaps, key=lambda s: self._heaps[s][0][0])
        heap = self._heaps[signature]
        parts: list[Taken] = []
        while heap and limit > 0:
            _, entry = heap[0]
            count = min(entry.left, limit)
            if count:
                parts.append(Taken(entry.submission, entry.taken, count))
                entry.taken += count
                limit -= count
                self.size -= count
            if not entry.left:
                heapq.heappop(heap)
                self._by_request.pop(entry.submission.request, None)
        if not heap:
            del self._heaps[signature]
        return parts

    def _drop_exhausted(self) -> None:
        for signature in list(self._heaps):
            heap = self._heaps[signature]
            while heap and not heap[0][1].left:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[signature]

    def _compact(self) -> None:
        """Keep what was removed lazily from outgrowing what is alive."""
        alive = 2 * len(self._by_request) + 64
        if len(self._by_age) > alive:
            self._by_age = deque(entry for entry in self._by_age if entry.left)
        if len(self._by_deadline) > alive:
            self._by_deadline = [item for item in self._by_deadline if item[2].left]
            heapq.heapify(self._by_deadline)
        if sum(map(len, self._heaps.values())) > alive:
            for signature, heap in list(self._heaps.items()):
                kept = [item for item in heap if item[1].left]
                heapq.heapify(kept)
                self._heaps[signature] = kept
            self._drop_exhausted()
