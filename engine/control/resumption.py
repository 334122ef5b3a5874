"""The resumption after a restart: learned thresholds wait until samples look like those before it.

What was learned was certified on the samples of its time. Nobody knows what comes after a restart:
the load of that time may be gone. So thresholds that answer more than the compiled policy does are
held back, and what exits say of served samples is compared with what they said before the restart
(:mod:`.shift_guard`). In the meantime the compiled thresholds are in force; or, where they are out
of the question (an alarm rang, or the exits are others), the most aggressive level that was
certified and answers nothing that they do not.

    alike:      after so many samples what was learned comes into force again, with its evidence
    different:  it is forgotten, and the server goes on as without a kept state; where the compiled
                thresholds are out of the question, that is an alarm

What answers no more than the compiled policy does is in force at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offramp.certify.kept import kept_part
from offramp.engine.control.counters import ControlCounters
from offramp.engine.control.in_force import PolicyInForce
from offramp.engine.control.shift_guard import ALIKE, ShiftGuard


class Resumption:
    """Holds back what was learned before a restart, and decides what becomes of it."""

    def __init__(
        self, in_force: PolicyInForce, counters: ControlCounters, guard: ShiftGuard | None
    ) -> None:
        """Hold nothing back so far; without a guard nothing ever is."""
        self._in_force, self._counters, self._guard = in_force, counters, guard
        self.kept: Mapping[str, Any] | None = None
        """The state that was restored, while it is held back."""

    def begin(self, state: Mapping[str, Any]) -> None:
        """Hold back what a state says that was just restored, unless that answers no more.

        ValueError if too few samples were kept to compare with.
        """
        if self._guard is None:
            return
        if not self._in_force.hold_back():
            self._guard.watch(self._in_force.policy)
            return
        if not self._guard.compare_with_past(self._in_force.policy):
            raise ValueError("state: 'recent' has too few samples to compare with")
        self.kept = state
        text = f"thresholds stay within the compiled ones until {ALIKE:,} samples look like those"
        self._note(f"{text} before the restart")

    def resume_if_alike(self) -> None:
        """Put what was learned in force again once enough samples were like those before."""
        if self._guard is None or self.kept is None or not self._guard.is_alike:
            return
        self._in_force.resume()
        version = self._in_force.policy.version
        self._counters.resume_estimate(kept_part(self.kept, "counters"), version=version)
        self.kept = None
        self._note("samples look like those before the restart; what was learned is in force")

    def forget(self) -> bool:
        """Forget what was learned: whether the compiled thresholds, which go on, are in force."""
        kept, self.kept = self.kept, None
        if self._guard is None or kept is None or not self._in_force.forget_learned():
            return False
        self._guard.start_over(self._in_force.policy)
        self._note("samples are not like those before the restart; what was learned is forgotten")
        return True

    def describe(self) -> str:
        """How far the comparison is, for people."""
        alike = 0 if self._guard is None else self._guard.alike
        return f"as compiled: {alike:,} of {ALIKE:,} samples like those before the restart"

    def _note(self, why: str) -> None:
        self._counters.note("policy", f"policy {self._in_force.policy.version}: {why}")
