"""The shift detector: notices changed inputs from what every sample shows anyway, without audits.

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

from statistics import NormalDist
from typing import Final

import numpy as np

from offramp.certify import Float32Array, FloatArray, IntArray

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
