"""What happens along a path of thresholds from cautious to bold, all levels in one pass.

As the thresholds of a path only fall, each (exit, sample) has one level from which on its
confidence suffices. So a sample is answered at exit e from that level until an earlier exit takes
it over: two entries in a difference array, whatever the number of levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offramp.certify.decision import NEVER, BoolArray, ConfidenceArray, FloatArray, IntArray
from offramp.certify.records import Records, check_confidence, savings_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """Counts at each level of a path."""

    errors: IntArray
    """int64[levels]: samples answered unlike the source model."""
    counts: IntArray
    """int64[levels, exits + 1]: samples answered at each exit, the last by the model."""


def walk(path_thresholds: FloatArray, confidence: ConfidenceArray, agrees: BoolArray) -> Walk:
    """Count exits and errors at every level of a path.

    Args:
        path_thresholds: float64[levels, exits], no exit's threshold rising.
        confidence: float[exits, samples] in [0, 1].
        agrees: bool[exits, samples].

    Raises:
        ValueError: a path that rises or has NaN, no samples, shapes that do not fit.
    """
    confidence, agrees = check_confidence(confidence, agrees)
    path = check_path(path_thresholds, exits=confidence.shape[0])
    levels, exits = path.shape
    samples = confidence.shape[1]
    errors = np.zeros(levels + 1, dtype=np.int64)
    counts = np.zeros((exits + 1, levels + 1), dtype=np.int64)
    taken = np.full(samples, levels)  # level from which on an earlier exit answers
    for exit_ in range(exits):
        # first level with threshold <= confidence, on the rising row of negated thresholds
        level = np.searchsorted(-path[:, exit_], -confidence[exit_].astype(np.float64))
        span = level < taken
        counts[exit_] = _spans(level[span], taken[span], levels)
        wrong = span & ~agrees[exit_]
        errors += _spans(level[wrong], taken[wrong], levels)
        taken = np.minimum(taken, level)
    counts = np.cumsum(counts, axis=1)
    counts[exits] = samples - counts[:exits].sum(axis=0)
    return Walk(errors=np.cumsum(errors)[:levels], counts=counts[:, :levels].T)


def best_common_thresholds(
    records: Records, allowed: int, *, vanilla_ms: float | None = None
) -> FloatArray:
    """Find the best common threshold with at most ``allowed`` errors: float64[exits].

    Every distinct confidence is tried, so this is exact on the path.
    """
    levels = np.unique(records.confidence)[::-1].astype(np.float64)
    path = np.repeat(np.concatenate([[NEVER], levels])[:, None], records.exits, axis=1)
    walked = walk(path, records.confidence, records.agrees)
    savings = savings_of(walked.counts, records.latency_ms, vanilla_ms)
    savings[walked.errors > allowed] = -np.inf
    best: FloatArray = path[int(savings.argmax())]
    return best


def check_path(path_thresholds: FloatArray, *, exits: int) -> FloatArray:
    """Refuse anything but levels × exits thresholds that never rise."""
    path = np.asarray(path_thresholds, dtype=np.float64)
    if path.ndim != 2 or path.shape[0] == 0 or path.shape[1] != exits:
        raise ValueError(f"the path must be [levels, {exits}] thresholds, got shape {path.shape}")
    if np.isnan(path).any():
        raise ValueError("the path holds NaN; a level without exits is NEVER")
    rising = np.argwhere(np.diff(path, axis=0) > 0)
    if rising.size:
        level, exit_ = rising[0]
        raise ValueError(
            f"the path must go from cautious to bold, but exit {exit_} rises at level {level + 1}: "
            f"{path[level, exit_]} to {path[level + 1, exit_]}"
        )
    return path


def _spans(first: IntArray, end: IntArray, levels: int) -> IntArray:
    """Difference array, int64[levels + 1], of half-open level ranges."""
    begins = np.bincount(first, minlength=levels + 1)
    return np.asarray(begins - np.bincount(end, minlength=levels + 1), dtype=np.int64)
