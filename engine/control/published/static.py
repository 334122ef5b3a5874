"""Thresholds tuned once: what early exits come with elsewhere (BranchyNet, DeeBERT).

As Apparate compares with them (5.3, table 2): every exit is always in use, thresholds are tuned
once on data sampled from the workload, and are never touched again. Either all exits share one
threshold, or, in the variants marked "+", each has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offramp.bundle import ExitPolicy
from offramp.certify import FloatArray, Observations, Records
from offramp.engine.control.published.published import PublishedController, policy_of
from offramp.engine.control.published.thresholds import Tuning, tune


def tune_shared(records: Records, max_disagreement: float) -> Tuning:
    """Find the one threshold for all exits that saves the most within the bound on the records.

    On raw confidence. As fine as a grid search can be: every confidence that occurs is tried. About
    unseen data it says little.
    """
    return tune(records.confidence, records.agrees, records.latency_ms, max_disagreement, "path")


def tune_separate(records: Records, max_disagreement: float) -> Tuning:
    """Find a threshold for each exit ("+") such that they save the most within the bound.

    The paper searches a grid of all combinations; with steps of 0.1 and 13 exits that would be
    11^13 of them. The beam search stands in: exact or within a percent of it where that can be
    checked (:mod:`.search`), and never worse than :func:`tune_shared` on the same records.
    """
    return tune(records.confidence, records.agrees, records.latency_ms, max_disagreement, "search")


def always_active(thresholds: FloatArray, *, version: int = 1) -> ExitPolicy:
    """Put every exit to use, float64[K] thresholds; those at NEVER cost time and answer nothing."""
    return policy_of(version, range(len(thresholds)), thresholds.tolist())


class StaticController(PublishedController):
    """Keeps the policy that it is given; counts and estimates, and acts on nothing."""

    name = "static"

    def observe(self, seen: Observations) -> None:
        """Count."""
        self._counters.add(seen, version=self.policy.version)

    def state(self) -> Mapping[str, Any] | None:
        """Keep nothing: the policy is the bundle's, and counts begin with the server."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Refuse: this controller never kept a state."""
        raise ValueError(f"the static controller keeps no state; got one with {sorted(state)}")

    def _describe(self) -> str:
        return "never changes"
