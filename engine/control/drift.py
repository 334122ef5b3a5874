"""Disagreement of audited samples, watched: the drift alarm, and suspicion.

The drift alarm rings when the risk has risen above its bound, by bets begun at every sample:
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

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from offramp.certify import FloatArray
from offramp.certify.kept import kept_array, kept_count, kept_number

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


_TOLERATED: Final = 1.25
"""κ, as a multiple of the bound."""
_SERIOUS: Final = 5.0
"""S from which the evidence for a policy counts as doubtful. Single disagreements do not get there:
where the risk is seven tenths of the bound, S is there with a probability of e^(−5 · 1.07) = 0.5 %
at most (the exponential bound of a reflected walk)."""
_LEAST_SHARE: Final = 0.3
"""Of the audits, what is never moved to after disagreements."""
_MEMORY: Final = 4096.0
"""Audits after which it is forgotten, all but a third, how many came after disagreements."""
_STEPS_PER_HALVING: Final = 4
_PRIOR: Final = 512.0
"""Audits that are taken to have been made before any."""
_FIRST_SHARE: Final = 0.43
"""Of these, what was not made after disagreements: about as where the risk is seven tenths of the
bound, so that audits are hardly more than they should be at first either."""


class Suspicion:
    """Says how many audits there should be, from those of the policies in force so far.

    S_t = max(S_{t−1} + q_t (X_t − κ), 0), with X the loss of a sample (0, or 1/q if it was audited
    and disagreed) and q its audit probability, counts the disagreements beyond a tolerated share κ
    of the audits since S was last 0: Page's cumulative sum ("Continuous inspection schemes", 1954).
    While S is above 0, S/κ more audits without a disagreement would bring it back to 0 (0.8/ε after
    the first one), and so many are asked for until the next look: all samples are audited, or if
    more than that are expected, a share of them. Observing rarely while a statistic is low, and
    everything while it is not, is how a change is found soonest with a limited number of
    observations (Banerjee, Veeravalli: "Data-efficient quickest change detection in minimax
    settings", 2013).

    κ is 1.25 times the bound. Of 1, 1.25, 1.5 and 1.75 that noticed 2 % more disagreement soonest
    for as many audits where the risk was seven tenths of the bound (simulated); 1 was a little
    sooner at a fifth of it, but its audits have no end where the risk is at the bound. Disagreement
    above κ keeps S rising, so that all is audited until the alarm rings or the risk has fallen.

    Audits are moved, not added: what follows disagreements is taken off those made at other times
    (:attr:`Suspicion.share`), so that their sum stays within the budget while all is well.

    Every theorem about audits stays: q is *predictable*. It is a function of what was observed
    before, and is fixed, and kept with the sample, before the sample is started. So the coin says
    nothing of the sample, the loss weighted with 1/q has the mean of the disagreement given the
    past, whatever the past made of q, and the products of :mod:`offramp.certify.betting` and the
    sums of :class:`DriftAlarm` are supermartingales as before. The mean of these losses has no bias
    either (:class:`.counters.ControlCounters`); the share of the audits that disagreed is too low
    in the mean, as each disagreement brings audits that dilute it.
    """

    def __init__(self, bound: float, *, least: float = 0.0) -> None:
        """Suspect nothing; ``bound`` is the constraint, ε in (0, 1).

        ``least``, in [0, 1], is the audit probability that is never gone below.
        """
        self._tolerated = _TOLERATED * bound
        self._least = least
        self.excess = 0.0
        """S: disagreements beyond the tolerated share, since it was last 0."""
        self.disagreed, self.audits = 0, 0.0
        """Disagreements and audits since then."""
        self.share = _FIRST_SHARE
        """Of the audits, what is made while nothing is suspected."""
        self._usual, self._moved = _FIRST_SHARE * _PRIOR, (1 - _FIRST_SHARE) * _PRIOR
        """Audits while nothing was suspected, and beyond as many; older ones are forgotten."""
        self._pending = 0.0
        """Those of the second kind since suspicion began. If it was right, they do not count."""
        self._arrived, self._expected = 0, 1.0
        """Samples since the last look, and how many to expect until the next one."""

    @property
    def raised(self) -> bool:
        """Whether more is audited than usual."""
        return self.excess > 0

    @property
    def serious(self) -> bool:
        """Whether so much disagreed that chance is a poor explanation."""
        return self.excess >= _SERIOUS

    def audit_probability(self, budgeted: float) -> float:
        """For samples that are started from now on, in (0, 1], where so much is in the budget.

        A look ends with the first question after samples arrived; asked again, it says the same. As
        many samples as came with this look are expected with the next one; or half of those
        expected of this one, if these are more: looks while one slow batch is waited for are small.
        """
        if self._arrived:
            self._expected = max(self._arrived, self._expected / 2)
            self._arrived = 0
        wanted = self.excess / self._tolerated / self._expected
        return max(self._unsuspected(budgeted), _step(wanted) if wanted else 0.0)

    def pass_by(self, samples: int) -> None:
        """Count samples, of whatever policy."""
        self._arrived += samples

    def observe(self, loss: FloatArray, audit_probability: FloatArray) -> None:
        """Take in samples in order: float64[n] losses, 0 or 1/q, and the q of each in (0, 1]."""
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
        """Count audits that were made for a budget; to be called after :meth:`observe`."""
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
        """Suspect nothing any more: what was wrong has been seen to."""
        self.excess = self.audits = self._pending = 0.0
        self.disagreed = 0

    def state(self) -> dict[str, Any]:
        """What to keep over a restart."""
        return {
            "excess": self.excess,
            "disagreed": self.disagreed,
            "audits": self.audits,
            "usual": self._usual,
            "moved": self._moved,
            "pending": self._pending,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; if it is refused with a ValueError, nothing has changed."""
        disagreed = kept_count(state, "disagreed")
        # what is beyond the tolerated share of the disagreements is at most all of them
        excess = kept_number(state, "excess", most=disagreed * (1 + 1e-9))
        audits, usual, moved, pending = (
            kept_number(state, name) for name in ("audits", "usual", "moved", "pending")
        )
        self.excess, self.disagreed, self.audits = excess, disagreed, audits
        self._usual, self._moved, self._pending = usual, moved, pending
        self._share_out()

    def describe(self) -> str:
        """What is suspected, for people."""
        return f"suspicious: {self.disagreed} of {math.ceil(self.audits)} audited samples disagreed"

    def _share_out(self) -> None:
        self.share = max(self._usual / max(self._usual + self._moved, 1.0), _LEAST_SHARE)

    def _unsuspected(self, budgeted: float) -> float:
        """The audit probability while nothing is suspected."""
        return max(_step(budgeted * self.share), self._least)


def _step(probability: float) -> float:
    """The nearest of a few probabilities: losses are counted by their weights."""
    steps = round(math.log2(probability) * _STEPS_PER_HALVING)
    return min(math.exp2(steps / _STEPS_PER_HALVING), 1.0)
