"""Changed inputs, noticed without audits: what exits say of samples, compared with before.

Audits tell whether answers got worse, but they are few. How sure an exit is of the samples that
reach it is known of all of them, and it moves with nearly everything that makes inputs harder,
easier or other. So the distribution of these confidences is compared with what it was: recent
samples against those before, by Pearson's chi-square over ten bins of equal share at each exit,
summed over the exits, at several lengths of "recent" (short ones notice a jump, long ones a small
step). The later an exit, the more its confidences say, and the fewer samples reach it.

This is a reason to test afresh, no statement about agreement: a certificate takes for granted that
samples are like those it was made from, and here they are not. The drift alarm (:mod:`.drift`)
watches what matters whether this notices anything or not.

Chosen here: samples that follow each other are often alike (frames of a film), so that windows
differ more than chance would have it. Their usual excess is estimated (the dispersion of
quasi-likelihood, Wedderburn 1974) and divided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from offramp.bundle import ExitPolicy
from offramp.certify import (
    NEVER,
    BoolArray,
    Float32Array,
    FloatArray,
    IntArray,
    Observations,
    Window,
    first_exit,
)
from offramp.certify.decision import reaches
from offramp.certify.kept import kept_array, kept_count

BINS: Final = 10
SCALES: Final = (128, 512, 2048)
"""Samples that count as recent."""
LOOK_EVERY: Final = 64
"""Samples from one comparison to the next."""
SIGNIFICANCE: Final = 1e-9
"""Of one comparison: they are many, and the tail of a chi-square over small counts is heavier than
its formula."""
LEAST_REFERENCE: Final = 512
"""Samples that bins are made of, and that are compared with, at least."""
_LEAST_REACHED: Final = 128
"""Of these, that reach an exit, or it is left out."""
_WINDOWS_AVERAGED: Final = 32
_ABSENT: Final = BINS
"""Instead of a bin: the sample did not reach the exit."""


class ShiftDetector:
    """Compares the newest confidences of some exits with older ones."""

    def __init__(self, *, significance: float = SIGNIFICANCE) -> None:
        """Know nothing; a single comparison is significant at ``significance``, in (0, 1)."""
        if not 0 < significance < 1:
            raise ValueError(f"significance is {significance}, expected in (0, 1)")
        self._significance = significance
        self.excess: FloatArray = np.ones(len(SCALES))
        """Chi-square over its expectation, at each scale, in the mean over windows."""
        self.reset()

    def reset(self, reference: Float32Array | None = None) -> None:
        """Compare with other samples from now on.

        The float32[exits, n] confidences of ``reference`` are NaN where a sample did not reach an
        exit; the next samples make up for what is missing.
        """
        self._collected: list[Float32Array] = []
        self._edges: list[FloatArray] | None = None
        self._reference: FloatArray = np.zeros((0, BINS))
        """float64[exits, bins]: samples that are not recent at any scale."""
        self._recent: IntArray = np.empty((0, 0), np.int64)
        """int64[exits, n]: bins of the newest samples, oldest first."""
        self._unlooked = 0
        if reference is not None:
            self._collect(reference)

    @property
    def compares(self) -> bool:
        """Whether there are enough older samples of any exit to compare with."""
        return self._edges is not None and any(edges.size for edges in self._edges)

    def add(self, confidence: Float32Array) -> bool:
        """Take in samples in order; whether they have changed.

        After a notice it is the caller's to :meth:`reset`. float32[exits, n]; NaN where a sample
        did not reach an exit.
        """
        if self._edges is None:
            self._collect(confidence)
            return False
        for first in range(0, confidence.shape[1], LOOK_EVERY):
            part = confidence[:, first : first + LOOK_EVERY]
            self._recent = np.concatenate([self._recent, self._bins(part)], axis=1)
            self._unlooked += part.shape[1]
            if self._unlooked >= LOOK_EVERY:
                self._unlooked = 0
                if self._look():
                    return True
        return False

    def _collect(self, confidence: Float32Array) -> None:
        self._collected.append(confidence)
        if sum(part.shape[1] for part in self._collected) >= LEAST_REFERENCE:
            reference = np.concatenate(self._collected, axis=1)
            self._collected = []
            self._edges = [_edges(row[~np.isnan(row)]) for row in reference]
            self._reference = _count(self._bins(reference))
            self._recent = np.empty((len(reference), 0), np.int64)

    def _bins(self, confidence: Float32Array) -> IntArray:
        """int64[exits, n]."""
        assert self._edges is not None
        bins = [
            np.where(np.isnan(row) | (len(edges) == 0), _ABSENT, np.searchsorted(edges, row))
            for row, edges in zip(confidence, self._edges, strict=True)
        ]
        return np.array(bins, np.int64).reshape(confidence.shape)

    def _look(self) -> bool:
        """Compare at every scale; then what is recent at none becomes part of what is usual."""
        found = False
        newest = _count(self._recent)
        for place, scale in enumerate(SCALES):
            if self._recent.shape[1] < scale:
                break
            recent = _count(self._recent[:, -scale:])
            statistic, freedom = chi_square(recent, newest - recent + self._reference)
            usual = max(float(self.excess[place]), 1.0)
            limit = chi_square_quantile(self._significance, max(freedom, 1))
            found |= statistic > limit * usual
            self._learn(place, scale, statistic / max(freedom, 1))
        overflow = self._recent.shape[1] - SCALES[-1]
        if overflow > 0:
            self._reference += _count(self._recent[:, :overflow])
            self._recent = self._recent[:, overflow:]
        return found

    def _learn(self, place: int, scale: int, excess: float) -> None:
        """Average what windows differ by; each counts for the part of it that is new.

        Slowly, and none for more than twice the usual, lest a shift hide itself.
        """
        weight = LOOK_EVERY / scale / _WINDOWS_AVERAGED
        excess = min(excess, 2.0 * max(float(self.excess[place]), 1.0))
        self.excess[place] += weight * (excess - self.excess[place])


def chi_square(recent: FloatArray, before: FloatArray) -> tuple[float, int]:
    """Pearson's statistic of two float64[exits, bins] of counts, and its degrees of freedom."""
    total = recent + before
    ours, theirs = recent.sum(axis=1), before.sum(axis=1)
    known = (ours > 0) & (theirs > 0)
    if not known.any():
        return 0.0, 0
    total, recent = total[known], recent[known]
    share = (ours[known] / (ours + theirs)[known])[:, None]
    there = total > 0
    expected = total * share
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = (recent - expected) ** 2 / (expected * (1 - share))
    return float(terms[there].sum()), int(there.sum()) - int(known.sum())


def chi_square_quantile(tail: float, freedom: int) -> float:
    """What chi-square exceeds with probability ``tail`` (Wilson and Hilferty 1931)."""
    part = 2 / (9 * freedom)
    normal = -NormalDist().inv_cdf(tail)
    return float(freedom * (1 - part + normal * part**0.5) ** 3)


def _edges(reached: Float32Array) -> FloatArray:
    """Inner edges of bins of equal share; none where too few samples reach the exit."""
    if len(reached) < _LEAST_REACHED:
        return np.empty(0)
    shares = np.arange(1, BINS) / BINS
    return np.unique(np.quantile(reached, shares).astype(np.float64))


def _count(bins: IntArray) -> FloatArray:
    """float64[exits, bins] of int64[exits, n]."""
    counts = [np.bincount(row, minlength=BINS + 1)[:BINS] for row in bins]
    return np.array(counts, np.float64).reshape(len(bins), BINS)


RECOVERY: Final = 8_192
"""Samples that are all audited after an alarm, at most."""
_COMPARED: Final = 4_096
"""Samples that are compared with when a policy comes into force."""
BLIND: Final = 1_024
"""Samples until exits of which too little was known are compared too."""
ALIKE: Final = 1_024
"""Samples that have to look like those before a restart until they count as alike."""
KEPT: Final = 2_048
"""Samples that are kept over a restart to compare with."""
FIRST_WAIT: Final = 1_024
"""Samples until a second notice may follow the first."""
_UNSAID: Final = -1.0
"""In a kept state, the confidence of an exit that a sample did not pass."""
_MISSING: Final = 0.1
"""Share of those that would have reached an exit of which it may be unknown what it says."""
QUIET: Final = 32_768
"""Samples without a notice that halve the wait again."""


class ShiftGuard:
    """Compares what exits say of samples with what they said of those before.

    Two things that audits alone are too slow for. A share of 2 % audited shows a disagreement of 4
    % after some ten thousand samples; what exits say of *all* samples that reach them shows most
    shifts after some hundred (:class:`ShiftDetector`). Samples are then not like those that the
    certificate was made from: the controller gives it up, no exit answers, and its levels are
    tested afresh (:meth:`.certified.CertifiedController.invalidate`). And after that, or after a
    drift alarm, every sample runs to the end for as long as evidence for more aggressive levels is
    still missing, within a limit: for these moments audits may take more than their budget.

    After a notice, the next one has to wait twice as long as the last time, so that a load which
    never comes to rest is not tested all the time; quiet halves that again.
    """

    def __init__(self, calibration: Float32Array, *, recovery: int = RECOVERY) -> None:
        """Compare with the float32[K, n] confidences of calibration at first; :meth:`watch` begins.

        After an alarm, at most ``recovery`` samples are all audited.
        """
        self._recovery = recovery
        self._wait = self._since = FIRST_WAIT
        """Samples from one notice to the next, at least, and since the last one."""
        self._left = 0
        """Samples that are still all audited."""
        self._detector = ShiftDetector()
        self._watched: tuple[int, ...] = ()
        """Exits whose confidences are compared."""
        self._answering: tuple[tuple[int, float], ...] | None = None
        """Exits that answered when they were chosen: who reaches an exit depends on these."""
        self._calibration = calibration[:, -_COMPARED:]
        self._recent = Window(exits=len(calibration), capacity=_COMPARED)
        """The last samples, whether they ran to the end or not."""
        self._recent.add_confidence(calibration)
        self.alike = ALIKE
        """Samples since a restart that look like those before it, up to :data:`ALIKE`."""
        self._is_half_blind, self._blind_for = False, 0
        """Whether some exits are not compared for want of samples; for so many samples more."""

    @property
    def is_alike(self) -> bool:
        """Whether enough samples look like those before a restart, if there was one."""
        return self.alike >= ALIKE

    @property
    def audits_all(self) -> bool:
        """Whether every sample runs to the end, as evidence is gathered again."""
        return self._left > 0

    def pass_by(self, samples: int) -> None:
        """Count samples; to be called with every chunk."""
        before, self._since = self._since, self._since + samples
        if before // QUIET < self._since // QUIET:
            self._wait = max(self._wait // 2, FIRST_WAIT)

    def has_shifted(self, seen: Observations, policy: ExitPolicy, *, needs_evidence: bool) -> bool:
        """Take in samples after which no other alarm rang; whether inputs have changed.

        If so, the evidence has to be given up, and :meth:`recover` be called. ``needs_evidence``
        says whether audits could still bring more aggressive thresholds, or confirm those in force.
        """
        self._left = max(self._left - len(seen), 0) if needs_evidence else 0
        mine = seen.take(seen.policy_version == policy.version)
        if self._differs(mine) and (self._since >= self._wait or not self.is_alike):
            self._since, self._wait = 0, self._wait * 2
            return True
        self.alike = min(self.alike + len(mine), ALIKE)
        self._recent.add_confidence(seen.confidence)
        self._blind_for = max(self._blind_for - len(seen), 0)
        if _answering(policy) != self._answering:
            self.watch(policy)
        elif self._is_half_blind and not self._blind_for and self.is_alike:
            self._recent.keep(BLIND)
            self.watch(policy)
        return False

    def recover(self, policy: ExitPolicy) -> None:
        """After any alarm: have everything audited, and compare with what comes now."""
        self._left = self._recovery
        self._recent.keep(0)
        self.alike = ALIKE
        self.watch(policy)

    def start_over(self, policy: ExitPolicy) -> None:
        """Compare with calibration, as at first."""
        self._recent.keep(0)
        self._recent.add_confidence(self._calibration)
        self.alike = ALIKE
        self.watch(policy)

    def compare_with_past(self, policy: ExitPolicy) -> bool:
        """Compare with the samples before a restart: whether there are enough of them."""
        self.watch(policy)
        self.alike = 0
        return self._detector.compares

    def watch(self, policy: ExitPolicy) -> None:
        """Compare what is served under a policy from now on.

        Which samples reach an exit depends on those before it that answer. So samples are compared
        with those of the last ones that would have reached it now. Where a threshold has risen,
        that is not known of all of them; exits of which too little is known are compared again
        when there are enough new samples.
        """
        self._answering = _answering(policy)
        self._watched = tuple(active.exit for active in policy.active)
        confidence = self._recent.confidence(self._watched)
        if not confidence.size:
            self._detector.reset()
            return
        thresholds = [active.threshold for active in policy.active]
        answered_by = first_exit(confidence, thresholds)
        reached = reaches(answered_by, range(len(self._watched)))
        missing = np.count_nonzero(reached & np.isnan(confidence), axis=1)
        unknown = missing > _MISSING * np.count_nonzero(reached, axis=1)
        self._is_half_blind, self._blind_for = bool(unknown.any()), BLIND
        self._detector.reset(_only(reached & ~unknown[:, None], confidence))

    def state(self) -> dict[str, Any]:
        """What to keep over a restart: when to notice again, and what inputs look like."""
        recent = self._recent.confidence(range(len(self._calibration)), KEPT)
        return {
            "wait": self._wait,
            "since": self._since,
            "recent": np.nan_to_num(recent, nan=_UNSAID),
            "excess": self._detector.excess.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError, and nothing has changed, if it does not fit."""
        wait = kept_count(state, "wait", least=FIRST_WAIT)
        since = kept_count(state, "since")
        shape = (len(self._calibration), None)
        recent = kept_array(state, "recent", shape, least=_UNSAID, most=1.0).astype(np.float32)
        excess = kept_array(state, "excess", self._detector.excess.shape, least=0.0)
        self._wait, self._since, self._detector.excess = wait, since, excess
        self._recent.keep(0)
        self._recent.add_confidence(np.where(recent < 0, np.float32(np.nan), recent))

    def _differs(self, seen: Observations) -> bool:
        """Whether what exits say of the samples that reach them has changed."""
        if not self._watched:
            return False
        reached = reaches(seen.answered_at, self._watched)
        return self._detector.add(_only(reached, seen.confidence[list(self._watched)]))


def _answering(policy: ExitPolicy) -> tuple[tuple[int, float], ...]:
    """The exits that answer."""
    return tuple((a.exit, a.threshold) for a in policy.active if a.threshold < NEVER)


def _only(reached: BoolArray, confidence: Float32Array) -> Float32Array:
    """What exits said of those that reach them, NaN elsewhere (audited samples go further)."""
    return np.where(reached, confidence, np.float32(np.nan))
