"""Evidence that a disagreement is below a bound, valid at any time: betting on the next samples.

Theorem (Waudby-Smith, Ramdas: "Estimating means of bounded random variables by betting", 2024;
Ville 1939). Let X_1, X_2 … be losses of at least 0 whose mean, given the past, is at least m (the
null hypothesis: the risk is m or more). Let the bets λ_t be fixed before X_t is known, with
0 <= λ_t and λ_t · (X_t − m) <= 1. Then the wealth W_t = Π (1 + λ_i (m − X_i)) is a nonnegative
supermartingale that starts at 1, so that P(W_t >= 1/α at any t) <= α. Who sees W_t reach 1/α may
therefore say "the risk is below m" with confidence 1 − α, whenever it happens, however often W was
looked at before.

Why it fits serving: a sample that was answered early and runs on with probability q, drawn
before, has the loss ℓ/q if it did, and 0 if it did not. That has the mean of ℓ whatever q is, and
is at most 1/q, which bounds the bets. q may change with all that was seen before.

Bets are fixed per chunk of samples here, from what earlier chunks said. Every q and every policy in
a chunk was also chosen from earlier chunks, since nothing else has been seen then. For
losses of 0 and B with mean p the bet (m − p) / (m (B − m)) grows fastest (Kelly 1956); both are
estimated from the past, drawn towards a prior while there is little of it. A bad estimate only
slows the growth: the theorem does not need it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from offramp.certify.decision import FloatArray
from offramp.certify.kept import MOST, kept_array, kept_number, kept_part

Losses: TypeAlias = Sequence[tuple[float, FloatArray | int]]
"""Losses above 0 in a chunk: a value, and how many samples have it, [hypotheses] or one number."""

_LARGEST_STAKE: Final = 0.85
"""Share of the wealth that the worst loss may take; at 1 a single one ends the game."""
_PRIOR_SAMPLES: Final = 150.0
"""Audited samples that the prior counts for. 50 to 200, and largest stakes of 0.75 to 0.9, were
tried: of the samples needed at a risk of 0, 0.25 and 0.5 of the bound, they move a tenth either
way."""
_PRIOR_MEAN: Final = 0.5
"""Mean loss that the prior takes for granted, as a share of the bound."""
_MEMORY, _SHORT_MEMORY = 8_000.0, 1_000.0
"""Audited samples after which estimates have forgotten all but a third. Where the short memory is
clearly better than the long one, data became easier, and the long one starts again from there:
else what was too much for long would get no second chance as long again."""
_CLEARLY: Final = 3.0
"""Standard errors by which the short memory must be below the long one."""
_CHECK_EVERY: Final = 4
"""Chunks from one comparison of the memories to the next, for speed."""
_KEPT: Final = ("log", "highest", "_long", "_short")
_GRID: Final = 64
_LEAST_BOUND, _MOST_BOUND = 1e-4, 0.5


class Wealth:
    """Wealth of bets against hypotheses "the risk is bound j or more", side by side."""

    def __init__(self, bounds: FloatArray) -> None:
        """Start at 1, against each of float64[hypotheses] ``bounds`` in (0, 1)."""
        bounds = np.asarray(bounds, dtype=np.float64)
        if bounds.ndim != 1 or not ((bounds > 0) & (bounds < 1)).all():
            raise ValueError(f"bounds must be a row of numbers in (0, 1), got {bounds}")
        self.bounds = bounds
        self.log = np.zeros(len(bounds))
        """float64[hypotheses]: logarithm of the wealth."""
        self.highest = np.zeros(len(bounds))
        """float64[hypotheses]: the highest that it ever was."""
        self._long = np.zeros((3, len(bounds)))
        """float64[3, hypotheses]: number of samples, sum of their losses and of the squares, as far
        as they are not forgotten; for the bets only."""
        self._short = np.zeros((3, len(bounds)))
        self._unchecked = 0

    @property
    def mean(self) -> FloatArray:
        """float64[hypotheses]: plain mean loss of what is not forgotten; 0 before any."""
        return np.asarray(self._long[1] / np.maximum(self._long[0], 1.0))

    def bets(self, largest: float) -> FloatArray:
        """float64[hypotheses]: what the past suggests to bet on losses of at most ``largest``."""
        bounds, prior = self.bounds, _PRIOR_SAMPLES * largest
        samples, losses, squares = self._long
        mean = (prior * _PRIOR_MEAN * bounds + losses) / (prior + samples)
        # Losses of several sizes are taken for losses of one size with the same ratio of moments.
        size = np.minimum((squares + largest**2) / (losses + largest), largest)
        room = np.maximum(largest - bounds, 1e-12)
        # Kelly's bet for losses of 0 and this size; a bad estimate only slows the growth.
        best = (bounds - mean) / (bounds * np.maximum(size - bounds, 1e-12))
        return np.asarray(np.clip(best, 0.0, _LARGEST_STAKE / room))

    def add(self, samples: int, losses: Losses, *, largest: float) -> None:
        """Bet on a chunk of samples, all of them at once, those without a loss included.

        ``largest`` is the largest loss that was possible, 1/q for the least q; at least 1.
        """
        bets = self.bets(largest)
        nothing = np.log1p(bets * self.bounds)
        growth = samples * nothing
        seen = np.zeros((3, len(bets)))
        seen[0] = samples
        for value, count in losses:
            growth += count * (np.log1p(bets * (self.bounds - value)) - nothing)
            seen[1] += count * value
            seen[2] += count * value**2
        self.log += growth
        np.maximum(self.highest, self.log, out=self.highest)
        self._remember(seen, samples / largest, largest)

    def _remember(self, seen: FloatArray, audited: float, largest: float) -> None:
        self._long += seen
        self._long *= math.exp(-audited / _MEMORY)
        self._short += seen
        self._short *= math.exp(-audited / _SHORT_MEMORY)
        self._unchecked += 1
        if self._unchecked < _CHECK_EVERY:
            return
        self._unchecked = 0
        samples, losses, _ = self._short
        samples = np.maximum(samples, 1.0)
        mean = self.mean
        easier = losses / samples + _CLEARLY * np.sqrt(mean * largest / samples) < mean
        if easier.any():
            self._long = np.where(easier, self._short, self._long)

    def take(self, rows: slice) -> Wealth:
        """Go on with some of the hypotheses, with what they have."""
        taken = Wealth(self.bounds[rows])
        for name in _KEPT:
            setattr(taken, name, getattr(self, name)[..., rows].copy())
        return taken

    def state(self) -> dict[str, Any]:
        """What to keep over a restart."""
        return {name.strip("_"): getattr(self, name).copy() for name in _KEPT}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError if it is of other hypotheses, or of no numbers."""
        kept = {name: self._kept(state, name) for name in _KEPT}
        if not (kept["highest"] >= np.maximum(kept["log"], 0.0)).all():
            raise ValueError("state: 'highest' is below 'log' or 0, expected the highest ever")
        for name, values in kept.items():
            setattr(self, name, values)

    def _kept(self, state: Mapping[str, Any], name: str) -> FloatArray:
        least = -MOST if name in ("log", "highest") else 0.0  # the others are sums of losses
        return kept_array(state, name.strip("_"), getattr(self, name).shape, least=least)


class UpperBound:
    """The least bound that one stream's risk is known to keep, at any time, with confidence 1 − α.

    A confidence sequence: a number m on a grid is out once the wealth against "the risk is m or
    more" has reached 1/α. The bound is the number after the last one that is not out. It is wrong
    only if the largest number on the grid that the risk does reach is out: with probability α.
    """

    def __init__(self, alpha: float) -> None:
        """Know nothing; with probability ``alpha``, in (0, 1), the bound may ever be wrong."""
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}, expected above 0, below 1")
        self.alpha = alpha
        self._wealth = Wealth(np.geomspace(_LEAST_BOUND, _MOST_BOUND, _GRID))

    @property
    def value(self) -> float:
        """Upper bound of the risk; 1 at first."""
        not_out = np.flatnonzero(self._wealth.highest < math.log(1 / self.alpha))
        first_out = int(not_out[-1]) + 1 if not_out.size else 0
        return float(self._wealth.bounds[first_out]) if first_out < _GRID else 1.0

    def add(self, losses: FloatArray, *, largest: float) -> None:
        """Take in float64[n] losses in a chunk, at most ``largest`` each."""
        counts = Counter(losses[losses > 0].tolist())
        self._wealth.add(len(losses), list(counts.items()), largest=largest)

    def state(self) -> dict[str, Any]:
        """What to keep over a restart."""
        return {"alpha": self.alpha, "wealth": self._wealth.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError if it does not fit."""
        restored = UpperBound(kept_number(state, "alpha"))
        restored._wealth.restore(kept_part(state, "wealth"))
        self.alpha, self._wealth = restored.alpha, restored._wealth
