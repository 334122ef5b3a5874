"""Thresholds tuned once: what early exits come with elsewhere (BranchyNet, DeeBERT).

As Apparate compares with them (5.3, table 2): every exit is always in use, thresholds are tuned
once on data sampled from the workload, and are never touched again. Either all exits share one
threshold, or, in the variants marked "+", each has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offramp.bundle.policy import NEVER, ActiveExit, ExitPolicy
from offramp.certify.decision import FloatArray
from offramp.certify.observations import Observations
from offramp.certify.records import Records
from offramp.engine.control.controller import ControlStatus, Event, Evidence, Job
from offramp.engine.control.counters import AgreementCounters
from offramp.engine.control.published.thresholds import Tuning, tune


def tune_shared(records: Records, max_disagreement: float) -> Tuning:
    """Find the one threshold for all exits that saves the most within the bound on the records.

    On raw confidence. As fine as a grid search can be: every confidence that occurs is tried.

    Args:
        records: Of all exits in use.
        max_disagreement: Largest tolerated share of other answers, on these records; about unseen
            data it says little.
    """
    return tune(*_data(records), max_disagreement, method="path")


def tune_separate(records: Records, max_disagreement: float) -> Tuning:
    """Find a threshold for each exit ("+") such that they save the most within the bound.

    The paper searches a grid of all combinations; with steps of 0.1 and 13 exits that would be
    11^13 of them. The beam search stands in: exact or within a percent of it where that can be
    checked (:mod:`.search`), and never worse than :func:`tune_shared` on the same records.
    """
    return tune(*_data(records), max_disagreement, method="search")


def always_active(thresholds: FloatArray, *, version: int = 1) -> ExitPolicy:
    """Put every exit to use, float64[K] thresholds; those at NEVER cost time and answer nothing."""
    return ExitPolicy(
        version=version,
        active=tuple(ActiveExit(exit=e, threshold=float(t)) for e, t in enumerate(thresholds)),
    )


class StaticController:
    """Keeps the policy that it is given; counts and estimates, and acts on nothing."""

    def __init__(
        self,
        policy: ExitPolicy,
        *,
        max_disagreement: float,
        confidence: float = 0.95,
        audit_probability: float = 1.0,
    ) -> None:
        if not 0 < audit_probability <= 1:
            raise ValueError(f"audit_probability must be in (0, 1], got {audit_probability}")
        self._policy = policy
        self._max_disagreement = max_disagreement
        self._confidence = confidence
        self._audit_probability = audit_probability
        self._counters = AgreementCounters()

    @property
    def name(self) -> str:
        """As on the command line."""
        return "static"

    @property
    def policy(self) -> ExitPolicy:
        """The one given."""
        return self._policy

    @property
    def audit_probability(self) -> float:
        """The one given."""
        return self._audit_probability

    def observe(self, seen: Observations) -> None:
        """Count."""
        self._counters.add(seen, version=self._policy.version)

    def take_job(self) -> Job | None:
        """Ask for nothing."""
        return None

    def finish(self, job: Job, result: Any) -> None:
        """Ignore a job of someone else's."""

    def status(self) -> ControlStatus:
        """Give counts and estimate; the upper bound stays 1, since nothing is tested."""
        return ControlStatus(
            controller=self.name,
            max_disagreement=self._max_disagreement,
            confidence=self._confidence,
            evidence=self._evidence(),
            disagreement=self._counters.estimate(self._policy.version),
            disagreement_upper_bound=1.0,
            audit_probability=self._audit_probability,
            observed=self._counters.observed,
            audited=self._counters.audited,
            disagreed=self._counters.disagreed,
            alarms=0,
            tunings=0,
            adjustments=0,
            state="never changes",
        )

    def take_events(self) -> list[Event]:
        """Nothing happens."""
        return []

    def state(self) -> Mapping[str, Any] | None:
        """Keep nothing: the policy is the bundle's, and counts begin with the server."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Refuse: this controller never kept a state.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"the static controller keeps no state; got one with {sorted(state)}")

    def _evidence(self) -> Evidence:
        """The promise that the policy came with, if it covers the constraint."""
        promise = self._policy.promise
        if all(active.threshold >= NEVER for active in self._policy.active):
            return Evidence.CAUTIOUS
        if promise is None or not promise.covers(self._max_disagreement, self._confidence):
            return Evidence.NONE
        return Evidence.CALIBRATED


def _data(records: Records) -> tuple[Any, Any, FloatArray]:
    return records.confidence, records.agrees, records.latency_ms
