"""The audit rate: as many answers as evidence needs, within a share of all compute.

An audit runs a sample that was answered at exit e on to the end: its cost is the time from there.
With C the mean time that stages take for a sample without audits, and E the mean time from the
answer to the end (0 for what nothing answers early), audits of a share q take q E of C + q E. Held
to a budget b that allows q <= b / (1 − b) · C / E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.certify import FloatArray

_STEPS_PER_HALVING: Final = 4
_UP: Final = 1.2
"""How far above the next step the aim must be to go there, so that q does not flutter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """How much auditing is too much, and too little."""

    budget: float = 0.05
    """Largest share of all compute, audits included, that they may take; in (0, 1)."""
    least: float = 0.01
    """Probability that is never gone below, in (0, 1]: bets are bounded by its inverse. It comes
    before the budget."""
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
    """Largest audit probability within the budget, in (0, 1].

    Args:
        shares: float64[active + 1]: of samples answered at each exit in use, the last at the end.
        latency_ms: float64[active + 1]: until each, every exit in use paid
            (:meth:`.costs.CostModel.latency_ms`).
        budget: Share of all compute, in (0, 1).
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
        self.value = 1.0
        """In (0, 1]."""
        self._since = 0
        self.set(self.aim(shares, latency_ms, needed=True))

    def aim(self, shares: FloatArray, latency_ms: FloatArray, *, needed: bool) -> float:
        """Give the probability wanted; ``needed`` says whether evidence is still missing."""
        most = affordable(shares, latency_ms, self._settings.budget)
        wanted = most if needed else most * self._settings.steady
        return min(max(wanted, self._settings.least), 1.0)

    def set(self, wanted: float) -> None:
        """Jump to the step at or below what is wanted, never below the least one."""
        steps = math.floor(np.log2(wanted) * _STEPS_PER_HALVING + 1e-9)
        self.value = max(2.0 ** (steps / _STEPS_PER_HALVING), self._settings.least)
        self._since = 0

    def follow(self, wanted: float, samples: int) -> None:
        """Go where it is wanted, if that is far enough away, and the last change long enough."""
        self._since += samples
        if self._since < self._settings.every:
            return
        if wanted < self.value or wanted >= self.value * 2 ** (1 / _STEPS_PER_HALVING) * _UP:
            self.set(wanted)
