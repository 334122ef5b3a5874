"""Monitoring of the disagreement of audited samples: the drift alarm, and suspicion.

The drift alarm fires when the risk has risen above its bound. It places bets that begin at every
sample: an e-detector (Shin, Ramdas, Rinaldo: "E-detectors: a nonparametric framework for sequential
change detection", 2023) of the Shiryaev-Roberts kind: M_t = (M_{t−1} + q_t) (1 + λ_t (X_t − ε)),
with X_t the loss of sample t, q_t its audit probability (1 in release mode), λ_t the bet, and ε the
bound. As long as the mean of X given the past is at most ε, M_t − (q_1 + … + q_t) is a
supermartingale, so M takes at least 1/a audited samples, in the mean, to reach 1/a: this bounds the
rate of false alarms. Once the mean is above ε, M grows exponentially from the best moment to have
begun. (With 1 in place of q_t, M would start as many bets as there are samples, and would alarm as
often with few audits as with many.)

Each alternative p > ε has its own bet, which grows fastest there (for losses of 0 and 1/q); the
mean of their M's is again an e-detector. Between two losses above 0 there is a closed form, so only
these losses are processed one by one. M is checked after every loss, and at the end of every run
without a loss: fewer checks cause no false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from offramp.certify import FloatArray
from offramp.certify.kept import kept_array, kept_count, kept_number

DEFAULT_RATE: Final = 1e-6
"""Largest number of false alarms per audited sample."""
_ALTERNATIVES: Final = (1.5, 2.0, 3.0, 5.0, 10.0)
"""Risks to look for, as multiples of the bound."""


class DriftAlarm:
    """Monitors the losses of all active policies, one policy after the other."""

    def __init__(self, bound: float, *, rate: float = DEFAULT_RATE) -> None:
        """Start to watch for a risk above ``bound``, ε in (0, 1).

        While the risk is within the bound, there are at most ``rate``, a in (0, 1), alarms per
        audited sample.
        """
        if not 0 < bound < 1 or not 0 < rate < 1:
            raise ValueError(f"bound and rate must be in (0, 1), got {bound}, {rate}")
        self.bound, self.rate = bound, rate
        self.risks: FloatArray = np.minimum(np.array(_ALTERNATIVES) * bound, (1 + bound) / 2)
        """float64[alternatives]: risks to look for."""
        self.sums: FloatArray = np.zeros(len(self.risks))
        """float64[alternatives]: M of each alternative."""

    @property
    def level(self) -> float:
        """Progress towards an alarm, which fires at 1."""
        return float(self.sums.mean()) * self.rate

    def reset(self) -> None:
        """Drop all evidence, after the cause was handled."""
        self.sums = np.zeros(len(self.risks))

    def add(self, losses: FloatArray, audit_probability: FloatArray) -> int | None:
        """Add samples in order; after an alarm, the remaining samples are ignored.

        Returns the position of the sample that caused the alarm; ``None`` without an alarm.
        float64[n] losses are 0, or up to 1/q, with q in (0, 1] the audit probability of each
        sample.
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
        """Return the state to keep across a restart."""
        return {"sums": self.sums.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ValueError if it does not fit."""
        self.sums = kept_array(state, "sums", self.sums.shape, least=0.0)

    def _bets(self, probability: float) -> FloatArray:
        """Return each alternative's bet, float64[alternatives], ≤ 1/ε so that no factor is < 0."""
        edge = self.risks - self.bound
        return np.asarray(edge / (self.bound * (1 / probability - self.bound)))


def _without_loss(sums: FloatArray, factor: FloatArray, samples: int) -> FloatArray:
    """Return M in units of q after some samples without a loss: f^n M + f + f² + … + f^n."""
    power = factor**samples
    return power * sums + factor * (1 - power) / (1 - factor)


_TOLERATED: Final = 1.25
"""κ of :class:`Suspicion`, the tolerated share of disagreement, as a multiple of the bound."""
_SERIOUS: Final = 5.0
"""Value of S (:class:`Suspicion`) from which the evidence for a policy counts as doubtful. A few
disagreements do not reach it: where the risk is seven tenths of the bound, S reaches it with a
probability of at most e^(−5 · 1.07) = 0.5 % (the exponential bound of a reflected walk)."""
_LEAST_SHARE: Final = 0.3
"""Share of the audits that is never moved to the time after disagreements."""
_MEMORY: Final = 4096.0
"""Audits after which the weight of earlier audits has fallen to about a third."""
_STEPS_PER_HALVING: Final = 4
_PRIOR: Final = 512.0
"""Number of audits that are assumed to have been made before the first real audit."""
_FIRST_SHARE: Final = 0.43
"""Share of :data:`_PRIOR` that counts as usual audits, not as moved ones. It is about the share at
a risk of seven tenths of the bound, so that audits hardly exceed their budget at first."""


class Suspicion:
    """Determines how many audits there should be, from the audits of all active policies so far.

    S_t = max(S_{t−1} + q_t (X_t − κ), 0), with X the loss of a sample (0, or 1/q if it was audited
    and disagreed) and q its audit probability, counts the disagreements beyond a tolerated share κ
    of the audits since S was last 0: Page's cumulative sum ("Continuous inspection schemes", 1954).
    While S is above 0, S/κ more audits without a disagreement would bring it back to 0 (0.8/ε after
    the first one), and so many are requested until the next check: all samples are audited, or if
    more samples than that are expected, a share of them. To observe rarely while a statistic is
    low, and everything while it is not, detects a change soonest with a limited number of
    observations (Banerjee, Veeravalli: "Data-efficient quickest change detection in minimax
    settings", 2013).

    κ is 1.25 times the bound. Among 1, 1.25, 1.5 and 1.75, this value detected 2 % more
    disagreement soonest for the same number of audits at a risk of seven tenths of the bound
    (simulated). A κ of the bound itself was a little sooner at a risk of a fifth of the bound, but
    then audits never end where the risk is at the bound. Disagreement above κ keeps S rising, so
    that all samples are audited until the alarm fires or the risk has fallen.

    Audits are moved, not added: audits after disagreements reduce those at other times
    (:attr:`Suspicion.share`), so that their sum stays within the budget while all is well.

    All theorems about audits stay valid: q is *predictable*. It is a function of earlier
    observations, and is fixed and stored with the sample before the sample is started. So the coin
    is independent of the sample's outcome, and the loss weighted with 1/q has the mean of the
    disagreement given the past, however q depends on the past. The products of
    :mod:`offramp.certify.betting` and the sums of :class:`DriftAlarm` are supermartingales as
    before. The mean of these losses is unbiased too (:class:`.counters.ControlCounters`). The share
    of the audits that disagreed is too low in the mean, as each disagreement brings audits that
    dilute it.
    """

    def __init__(self, bound: float, *, least: float = 0.0) -> None:
        """Start without suspicion; ``bound`` is the constraint, ε in (0, 1).

        ``least``, in [0, 1], is the lower bound of the audit probability.
        """
        self._tolerated = _TOLERATED * bound
        self._least = least
        self.excess = 0.0
        """S: disagreements beyond the tolerated share, since S was last 0."""
        self.disagreed, self.audits = 0, 0.0
        """Disagreements and audits since S was last 0."""
        self.share = _FIRST_SHARE
        """Share of the audits that is made while nothing is suspected."""
        self._usual, self._moved = _FIRST_SHARE * _PRIOR, (1 - _FIRST_SHARE) * _PRIOR
        """Usual audits (as many as without suspicion), and moved audits beyond the usual ones, with
        decay."""
        self._pending = 0.0
        """Moved audits since suspicion began. If the suspicion was right, they do not count."""
        self._arrived, self._expected = 0, 1.0
        """Samples since the last check, and the number of samples expected until the next check."""

    @property
    def raised(self) -> bool:
        """True while more samples are audited than usual."""
        return self.excess > 0

    @property
    def serious(self) -> bool:
        """True if so many samples disagreed that chance is an unlikely explanation."""
        return self.excess >= _SERIOUS

    def audit_probability(self, budgeted: float) -> float:
        """Return the probability for samples started from now on, in (0, 1], from the budgeted one.

        A check ends with the first call after samples arrived; further calls return the same value.
        The next check is expected to bring as many samples as this one, or half of the number
        expected of this one, if that is more: checks are small while one slow batch is waited for.
        """
        if self._arrived:
            self._expected = max(self._arrived, self._expected / 2)
            self._arrived = 0
        wanted = self.excess / self._tolerated / self._expected
        return max(self._unsuspected(budgeted), _step(wanted) if wanted else 0.0)

    def count_samples(self, samples: int) -> None:
        """Count samples that arrived, under any policy."""
        self._arrived += samples

    def observe(self, loss: FloatArray, audit_probability: FloatArray) -> None:
        """Add samples in order: float64[n] losses, 0 or 1/q, and the q of each in (0, 1]."""
        if not len(loss):
            return
        wrong = loss > 0
        steps = self.excess + np.cumsum(wrong - self._tolerated * audit_probability)
        lowest = len(steps) - 1 - int(steps[::-1].argmin())
        if steps[lowest] > 0:
            self.excess, since = float(steps[-1]), 0
        else:
            self.excess, since = float(steps[-1] - steps[lowest]), lowest + 1
            self.disagreed, self.audits = 0, 0.0
        self.disagreed += int(np.count_nonzero(wrong[since:]))
        self.audits += float(audit_probability[since:].sum())

    def account(self, audit_probability: FloatArray, budgeted: float) -> None:
        """Count the audits of some samples, given the budgeted probability.

        Call this after :meth:`observe`.
        """
        usual = float(np.minimum(audit_probability, self._unsuspected(budgeted)).sum())
        moved = float(audit_probability.sum()) - usual
        keep = math.exp(-(usual + moved) / _MEMORY)
        self._usual = self._usual * keep + usual
        self._moved *= keep
        self._pending += moved
        if not self.raised:
            self._moved, self._pending = self._moved + self._pending, 0.0
            self._share_out()

    def reset(self) -> None:
        """Drop all suspicion, after the cause was handled."""
        self.excess = self.audits = self._pending = 0.0
        self.disagreed = 0

    def state(self) -> dict[str, Any]:
        """Return the state to keep across a restart."""
        return {
            "excess": self.excess,
            "disagreed": self.disagreed,
            "audits": self.audits,
            "usual": self._usual,
            "moved": self._moved,
            "pending": self._pending,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ValueError without any change if it does not fit."""
        disagreed = kept_count(state, "disagreed")
        # The excess disagreements are at most all disagreements.
        excess = kept_number(state, "excess", most=disagreed * (1 + 1e-9))
        audits, usual, moved, pending = (
            kept_number(state, name) for name in ("audits", "usual", "moved", "pending")
        )
        self.excess, self.disagreed, self.audits = excess, disagreed, audits
        self._usual, self._moved, self._pending = usual, moved, pending
        self._share_out()

    def describe(self) -> str:
        """Return what is suspected, as text for people."""
        return f"suspicious: {self.disagreed} of {math.ceil(self.audits)} audited samples disagreed"

    def _share_out(self) -> None:
        self.share = max(self._usual / max(self._usual + self._moved, 1.0), _LEAST_SHARE)

    def _unsuspected(self, budgeted: float) -> float:
        """Return the audit probability while nothing is suspected."""
        return max(_step(budgeted * self.share), self._least)


def _step(probability: float) -> float:
    """Round to one of a few probabilities, because losses are counted by their weights 1/q."""
    steps = round(math.log2(probability) * _STEPS_PER_HALVING)
    return min(math.exp2(steps / _STEPS_PER_HALVING), 1.0)
