"""The last samples that ran to the end, with how many samples each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.certify.decision import BoolArray, Float32Array, FloatArray, first_exit
from offramp.certify.observations import Observations
from offramp.certify.records import final_agrees


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

    def risk(self, thresholds: FloatArray) -> float:
        """Share that float64[exits] thresholds answer unlike the source model, n above 0."""
        first = first_exit(self.confidence, thresholds)
        wrong = ~final_agrees(self.agrees)[first, np.arange(len(first))]
        return float(self.weight @ wrong / self.weight.sum())

    def of(self, exits: Sequence[int]) -> Weighted:
        """Some of the exits, by their rows."""
        rows = list(exits)
        return Weighted(
            confidence=self.confidence[rows], agrees=self.agrees[rows], weight=self.weight
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

    def seen_by(self, exits: Sequence[int], most: int | None = None) -> Weighted:
        """Those that all these exits looked at, oldest first.

        Args:
            exits: Their indices.
            most: Look at so many samples only, the newest; default all.
        """
        count = len(self) if most is None else min(most, len(self))
        order = np.arange(self._added - count, self._added) % self._capacity
        rows = np.asarray(exits, dtype=np.int64)
        confidence = self._confidence[np.ix_(rows, order)]
        known = ~np.isnan(confidence).any(axis=0)
        if not known.all():
            order, confidence = order[known], confidence[:, known]
        return Weighted(
            confidence=confidence,
            agrees=self._agrees[np.ix_(rows, order)],
            weight=self._weight[order],
        )
