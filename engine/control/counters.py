"""Counts and reports of every controller: samples, agreement, alarms, tunings and events."""

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
    """Counts since the start, events, and a running estimate for the active policy.

    The estimate is the mean loss of the samples: an audit that disagreed counts as the inverse of
    its probability, any other sample as 0 (Horvitz, Thompson 1952). It is unbiased, provided that
    each probability depends on earlier observations only; there is no statement about its error.
    Forced answers are not part of it. They are counted as observed, and as audited if they ran to
    the end.
    """

    def __init__(self, *, tolerated: float = math.inf) -> None:
        """Start at 0; there is no estimate while one disagreement could exceed ``tolerated``."""
        self._tolerated = tolerated
        self.observed = self.audited = self.disagreed = 0
        """Samples seen; early answers that ran to the end; and of these, the ones that differ from
        the source model's answer."""
        self.alarms = self.tunings = self.adjustments = 0
        """Drift alarms, finished threshold tunings, and changes of the set of exits in use."""
        self._events: list[ControlEvent] = []
        self._heaviest = 0.0
        """Loss that the rarest audit so far would have counted if it had disagreed."""
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
        """Return whether the estimate under policy ``version`` is above a bound."""
        estimate = self.estimate(version)
        return estimate is not None and estimate > bound

    def note(self, kind: str, text: str, *, warning: bool = False) -> None:
        """Add an event for the operator's log."""
        self._events.append(ControlEvent(kind=kind, text=text, warning=warning))

    def take_events(self) -> list[ControlEvent]:
        """Return the events since the last call."""
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
        """Return a snapshot with policy ``version`` active; the bound is 1 if no test runs."""
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
        """Return the state to keep across a restart: all counts, and the estimate if any."""
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
        """Continue from a saved state; ValueError without any change if it does not fit."""
        counts = {name: kept_count(state, name) for name in _COUNTED}
        estimate = _kept_estimate(state)
        self._begin(None)
        vars(self).update(counts | estimate)

    def resume_estimate(self, state: Mapping[str, Any], *, version: int) -> None:
        """Continue only the estimate of a saved state, as that of policy ``version``."""
        self._begin(version)
        vars(self).update(_kept_estimate(state) | {"_version": version})

    def _begin(self, version: int | None) -> None:
        """Start the estimate of another policy, or of none."""
        self._version, self._samples, self._loss = version, 0, 0.0
        self._heaviest = 0.0


def _kept_estimate(state: Mapping[str, Any]) -> dict[str, Any]:
    """Read an estimate; empty where there was none."""
    if "estimate" not in state:
        return {}
    kept = kept_part(state, "estimate")
    samples = kept_count(kept, "samples")
    heaviest = kept_number(kept, "heaviest")
    loss = kept_number(kept, "loss", most=min(heaviest * samples * (1 + 1e-9), MOST))
    version = kept_count(kept, "version")
    return {"_version": version, "_samples": samples, "_loss": loss, "_heaviest": heaviest}
