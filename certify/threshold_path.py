"""A path of thresholds whose levels are all tested on every sample that is served.

Anytime-valid Learn then Test. Let the levels of a path be fixed before the samples that they are
tested on are observed. Whenever a sample ran to the end, the answers of all exits and of the source
model are known, and so is the answer of *every* level. So level j has the loss X^j = ℓ^j / π if the
sample ran to the end, else 0. ℓ^j is 1 if the answer of level j differs from the source model's,
else 0. π is the probability that the sample ran to the end: q if the policy that it was served with
answered it early, else 1. The mean of X^j is level j's risk, whichever policy served the sample.

Theorem. Let W^j be the wealth of bets against "level j's risk is ε or more" (:mod:`.betting`), and
let a level pass once W^i has reached 1/α, at any time, for every level i up to and including j.
With probability at least 1 − α, no level whose risk is ε or more ever passes.

Why: let j be the first level whose risk is ε or more. A wrong level can pass only if W^j reached
1/α, and the probability that it ever does is at most α (Ville). So neither the times of examination
nor the number of levels needs a correction (fixed sequence testing, as in :mod:`.learn_then_test`).
A controller's k-th path is tested at α / (k (k + 1)), which sums to α. So over the controller's
whole life, with any number of retunings and sets of exits, all levels that ever passed are right
with probability at least 1 − α.

Assumptions: while a path is in use, samples are exchangeable (a level's risk does not change; drift
ends a path), q was fixed before a sample was started and audits depend on it alone, and every exit
of the path was in use for each sample counted. Samples that are started and then dropped, because
they are late or withdrawn, do not count here. If many are, and hard ones more often than easy ones,
aggressive levels look better than they are. Samples that were answered below the exit's threshold,
to be in time, are not counted.

No exit answers at level 0, so it needs no evidence.
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
    """Return the part of α for statement k = ``number`` (from 1); all parts sum to α."""
    return alpha / (number * (number + 1))


class ThresholdPath:
    """Levels of thresholds, from conservative to aggressive, and the evidence for each of them.

    ``certified`` is the index of the most aggressive level that passed so far, 0 if none did, and
    ``samples`` the number of samples that were counted.
    """

    def __init__(
        self,
        exits: Sequence[int],
        thresholds: FloatArray,
        shares: FloatArray,
        *,
        bound: float,
        alpha: float,
    ) -> None:
        """Fix the levels; samples observed from now on are evidence.

        ``thresholds`` are float64[levels, exits]; ``exits`` are in rising order, no threshold rises
        from level to level, and no exit answers at the first level. ``shares``,
        float64[levels, exits + 1], are the expected shares of samples answered at each exit, last
        at the model's end; they serve planning and are not evidence. ``bound`` is ε. ``alpha`` is
        the probability that a wrong level ever passes.
        """
        self.exits = tuple(exits)
        self.thresholds = check_path(thresholds, exits=len(self.exits))
        if not (self.thresholds[0] > 1).all():
            raise ValueError(f"no exit may answer at the first level, got {self.thresholds[0]}")
        self.levels = len(self.thresholds)
        """Number of levels, including the first one, at which no exit answers."""
        self.shares = np.asarray(shares, dtype=np.float64)
        if self.shares.shape != (expected := (self.levels, len(self.exits) + 1)):
            raise ValueError(f"shares have shape {self.shares.shape}, expected {expected}")
        self.bound = bound
        self.alpha = alpha
        self.wealth = Wealth(np.full(len(self.thresholds), bound))
        self.samples = 0
        """Number of samples counted as evidence so far."""
        self.effort = 0.0
        """Number of audited samples that would be as much evidence as all samples since a level
        last passed."""
        self._ready = False
        """True once a sample has shown that every exit is in use."""
        self._keys = search_keys(self.thresholds)
        self.certified = 0
        """Index of the most aggressive level that passed."""

    @property
    def risk(self) -> FloatArray:
        """float64[levels]: running estimate of each level's risk; its error is not bounded."""
        return self.wealth.mean

    def add(self, seen: Observations) -> None:
        """Count samples, none of them forced, as evidence.

        An exit that was requested comes into use at some later sample. A sample that left early
        does not show which later exits were in use. So samples count only after one that ran to the
        end has shown all exits: the chunk with the first such sample does not count, and neither
        does a chunk with a sample that lacks an exit. Add samples in chunks as they are served.
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
        """Return the path without some exits and without the levels at which they answer.

        As thresholds only fall, the levels that remain are the first ones; their answers and their
        evidence do not change.
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
        """Return the values to save for a restart."""
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
        """Return the path of a saved state, with its evidence, for a bundle with ``exits`` exits.

        ValueError if the state is not valid.
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
        """Return the losses above 0, each with its number of samples by level, [levels]."""
        begin, end = answered_between(self._keys, confidence)
        exit_, sample = np.nonzero(wrong & (begin < end))
        first, until, value = begin[exit_, sample], end[exit_, sample], weight[sample]
        return [
            (v, spread(first[value == v], until[value == v], self.levels))
            for v in sorted(set(value.tolist()))
        ]

    def _passed(self) -> int:
        # Fixed sequence testing: no level after the first that has not passed can pass.
        failed = self.wealth.highest < math.log(1 / self.alpha)
        failed[0] = False
        return (int(failed.argmax()) if failed.any() else self.levels) - 1
