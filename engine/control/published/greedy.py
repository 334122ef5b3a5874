"""Apparate's greedy threshold tuning, vectorised over samples and exits.

Algorithm 1 of Apparate, as its section 3.2 words it: thresholds start where nothing exits, steps at
0.1; each round tries one step of each exit alone, and takes the one that saves the most time per
accuracy lost; the exit taken doubles its step, exits that overstepped the bound halve theirs, down
to 0.01; the end is reached when every exit oversteps with its least step.

Apparate's thresholds bound the error 1 − confidence from above; they live in this module only.
What the words leave open follows the authors' artifact (github.com/dywsjtu/apparate, utils.py):

* a sample exits when error < threshold, strictly;
* thresholds are rounded to 4 decimals, accuracies to 7;
* the score is |change of accuracy| / |change of savings|, least first, the earlier exit on ties;
* a step that changes no latency has no score; one is taken only where nothing has a score;
* an exit is not raised any more once its threshold is above 1.

Unlike the artifact: a bound met exactly is met (it asks for less), exit 0 can be the best one (it
tests ``not best_direction``), steps are the paper's (it starts at 0.01 and ends at 0.001), and only
exits that overstepped halve their steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offramp.bundle.schema.policy import NEVER
from offramp.certify import BoolArray, FloatArray, IntArray, Records
from offramp.certify.records import final_agrees

FIRST_STEP = 0.1
"""Initial step of a threshold (Apparate 3.2)."""
LEAST_STEP = 0.01
"""Steps are not halved below this (Apparate 3.2)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Position:
    """Where the search stands; changed in place, round by round."""

    thresholds: list[float]
    """On the error, of each exit."""
    steps: list[float]
    first: IntArray
    """int64[samples]: where each sample exits now."""
    counts: IntArray
    """int64[exits + 1]: samples answered at each place."""
    right: int
    """Samples answered like the source model."""


def greedy_thresholds(records: Records, allowed: int) -> FloatArray:
    """Find thresholds with at most ``allowed`` errors: float64[exits], as confidences."""
    return np.array([confidence_threshold(t) for t in greedy_error_thresholds(records, allowed)])


def greedy_error_thresholds(records: Records, allowed: int) -> list[float]:
    """Run the search; thresholds on the error 1 − confidence, as Apparate has them."""
    exits, samples = records.exits, records.samples
    error = 1.0 - records.confidence.astype(np.float64)
    agrees = final_agrees(records.agrees)
    at = _Position(
        thresholds=[0.0] * exits,
        steps=[FIRST_STEP] * exits,
        first=np.full(samples, exits),
        counts=np.array([0] * exits + [samples]),
        right=samples,
    )
    while True:
        raised, counts, right = _try_steps(at, error, agrees)
        raisable = [e for e in range(exits) if at.thresholds[e] <= 1]
        overstepped = [e for e in raisable if samples - right[e] > allowed]
        fits = [e for e in raisable if e not in overstepped]
        chosen = _choose(at, counts, right, fits, records)
        if chosen is None and all(at.steps[e] <= LEAST_STEP for e in overstepped):
            return at.thresholds
        for e in overstepped:
            at.steps[e] = max(at.steps[e] / 2, LEAST_STEP)
        if chosen is not None:
            at.thresholds[chosen] = raised[chosen]
            at.steps[chosen] *= 2
            at.counts, at.right = counts[chosen], right[chosen]
            at.first[(error[chosen] < raised[chosen]) & (at.first > chosen)] = chosen


def confidence_threshold(error_threshold: float) -> float:
    """Least float32 confidence c with 1 − c < ``error_threshold``; ``NEVER`` if there is none.

    By bisection over the bit patterns of [0, 1], which are ordered like the values; nearly always
    within a few of that of 1 − ``error_threshold``.
    """
    if not error_threshold > 0.0:
        return NEVER
    one = int(np.float32(1.0).view(np.int32))
    guess = int(np.float32(max(0.0, 1.0 - error_threshold)).view(np.int32))
    low, high = guess - 4, guess + 4
    if low < 0 or 1.0 - _from_bits(low) < error_threshold:
        low = -1
    if high > one or 1.0 - _from_bits(high) >= error_threshold:
        high = one
    while high - low > 1:
        middle = (low + high) // 2
        if 1.0 - _from_bits(middle) < error_threshold:
            high = middle
        else:
            low = middle
    return _from_bits(high)


def _from_bits(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def _try_steps(
    at: _Position, error: FloatArray, agrees: BoolArray
) -> tuple[list[float], IntArray, list[int]]:
    """Evaluate all single steps at once: only samples that move to the raised exit matter.

    By exit: its threshold one step on; if this exit alone took its step, the samples answered at
    each place, int64[exits, exits + 1], and those answered like the source model.
    """
    exits = len(at.steps)
    raised = [round(t + step, 4) for t, step in zip(at.thresholds, at.steps, strict=True)]
    moves = error < np.array(raised)[:, None]
    moves &= at.first > np.arange(exits)[:, None]
    target, sample = np.nonzero(moves)
    origin = at.first[sample]
    moved = np.bincount(target * (exits + 1) + origin, minlength=exits * (exits + 1))
    counts = at.counts - moved.reshape(exits, exits + 1)
    counts[np.arange(exits), np.arange(exits)] += np.bincount(target, minlength=exits)
    gained = np.bincount(target[agrees[target, sample]], minlength=exits)
    lost = np.bincount(target[agrees[origin, sample]], minlength=exits)
    return raised, counts, (at.right + gained - lost).tolist()


def _choose(
    at: _Position, counts: IntArray, right: list[int], fits: list[int], records: Records
) -> int | None:
    """Pick the exit that loses the least accuracy per time saved, or a step that changes none."""
    samples = records.samples
    accuracy = round(at.right / samples, 7)
    savings = float(_savings(at.counts, records.latency_ms))
    savings_after = _savings(counts, records.latency_ms).tolist()
    best, best_score, plateau = None, float("inf"), None
    for e in fits:
        change = abs(savings_after[e] - savings)
        if change == 0:
            plateau = e if plateau is None else plateau
            continue
        score = abs(round(right[e] / samples, 7) - accuracy) / change
        if score < best_score:
            best, best_score = e, score
    return plateau if best is None else best


def _savings(counts: IntArray, latency_ms: FloatArray) -> FloatArray:
    """Percent saved by int[..., exits + 1] answers; summed exit by exit, as a plain loop does."""
    terms = counts / counts.sum(axis=-1, keepdims=True) * latency_ms
    mean_ms = np.add.accumulate(terms, axis=-1)[..., -1]
    return np.asarray((latency_ms[-1] - mean_ms) / latency_ms[-1] * 100)
