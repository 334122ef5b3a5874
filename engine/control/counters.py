"""What every controller counts and reports: samples, agreement, alarms, tunings and events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from offramp.certify import Observations
from offramp.certify.kept import MOST, kept_count, kept_number, kept_part
from offramp.engine.control.controller import ControlEvent, ControlStatus, Evidence

_COUNTED = ("observed", "audited", "disagreed", "alarms", "tunings", "adjustments")


class ControlCounters:
    """Counts since the start, events, and a running estimate for the policy in force.

    The estimate is the mean loss of the samples: an audit that disagreed counts as the inverse of
    its probability, all else as 0 (Horvitz, Thompson 1952). It has no bias, however the
    probabilities followed from what was observed before, and nothing is said about its error.
    Forced answers are outside of it; they are counted as observed, and where they ran on, as
    audited.
    """

    def __init__(self, *, tolerated: float = math.inf) -> None:
        """Start at 0; no estimate that a single rare audit that disagreed would put above this."""
        self._tolerated = tolerated
        self.observed = self.audited = self.disagreed = 0
        """Samples seen; of those answered early, the ones that ran to the end; and of these, the
        ones answered unlike the source model."""
        self.alarms = self.tunings = self.adjustments = 0
        """Drift alarms, finished threshold tunings, changes of the set of exits in use."""
        self._events: list[ControlEvent] = []
        self._heaviest = 0.0
        """What the rarest audit so far counts, if it disagreed."""
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
        if counts.any():
            self._samples += int(np.count_nonzero(counts))
            self._loss += float(loss[counts].sum())
            rarest = float(seen.audit_probability[counts].min())
            self._heaviest = max(self._heaviest, 1 / rarest)

    def estimate(self, version: int) -> float | None:
        """Mean disagreement under policy ``version``; ``None`` before enough samples."""
        if version != self._version or not self._samples:
            return None
        if self._heaviest > self._tolerated * self._samples:
            return None
        return self._loss / self._samples

    def exceeds(self, bound: float, version: int) -> bool:
        """Whether the estimate under policy ``version`` is above a bound."""
        estimate = self.estimate(version)
        return estimate is not None and estimate > bound

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

    def state(self) -> dict[str, Any]:
        """What to keep over a restart: all counts, and the estimate if there is one."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTED}
        if self._version is None:
            return counts
        estimate = {
            "version": self._version,
            "samples": self._samples,
            "loss": self._loss,
            "heaviest": self._heaviest,
        }
        return counts | {"estimate": estimate}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError, and nothing has changed, if it does not fit."""
        counts = {name: kept_count(state, name) for name in _COUNTED}
        estimate = _kept_estimate(state)
        self._begin(None)
        vars(self).update(counts | estimate)

    def resume_estimate(self, state: Mapping[str, Any], *, version: int) -> None:
        """Go on with the estimate alone of a kept state, now that of policy ``version``."""
        self._begin(version)
        vars(self).update(_kept_estimate(state) | {"_version": version})

    def _begin(self, version: int | None) -> None:
        """Start the estimate of another policy, or of none."""
        self._version, self._samples, self._loss = version, 0, 0.0
        self._heaviest = 0.0


def _kept_estimate(state: Mapping[str, Any]) -> dict[str, Any]:
    """Read an estimate; nothing where there was none."""
    if "estimate" not in state:
        return {}
    kept = kept_part(state, "estimate")
    samples = kept_count(kept, "samples")
    heaviest = kept_number(kept, "heaviest")
    loss = kept_number(kept, "loss", most=min(heaviest * samples * (1 + 1e-9), MOST))
    version = kept_count(kept, "version")
    return {"_version": version, "_samples": samples, "_loss": loss, "_heaviest": heaviest}
