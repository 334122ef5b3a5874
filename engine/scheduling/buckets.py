"""Waiting samples in lanes: those of one lane can share a batch."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import NamedTuple

from offramp.engine.scheduling.base import Submission
from offramp.engine.scheduling.ordering import Key, SortedQueue


class Entry:
    """A submission, less the samples that were taken already."""

    __slots__ = ("count", "deadline_s", "key", "lane", "left", "priority", "request", "submitted_s")

    def __init__(self, submission: Submission, now_s: float, key: Key, lane: Lane) -> None:
        """Nothing is taken yet."""
        self.request, self.count, self.deadline_s, self.priority, _ = submission
        self.left = self.count
        """Samples that still wait."""
        self.submitted_s = now_s
        self.key = key
        """Priority (negated), deadline, order of arrival: the smallest goes first."""
        self.lane = lane


class Taken(NamedTuple):
    """Neighbouring samples of a submission, taken from a lane."""

    entry: Entry
    first: int
    size: int


class Lane:
    """Samples of one signature, most urgent first."""

    __slots__ = (
        "_by_age",
        "_by_urgency",
        "bound",
        "latest_s",
        "lowest_priority",
        "ripe",
        "serial",
        "signature",
        "size",
        "timed",
    )

    def __init__(self, signature: Hashable, *, aged: bool) -> None:
        """Start empty; ``aged`` if :meth:`oldest_s` will be asked for."""
        self.signature = signature
        self.size = 0
        """Samples that wait."""
        self.latest_s = 0.0
        """The last time that one of them is due, or later."""
        self.lowest_priority = 0
        """Of them, or lower."""
        self._by_urgency: SortedQueue[Entry] = SortedQueue()
        self._by_age: SortedQueue[Entry] | None = SortedQueue() if aged else None
        # Marks of LaneIndex:
        self.ripe = False
        self.timed = False
        self.bound: Key = ()
        self.serial = -1

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        self._by_urgency.push(entry.key, entry)
        if self._by_age is not None:
            self._by_age.push((entry.submitted_s, entry.key[-1]), entry)
        if not self.size:
            self.latest_s, self.lowest_priority = entry.key[1], entry.priority
        else:
            self.latest_s = max(self.latest_s, entry.key[1])
            self.lowest_priority = min(self.lowest_priority, entry.priority)
        self.size += entry.left

    def forget(self, entry: Entry) -> None:
        """Count what is left of an entry no longer."""
        self.size -= entry.left
        entry.left = 0
        self._died(1)

    def take(self, limit: int) -> list[Taken]:
        """Take up to ``limit`` samples, most urgent first."""
        taken, exhausted = [], 0
        while self.size and limit > 0:
            entry = self.most_urgent()
            left = entry.left
            count = left if left <= limit else limit
            taken.append(Taken(entry, entry.count - left, count))
            entry.left = left - count
            self.size -= count
            limit -= count
            exhausted += count == left
        self._died(exhausted)
        return taken

    def _died(self, entries: int) -> None:
        self._by_urgency.died(entries)
        if self._by_age is not None:
            self._by_age.died(entries)

    def most_urgent(self) -> Entry:
        """The entry to serve first; the lane must not be empty."""
        head = self._by_urgency.head()
        assert head is not None, "an empty lane has no most urgent entry"
        return head[1]

    def oldest_s(self) -> float:
        """When the sample that waits longest was submitted; the lane must not be empty."""
        assert self._by_age is not None, "this lane does not know ages"
        head = self._by_age.head()
        assert head is not None, "an empty lane has no oldest entry"
        return head[1].submitted_s


class LaneIndex:
    """Which lane a batch is formed of next, in O(log lanes).

    A lane is ripe once it holds a full batch, or once its oldest sample has waited long enough;
    of the ripe ones the lane with the most urgent sample is served. A heap keeps a lower bound
    of each ripe lane's key; a bound that turns out too low when it surfaces is put right then.
    """

    def __init__(self, *, full: int, max_delay_s: float) -> None:
        """Start empty.

        Args:
            full: Samples of a full batch.
            max_delay_s: Longest that a sample waits for batch mates while a stream idles.
        """
        self._full = full
        self._max_delay_s = max_delay_s
        self._ripe: list[tuple[Key, int, Lane]] = []
        self._ripe_limit = 64
        self._timers: list[tuple[float, int, Lane]] = []
        self._timers_limit = 64
        self._serials = itertools.count()

    def flush(self) -> None:
        """Let whatever waits be ripe, from now on."""
        self._max_delay_s = 0.0
        timers, self._timers = self._timers, []
        for _, _, lane in timers:
            lane.timed = False
            self._ripen(lane)

    def pushed(self, lane: Lane, key: Key) -> None:
        """Note that an entry with this key came into the lane."""
        if lane.ripe:
            if key < lane.bound:
                self._bound(lane, key)
        elif self._max_delay_s <= 0.0 or lane.size >= self._full:
            self._ripen(lane)
        else:
            self._time(lane)

    def taken(self, lane: Lane) -> None:
        """Note that a batch was formed of the lane: what is left of it ripens anew."""
        if self._max_delay_s <= 0.0 or not lane.ripe:
            return
        lane.ripe = False
        if lane.size >= self._full:
            self._ripen(lane)
        elif lane.size:
            self._time(lane)

    def next(self, now_s: float) -> Lane | float:
        """The lane to serve, or when the next one ripens (infinity: none waits)."""
        timers = self._timers
        while timers and timers[0][0] <= now_s:
            _, _, lane = heapq.heappop(timers)
            lane.timed = False
            if lane.ripe or not lane.size:
                continue
            if lane.oldest_s() + self._max_delay_s <= now_s:
                self._ripen(lane)
            else:
                self._time(lane)
        return self._most_urgent() or (timers[0][0] if timers else float("inf"))

    def _most_urgent(self) -> Lane | None:
        heap = self._ripe
        while heap:
            bound, serial, lane = heap[0]
            if serial != lane.serial or not lane.ripe:
                heapq.heappop(heap)
            elif not lane.size:
                lane.ripe = False
                heapq.heappop(heap)
            else:
                key = lane.most_urgent().key
                if key == bound:
                    return lane
                lane.bound = key
                heapq.heapreplace(heap, (key, serial, lane))
        return None

    def _ripen(self, lane: Lane) -> None:
        if lane.size and not lane.ripe:
            lane.ripe = True
            self._bound(lane, lane.most_urgent().key)

    def _bound(self, lane: Lane, key: Key) -> None:
        lane.bound, lane.serial = key, next(self._serials)
        heapq.heappush(self._ripe, (key, lane.serial, lane))
        if len(self._ripe) > self._ripe_limit:
            for _, _, other in self._ripe:
                other.ripe = other.ripe and other.size > 0
            self._ripe = [i for i in self._ripe if i[2].ripe and i[1] == i[2].serial]
            heapq.heapify(self._ripe)
            self._ripe_limit = 2 * len(self._ripe) + 64

    def _time(self, lane: Lane) -> None:
        """Set the lane's one timer; where it has one, that goes off early and is set again."""
        if not lane.timed:
            lane.timed = True
            due_s = lane.oldest_s() + self._max_delay_s
            heapq.heappush(self._timers, (due_s, next(self._serials), lane))
            if len(self._timers) > self._timers_limit:
                for _, _, other in self._timers:
                    other.timed = other.size > 0 and not other.ripe
                self._timers[:] = [item for item in self._timers if item[2].timed]
                heapq.heapify(self._timers)
                self._timers_limit = 2 * len(self._timers) + 64
