"""The last samples that ran to the end, with how many samples each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.engine.control.observations import Observations
from offramp.engine.control.records import BoolArray, Float32Array, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighted:
    """Samples that some exits all looked at; inverse propensities make their mean that of all."""

    confidence: Float32Array
    """float32[exits, n]."""
    agrees: BoolArray
    """bool[exits, n]."""
    weight: FloatArray
    """float64[n], at least 1: how many samples it stands for."""

    @property
    def effective(self) -> float:
        """How many samples of equal weight would say as much (Kish)."""
        total = float(self.weight.sum())
        return total**2 / float((self.weight**2).sum()) if total else 0.0

    def of(self, exits: Sequence[int]) -> Weighted:
        """Some of the exits, by their rows."""
        rows = list(exits)
        return Weighted(
            confidence=self.confidence[rows], agrees=self.agrees[rows], weight=self.weight
        )

    def last(self, samples: int) -> Weighted:
        """At most so many, the newest."""
        rows = slice(-samples, None)
        return Weighted(
            confidence=self.confidence[:, rows],
            agrees=self.agrees[:, rows],
            weight=self.weight[rows],
        )


class Window:
    """A ring of complete samples; forced answers do not matter here, only whole samples do."""

    def __init__(self, *, exits: int, capacity: int) -> None:
        """Start empty.

        Args:
            exits: K, all exits of the bundle.
            capacity: Samples, at least 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 sample, got {capacity}")
        self._capacity = capacity
        self._confidence: Float32Array = np.empty((exits, capacity), dtype=np.float32)
        self._agrees: BoolArray = np.empty((exits, capacity), dtype=np.bool_)
        self._weight: FloatArray = np.empty(capacity)
        self._added = 0

    def __len__(self) -> int:
        """Samples held."""
        return min(self._added, self._capacity)

    def clear(self) -> None:
        """Forget all."""
        self._added = 0

    def add(self, seen: Observations) -> None:
        """Take in the complete ones; the oldest go."""
        rows = np.flatnonzero(seen.complete)[-self._capacity :]
        places = (self._added + np.arange(len(rows))) % self._capacity
        self._confidence[:, places] = seen.confidence[:, rows]
        self._agrees[:, places] = seen.prediction[:, rows] == seen.final[rows]
        self._weight[places] = seen.weight[rows]
        self._added += len(rows)

    def seen_by(self, exits: Sequence[int]) -> Weighted:
        """Those that all these exits looked at, oldest first."""
        first = self._added % self._capacity if self._added > self._capacity else 0
        order = (first + np.arange(len(self))) % self._capacity
        rows = list(exits)
        confidence = self._confidence[rows][:, order]
        known = ~np.isnan(confidence).any(axis=0)
        return Weighted(
            confidence=confidence[:, known],
            agrees=self._agrees[rows][:, order[known]],
            weight=self._weight[order[known]],
        )
