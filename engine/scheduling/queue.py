"""The bounded queue in front of stage 0: earliest deadline first within a priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from offramp.engine.scheduling.base import (
    DropCause,
    Dropped,
    SchedulerFullError,
    Submission,
)

PATIENCE_S = 1.0
"""A request without a deadline is ordered as if it had this long: it is never refused for being
late, and neither do those with deadlines overtake it for ever."""


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


_Key: TypeAlias = tuple[int, float, int]
"""Priority (negated), deadline, order of arrival: the smallest goes first."""


@dataclass(slots=True, eq=False)
class Lane:
    """Samples that can share a batch.

    Entries are removed lazily: one that was cancelled or has expired stays in heap and deque
    until it surfaces, but its samples stop counting at once.
    """

    size: int = 0
    """Samples that wait."""
    _heap: list[tuple[_Key, _Entry]] = field(default_factory=list)
    _by_age: deque[_Entry] = field(default_factory=deque)
    _alive: int = 0

    def push(self, key: _Key, entry: _Entry) -> None:
        """Add an entry."""
        heapq.heappush(self._heap, (key, entry))
        self._by_age.append(entry)
        self.size += entry.left
        self._alive += 1
        if len(self._heap) > 2 * self._alive + 64:
            self._heap = [item for item in self._heap if item[1].left]
            heapq.heapify(self._heap)
        if len(self._by_age) > 2 * self._alive + 64:
            self._by_age = deque(e for e in self._by_age if e.left)

    def forget(self, entry: _Entry) -> None:
        """Count an entry's samples no longer."""
        self.size -= entry.left
        self._alive -= 1
        entry.gone = True

    def urgency(self) -> _Key:
        """Key of the most urgent entry; the lane must not be empty."""
        while not self._heap[0][1].left:
            heapq.heappop(self._heap)
        return self._heap[0][0]

    def oldest_s(self) -> float:
        """When the sample that waits longest was submitted; the lane must not be empty."""
        while not self._by_age[0].left:
            self._by_age.popleft()
        return self._by_age[0].submitted_s

    def take(self, limit: int) -> Iterator[tuple[Taken, bool]]:
        """Take up to ``limit`` samples, most urgent first; says what exhausts its request."""
        while self.size and limit > 0:
            self.urgency()
            _, entry = self._heap[0]
            count = min(entry.left, limit)
            taken = Taken(entry.submission, entry.taken, count)
            entry.taken += count
            limit -= count
            self.size -= count
            if not entry.left:
                heapq.heappop(self._heap)
                self._alive -= 1
            yield taken, not entry.left


@dataclass(slots=True)
class SampleQueue:
    """Samples in lanes by signature; O(log n) a request, O(lanes) a batch."""

    capacity: int
    """Most samples that wait."""
    size: int = 0
    """Samples that wait now."""
    _lanes: dict[Hashable, Lane] = field(default_factory=dict)
    _by_request: dict[int, _Entry] = field(default_factory=dict)
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
        self._sequence += 1
        entry = _Entry(submission, now_s)
        deadline_s = submission.deadline_s
        if deadline_s == float("inf"):
            deadline_s = now_s + PATIENCE_S
        else:
            heapq.heappush(self._by_deadline, (deadline_s, self._sequence, entry))
        lane = self._lanes.setdefault(submission.signature, Lane())
        lane.push((-submission.priority, deadline_s, self._sequence), entry)
        self._by_request[submission.request] = entry
        self.size += submission.count
        if len(self._by_deadline) > 2 * len(self._by_request) + 64:
            self._by_deadline = [item for item in self._by_deadline if item[2].left]
            heapq.heapify(self._by_deadline)

    def remove(self, request: int, cause: DropCause) -> Dropped | None:
        """Remove what is left of a request; ``None`` if nothing of it waits."""
        entry = self._by_request.pop(request, None)
        if entry is None:
            return None
        dropped = Dropped(request, entry.left, cause)
        self.size -= entry.left
        signature = entry.submission.signature
        self._lanes[signature].forget(entry)
        self._drop_empty(signature)
        return dropped

    def expire(self, now_s: float) -> Iterator[Dropped]:
        """Remove what can no longer be answered in time."""
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            _, _, entry = heapq.heappop(self._by_deadline)
            if entry.left:
                dropped = self.remove(entry.submission.request, DropCause.EXPIRED)
                assert dropped is not None
                yield dropped

    def next_expiry_s(self) -> float:
        """When the next deadline passes; infinity if there is none."""
        while self._by_deadline and not self._by_deadline[0][2].left:
            heapq.heappop(self._by_deadline)
        return self._by_deadline[0][0] if self._by_deadline else float("inf")

    def lanes(self) -> Iterator[tuple[Hashable, Lane]]:
        """The lanes that hold samples, by signature."""
        return iter(self._lanes.items())

    def take(self, signature: Hashable, limit: int) -> list[Taken]:
        """Take up to ``limit`` samples of a lane, most urgent first."""
        parts = []
        for taken, exhausted in self._lanes[signature].take(limit):
            parts.append(taken)
            self.size -= taken.count
            if exhausted:
                del self._by_request[taken.submission.request]
        self._drop_empty(signature)
        return parts

    def _drop_empty(self, signature: Hashable) -> None:
        if not self._lanes[signature].size:
            del self._lanes[signature]
