"""The drift alarm: rings when the risk has risen above its bound, by bets begun at every sample.

E-detector (Shin, Ramdas, Rinaldo: "E-detectors: a nonparametric framework for sequential change
detection", 2023), of the kind of Shiryaev and Roberts: M_t = (M_{t−1} + q_t) (1 + λ_t (X_t − ε)),
with q_t the audit probability, 1 in release mode. As long as the mean of X given the past is at
most ε, M_t − (q_1 + … + q_t) is a supermartingale, so that M first reaches 1/a after 1/a audited
samples at least, in the mean: so rare are false alarms. Once the mean is above, M grows
exponentially from the best moment to have begun. (With 1 in place of q_t, M would start as many
bets as there are samples, and few audits would ring as often as many.)

Each alternative p > ε has its own bet, which grows fastest there (for losses of 0 and 1/q); the
mean of their M's is an e-detector again. Between two losses above 0 there is a closed form, so
that only these are gone through one by one. M is looked at after every loss, and at the end of
every run without: looking less often makes no false alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from offramp.certify import FloatArray
from offramp.certify.kept import kept_array

DEFAULT_RATE: Final = 1e-6
"""False alarms per audited sample, at most."""
_ALTERNATIVES: Final = (1.5, 2.0, 3.0, 5.0, 10.0)
"""Risks to look for, as multiples of the bound."""


class DriftAlarm:
    """Watches the losses of whatever policies are in force, one after the other."""

    def __init__(self, bound: float, *, rate: float = DEFAULT_RATE) -> None:
        """Start watching for a risk above ``bound``, ε in (0, 1).

        While all is well there are at most ``rate``, a in (0, 1), alarms per audited sample.
        """
        if not 0 < bound < 1 or not 0 < rate < 1:
            raise ValueError(f"bound and rate must be in (0, 1), got {bound}, {rate}")
        self.bound, self.rate = bound, rate
        self.risks: FloatArray = np.minimum(np.array(_ALTERNATIVES) * bound, (1 + bound) / 2)
        """float64[alternatives]: risks to look for."""
        self.sums: FloatArray = np.zeros(len(self.risks))
        """float64[alternatives]: M of each."""

    @property
    def level(self) -> float:
        """How near an alarm is; it rings at 1."""
        return float(self.sums.mean()) * self.rate

    def reset(self) -> None:
        """Forget everything: what was wrong has been seen to."""
        self.sums = np.zeros(len(self.risks))

    def add(self, losses: FloatArray, audit_probability: FloatArray) -> int | None:
        """Take in samples in order; after an alarm the rest is left alone.

        Returns the place of the sample that rang; ``None`` if all is well. float64[n] losses are 0,
        or up to 1/q, with q in (0, 1] the audit probability of each.
        """
        if not len(losses):
            return None
        marks = {0, len(losses), *np.flatnonzero(losses > 0).tolist()}
        if audit_probability.min() < audit_probability.max():
            marks.update((np.flatnonzero(np.diff(audit_probability)) + 1).tolist())
        for first, end in pairwise(sorted(marks)):
            weight = float(audit_probability[first])
            bets = self._bets(weight)
            run = first
            if losses[first] > 0:
                self.sums = (self.sums + weight) * (1 + bets * (float(losses[first]) - self.bound))
                run = first + 1
                if self.level >= 1:
                    return first
            if end > run:
                factor = 1 - bets * self.bound
                self.sums = _without_loss(self.sums / weight, factor, end - run) * weight
                if self.level >= 1:
                    return end - 1
        return None

    def state(self) -> dict[str, Any]:
        """What to keep over a restart."""
        return {"sums": self.sums.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError if it does not fit."""
        self.sums = kept_array(state, "sums", self.sums.shape, least=0.0)

    def _bets(self, probability: float) -> FloatArray:
        """float64[alternatives], at most 1/ε, so that no factor is below 0."""
        edge = self.risks - self.bound
        return np.asarray(edge / (self.bound * (1 / probability - self.bound)))


def _without_loss(sums: FloatArray, factor: FloatArray, samples: int) -> FloatArray:
    """M, in units of q, after some samples without a loss: f^n M + f + f² + … + f^n."""
    power = factor**samples
    return power * sums + factor * (1 - power) / (1 - factor)
