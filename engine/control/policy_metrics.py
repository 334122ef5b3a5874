"""Metrics of the policy in force: a bound on its risk, where it answers, how much to audit it.

The audit rate gives as many answers as evidence needs, within a share of all compute. An audit runs
a sample that was answered at exit e on to the end: its cost is the time from there. With C the mean
time that stages take for a sample without audits, and E the mean time from the answer to the end (0
for what nothing answers early), audits of a share q take q E of C + q E. Held to a budget b that
allows q <= b / (1 − b) · C / E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.certify import FloatArray, Observations, count_answers
from offramp.certify.betting import UpperBound
from offramp.engine.control.costs import CostModel
from offramp.engine.control.settings import CertifiedSettings

_STEPS_PER_HALVING: Final = 4
_UP: Final = 1.2
"""How far above the next step the aim must be to go there, so that q does not flutter."""
_MEMORY: Final = 2048.0
"""Samples after which the shares answered at each exit have forgotten all but a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """How much auditing is too much, and too little."""

    budget: float = 0.05
    """Largest share of all compute, audits included, that they may take; in (0, 1)."""
    least: float = 0.01
    """Probability that the rate never goes below, in (0, 1]. It comes before the budget."""
    steady: float = 0.25
    """Share of the budget once no more evidence is needed: enough to notice drift."""
    every: int = 512
    """Samples from one change to the next, at least."""

    def __post_init__(self) -> None:
        for name in ("budget", "least", "steady"):
            value = getattr(self, name)
            if not 0 < value <= 1 or (name == "budget" and value == 1):
                raise ValueError(f"{name} is {value}, expected above 0, below 1")


def affordable(shares: FloatArray, latency_ms: FloatArray, budget: float) -> float:
    """Largest audit probability within the budget, a share of all compute, in (0, 1].

    ``shares``, float64[active + 1], are of samples answered at each exit in use, the last at the
    end, and ``latency_ms`` is until each, every exit in use paid (:meth:`.CostModel.latency_ms`).
    """
    without = float(shares @ latency_ms)
    more = float(shares @ (latency_ms[-1] - latency_ms))
    if more <= 0:
        return 1.0
    return min(1.0, budget / (1 - budget) * without / more)


class AuditRate:
    """The audit probability in force; it changes rarely, in steps of a fourth of a halving."""

    def __init__(self, settings: AuditSettings, shares: FloatArray, latency_ms: FloatArray) -> None:
        self._settings = settings
        self._since = 0
        self.set(self.aim(shares, latency_ms, needed=True))

    def aim(self, shares: FloatArray, latency_ms: FloatArray, *, needed: bool) -> float:
        """Give the probability wanted; ``needed`` says whether evidence is still missing."""
        most = affordable(shares, latency_ms, self._settings.budget)
        wanted = most if needed else most * self._settings.steady
        return min(max(wanted, self._settings.least), 1.0)

    def set(self, wanted: float) -> None:
        """Jump to the step at or below what is wanted, never below the least one, in (0, 1]."""
        steps = math.floor(np.log2(wanted) * _STEPS_PER_HALVING + 1e-9)
        self.value: float = max(2.0 ** (steps / _STEPS_PER_HALVING), self._settings.least)
        self._since = 0

    def follow(self, wanted: float, samples: int) -> None:
        """Go where it is wanted, if that is far enough away, and the last change long enough."""
        self._since += samples
        if self._since < self._settings.every:
            return
        if wanted < self.value or wanted >= self.value * 2 ** (1 / _STEPS_PER_HALVING) * _UP:
            self.set(wanted)


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
        """Know nothing yet, of a policy with these exits in use, answering or in shadow mode.

        ``shares``, float64[K + 1], are of samples expected to be answered at each exit, the last at
        the end. The upper bound may ever be wrong with probability ``alpha``.
        """
        self._costs = costs
        self._answered = shares.copy()
        """float64[K + 1]: samples answered at each, the older ones forgotten."""
        self.bound = UpperBound(alpha)
        """Of the policy's risk."""
        self.served = 0
        """Samples seen that were served under it."""
        audits = AuditSettings(budget=settings.audit_budget, least=settings.least_budgeted)
        self.audit = AuditRate(audits, *self._shares(exits))

    def observe(self, seen: Observations, loss: FloatArray) -> None:
        """Take in samples served under the policy, none forced, and their float64[n] losses."""
        self.served += len(seen)
        self.bound.add(loss, largest=1 / float(seen.audit_probability.min()))
        self._answered *= math.exp(-len(seen) / _MEMORY)
        self._answered += count_answers(seen.answered_at, self._costs.exits)

    def follow(self, exits: Sequence[int], *, needs_evidence: bool, samples: int) -> None:
        """Move the audit probability, so many samples after the last time, for the exits in use."""
        aim = self.audit.aim(*self._shares(exits), needed=needs_evidence)
        self.audit.follow(aim, samples)

    def _shares(self, exits: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Shares answered at the exits in use and the end, and the time until each."""
        answered = self._answered[[*exits, self._costs.exits]]
        return answered / max(float(answered.sum()), 1e-9), self._costs.latency_ms(exits)
