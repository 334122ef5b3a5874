"""Observations: results of served samples, which tests and controllers take as evidence.

Arrays over samples are in the order in which the samples were started. So whether and when a
sample runs on to the model's end does not change when it is counted.

A :class:`Window` keeps the newest samples, and how many samples each represents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import (
    MODEL_END,
    BoolArray,
    Float32Array,
    FloatArray,
    IntArray,
    first_exit,
)
from offramp.certify.records import final_agrees

UNKNOWN = -1
"""Code of a prediction that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations:
    """Results of n served samples at all K exits of a bundle, in use or not."""

    confidence: Float32Array
    """float32[K, n] in [0, 1]; NaN where a sample did not pass the exit, or it was not in use."""
    prediction: NDArray[np.int32]
    """int32[K, n]: the code of the exit's answer; :data:`UNKNOWN` where ``confidence`` is NaN, or
    where the code depends on the answer of the model's end and the sample did not run there."""
    answered_at: IntArray
    """int64[n]: the exit that answered; :data:`MODEL_END` if none did."""
    final: NDArray[np.int32]
    """int32[n]: the source model's answer; :data:`UNKNOWN` where the sample left for good."""
    audit_probability: FloatArray
    """float64[n], in (0, 1]: probability, fixed before the sample was started, that it runs to the
    end after it was answered early. 1 is release mode. Samples that no exit answered run to the
    end anyway."""
    policy_version: IntArray
    """int64[n]: version of the policy that the sample was started with, and kept."""
    forced: BoolArray
    """bool[n]: answered below the exit's threshold, to be in time; excluded from any promise."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            is_per_exit = name in ("confidence", "prediction")
            expected = self.confidence.shape if is_per_exit else self.confidence.shape[1:]
            if (shape := getattr(self, name).shape) != expected:
                raise ValueError(f"{name} has shape {shape}, expected {expected}")

    def __len__(self) -> int:
        return len(self.answered_at)

    @property
    def exits(self) -> int:
        """Number of exits, K."""
        return int(self.confidence.shape[0])

    @property
    def early(self) -> BoolArray:
        """bool[n]: answered by an exit."""
        return np.asarray(self.answered_at != MODEL_END)

    @property
    def complete(self) -> BoolArray:
        """bool[n]: ran to the end, so that every exit's answer can be compared with the model's."""
        return np.asarray(self.final != UNKNOWN)

    @property
    def weight(self) -> FloatArray:
        """float64[n]: inverse propensity; the mean of ``weight · x`` estimates the mean of x.

        1/q for an audited sample, 1 for one that no exit answered, 0 for one that left at an exit.
        """
        weight = np.where(self.early, 1.0 / self.audit_probability, 1.0)
        return np.where(self.complete, weight, 0.0)

    @property
    def loss(self) -> FloatArray:
        """float64[n]: weight of samples whose answer is known to differ from the source model's.

        0 for all others; the mean is an unbiased estimate of the disagreement.
        """
        early = np.flatnonzero(self.early & self.complete)
        loss = np.zeros(len(self))
        wrong = self.prediction[self.answered_at[early], early] != self.final[early]
        loss[early] = wrong / self.audit_probability[early]
        return loss

    def agrees(self) -> BoolArray:
        """Return whether each exit agrees with the model's end, bool[K, n]; false if unknown."""
        return np.asarray((self.prediction == self.final) & self.complete)

    def take(self, rows: NDArray[Any] | slice) -> Observations:
        """Return some of the samples."""
        return Observations(**{f.name: getattr(self, f.name)[..., rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighted:
    """Samples that passed each of some exits; weighted means estimate means over all samples."""

    confidence: Float32Array
    """float32[exits, n]: confidence of each of these exits."""
    agrees: BoolArray
    """bool[exits, n]: whether the exit's answer is the source model's."""
    weight: FloatArray
    """float64[n], at least 1: number of samples that each represents."""

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def effective(self) -> float:
        """Number of equally weighted samples with the same variance of the mean (Kish)."""
        total = float(self.weight.sum())
        return total**2 / float((self.weight**2).sum()) if total else 0.0

    def risk(self, thresholds: FloatArray) -> float:
        """Return the share answered unlike the source model at float64[exits] thresholds; n > 0."""
        first = first_exit(self.confidence, thresholds)
        wrong = ~final_agrees(self.agrees)[first, np.arange(len(first))]
        return float(self.weight @ wrong / self.weight.sum())

    def of(self, exits: Sequence[int]) -> Weighted:
        """Return the same samples with the confidences and answers of some of the exits."""
        rows = list(exits)
        return replace(self, confidence=self.confidence[rows], agrees=self.agrees[rows])

    def newest(self, most: int) -> Weighted:
        """Return the newest samples, at most ``most`` of them."""
        last = slice(max(len(self) - most, 0), None)
        return Weighted(
            confidence=self.confidence[:, last],
            agrees=self.agrees[:, last],
            weight=self.weight[last],
        )


class Window:
    """Ring buffer of samples; confidences of exits that were not in use are NaN."""

    def __init__(self, *, exits: int, capacity: int) -> None:
        """Create an empty window for ``capacity`` samples of all K exits of the bundle."""
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
        """Drop all but the newest samples."""
        self._held = min(self._held, newest)

    def add(self, seen: Observations) -> None:
        """Add the samples that ran to the end, forced or not; they replace the oldest."""
        rows = np.flatnonzero(seen.complete)[-self._capacity :]
        places = self.add_confidence(seen.confidence[:, rows])
        self._agrees[:, places] = seen.prediction[:, rows] == seen.final[rows]
        self._weight[places] = seen.weight[rows]

    def add_confidence(self, confidence: Float32Array) -> IntArray:
        """Add samples with float32[K, n] confidences alone; return their indices in the buffer."""
        confidence = confidence[:, -self._capacity :]
        count = confidence.shape[1]
        places: IntArray = (self._added + np.arange(count)) % self._capacity
        self._confidence[:, places] = confidence
        self._added += count
        self._held = min(self._held + count, self._capacity)
        return places

    def confidence(self, exits: Sequence[int], most: int | None = None) -> Float32Array:
        """Return float32[exits, n] confidences of the newest samples (default all) in order."""
        return self._confidence[np.ix_(np.asarray(exits, dtype=np.int64), self._newest(most))]

    def seen_by(self, exits: Sequence[int], most: int | None = None) -> Weighted:
        """Return samples that passed all these exits, among the newest ``most``; oldest first."""
        order, rows = self._newest(most), np.asarray(exits, dtype=np.int64)
        confidence = self._confidence[np.ix_(rows, order)]
        known = ~np.isnan(confidence).any(axis=0)
        if not known.all():
            order, confidence = order[known], confidence[:, known]
        agrees = self._agrees[np.ix_(rows, order)]
        return Weighted(confidence=confidence, agrees=agrees, weight=self._weight[order])

    def _newest(self, most: int | None) -> IntArray:
        """Return the indices of the newest samples in the buffer, oldest first."""
        count = self._held if most is None else min(most, self._held)
        return np.arange(self._added - count, self._added) % self._capacity
