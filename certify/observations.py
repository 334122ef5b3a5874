"""Observations: what serving shows of samples, which tests and controllers take as evidence.

Arrays over samples, in the order in which the samples were started, so that whether and when a
sample runs on does not decide when it is counted.

A :class:`Window` keeps the last of them, and how many samples each stands for.
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
"""In place of a prediction that nobody made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations:
    """What is known of n served samples at all K exits of a bundle, whether in use or not."""

    confidence: Float32Array
    """float32[K, n] in [0, 1]; NaN where the sample did not pass the exit, or it was not in use."""
    prediction: NDArray[np.int32]
    """int32[K, n]: the code of the exit's answer; :data:`UNKNOWN` where ``confidence`` is NaN, or
    where only the model's end, which was not heard, could tell."""
    answered_at: IntArray
    """int64[n]: the exit that answered; :data:`MODEL_END` if none did."""
    final: NDArray[np.int32]
    """int32[n]: the source model's answer; :data:`UNKNOWN` where the sample left for good."""
    audit_probability: FloatArray
    """float64[n], in (0, 1]: with which probability, drawn before the sample was started, it was
    to run to the end had it left early. 1 is release mode. Samples that nothing answered early
    run to the end anyway."""
    policy_version: IntArray
    """int64[n]: the policy that the sample was started under, and held to."""
    forced: BoolArray
    """bool[n]: answered below the exit's threshold, to be in time; outside any promise."""

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
        """K."""
        return int(self.confidence.shape[0])

    @property
    def early(self) -> BoolArray:
        """bool[n]: answered by an exit."""
        return np.asarray(self.answered_at != MODEL_END)

    @property
    def complete(self) -> BoolArray:
        """bool[n]: ran to the end, so that every exit's answer can be judged."""
        return np.asarray(self.final != UNKNOWN)

    @property
    def weight(self) -> FloatArray:
        """float64[n]: inverse propensity; the mean of ``weight · x`` is that of x over all.

        1/q for an audited sample, 1 for what ran to the end anyway, 0 for what left for good.
        """
        weight = np.where(self.early, 1.0 / self.audit_probability, 1.0)
        return np.where(self.complete, weight, 0.0)

    @property
    def loss(self) -> FloatArray:
        """float64[n]: the weight of what was answered unlike the source model, as far as known.

        Else 0; the mean is the disagreement, without bias.
        """
        early = np.flatnonzero(self.early & self.complete)
        loss = np.zeros(len(self))
        wrong = self.prediction[self.answered_at[early], early] != self.final[early]
        loss[early] = wrong / self.audit_probability[early]
        return loss

    def agrees(self) -> BoolArray:
        """bool[K, n]: the exit's answer is the source model's; false where either is unknown."""
        return np.asarray((self.prediction == self.final) & self.complete)

    def take(self, rows: NDArray[Any] | slice) -> Observations:
        """Some of the samples."""
        return Observations(**{f.name: getattr(self, f.name)[..., rows] for f in fields(self)})


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
