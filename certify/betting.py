"""Evidence that a disagreement is below a bound, valid at any time: betting on the next samples.

Theorem (Waudby-Smith, Ramdas: "Estimating means of bounded random variables by betting", 2024;
Ville 1939). Let X_1, X_2 … be losses of at least 0 whose mean, given the past, is at least m (the
null hypothesis: the risk is m or more). Let the bets λ_t be fixed before X_t is known, with
0 <= λ_t and λ_t · (X_t − m) <= 1. Then the wealth W_t = Π (1 + λ_i (m − X_i)) is a nonnegative
supermartingale that starts at 1, so that P(W_t >= 1/α at any t) <= α. Once W_t has reached 1/α,
"the risk is below m" therefore holds with confidence 1 − α, whenever that happens and however often
W was examined before.

Why it fits serving: a sample that was answered early and runs on with probability q, drawn before,
has the loss ℓ/q if it ran on, and 0 if it did not. The mean of this loss is the mean of ℓ for any
q. The loss is at most 1/q, which limits the bets. q may change with everything seen before.

Bets are fixed per chunk of samples here, from earlier chunks. Every q and every policy in a chunk
was also chosen from earlier chunks, since no other results exist at that time. For losses of 0 and
B with mean p the bet (m − p) / (m (B − m)) grows fastest (Kelly 1956). p and B are estimated from
the past, drawn towards a prior while there is little of it. A bad estimate only slows the growth:
the theorem does not need it.
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
"""Losses above 0 in a chunk: (value, count); a count is [hypotheses] or one number for all."""

_LARGEST_STAKE: Final = 0.85
"""Share of the wealth that the largest loss may take; at 1 a single such loss would end the
test."""
_PRIOR_SAMPLES: Final = 150.0
"""Weight of the prior, in audited samples. 50 to 200, and largest stakes of 0.75 to 0.9, were
tried: they change the number of samples needed, at a risk of 0, 0.25 and 0.5 of the bound, by at
most a tenth."""
_PRIOR_MEAN: Final = 0.5
"""Mean loss that the prior assumes, as a share of the bound."""
_MEMORY, _SHORT_MEMORY = 8_000.0, 1_000.0
"""Time constants of the long and the short memory, in audited samples: estimates decay to a third
after that many samples. Where the short memory is clearly below the long one, the data became
easier, and the long memory is reset to the short one. Without the reset, a level that once was too
aggressive would be rejected for as long again."""
_CLEARLY: Final = 3.0
"""Standard errors by which the short memory must be below the long one for a reset."""
_CHECK_EVERY: Final = 4
"""Chunks between two comparisons of the memories; comparing after each would be slow."""
_KEPT: Final = ("log", "highest", "_long", "_short")
_GRID: Final = 64
_LEAST_BOUND, _MOST_BOUND = 1e-4, 0.5


class Wealth:
    """Wealth of bets against several hypotheses "the risk is at least bound j"."""

    def __init__(self, bounds: FloatArray) -> None:
        """Start with wealth 1 against each of float64[hypotheses] ``bounds`` in (0, 1)."""
        bounds = np.asarray(bounds, dtype=np.float64)
        if bounds.ndim != 1 or not ((bounds > 0) & (bounds < 1)).all():
            raise ValueError(f"bounds must be a row of numbers in (0, 1), got {bounds}")
        self.bounds = bounds
        self.log = np.zeros(len(bounds))
        """float64[hypotheses]: logarithm of the wealth."""
        self.highest = np.zeros(len(bounds))
        """float64[hypotheses]: highest value that ``log`` has had."""
        self._long = np.zeros((3, len(bounds)))
        """float64[3, hypotheses]: number of samples, sums of their losses and of the squares, all
        decaying with time; only bets use them."""
        self._short = np.zeros((3, len(bounds)))
        self._unchecked = 0

    @property
    def mean(self) -> FloatArray:
        """float64[hypotheses]: mean loss of the samples in the long memory; 0 before any sample."""
        return np.asarray(self._long[1] / np.maximum(self._long[0], 1.0))

    def bets(self, largest: float) -> FloatArray:
        """Return bets for losses of at most ``largest``, by past losses: float64[hypotheses]."""
        bounds, prior = self.bounds, _PRIOR_SAMPLES * largest
        samples, losses, squares = self._long
        mean = (prior * _PRIOR_MEAN * bounds + losses) / (prior + samples)
        # Losses of several sizes are treated as losses of one size with the same ratio of moments.
        size = np.minimum((squares + largest**2) / (losses + largest), largest)
        room = np.maximum(largest - bounds, 1e-12)
        # Kelly's bet for losses of 0 and this size; a bad estimate only slows the growth.
        best = (bounds - mean) / (bounds * np.maximum(size - bounds, 1e-12))
        return np.asarray(np.clip(best, 0.0, _LARGEST_STAKE / room))

    def add(self, samples: int, losses: Losses, *, largest: float) -> None:
        """Bet on a chunk of samples as a whole; ``samples`` includes those without a loss.

        ``largest`` is the largest loss that was possible, 1/q for the smallest q of the chunk; at
        least 1.
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
        """Return the wealth of some of the hypotheses, with their evidence."""
        taken = Wealth(self.bounds[rows])
        for name in _KEPT:
            setattr(taken, name, getattr(self, name)[..., rows].copy())
        return taken

    def state(self) -> dict[str, Any]:
        """Return the values to save for a restart."""
        return {name.strip("_"): getattr(self, name).copy() for name in _KEPT}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ValueError for other hypotheses or values out of range."""
        kept = {name: self._kept(state, name) for name in _KEPT}
        if not (kept["highest"] >= np.maximum(kept["log"], 0.0)).all():
            raise ValueError(
                "state: 'highest' is below 'log' or 0, expected the highest value so far"
            )
        for name, values in kept.items():
            setattr(self, name, values)

    def _kept(self, state: Mapping[str, Any], name: str) -> FloatArray:
        least = -MOST if name in ("log", "highest") else 0.0  # the others are sums of losses
        return kept_array(state, name.strip("_"), getattr(self, name).shape, least=least)


class UpperBound:
    """An upper bound of a sequence's risk, valid at any time with confidence 1 − α.

    A confidence sequence: a number m on a grid is rejected once the wealth against "the risk is m
    or more" has reached 1/α. The bound is the grid's next number after the largest number that is
    not rejected. It is wrong only if the largest grid number that is not above the risk is
    rejected, which has probability at most α.
    """

    def __init__(self, alpha: float) -> None:
        """Start without evidence; ``alpha`` is the probability that the bound is ever wrong."""
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}, expected above 0, below 1")
        self.alpha = alpha
        self._wealth = Wealth(np.geomspace(_LEAST_BOUND, _MOST_BOUND, _GRID))

    @property
    def value(self) -> float:
        """Upper bound of the risk; 1 before there is evidence."""
        not_out = np.flatnonzero(self._wealth.highest < math.log(1 / self.alpha))
        first_out = int(not_out[-1]) + 1 if not_out.size else 0
        return float(self._wealth.bounds[first_out]) if first_out < _GRID else 1.0

    def add(self, losses: FloatArray, *, largest: float) -> None:
        """Add a chunk of float64[n] losses, at most ``largest`` each."""
        counts = Counter(losses[losses > 0].tolist())
        self._wealth.add(len(losses), list(counts.items()), largest=largest)

    def state(self) -> dict[str, Any]:
        """Return the values to save for a restart."""
        return {"alpha": self.alpha, "wealth": self._wealth.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ValueError if it does not fit."""
        restored = UpperBound(kept_number(state, "alpha"))
        restored._wealth.restore(kept_part(state, "wealth"))
        self.alpha, self._wealth = restored.alpha, restored._wealth
