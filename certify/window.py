"""A window of the last samples, and how many samples each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp.certify.decision import BoolArray, Float32Array, FloatArray, IntArray, first_exit
from offramp.certify.observations import Observations
from offramp.certify.records import final_agrees


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighted:
    """Samples that some exits all saw; inverse propensities make their mean that of all samples."""

    confidence: Float32Array
    """float32[exits, n]."""
    agrees: BoolArray
    """bool[exits, n]."""
    weight: FloatArray
    """float64[n], at least 1: how many samples it stands for."""

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def effective(self) -> float:
        """How many samples of equal weight would say as much (Kish)."""
        total = float(self.weight.sum())
        return total**2 / float((self.weight**2).sum()) if total else 0.0

    def risk(self, thresholds: FloatArray) -> float:
        """Share that float64[exits] thresholds answer unlike the source model, n above 0."""
        first = first_exit(self.confidence, thresholds)
        wrong = ~final_agrees(self.agrees)[first, np.arange(len(first))]
        return float(self.weight @ wrong / self.weight.sum())

    def of(self, exits: Sequence[int]) -> Weighted:
        """Some of the exits, by their rows."""
        rows = list(exits)
        return replace(self, confidence=self.confidence[rows], agrees=self.agrees[rows])

    def newest(self, most: int) -> Weighted:
        """The last samples, at most so many."""
        last = slice(max(len(self) - most, 0), None)
        return Weighted(
            confidence=self.confidence[:, last],
            agrees=self.agrees[:, last],
            weight=self.weight[last],
        )


class Window:
    """A ring buffer of samples; exits that were not in use know nothing of one (NaN)."""

    def __init__(self, *, exits: int, capacity: int) -> None:
        """Start empty, with room for ``capacity`` samples of all K exits of the bundle."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 sample, got {capacity}")
        self._capacity = capacity
        self._confidence: Float32Array = np.empty((exits, capacity), dtype=np.float32)
        self._agrees: BoolArray = np.zeros((exits, capacity), dtype=np.bool_)
        self._weight: FloatArray = np.zeros(capacity)
        self._added = self._held = 0

    def __len__(self) -> int:
        return self._held

    def keep(self, newest: int) -> None:
        """Forget all but the newest samples."""
        self._held = min(self._held, newest)

    def add(self, seen: Observations) -> None:
        """Take in the samples that ran to the end, forced or not; the oldest go."""
        rows = np.flatnonzero(seen.complete)[-self._capacity :]
        places = self.add_confidence(seen.confidence[:, rows])
        self._agrees[:, places] = seen.prediction[:, rows] == seen.final[rows]
        self._weight[places] = seen.weight[rows]

    def add_confidence(self, confidence: Float32Array) -> IntArray:
        """Take in float32[K, n] of samples of which nothing else is known; gives their places."""
        confidence = confidence[:, -self._capacity :]
        count = confidence.shape[1]
        places: IntArray = (self._added + np.arange(count)) % self._capacity
        self._confidence[:, places] = confidence
        self._added += count
        self._held = min(self._held + count, self._capacity)
        return places

    def confidence(self, exits: Sequence[int], most: int | None = None) -> Float32Array:
        """What exits said, float32[exits, n], of the newest samples (default all), oldest first."""
        return self._confidence[np.ix_(np.asarray(exits, dtype=np.int64), self._newest(most))]

    def seen_by(self, exits: Sequence[int], most: int | None = None) -> Weighted:
        """Those that all these exits saw, of the newest samples (default all), oldest first."""
        order, rows = self._newest(most), np.asarray(exits, dtype=np.int64)
        confidence = self._confidence[np.ix_(rows, order)]
        known = ~np.isnan(confidence).any(axis=0)
        if not known.all():
            order, confidence = order[known], confidence[:, known]
        agrees = self._agrees[np.ix_(rows, order)]
        return Weighted(confidence=confidence, agrees=agrees, weight=self._weight[order])

    def _newest(self, most: int | None) -> IntArray:
        """Places of the newest samples, oldest first."""
        count = self._held if most is None else min(most, self._held)
        return np.arange(self._added - count, self._added) % self._capacity
