"""What every controller counts and reports: samples, agreement, alarms, tunings and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offramp.certify import Observations
from offramp.engine.control.controller import ControlEvent, ControlStatus, Evidence

_KEPT = ("observed", "audited", "disagreed")
_COUNTED = (*_KEPT, "alarms", "tunings", "adjustments")


class ControlCounters:
    """Counts since the start, events, and a running estimate for the policy in force.

    The estimate is a plain mean, without any statement about its error. Forced answers are
    outside of it; they are counted as observed, and where they ran on, as audited.
    """

    def __init__(self) -> None:
        self.observed = self.audited = self.disagreed = 0
        """Samples seen; of those answered early, the ones that ran to the end; and of these, the
        ones answered unlike the source model."""
        self.alarms = self.tunings = self.adjustments = 0
        """Drift alarms, finished threshold tunings, changes of the set of exits in use."""
        self._events: list[ControlEvent] = []
        self._begin(None)

    def add(self, seen: Observations, *, version: int) -> None:
        """Count samples; those started under policy ``version`` feed the estimate."""
        if version != self._version:
            self._begin(version)
        loss = seen.loss
        self.observed += len(seen)
        self.audited += int(np.count_nonzero(seen.early & seen.complete))
        self.disagreed += int(np.count_nonzero(loss))
        counts = (seen.policy_version == version) & ~seen.forced
        self._samples += int(np.count_nonzero(counts))
        self._loss += float(loss[counts].sum())

    def estimate(self, version: int) -> float | None:
        """Mean disagreement under policy ``version``; ``None`` before any evidence."""
        if version != self._version or not self._samples:
            return None
        return self._loss / self._samples

    def note(self, kind: str, text: str, *, warning: bool = False) -> None:
        """Report something that an operator wants to read."""
        self._events.append(ControlEvent(kind=kind, text=text, warning=warning))

    def take_events(self) -> list[ControlEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def status(
        self,
        controller: str,
        version: int,
        *,
        max_disagreement: float,
        confidence_level: float,
        evidence: Evidence,
        audit_probability: float,
        state: str,
        upper_bound: float = 1.0,
    ) -> ControlStatus:
        """A snapshot with policy ``version`` in force; the bound is 1 where nothing is tested."""
        return ControlStatus(
            controller=controller,
            max_disagreement=max_disagreement,
            confidence_level=confidence_level,
            evidence=evidence,
            disagreement=self.estimate(version),
            disagreement_upper_bound=upper_bound,
            audit_probability=audit_probability,
            state=state,
            **{name: getattr(self, name) for name in _COUNTED},
        )

    def state(self) -> dict[str, int]:
        """What to keep over a restart: the counts of samples, not the estimate."""
        return {name: getattr(self, name) for name in _KEPT}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting samples from a kept state; ValueError if a count is missing or none."""
        counts = {name: state.get(name) for name in _KEPT}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"state: {name} is {count!r}, expected a count")
        vars(self).update(counts)

    def _begin(self, version: int | None) -> None:
        """Start the estimate of another policy, or of none."""
        self._version, self._samples, self._loss = version, 0, 0.0
