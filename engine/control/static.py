"""Controllers that certify nothing: their common base, and a controller with a fixed policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from offramp.bundle import NEVER, ActiveExit, ExitPolicy
from offramp.certify import Observations
from offramp.certify.kept import kept_array, kept_count, kept_exits, kept_part
from offramp.engine.control.controller import ControlEvent, ControlStatus, Evidence, Job
from offramp.engine.control.counters import ControlCounters


class UncertifiedController:
    """A base of controllers (:class:`..controller.Controller`); on its own, it keeps its policy."""

    name: ClassVar[str]
    """Name on the command line."""

    def __init__(
        self,
        policy: ExitPolicy,
        *,
        max_disagreement: float,
        confidence_level: float = 0.95,
        audit_probability: float = 1.0,
    ) -> None:
        if not 0 < audit_probability <= 1:
            raise ValueError(f"audit_probability must be in (0, 1], got {audit_probability}")
        self.policy = policy
        """Policy that should be active."""
        self.audit_probability = audit_probability
        """Audit probability of all samples; 1 in release mode."""
        self._limits = max_disagreement, confidence_level
        self._counters = ControlCounters()

    def take_job(self) -> Job | None:
        """Request no job."""
        return None

    def finish(self, job: Job, result: Any) -> None:
        """Ignore the result: this controller requests no jobs."""

    def status(self) -> ControlStatus:
        """Return a snapshot; the upper bound stays 1, since nothing is tested."""
        return self._counters.status(
            self.name,
            self.policy.version,
            max_disagreement=self._limits[0],
            confidence_level=self._limits[1],
            evidence=self._evidence(),
            audit_probability=self.audit_probability,
            state=self._describe(),
        )

    def take_events(self) -> list[ControlEvent]:
        """Return the events since the last call."""
        return self._counters.take_events()

    def _evidence(self) -> Evidence:
        """Return the evidence of the policy's promise, unless the estimate exceeds the limit."""
        promise = self.policy.promise
        if all(active.threshold >= NEVER for active in self.policy.active):
            return Evidence.CONSERVATIVE
        is_covered = promise is not None and promise.covers(*self._limits)
        if is_covered and self._counters.exceeds(self._limits[0], self.policy.version):
            return Evidence.SUSPICIOUS
        return Evidence.CALIBRATED if is_covered else Evidence.NONE

    def _describe(self) -> str:
        raise NotImplementedError

    def _kept_policy(self) -> dict[str, Any]:
        """Return the policy in the form that a state stores."""
        return {
            "version": self.policy.version,
            "exits": np.array([a.exit for a in self.policy.active], dtype=np.int64),
            "thresholds": np.array([a.threshold for a in self.policy.active], dtype=np.float64),
        }

    def _kept(
        self, state: Mapping[str, Any], names: Sequence[str], *, exits: int
    ) -> tuple[ExitPolicy, list[int]]:
        """Restore the counts of samples; return the policy and other numbers of a state.

        Raises:
            ValueError: Something is missing, or an exit is not among the bundle's ``exits``.
        """
        try:
            version, used = kept_count(state, "version"), kept_exits(state, "exits", exits)
            thresholds = kept_array(state, "thresholds", (None,)).tolist()
            policy = policy_of(version, used, thresholds)
            numbers, counts = (
                [kept_count(state, name) for name in names],
                kept_part(state, "counters"),
            )
            self._counters.restore(counts)
        except ValueError as error:
            raise ValueError(f"no state of the {self.name} controller: {error}") from error
        return policy, numbers


def policy_of(version: int, exits: Sequence[int], thresholds: Sequence[float]) -> ExitPolicy:
    """Return a policy of exits with their thresholds."""
    pairs = zip(exits, thresholds, strict=True)
    active = tuple(ActiveExit(exit=int(e), threshold=float(t)) for e, t in pairs)
    return ExitPolicy(version=version, active=active)


class StaticController(UncertifiedController):
    """Keeps the initial policy; counts and estimates, without any action."""

    name = "static"

    def observe(self, seen: Observations) -> None:
        """Count samples; they change nothing."""
        self._counters.add(seen, version=self.policy.version)

    def state(self) -> Mapping[str, Any] | None:
        """Keep nothing: the policy is the bundle's, and counts start with the server."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Refuse any state: this controller keeps none."""
        raise ValueError(f"the static controller keeps no state; got one with {sorted(state)}")

    def _describe(self) -> str:
        return "never changes"
