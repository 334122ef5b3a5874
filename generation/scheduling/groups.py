"""Groups of sequences that wait for a stage and may share a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offramp.generation.scheduling.sequence_state import SequenceState
from offramp.generation.scheduling.steps import NEVER_S, TextLimits


class WaitingGroup:
    """Sequences that wait for one stage; any of them may share a step."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._rows: dict[int, SequenceState] = {}
        """Sequences by slot, in order of arrival."""
        self._timed = self._background = 0
        """Numbers of sequences with a deadline, and of background sequences; both are usually 0."""

    def __len__(self) -> int:
        """Return the number of sequences that wait for the stage."""
        return len(self._rows)

    @property
    def since(self) -> int:
        """Number of the step after which the sequence that waits longest began to wait."""
        return next(iter(self._rows.values())).since

    @property
    def first_deadline_s(self) -> float:
        """Earliest deadline of a sequence; infinity if none has a deadline."""
        if not self._timed:
            return NEVER_S
        return min(state.new.deadline_s for state in self._rows.values())

    @property
    def wanted(self) -> bool:
        """True if a caller waits for at least one of the sequences."""
        return self._background < len(self._rows)

    def add(self, state: SequenceState) -> None:
        """Add a sequence that waits for the group's stage."""
        assert state.slot is not None
        self._rows[state.slot] = state
        self._count(state, 1)

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence that does not wait any more."""
        assert state.slot is not None
        del self._rows[state.slot]
        self._count(state, -1)

    def most_urgent(self, limit: int) -> list[SequenceState]:
        """Return up to ``limit`` sequences: by priority, then by waiting time, the longest first.

        This order spreads tokens evenly over sequences. Policies handle near deadlines.
        """
        rows = list(self._rows.values())
        return rows if len(rows) <= limit else sorted(rows, key=_by_priority)[:limit]

    def _count(self, state: SequenceState, more: int) -> None:
        self._timed += more * (state.new.deadline_s != NEVER_S)
        self._background += more * state.new.background


class WaitingGroups:
    """All sequences in slots that wait for a stage, in groups.

    If the backend is not ragged, the sequences of a group have equal lengths. A sequence that must
    run alone is a group of its own.
    """

    def __init__(self, limits: TextLimits) -> None:
        self._limits = limits
        self._groups: dict[tuple[int, int, int], WaitingGroup] = {}
        """Groups by stage, length, and slot of a sequence that runs alone; none is empty."""

    def add(self, state: SequenceState, step: int) -> None:
        """Add a sequence that has waited for its stage since the step of this number."""
        alone = state.slot if state.alone else None
        length = 0 if self._limits.ragged else state.length
        key = (state.stage, length, -1 if alone is None else alone)
        state.since, state.group = step, key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = WaitingGroup(state.stage)
        group.add(state)

    def discard(self, state: SequenceState) -> None:
        """Remove a sequence, if it waits."""
        if state.group is None:
            return
        group = self._groups[state.group]
        group.remove(state)
        if not len(group):
            del self._groups[state.group]
        state.group = None

    def candidates(self, *, wanted: bool) -> Sequence[WaitingGroup]:
        """Return the groups that may run; if callers wait, only groups that a caller waits for.

        ``wanted`` is true if a caller waits for a sequence in the queue.
        """
        groups = list(self._groups.values())
        chosen = [group for group in groups if group.wanted]
        return chosen if chosen or wanted else groups


def _by_priority(state: SequenceState) -> tuple[bool, int]:
    return (state.new.background, -state.new.priority)


class WaitingText(NamedTuple):
    """The possible next steps, from which a policy chooses."""

    groups: Sequence[WaitingGroup]
    """Groups that may run, unordered; none is empty."""
    startable: int
    """Number of sequences that may get a slot now."""
    holding: int
    """Number of slots whose sequence would not give up the slot for a startable sequence."""
    rows: int
    """Largest number of rows in a step."""
    step: int
    """Number of the scheduler's last step."""
