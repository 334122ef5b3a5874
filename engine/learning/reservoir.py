"""A uniform sample of a sequence of unknown length (Vitter 1985, Algorithm R); without I/O."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection


class Reservoir:
    """Decides which rows (samples) of a sequence of requests are kept, and in which slot.

    The first ``capacity`` rows fill the slots. Later, row number t replaces the row of a random
    slot with probability ``capacity / t``. After any number of rows, each of these rows is in the
    sample with the same probability.

    If a selected row cannot be kept, its slot stays free, and the next row fills it.
    """

    def __init__(
        self,
        capacity: int,
        *,
        seen: int = 0,
        filled: Collection[int] = (),
        seed: int | None = None,
    ) -> None:
        """Continue after ``seen`` rows; some of these rows fill the slots ``filled``.

        ``seed`` makes the draws repeatable; ``None`` uses the system's randomness.
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        self.seen = max(seen, len(filled))
        """Number of rows offered so far."""
        self._slots = list(range(capacity))
        self._free = deque(slot for slot in self._slots if slot not in filled)
        self._draw = random.Random(seed).random  # noqa: S311 - not for security

    @property
    def capacity(self) -> int:
        """Number of rows in the sample after all slots are filled."""
        return len(self._slots)

    def offer(self, rows: int) -> list[tuple[int, int]]:
        """Return which of the next ``rows`` rows to keep, each with its slot."""
        if self._free:
            return [pair for row in range(rows) if (pair := self._one(row)) is not None]
        slots, draw, seen = self._slots, self._draw, self.seen
        capacity, self.seen = len(slots), seen + rows
        return [
            (row, slots[drawn])
            for row in range(rows)
            if (drawn := int(draw() * (seen + row + 1))) < capacity
        ]

    def give_back(self, slot: int) -> None:
        """Free a slot whose row could not be kept."""
        if slot in self._slots and slot not in self._free:
            self._free.append(slot)

    def shrink(self, slots: Collection[int]) -> None:
        """Reduce the sample to the given slots, all of which are filled."""
        if not slots:
            raise ValueError("a sample without slots holds nothing; expected at least one slot")
        self._slots = sorted(slots)
        self._free.clear()

    def _one(self, row: int) -> tuple[int, int] | None:
        self.seen += 1
        if self._free:
            return row, self._free.popleft()
        drawn = int(self._draw() * self.seen)
        return (row, self._slots[drawn]) if drawn < len(self._slots) else None
