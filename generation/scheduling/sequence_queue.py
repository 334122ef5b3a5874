"""Bounded queue of sequences that wait for a slot: by priority, then by deadline."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from offramp.generation.scheduling.sequence_state import Key, SequenceState
from offramp.generation.scheduling.steps import NEVER_S, NewSequence, TextQueueFullError

PATIENCE_S = 10.0
"""Assumed time to the deadline, in seconds, of a sequence without a deadline. So sequences with
deadlines do not overtake it forever."""

_by_key = attrgetter("key")


class SequenceQueue:
    """Sequences that wait for a slot.

    At most ``capacity`` sequences with a caller may wait, and in addition ``capacity`` background
    sequences. Restarted sequences are always accepted: their number is at most the number of slots.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the queue's capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._waiting: dict[bool, list[SequenceState]] = {False: [], True: []}
        """Waiting sequences: background sequences under the key ``True``, all others under
        ``False``."""
        self._arrived = 0

    def __len__(self) -> int:
        """Return the number of all sequences that wait."""
        return len(self._waiting[False]) + len(self._waiting[True])

    def key(self, new: NewSequence, now_s: float) -> Key:
        """Return the sort key of a sequence; TextQueueFullError if the queue is full."""
        waiting = len(self._waiting[new.background])
        if waiting >= self._capacity:
            raise TextQueueFullError(f"{waiting} of {self._capacity} sequences wait: try later")
        self._arrived += 1
        order_s = now_s + PATIENCE_S if new.deadline_s == NEVER_S else new.deadline_s
        return (new.background, -new.priority, order_s, self._arrived)

    def push(self, state: SequenceState) -> None:
        """Queue a sequence, for the first time or again."""
        insort(self._waiting[state.new.background], state, key=_by_key)

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence that waits."""
        self._waiting[state.new.background].remove(state)

    def first(self) -> list[SequenceState]:
        """Return the sequences, in order, from which the next prefill is chosen."""
        return self._waiting[False] or self._waiting[True]
