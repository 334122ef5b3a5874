"""The streamed samples, drawn from recorded populations segment by segment.

Every segment draws with replacement from a finite population with known weights. So the samples of
a segment are independent and identically distributed, and the expected disagreement of any policy
is known exactly: whether a segment's policies keep the constraint need not be estimated from few
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ExitPolicy
from offramp.bundle.schema.policy import NEVER
from offramp.certify import BoolArray, Float32Array, FloatArray, IntArray, first_exit
from offramp.certify.agreement import float32_at_least


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Population:
    """The recorded answers of a model and all its K exits to m samples."""

    confidence: Float32Array
    """float32[K, m]: confidence of each exit for each sample."""
    prediction: NDArray[np.int32]
    """int32[K, m]: predicted class of each exit for each sample."""
    final: NDArray[np.int32]
    """int32[m]: the source model's answer."""
    labels: IntArray | None
    """int64[m], where the data has labels."""

    def __len__(self) -> int:
        return len(self.final)

    def take(self, rows: slice | IntArray) -> Population:
        """Return the answers to some samples."""
        return Population(
            confidence=self.confidence[:, rows],
            prediction=self.prediction[:, rows],
            final=self.final[rows],
            labels=None if self.labels is None else self.labels[rows],
        )

    @property
    def exits(self) -> int:
        """Number of exits, K."""
        return int(self.confidence.shape[0])

    @property
    def agrees(self) -> BoolArray:
        """bool[K + 1, m]: whether the answer of each exit and of the end is the source model's."""
        same = self.prediction == self.final
        return np.concatenate([same, np.ones((1, len(self)), np.bool_)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShiftSegment:
    """A run of samples from one distribution."""

    name: str
    population: Population
    weights: FloatArray
    """float64[m], adding up to 1: how often each sample is drawn."""
    samples: int

    def __post_init__(self) -> None:
        if self.weights.shape != (len(self.population),) or not (self.weights >= 0).all():
            raise ValueError(
                f"segment {self.name!r}: weights must be {len(self.population)} numbers of at "
                f"least 0, got shape {self.weights.shape}"
            )
        if not np.isclose(self.weights.sum(), 1.0):
            raise ValueError(f"segment {self.name!r}: weights add up to {self.weights.sum():g}")

    def risk(self, policy: ExitPolicy) -> float:
        """Return the share of a policy's answers that differ from the source model's.

        It is the share in the long run, which is known exactly here.
        """
        places = answering_places(self.population.confidence, policy)
        wrong = ~self.population.agrees[places, np.arange(len(self.population))]
        return float(self.weights[wrong].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentSpan:
    """The place of a segment in its sequence."""

    segment: ShiftSegment
    start: int
    end: int
    """Index after the segment's last sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleSequence:
    """N samples, in the order in which they are served."""

    scenario: str
    description: str
    spans: tuple[SegmentSpan, ...]
    drawn: Population
    """The samples, one after another."""
    rows: IntArray
    """int64[N]: index of each sample in the population of its segment."""

    def __len__(self) -> int:
        return len(self.drawn)


def draw(
    scenario: str, description: str, segments: Sequence[ShiftSegment], rng: np.random.Generator
) -> SampleSequence:
    """Draw the samples of all segments."""
    rows = [rng.choice(len(s.weights), s.samples, p=s.weights) for s in segments]
    ends = np.cumsum([s.samples for s in segments]).tolist()
    starts = [0, *ends[:-1]]
    spans = zip(segments, starts, ends, strict=True)
    parts = [s.population.take(r) for s, r in zip(segments, rows, strict=True)]
    labels = [part.labels for part in parts if part.labels is not None]
    return SampleSequence(
        scenario=scenario,
        description=description,
        spans=tuple(SegmentSpan(segment=s, start=a, end=b) for s, a, b in spans),
        drawn=Population(
            confidence=np.concatenate([part.confidence for part in parts], axis=1),
            prediction=np.concatenate([part.prediction for part in parts], axis=1),
            final=np.concatenate([part.final for part in parts]),
            labels=np.concatenate(labels) if len(labels) == len(parts) else None,
        ),
        rows=np.concatenate(rows),
    )


def answering_places(confidence: Float32Array, policy: ExitPolicy) -> IntArray:
    """Return int64[n]: the exit that answers each sample of float32[K, n], or MODEL_END."""
    return first_exit(confidence, thresholds_of(policy, len(confidence)))


def thresholds_of(policy: ExitPolicy, exits: int) -> FloatArray:
    """Return float64[K]: the thresholds, rounded as in the engine."""
    thresholds = np.full(exits, NEVER)
    for active in policy.active:
        thresholds[active.exit] = active.threshold
    return float32_at_least(thresholds)
