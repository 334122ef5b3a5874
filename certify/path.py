"""Paths of thresholds from conservative to aggressive: exits and errors at each level in one pass.

As the thresholds of a path only fall, each (exit, sample) has one first level at which its
confidence suffices. So exit e answers a sample from that level on, until an earlier exit answers it
at a later level. That takes two entries in a difference array, for any number of levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.certify.decision import NEVER, BoolArray, ConfidenceArray, FloatArray, IntArray
from offramp.certify.observations import Weighted
from offramp.certify.records import Records, check_confidence, savings_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """Counts of samples at each level of a path."""

    errors: IntArray
    """int64[levels]: samples answered unlike the source model."""
    counts: IntArray
    """int64[levels, exits + 1]: samples answered at each exit, the last by the model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outlook:
    """Shares of weighted samples at each level of a path."""

    risk: FloatArray
    """float64[levels]: share answered unlike the source model."""
    shares: FloatArray
    """float64[levels, exits + 1]: share answered at each exit, the last by the model."""


def walk(path_thresholds: FloatArray, confidence: ConfidenceArray, agrees: BoolArray) -> Walk:
    """Count exits and errors at every level of a path.

    The path is float64[levels, exits]; no threshold rises from level to level. The samples (at
    least one) are float[exits, samples] confidences in [0, 1] and bool[exits, samples] ``agrees``.
    """
    confidence, agrees = check_confidence(confidence, agrees)
    path = check_path(path_thresholds, exits=confidence.shape[0])
    levels, exits = path.shape
    begin, end = answered_between(search_keys(path), confidence)
    answers = begin < end
    errors = np.zeros(levels)
    counts = np.zeros((levels, exits + 1), dtype=np.int64)
    for exit_ in range(exits):
        here, wrong = answers[exit_], answers[exit_] & ~agrees[exit_]
        counts[:, exit_] = spread(begin[exit_, here], end[exit_, here], levels)
        errors += spread(begin[exit_, wrong], end[exit_, wrong], levels)
    counts[:, exits] = confidence.shape[1] - counts.sum(axis=1)
    return Walk(errors=errors.astype(np.int64), counts=counts)


def look_ahead(thresholds: FloatArray, samples: Weighted) -> Outlook:
    """Evaluate every level of a path, float64[levels, exits], on at least one weighted sample."""
    return outlook(thresholds, samples.confidence, (~samples.agrees).astype(float), samples.weight)


def outlook(
    thresholds: FloatArray, confidence: ConfidenceArray, loss: FloatArray, weight: FloatArray
) -> Outlook:
    """Evaluate every level; ``loss``, float64[exits, n], is the expected loss of each answer."""
    levels, exits = thresholds.shape
    begin, end = answered_between(search_keys(thresholds), confidence)
    shares = np.zeros((levels, exits + 1))
    risk = np.zeros(levels)
    total = float(weight.sum())
    for exit_ in range(exits):
        here = np.flatnonzero(begin[exit_] < end[exit_])
        first, until, stands_for = begin[exit_, here], end[exit_, here], weight[here]
        shares[:, exit_] = spread(first, until, levels, stands_for) / total
        risk += spread(first, until, levels, stands_for * loss[exit_, here]) / total
    # Sums of floats may miss 0 and 1 by a rounding error.
    shares[:, exits] = np.maximum(1 - shares[:, :exits].sum(axis=1), 0.0)
    return Outlook(risk=np.maximum(risk, 0.0), shares=shares)


def best_common_thresholds(
    records: Records, allowed: int, *, vanilla_ms: float | None = None
) -> FloatArray:
    """Return one threshold for all exits that saves most with ``allowed`` errors: float64[exits].

    Every distinct confidence is tried, so the result is exact.
    """
    levels = np.unique(records.confidence)[::-1].astype(np.float64)
    path = np.repeat(np.concatenate([[NEVER], levels])[:, None], records.exits, axis=1)
    walked = walk(path, records.confidence, records.agrees)
    savings = savings_of(walked.counts, records.latency_ms, vanilla_ms)
    savings[walked.errors > allowed] = -np.inf
    return np.asarray(path[int(savings.argmax())])


def check_path(path_thresholds: FloatArray, *, exits: int) -> FloatArray:
    """Check that a path is [levels, exits] thresholds without NaN that never rise."""
    path = np.asarray(path_thresholds, dtype=np.float64)
    if path.ndim != 2 or path.shape[0] == 0 or path.shape[1] != exits:
        raise ValueError(
            f"the path must be [levels, exits] thresholds, got shape {path.shape}, with samples "
            f"[exits, samples] that have {exits} rows"
        )
    if np.isnan(path).any():
        raise ValueError(
            "the path contains NaN; use the threshold NEVER for exits that must not answer"
        )
    rising = np.argwhere(np.diff(path, axis=0) > 0)
    if rising.size:
        level, exit_ = rising[0]
        raise ValueError(
            f"the path must go from conservative to aggressive, but exit {exit_} rises at level "
            f"{level + 1}: {path[level, exit_]} to {path[level + 1, exit_]}"
        )
    return path


def search_keys(thresholds: FloatArray) -> list[FloatArray]:
    """Return a rising row per exit, for :func:`answered_between`: the negated thresholds."""
    return [np.ascontiguousarray(-column) for column in thresholds.T]


def answered_between(
    keys: Sequence[FloatArray], confidence: ConfidenceArray
) -> tuple[IntArray, IntArray]:
    """Return the levels between which each exit answers each sample: int64[exits, n] twice.

    The first level is included, the second is not. Where the second is not larger, the exit answers
    the sample at no level.
    """
    exits, samples = confidence.shape
    begin = np.empty((exits, samples), dtype=np.int64)
    for exit_, key in enumerate(keys):
        # The first level with threshold <= confidence. −NaN sorts after all levels: such an exit
        # never answers.
        begin[exit_] = np.searchsorted(key, -confidence[exit_].astype(np.float64))
    end = np.empty_like(begin)
    if exits:
        end[0] = len(keys[0])
        np.minimum.accumulate(begin[:-1], axis=0, out=end[1:])
    return begin, end


def spread(
    first: IntArray, until: IntArray, levels: int, weight: FloatArray | None = None
) -> FloatArray:
    """Count samples, or sum their weights, at each level in [first, until): float64[levels]."""
    begins = np.bincount(first, weight, minlength=levels + 1)
    ends = np.bincount(until, weight, minlength=levels + 1)
    return np.asarray(np.cumsum(begins - ends)[:levels], dtype=np.float64)
