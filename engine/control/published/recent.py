"""The last samples of which everything is known: what exits looked on, and what the model said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.certify.decision import BoolArray, Float32Array
from offramp.certify.observations import Observations


class RecentSamples:
    """A window over the samples that ran to the end; those that left for good are no use here.

    Exits that were not in use when a sample passed know nothing of it (NaN); one asks for the
    samples that certain exits all looked at.
    """

    def __init__(self, *, exits: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 sample, got {capacity}")
        self._capacity = capacity
        self._confidence: Float32Array = np.empty((exits, 0), dtype=np.float32)
        self._agrees: BoolArray = np.empty((exits, 0), dtype=np.bool_)

    def __len__(self) -> int:
        """Samples held."""
        return int(self._confidence.shape[1])

    def add(self, seen: Observations) -> None:
        """Take in complete samples; the oldest go."""
        rows = np.flatnonzero(seen.complete)[-self._capacity :]
        if not rows.size:
            return
        confidence, agrees = seen.confidence[:, rows], seen.agrees()[:, rows]
        # a joined copy a chunk: some ten microseconds at 13 exits and 512 samples
        last = slice(-self._capacity, None)
        self._confidence = np.concatenate([self._confidence, confidence], axis=1)[:, last]
        self._agrees = np.concatenate([self._agrees, agrees], axis=1)[:, last]

    def seen_by(self, exits: Sequence[int], most: int) -> tuple[Float32Array, BoolArray]:
        """Give the last samples that all these exits looked at, at most so many, oldest first.

        Returns:
            Confidence, float32[exits, n], and agreement with the model, bool[exits, n].
        """
        rows = list(exits)
        confidence = self._confidence[rows]
        known = np.flatnonzero(~np.isnan(confidence).any(axis=0))[-most:]
        return confidence[:, known], self._agrees[rows][:, known]

    def looking_on(self, last: int) -> frozenset[int]:
        """Exits that looked at every one of the last samples; none if there are none."""
        if not len(self):
            return frozenset()
        known = ~np.isnan(self._confidence[:, -last:]).any(axis=1)
        return frozenset(np.flatnonzero(known).tolist())
