"""Notice that inputs have changed, from what every sample shows anyway: no audit is needed.

Audits tell whether answers got worse, but they are few. How sure the first exit in use is of a
sample is known of all of them, whichever policy is in force, and it moves with nearly everything
that makes inputs harder, easier or other. So the distribution of that confidence is compared with
what it was: recent samples against those before, by Pearson's chi-square over ten bins of equal
share, at several lengths of "recent" (short ones notice a jump, long ones a small step).

This is a reason to test afresh, no statement about agreement: a certificate takes for granted that
samples are like those it was made from, and here they are not. It makes no promise of its own; the
drift alarm (:mod:`.drift`) watches what matters whether this notices anything or not.

Chosen here: samples that follow each other are often alike (frames of a film), so that windows
differ more than chance would have it. Their usual excess is estimated (the dispersion of
quasi-likelihood, Wedderburn 1974) and divided by. After a notice, the next one has to wait twice as
long as the last time, so that a load which never comes to rest is not tested all the time; quiet
halves that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from offramp.engine.control.records import ConfidenceArray, FloatArray, IntArray

BINS: Final = 10
SCALES: Final = (128, 512, 2048)
"""Samples that count as recent."""
LOOK_EVERY: Final = 64
"""Samples from one comparison to the next."""
SIGNIFICANCE: Final = 1e-9
"""Of one comparison. They overlap, and the tail of a chi-square over small counts is heavier than
its formula: 1e-9 rang in none of 400 simulated streams of 50,000 samples alike."""
LEAST_REFERENCE: Final = 1024
"""Samples that bins are made of, and that are compared with, at least."""
FIRST_WAIT: Final = 1024
"""Samples until a second notice may follow the first."""
_WINDOWS_AVERAGED: Final = 32
QUIET: Final = 32_768
"""Samples without a notice that halve the wait again."""


class ShiftDetector:
    """Compares the newest confidences of one exit with older ones."""

    def __init__(self, *, significance: float = SIGNIFICANCE) -> None:
        """Know nothing.

        Args:
            significance: Of one comparison, in (0, 1).
        """
        if not 0 < significance < 1:
            raise ValueError(f"significance is {significance}, expected in (0, 1)")
        self._limit = chi_square_quantile(significance, BINS - 1)
        self._wait = FIRST_WAIT
        self._since = FIRST_WAIT
        """Samples since the last notice."""
        self._quiet = 0
        self._excess = np.ones(len(SCALES))
        """Chi-square over its expectation, at each scale, in the mean over windows."""
        self.reset()

    def reset(self, reference: ConfidenceArray | None = None) -> None:
        """Compare with other samples from now on.

        Args:
            reference: float[n] of the exit's confidences; ``None`` takes the next ones.
        """
        self._collected: list[ConfidenceArray] = []
        self._edges: FloatArray | None = None
        self._reference: FloatArray = np.zeros(BINS)
        """Samples by bin that are not recent at any scale."""
        self._recent: IntArray = np.empty(0, np.int64)
        """Bins of the newest samples, oldest first."""
        self._unlooked = 0
        if reference is not None and len(reference) >= LEAST_REFERENCE:
            self._adopt(np.asarray(reference))

    def add(self, confidence: ConfidenceArray) -> bool:
        """Take in float[n] confidences in order; whether they have changed.

        After a notice it is the caller's to :meth:`reset`.
        """
        confidence = confidence[~np.isnan(confidence)]
        self._since += len(confidence)
        self._quiet += len(confidence)
        if self._quiet >= QUIET:
            self._quiet, self._wait = 0, max(self._wait // 2, FIRST_WAIT)
        if self._edges is None:
            self._collect(confidence)
            return False
        for first in range(0, len(confidence), LOOK_EVERY):
            part = confidence[first : first + LOOK_EVERY]
            self._recent = np.concatenate([self._recent, self._bins(part)])
            self._unlooked += len(part)
            if self._unlooked >= LOOK_EVERY:
                self._unlooked = 0
                if self._look():
                    return True
        return False

    def state(self) -> dict[str, Any]:
        """What to keep over a restart: the samples to compare with are taken anew."""
        return {"wait": self._wait, "since": self._since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state.

        Raises:
            ValueError: It does not fit.
        """
        wait, since = int(state["wait"]), int(state["since"])
        if wait < FIRST_WAIT or since < 0:
            raise ValueError(f"state: wait {wait}, since {since} are no counts of samples")
        self._wait, self._since = wait, since

    def _collect(self, confidence: ConfidenceArray) -> None:
        self._collected.append(confidence)
        if sum(map(len, self._collected)) >= LEAST_REFERENCE:
            self._adopt(np.concatenate(self._collected))
            self._collected = []

    def _adopt(self, reference: ConfidenceArray) -> None:
        """Make bins of equal share; fewer where many confidences are the same."""
        shares = np.arange(1, BINS) / BINS
        self._edges = np.unique(np.quantile(reference, shares).astype(np.float64))
        self._reference = np.bincount(self._bins(reference), minlength=BINS).astype(np.float64)

    def _bins(self, confidence: ConfidenceArray) -> IntArray:
        assert self._edges is not None
        bins: IntArray = np.searchsorted(self._edges, confidence, side="right")
        return bins

    def _look(self) -> bool:
        """Compare at every scale; then what is recent at none becomes part of what is usual."""
        found = False
        for place, scale in enumerate(SCALES):
            if len(self._recent) < scale:
                break
            recent = np.bincount(self._recent[-scale:], minlength=BINS).astype(np.float64)
            before = np.bincount(self._recent[:-scale], minlength=BINS) + self._reference
            statistic, freedom = chi_square(recent, before)
            usual = max(float(self._excess[place]), 1.0)
            limit = self._limit * freedom / (BINS - 1)
            found |= statistic > limit * usual
            self._learn(place, scale, statistic / max(freedom, 1))
        overflow = len(self._recent) - SCALES[-1]
        if overflow > 0:
            self._reference += np.bincount(self._recent[:overflow], minlength=BINS)
            self._recent = self._recent[overflow:]
        if not found or self._since < self._wait:
            return False
        self._since = self._quiet = 0
        self._wait *= 2
        return True

    def _learn(self, place: int, scale: int, excess: float) -> None:
        """Average what windows differ by; each counts for the part of it that is new.

        Slowly, and none for more than twice the usual, lest a shift hide itself.
        """
        weight = LOOK_EVERY / scale / _WINDOWS_AVERAGED
        excess = min(excess, 2.0 * max(float(self._excess[place]), 1.0))
        self._excess[place] += weight * (excess - self._excess[place])


def chi_square(recent: FloatArray, before: FloatArray) -> tuple[float, int]:
    """Pearson's statistic of two rows of counts, and its degrees of freedom."""
    total = recent + before
    there = total > 0
    expected = total[there] * (recent.sum() / total.sum())
    expected_before = total[there] - expected
    statistic = ((recent[there] - expected) ** 2 * (1 / expected + 1 / expected_before)).sum()
    return float(statistic), int(there.sum()) - 1


def chi_square_quantile(tail: float, freedom: int) -> float:
    """What chi-square exceeds with probability ``tail`` (Wilson and Hilferty 1931)."""
    part = 2 / (9 * freedom)
    value: float = freedom * (1 - part + _normal_quantile(tail) * part**0.5) ** 3
    return value


def _normal_quantile(tail: float) -> float:
    """What a standard normal exceeds with probability ``tail``."""
    return -NormalDist().inv_cdf(tail)
