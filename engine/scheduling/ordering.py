"""Sorted queues whose items may be used up while they wait."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

Key: TypeAlias = tuple[Any, ...]
"""Compared as tuples, smallest first; the last element is unique."""


class Queueable(Protocol):
    """An item that may be used up while it is queued."""

    @property
    def left(self) -> int:
        """The amount that is left of it; at 0 it is used up, and skipped."""
        ...


_T = TypeVar("_T", bound=Queueable)


class SortedQueue(Generic[_T]):
    """A priority queue, O(1) for what arrives in order and O(log n) for what does not.

    Requests of equal patience arrive in the order of their deadlines, so nearly all go to the end
    of a deque; only the others pay for a heap. Items that are used up are removed when they
    surface, or all at once when they are the majority: memory stays proportional to what is left.
    """

    __slots__ = ("_heap", "_in_order", "_left")

    def __init__(self) -> None:
        self._in_order: deque[tuple[Key, _T]] = deque()
        self._heap: list[tuple[Key, _T]] = []
        self._left = 0

    def push(self, key: Key, item: _T) -> None:
        """Add an item of which something is left."""
        in_order = self._in_order
        if not in_order or key > in_order[-1][0]:
            in_order.append((key, item))
        else:
            heapq.heappush(self._heap, (key, item))
        self._left += 1
        if len(in_order) + len(self._heap) > 2 * self._left + 64:
            self._compact()

    def used_up(self, count: int = 1) -> None:
        """Take note that nothing is left of some items."""
        self._left -= count

    def head(self) -> tuple[Key, _T] | None:
        """The first item of which something is left, and its key; ``None`` if there is none."""
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
