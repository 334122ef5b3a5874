"""Metrics of the policy in force: a bound on its risk, where it answers, how much to audit it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from offramp.certify import FloatArray, Observations, count_answers
from offramp.certify.betting import UpperBound
from offramp.engine.control.audit import AuditRate, AuditSettings
from offramp.engine.control.costs import CostModel
from offramp.engine.control.settings import CertifiedSettings

_MEMORY: Final = 2048.0
"""Samples after which the shares answered at each exit have forgotten all but a third."""


class PolicyMetrics:
    """Metrics of one policy; another one that answers otherwise begins with new ones."""

    def __init__(
        self,
        costs: CostModel,
        settings: CertifiedSettings,
        exits: Sequence[int],
        shares: FloatArray,
        *,
        alpha: float,
    ) -> None:
        """Know nothing yet.

        Args:
            costs: Of all K exits.
            settings: Audits are held to its budget.
            exits: In use, whether they answer or run in shadow mode.
            shares: float64[K + 1]: of samples expected to be answered at each, the last at the end.
            alpha: With which probability the upper bound may ever be wrong.
        """
        self._costs = costs
        self._answered = shares.copy()
        """float64[K + 1]: samples answered at each, the older ones forgotten."""
        self.bound = UpperBound(alpha)
        """Of the policy's risk."""
        self.served = 0
        """Samples seen that were served under it."""
        audits = AuditSettings(budget=settings.audit_budget, least=settings.least_audit)
        self._audit = AuditRate(audits, *self._shares(exits))

    @property
    def audit_probability(self) -> float:
        """For its samples, in audit mode."""
        return self._audit.value

    def observe(self, seen: Observations, loss: FloatArray) -> None:
        """Take in samples served under the policy, none forced, and their float64[n] losses."""
        self.served += len(seen)
        self.bound.add(loss, largest=1 / float(seen.audit_probability.min()))
        self._answered *= math.exp(-len(seen) / _MEMORY)
        self._answered += count_answers(seen.answered_at, self._costs.exits)

    def follow(self, exits: Sequence[int], *, needs_evidence: bool, samples: int) -> None:
        """Move the audit probability, so many samples after the last time, for the exits in use."""
        aim = self._audit.aim(*self._shares(exits), needed=needs_evidence)
        self._audit.follow(aim, samples)

    def _shares(self, exits: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Shares answered at the exits in use and the end, and the time until each."""
        answered = self._answered[[*exits, self._costs.exits]]
        return answered / max(float(answered.sum()), 1e-9), self._costs.latency_ms(exits)
