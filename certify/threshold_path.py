"""A path of thresholds, each level of which is tested on everything that is served.

Anytime-valid Learn then Test. Let the levels of a path be fixed before the samples that they are
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
number of levels costs anything (fixed sequence testing, as in :mod:`.learn_then_test`). A
controller's k-th path is tested at α / (k (k + 1)), which sums to α: over its whole life, with any
number of retunings and of sets of exits, every level that ever passed is right with probability
1 − α.

Assumptions: while a path is in use, samples are exchangeable (a level's risk does not change; drift
ends a path), q was fixed before a sample was started and audits are drawn by it alone, and every
exit of the path was in use for each sample counted. Samples that are started and then dropped, late
or withdrawn, are no samples here: where many are, and hard ones more often than easy ones,
aggressive levels look better than they are. Answers that were forced below their threshold are not
counted.

Level 0 answers nothing, and needs no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offramp.certify.betting import Losses, Wealth
from offramp.certify.decision import NEVER, BoolArray, Float32Array, FloatArray
from offramp.certify.kept import kept_array, kept_count, kept_exits, kept_number, kept_part
from offramp.certify.observations import Observations
from offramp.certify.path import answered_between, check_path, search_keys, spread


def alpha_of(number: int, alpha: float) -> float:
    """Share of α for the k-th of arbitrarily many statements, k from 1; they sum to α."""
    return alpha / (number * (number + 1))


class ThresholdPath:
    """Levels from conservative to aggressive, and the evidence for each of them."""

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

        ``thresholds`` are float64[levels, exits] of rising exits, no exit's rising; the first level
        answers nothing. ``shares``, float64[levels, exits + 1], are of samples expected to be
        answered at each exit, the last at the model's end; to plan with, no evidence. ``bound`` is
        ε, and a wrong level may ever pass with probability ``alpha``.
        """
        self.exits = tuple(exits)
        self.thresholds = check_path(thresholds, exits=len(self.exits))
        if not (self.thresholds[0] > 1).all():
            raise ValueError(f"the first level must answer nothing, got {self.thresholds[0]}")
        self.levels = len(self.thresholds)
        """How many levels there are, the one that answers nothing included."""
        self.shares = np.asarray(shares, dtype=np.float64)
        if self.shares.shape != (expected := (self.levels, len(self.exits) + 1)):
            raise ValueError(f"shares have shape {self.shares.shape}, expected {expected}")
        self.bound = bound
        self.alpha = alpha
        self.wealth = Wealth(np.full(len(self.thresholds), bound))
        self.samples = 0
        """Samples counted."""
        self.effort = 0.0
        """Audited samples since a level last passed, or as many as they are worth."""
        self._ready = False
        """Whether every exit is known to be in use."""
        self._keys = search_keys(self.thresholds)
        self.certified = 0
        """The most aggressive level that passed."""

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
        if passed > self.certified:
            self.certified, self.effort = passed, 0.0

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
        shorter.certified = min(self.certified, end - 1)
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
            "certified": self.certified,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], *, exits: int) -> ThresholdPath:
        """Make the path that was kept, of a bundle of so many ``exits``; its evidence counts on.

        ValueError if it is none.
        """
        used = kept_exits(state, "exits", exits)
        thresholds = kept_array(state, "thresholds", (None, len(used)), least=0.0, most=NEVER)
        alpha = kept_number(state, "alpha", most=1.0)
        if not alpha > 0:
            raise ValueError("state: 'alpha' is 0, expected more")
        path = cls(
            used,
            thresholds,
            kept_array(state, "shares", (len(thresholds), len(used) + 1), least=-1e-6, most=1.001),
            bound=kept_number(state, "bound", most=1.0),
            alpha=alpha,
        )
        path.wealth.restore(kept_part(state, "wealth"))
        path.samples, path.effort = kept_count(state, "samples"), kept_number(state, "effort")
        path.certified = kept_count(state, "certified")
        if path.certified > path._passed():
            raise ValueError(f"state: level {path.certified} did not pass")
        return path

    def _losses(self, confidence: Float32Array, wrong: BoolArray, weight: FloatArray) -> Losses:
        """Losses above 0 by their value: how many samples have it, [levels]."""
        begin, end = answered_between(self._keys, confidence)
        exit_, sample = np.nonzero(wrong & (begin < end))
        first, until, value = begin[exit_, sample], end[exit_, sample], weight[sample]
        return [
            (v, spread(first[value == v], until[value == v], self.levels))
            for v in sorted(set(value.tolist()))
        ]

    def _passed(self) -> int:
        # Fixed sequence testing: the first level that has not passed ends it for all behind.
        failed = self.wealth.highest < math.log(1 / self.alpha)
        failed[0] = False
        return (int(failed.argmax()) if failed.any() else self.levels) - 1
