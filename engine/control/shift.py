"""Detection of changed inputs without audits: confidences of exits, compared with earlier ones.

Audits show whether answers got worse, but audits are few. The confidence of an exit is known for
all samples that reach it, and it changes with nearly everything that makes inputs harder, easier or
different. So the distribution of these confidences is compared with the earlier one: recent samples
against those before, by Pearson's chi-square over ten bins of equal share at each exit, summed over
the exits, at several lengths of "recent" (short ones detect a jump, long ones a small step). Later
exits have more informative confidences, and fewer samples reach them.

A detected shift is a reason to test again, not a statement about agreement: a certificate assumes
that samples are like those it was made from, and after a shift they are not. The drift alarm
(:mod:`.drift`) monitors the disagreement itself, independently of this detector.

Our choice: consecutive samples are often similar (frames of a film), so that windows differ more
than by chance. Their usual excess is estimated (the dispersion of quasi-likelihood, Wedderburn
1974), and the statistic is divided by it.
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
"""Numbers of samples that count as recent."""
LOOK_EVERY: Final = 64
"""Samples between two comparisons."""
SIGNIFICANCE: Final = 1e-9
"""Significance of one comparison. It is small because there are many comparisons, and because the
tail of a chi-square over small counts is heavier than its formula."""
LEAST_REFERENCE: Final = 512
"""Smallest number of samples to make bins from and to compare with."""
_LEAST_REACHED: Final = 128
"""Smallest number of reference samples that reach an exit; with fewer, the exit is not compared."""
_WINDOWS_AVERAGED: Final = 32
_ABSENT: Final = BINS
"""Value in place of a bin if the sample did not reach the exit."""


class ShiftDetector:
    """Compares the newest confidences of some exits with older ones."""

    def __init__(self, *, significance: float = SIGNIFICANCE) -> None:
        """Start empty; a single comparison is significant at ``significance``, in (0, 1)."""
        if not 0 < significance < 1:
            raise ValueError(f"significance is {significance}, expected in (0, 1)")
        self._significance = significance
        self.excess: FloatArray = np.ones(len(SCALES))
        """Mean over windows of chi-square divided by its expectation, at each scale."""
        self.reset()

    def reset(self, reference: Float32Array | None = None) -> None:
        """Compare with other samples from now on.

        The float32[exits, n] confidences of ``reference`` are NaN where a sample did not reach an
        exit. If there are too few, the next samples complete them.
        """
        self._collected: list[Float32Array] = []
        self._edges: list[FloatArray] | None = None
        self._reference: FloatArray = np.zeros((0, BINS))
        """float64[exits, bins]: samples that are no longer recent at any scale."""
        self._recent: IntArray = np.empty((0, 0), np.int64)
        """int64[exits, n]: bins of the newest samples, oldest first."""
        self._unlooked = 0
        if reference is not None:
            self._collect(reference)

    @property
    def compares(self) -> bool:
        """True if there are enough older samples of any exit to compare with."""
        return self._edges is not None and any(edges.size for edges in self._edges)

    def add(self, confidence: Float32Array) -> bool:
        """Add samples in order; return whether the distribution has changed.

        The caller must :meth:`reset` after a change. float32[exits, n]; NaN where a sample did not
        reach an exit.
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
        """Return the bins of confidences, int64[exits, n]."""
        assert self._edges is not None
        bins = [
            np.where(np.isnan(row) | (len(edges) == 0), _ABSENT, np.searchsorted(edges, row))
            for row, edges in zip(confidence, self._edges, strict=True)
        ]
        return np.array(bins, np.int64).reshape(confidence.shape)

    def _look(self) -> bool:
        """Compare at every scale; then add samples that are no longer recent to the reference."""
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
        """Average the differences between windows; each window counts by its share of new samples.

        The average moves slowly, and one window counts at most twice the usual excess, so that a
        shift cannot hide itself.
        """
        weight = LOOK_EVERY / scale / _WINDOWS_AVERAGED
        excess = min(excess, 2.0 * max(float(self.excess[place]), 1.0))
        self.excess[place] += weight * (excess - self.excess[place])


def chi_square(recent: FloatArray, before: FloatArray) -> tuple[float, int]:
    """Return Pearson's statistic of two float64[exits, bins] counts, and its degrees of freedom."""
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
    """Return the chi-square value with upper tail probability ``tail`` (Wilson, Hilferty 1931)."""
    part = 2 / (9 * freedom)
    normal = -NormalDist().inv_cdf(tail)
    return float(freedom * (1 - part + normal * part**0.5) ** 3)


def _edges(reached: Float32Array) -> FloatArray:
    """Return inner edges of bins of equal share; none where too few samples reach the exit."""
    if len(reached) < _LEAST_REACHED:
        return np.empty(0)
    shares = np.arange(1, BINS) / BINS
    return np.unique(np.quantile(reached, shares).astype(np.float64))


def _count(bins: IntArray) -> FloatArray:
    """Return the counts float64[exits, bins] of int64[exits, n]."""
    counts = [np.bincount(row, minlength=BINS + 1)[:BINS] for row in bins]
    return np.array(counts, np.float64).reshape(len(bins), BINS)


RECOVERY: Final = 8_192
"""Largest number of samples that are all audited after an alarm."""
_COMPARED: Final = 4_096
"""Number of samples to compare with when a policy becomes active."""
BLIND: Final = 1_024
"""Samples until exits with too little data are compared too."""
ALIKE: Final = 1_024
"""Samples that must look like those before a restart until the load counts as alike."""
KEPT: Final = 2_048
"""Samples that are kept across a restart to compare with."""
FIRST_WAIT: Final = 1_024
"""Samples until a second notice may follow the first."""
_UNSAID: Final = -1.0
"""Value in a saved state for the confidence of an exit that a sample did not pass."""
_MISSING: Final = 0.1
"""Largest share of the samples at an exit whose confidence there may be unknown."""
QUIET: Final = 32_768
"""Samples without a notice after which the wait is halved."""


class ShiftGuard:
    """Compares the confidences of exits with those of earlier samples.

    The guard does two things for which audits alone are too slow. First, it detects a shift of the
    inputs. With 2 % of the samples audited, a disagreement of 4 % shows after about ten thousand
    samples; the confidences of *all* samples show most shifts after some hundred
    (:class:`ShiftDetector`). After such a shift, samples are not like those that the certificate
    was made from: the controller drops the certificate, no exit answers, and its levels are tested
    again (:meth:`.certified.CertifiedController.invalidate`). Second, after a shift or a drift
    alarm, every sample runs to the end as long as evidence for more aggressive levels is missing,
    within a limit: in this phase audits may exceed their budget.

    After each notice, the wait until the next one doubles, so that a load that changes all the time
    is not tested all the time; a quiet period halves the wait again.
    """

    def __init__(self, calibration: Float32Array, *, recovery: int = RECOVERY) -> None:
        """Compare with the float32[K, n] confidences of calibration at first.

        After an alarm, at most ``recovery`` samples are all audited. :meth:`watch` starts the
        guard.
        """
        self._recovery = recovery
        self._wait = self._since = FIRST_WAIT
        """Least number of samples between two notices, and samples since the last notice."""
        self._left = 0
        """Number of samples from now on that are all audited."""
        self._detector = ShiftDetector()
        self._watched: tuple[int, ...] = ()
        """Exits whose confidences are compared."""
        self._answering: tuple[tuple[int, float], ...] | None = None
        """Exits that answered when :attr:`_watched` was chosen, with thresholds; they determine
        which samples reach an exit."""
        self._calibration = calibration[:, -_COMPARED:]
        self._recent = Window(exits=len(calibration), capacity=_COMPARED)
        """Last samples, whether they ran to the end or not."""
        self._recent.add_confidence(calibration)
        self.alike = ALIKE
        """Samples since a restart that look like those before it, up to :data:`ALIKE`."""
        self._is_half_blind, self._blind_for = False, 0
        """True if some exits lack samples and are not compared; samples until they are compared."""

    @property
    def matches_previous(self) -> bool:
        """True if enough samples look like those before a restart, or if there was no restart."""
        return self.alike >= ALIKE

    @property
    def audits_all(self) -> bool:
        """True while every sample runs to the end, as evidence is gathered again."""
        return self._left > 0

    def count_samples(self, samples: int) -> None:
        """Count samples; call this with every chunk."""
        before, self._since = self._since, self._since + samples
        if before // QUIET < self._since // QUIET:
            self._wait = max(self._wait // 2, FIRST_WAIT)

    def has_shifted(self, seen: Observations, policy: ExitPolicy, *, needs_evidence: bool) -> bool:
        """Add samples that caused no other alarm; return whether inputs have changed.

        If so, the caller must drop the evidence, and call :meth:`recover`. ``needs_evidence`` is
        whether audits could still support more aggressive thresholds, or confirm the active ones.
        """
        self._left = max(self._left - len(seen), 0) if needs_evidence else 0
        mine = seen.take(seen.policy_version == policy.version)
        if self._differs(mine) and (self._since >= self._wait or not self.matches_previous):
            self._since, self._wait = 0, self._wait * 2
            return True
        self.alike = min(self.alike + len(mine), ALIKE)
        self._recent.add_confidence(seen.confidence)
        self._blind_for = max(self._blind_for - len(seen), 0)
        if _answering(policy) != self._answering:
            self.watch(policy)
        elif self._is_half_blind and not self._blind_for and self.matches_previous:
            self._recent.keep(BLIND)
            self.watch(policy)
        return False

    def recover(self, policy: ExitPolicy) -> None:
        """Audit every sample after an alarm of any kind, and compare with samples from now on."""
        self._left = self._recovery
        self._recent.keep(0)
        self.alike = ALIKE
        self.watch(policy)

    def start_over(self, policy: ExitPolicy) -> None:
        """Compare with the calibration data again, as at first."""
        self._recent.keep(0)
        self._recent.add_confidence(self._calibration)
        self.alike = ALIKE
        self.watch(policy)

    def compare_with_past(self, policy: ExitPolicy) -> bool:
        """Compare with the samples before a restart; return whether there are enough."""
        self.watch(policy)
        self.alike = 0
        return self._detector.compares

    def watch(self, policy: ExitPolicy) -> None:
        """Compare samples that are served under a policy from now on.

        Which samples reach an exit depends on the answering exits before it. So samples are
        compared with the last ones that would have reached the exit now. Where a threshold has
        risen, this is unknown for some of them; exits with too many unknown samples are compared
        again when there are enough new samples.
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
        """Return the state to keep across a restart: waits, and recent confidences."""
        recent = self._recent.confidence(range(len(self._calibration)), KEPT)
        return {
            "wait": self._wait,
            "since": self._since,
            "recent": np.nan_to_num(recent, nan=_UNSAID),
            "excess": self._detector.excess.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ValueError without any change if it does not fit."""
        wait = kept_count(state, "wait", least=FIRST_WAIT)
        since = kept_count(state, "since")
        shape = (len(self._calibration), None)
        recent = kept_array(state, "recent", shape, least=_UNSAID, most=1.0).astype(np.float32)
        excess = kept_array(state, "excess", self._detector.excess.shape, least=0.0)
        self._wait, self._since, self._detector.excess = wait, since, excess
        self._recent.keep(0)
        self._recent.add_confidence(np.where(recent < 0, np.float32(np.nan), recent))

    def _differs(self, seen: Observations) -> bool:
        """Return whether the confidences of samples that reach the exits have changed."""
        if not self._watched:
            return False
        reached = reaches(seen.answered_at, self._watched)
        return self._detector.add(_only(reached, seen.confidence[list(self._watched)]))


def _answering(policy: ExitPolicy) -> tuple[tuple[int, float], ...]:
    """Return the exits that answer, with their thresholds."""
    return tuple((a.exit, a.threshold) for a in policy.active if a.threshold < NEVER)


def _only(reached: BoolArray, confidence: Float32Array) -> Float32Array:
    """Return confidences where samples reach the exit, else NaN (audited samples go further)."""
    return np.where(reached, confidence, np.float32(np.nan))
