"""Small populations and sequences whose every figure can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from benchmarks.adapt.sequence import Population, SampleSequence, SegmentSpan, ShiftSegment

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify import Observations
from offramp.engine.control.controller import ControlEvent, ControlStatus, Evidence, Job
from offramp.engine.control.costs import CostModel

COSTS = CostModel(
    source_ms=10.0,
    segments_ms=(2.0, 3.0, 5.0),
    stages_ms=(0.5, 0.5),
    after_segment=(0, 1),
    exits_ms=(0.5, 0.5),
)
"""Two exits: answers at 3 and 7 ms if both are in use, 12 ms at the end; 3 and 11 with exit 0."""


def population(
    confidence: Sequence[Sequence[float]],
    prediction: Sequence[Sequence[int]],
    final: Sequence[int],
    labels: Sequence[int] | None = None,
) -> Population:
    return Population(
        confidence=np.array(confidence, np.float32),
        prediction=np.array(prediction, np.int32),
        final=np.array(final, np.int32),
        labels=None if labels is None else np.array(labels),
    )


FOUR = population(
    [[0.9, 0.2, 0.6, 0.1], [0.9, 0.9, 0.3, 0.2]],
    [[1, 5, 2, 3], [1, 2, 3, 4]],
    [1, 2, 3, 4],
    [1, 2, 3, 9],
)
"""With thresholds of 0.5, samples leave at exits 0, 1, 0 and the end, and the third is wrong."""


def policy_of(version: int, thresholds: dict[int, float]) -> ExitPolicy:
    return ExitPolicy(
        version=version,
        active=tuple(ActiveExit(exit=e, threshold=t) for e, t in thresholds.items()),
    )


def in_order(*parts: tuple[str, Population]) -> SampleSequence:
    """Every population once, in its order; the weights are even."""
    spans, start = [], 0
    for name, part in parts:
        even = np.full(len(part), 1 / len(part))
        segment = ShiftSegment(name=name, population=part, weights=even, samples=len(part))
        spans.append(SegmentSpan(segment=segment, start=start, end=start + len(part)))
        start += len(part)
    populations = [part for _, part in parts]
    labels = [p.labels for p in populations if p.labels is not None]
    return SampleSequence(
        scenario="by hand",
        description="every sample once",
        spans=tuple(spans),
        drawn=Population(
            confidence=np.concatenate([p.confidence for p in populations], axis=1),
            prediction=np.concatenate([p.prediction for p in populations], axis=1),
            final=np.concatenate([p.final for p in populations]),
            labels=np.concatenate(labels) if len(labels) == len(parts) else None,
        ),
        rows=np.concatenate([np.arange(len(p)) for p in populations]),
    )


def repeated(part: Population, times: int) -> Population:
    return Population(
        confidence=np.tile(part.confidence, times),
        prediction=np.tile(part.prediction, times),
        final=np.tile(part.final, times),
        labels=None if part.labels is None else np.tile(part.labels, times),
    )


BOTH = policy_of(1, {0: 0.5, 1: 0.5})


def twice(value: int) -> int:
    return 2 * value


class Scripted:
    """Records its inputs; requests a job after each chunk, and increments the policy with it."""

    name = "scripted"

    def __init__(
        self, policy: ExitPolicy = BOTH, *, audit_probability: float = 1.0, jobs: bool = False
    ) -> None:
        self.policy = policy
        self.audit_probability = audit_probability
        self.seen: list[Observations] = []
        self.calls: list[str] = []
        self._jobs = jobs
        self._out = 0

    def observe(self, seen: Observations) -> None:
        self.seen.append(seen)
        self.calls.append(f"observe {len(seen)}")

    def take_job(self) -> Job | None:
        assert not self._out, "asked for a job while one is out"
        if not self._jobs:
            return None
        self._out = len(self.calls)
        return Job(number=self._out, purpose="doubling", function=twice, arguments=(21,))

    def finish(self, job: Job, result: Any) -> None:
        assert (job.number, result) == (self._out, 42)
        self._out = 0
        self.calls.append("finish")
        self.policy = policy_of(self.policy.version + 1, {0: 0.5})

    def status(self) -> ControlStatus:
        return ControlStatus(
            controller=self.name,
            max_disagreement=0.01,
            confidence_level=0.95,
            evidence=Evidence.NONE,
            disagreement=None,
            disagreement_upper_bound=1.0,
            audit_probability=self.audit_probability,
            observed=sum(len(s) for s in self.seen),
            audited=0,
            disagreed=0,
            alarms=0,
            tunings=0,
            adjustments=0,
            state="",
        )

    def take_events(self) -> list[ControlEvent]:
        return [ControlEvent(kind="note", text=str(len(self.calls)))]

    def state(self) -> Mapping[str, Any] | None:
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        raise ValueError(state)
