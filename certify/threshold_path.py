"""A path of policies from cautious to bold, each tested on everything that is served.

Anytime-valid Learn then Test. Let the levels of a threshold path be fixed before the samples that they are
tested on are observed. Whenever a sample ran to the end, all its exits' answers and the source
model's are known, and with them what *every* level would have answered. So level j has the loss
X^j = ℓ^j / π if the sample ran to the end, else 0, where ℓ^j says whether level j answers it unlike
the source model, and π is with which probability it ran to the end: q if the policy that it was
served under answered it early, else 1. Its mean is level j's risk, whichever policy served it.

Theorem. Let W^j be the wealth of bets against "level j's risk is ε or more" (:mod:`.betting`), and
let a level pass once W^i has reached 1/α, at whatever time, for every level i up to and with j.
With probability at least 1 − α, at no time has a level passed whose risk is ε or more.

Why: let j be the first level whose risk is ε or more. A wrong one can pass only if W^j reached 1/α,
and the probability that it ever does is at most α (Ville). So neither looking at any time nor the
number of levels costs anything (fixed sequence testing, as in :mod:`.certify`). A controller's k-th
threshold path is tested at α / (k (k + 1)), which sums to α: over its whole life, with any number of
retunings and of sets of exits, every level that ever passed is right with probability 1 − α.

Assumptions: while a threshold path is in use, samples are exchangeable (a level's risk does not change;
drift ends a threshold path, see :mod:`.drift`), q was fixed before a sample was started and audits are
drawn by it alone, and every exit of the threshold path was in use for each sample counted. Samples that are
started and then dropped, late or withdrawn, are none: where many are, and hard ones more often than
easy ones, bolder levels look better than they are. Answers that
were forced below their threshold are not counted.

Level 0 answers nothing, and needs no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp.certify.betting import Wealth
from offramp.certify.decision import BoolArray, Float32Array, FloatArray, IntArray
from offramp.certify.observations import Observations
from offramp.certify.path import check_path
from offramp.certify.window import Weighted


def alpha_of(number: int, alpha: float) -> float:
    """Share of α for the k-th of arbitrarily many statements, k from 1; they sum to α."""
    return alpha / (number * (number + 1))


class ThresholdPath:
    """Levels, and what is known of them."""

    def __init__(
        self,
        exits: Sequence[int],
        thresholds: FloatArray,
        shares: FloatArray,
        *,
        bound: float,
        alpha: float,
    ) -> None:
        """Fix the levels; what is observed from now on is evidence.

        Args:
            exits: Indices of the exits that levels name, rising.
            thresholds: float64[levels, exits], no exit's rising; the first level answers nothing.
            shares: float64[levels, exits + 1]: of samples expected to be answered at each exit,
                the last at the model's end; to plan with, no evidence.
            bound: ε.
            alpha: With which probability a wrong level may ever pass.

        Raises:
            ValueError: The thresholds are no such path.
        """
        self.exits = tuple(exits)
        self.thresholds = check_path(thresholds, exits=len(self.exits))
        if not (self.thresholds[0] > 1).all():
            raise ValueError(f"the first level must answer nothing, got {self.thresholds[0]}")
        self.shares = np.asarray(shares, dtype=np.float64)
        if self.shares.shape != (len(self.thresholds), len(self.exits) + 1):
            raise ValueError(
                f"shares have shape {self.shares.shape}, "
                f"expected {(len(self.thresholds), len(self.exits) + 1)}"
            )
        self.bound = bound
        self.alpha = alpha
        self.wealth = Wealth(np.full(len(self.thresholds), bound))
        self.samples = 0
        """Samples counted."""
        self.effort = 0.0
        """Audited samples since a level last passed, or as many as they are worth."""
        self._ready = False
        """Whether every exit is known to be in use."""
        self._keys = _search_keys(self.thresholds)
        self._certified = 0

    @property
    def levels(self) -> int:
        """How many, the one that answers nothing included."""
        return len(self.thresholds)

    @property
    def certified(self) -> int:
        """The boldest level that passed."""
        return self._certified

    @property
    def risk(self) -> FloatArray:
        """float64[levels]: running estimates, without any statement about their error."""
        return self.wealth.mean

    def add(self, seen: Observations) -> None:
        """Count samples, none of them forced, as evidence.

        An exit that was asked for is in use from some sample on. Of samples that left early nobody
        knows which exits were in use behind: so nothing counts until one that ran to the end shows
        them all, and nothing in a chunk with one that lacks some.
        """
        rows = np.flatnonzero(seen.complete)
        exits = list(self.exits)
        confidence = seen.confidence[exits][:, rows]
        if np.isnan(confidence).any():
            self._ready = False
            return
        if not self._ready:
            self._ready = bool(rows.size)
            return
        wrong = seen.prediction[exits][:, rows] != seen.final[rows]
        largest = 1 / float(seen.audit_probability.min(initial=1.0))
        losses = self._losses(confidence, wrong, seen.weight[rows])
        self.wealth.add(len(seen), losses, largest=largest)
        self.samples += len(seen)
        self.effort += len(seen) / largest
        passed = self._passed()
        if passed > self._certified:
            self._certified, self.effort = passed, 0.0

    def without(self, exits: Sequence[int]) -> ThresholdPath:
        """Leave exits out, and the levels at which one of them answers; evidence goes on.

        As thresholds only fall, the levels left are the first ones, and answer as before.
        """
        kept = [i for i, e in enumerate(self.exits) if e not in exits]
        gone = [i for i, e in enumerate(self.exits) if e in exits]
        silent = (self.thresholds[:, gone] > 1).all(axis=1)
        end = self.levels if silent.all() else int(silent.argmin())
        shorter = ThresholdPath(
            [self.exits[i] for i in kept],
            self.thresholds[:end][:, kept],
            self.shares[:end][:, [*kept, len(self.exits)]],
            bound=self.bound,
            alpha=self.alpha,
        )
        shorter.wealth = self.wealth.take(slice(end))
        shorter.samples, shorter.effort, shorter._ready = self.samples, self.effort, self._ready
        shorter._certified = min(self._certified, end - 1)
        return shorter

    def state(self) -> dict[str, Any]:
        """What to keep over a restart."""
        return {
            "exits": np.array(self.exits, dtype=np.int64),
            "thresholds": self.thresholds.copy(),
            "shares": self.shares.copy(),
            "bound": self.bound,
            "alpha": self.alpha,
            "wealth": self.wealth.state(),
            "samples": self.samples,
            "effort": self.effort,
            "certified": self._certified,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> ThresholdPath:
        """Make the one that was kept; its evidence counts on.

        Raises:
            ValueError: It is none.
        """
        exits = [int(e) for e in state["exits"]]
        threshold_path = cls(
            exits,
            np.asarray(state["thresholds"], dtype=np.float64),
            np.asarray(state["shares"], dtype=np.float64),
            bound=float(state["bound"]),
            alpha=float(state["alpha"]),
        )
        threshold_path.wealth.restore(state["wealth"])
        threshold_path.samples, threshold_path.effort = (
            int(state["samples"]),
            float(state["effort"]),
        )
        threshold_path._certified = int(state["certified"])
        if not 0 <= threshold_path._certified <= threshold_path._passed():
            raise ValueError(f"state: level {threshold_path._certified} did not pass")
        return threshold_path

    def _losses(
        self, confidence: Float32Array, wrong: BoolArray, weight: FloatArray
    ) -> list[tuple[float, FloatArray | int]]:
        """By their value: how many samples have it, [levels]."""
        begin, end = answered_between(self._keys, confidence)
        exit_, sample = np.nonzero(wrong & (begin < end))
        if not exit_.size:
            return []
        first, until, value = begin[exit_, sample], end[exit_, sample], weight[sample]
        return [
            (v, _spread(first[value == v], until[value == v], self.levels))
            for v in sorted(set(value.tolist()))
        ]

    def _passed(self) -> int:
        failed = self.wealth.highest < math.log(1 / self.alpha)
        failed[0] = False
        return (int(failed.argmax()) if failed.any() else self.levels) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outlook:
    """What each level would have done on some samples."""

    risk: FloatArray
    """float64[levels]: share answered unlike the source model."""
    shares: FloatArray
    """float64[levels, exits + 1]: shares answered at each exit, the last by the model's end."""


def look_ahead(thresholds: FloatArray, samples: Weighted) -> Outlook:
    """Try every level of a path, float64[levels, exits], on weighted samples (at least one)."""
    return outlook(thresholds, samples.confidence, (~samples.agrees).astype(float), samples.weight)


def outlook(
    thresholds: FloatArray, confidence: Float32Array, loss: FloatArray, weight: FloatArray
) -> Outlook:
    """Try every level; ``loss`` is float64[exits, n], what an answer there costs."""
    levels, exits = thresholds.shape
    begin, end = answered_between(_search_keys(thresholds), confidence)
    shares = np.zeros((levels, exits + 1))
    risk = np.zeros(levels)
    total = float(weight.sum())
    for exit_ in range(exits):
        span = np.flatnonzero(begin[exit_] < end[exit_])
        first, until, stands_for = begin[exit_, span], end[exit_, span], weight[span]
        shares[:, exit_] = _spread(first, until, levels, stands_for) / total
        risk += _spread(first, until, levels, stands_for * loss[exit_, span]) / total
    shares[:, exits] = np.maximum(1 - shares[:, :exits].sum(axis=1), 0.0)
    return Outlook(risk=np.maximum(risk, 0.0), shares=shares)


def answered_between(
    keys: Sequence[FloatArray], confidence: Float32Array
) -> tuple[IntArray, IntArray]:
    """From which level on each exit answers each sample, and until which: int64[exits, n] twice.

    As thresholds only fall, an exit's confidence suffices from one level on, until from another
    level on an earlier exit takes the sample over. Where that is no earlier it never answers.
    """
    exits, samples = confidence.shape
    begin = np.empty((exits, samples), dtype=np.int64)
    for exit_, key in enumerate(keys):  # −NaN sorts behind all levels: such an exit never answers
        begin[exit_] = np.searchsorted(key, -confidence[exit_].astype(np.float64))
    end = np.empty_like(begin)
    if exits:
        end[0] = len(keys[0])
        np.minimum.accumulate(begin[:-1], axis=0, out=end[1:])
    return begin, end


def _search_keys(thresholds: FloatArray) -> list[FloatArray]:
    """Per exit a rising row, for searches."""
    return [np.ascontiguousarray(-column) for column in thresholds.T]


def _spread(
    first: IntArray, until: IntArray, levels: int, weight: FloatArray | None = None
) -> FloatArray:
    """Sum over half-open ranges of levels, float64[levels]."""
    begins = np.bincount(first, weight, minlength=levels + 1)
    ends = np.bincount(until, weight, minlength=levels + 1)
    spread: FloatArray = np.cumsum(begins - ends)[:levels].astype(np.float64)
    return spread
