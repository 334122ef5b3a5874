"""One model in service: its facts, its pipeline, its scheduler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Bundle, ExitPolicy, Manifest, TensorSpec
from offramp.engine.backends import Backend, Slot
from offramp.engine.errors import OptionsError
from offramp.engine.options import ModelOptions
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, make_plan
from offramp.engine.scheduling import (
    Latencies,
    ModelScheduler,
    OperatingPoints,
    ParallelLimit,
    Span,
    going_on,
    make_scheduler,
    operating_points,
    stage_seconds,
)

STAGE_OVERHEAD_S = 60e-6
"""What a stage costs the executor beyond its graph, about (``benchmarks.executor``)."""
_TIMED_RUNS = 5
"""Runs whose fastest says how fast this machine is, against the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Immutable but for its scheduler, which the executor owns."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    policy: ExitPolicy
    mode: Mode
    options: ModelOptions
    pipeline: Pipeline
    scheduler: ModelScheduler
    good_inputs: Mapping[str, NDArray[Any]]
    """A sample that is known to run."""
    loaded_s: float = field(default_factory=time.monotonic)

    @classmethod
    def load(
        cls,
        name: str,
        bundle: Bundle,
        backend: Backend,
        *,
        mode: Mode,
        options: ModelOptions,
        streams: int,
        parallel: ParallelLimit,
    ) -> Self:
        """Prepare the stages, warm up every batch size, and see how fast they are here.

        Raises:
            BackendError: A stage cannot be loaded.
            OptionsError: The scheduling policy does not fit the model.
        """
        plan = make_plan(bundle, mode=mode)
        pipeline = Pipeline(backend, plan)
        points = points_of(bundle, plan, options)
        try:
            scheduler = scheduler_of(points, options, streams=streams, parallel=parallel)
        except ValueError as error:
            raise OptionsError(f"{name}: {error}") from error
        speed = _speed(pipeline, bundle.manifest, points.latencies, options.max_batch_size)
        points.latencies.calibrate(speed)
        return cls(
            inputs=bundle.manifest.inputs,
            outputs=bundle.manifest.outputs,
            answer=bundle.manifest.answer,
            policy=_in_force(bundle.policy, plan),
            mode=mode,
            options=options,
            pipeline=pipeline,
            scheduler=scheduler,
            good_inputs=zeros(bundle.manifest, 1),
        )

    def probe(self, slot: Slot) -> None:
        """Run a sample that is known to be good through all stages."""
        self.pipeline.warm_up(slot, self.good_inputs)


def points_of(
    bundle: Bundle, plan: Plan, options: ModelOptions, *, overhead_s: float = STAGE_OVERHEAD_S
) -> OperatingPoints:
    """What a plan's stages cost by the bundle's profile, and what stopping at each is worth.

    Args:
        bundle: Compiled.
        plan: Of it.
        options: Say the largest batch, and whether exits may be forced.
        overhead_s: What each stage costs beyond its graph.
    """
    stages = [
        Span(first_segment=s.first_segment, last_segment=s.last_segment, exit=s.exit)
        for s in plan.stages
    ]
    answering = [(s.index, s.exit, s.threshold) for s in plan.stages if s.answer is not None]
    seconds = stage_seconds(bundle.profile(), stages, options.max_batch_size, overhead_s=overhead_s)
    records = bundle.records()
    return OperatingPoints(
        points=operating_points(answering, records, forced=options.forced_exits),
        latencies=Latencies(seconds, going_on(answering, records, len(plan.stages))),
    )


def scheduler_of(
    points: OperatingPoints,
    options: ModelOptions,
    *,
    streams: int,
    parallel: ParallelLimit | None = None,
) -> ModelScheduler:
    """The scheduler of a model with these options.

    Raises:
        ValueError: Its policy does not fit the operating points.
    """
    return make_scheduler(
        options.scheduling,
        points,
        max_batch_size=options.max_batch_size,
        max_delay_s=options.max_queue_delay_ms / 1e3,
        max_queue=options.max_queue_samples,
        streams=streams,
        parallel=parallel,
    )


def zeros(manifest: Manifest, batch_size: int) -> dict[str, NDArray[Any]]:
    """A batch of the shapes that the calibration data had."""
    shapes = manifest.calibration.sample_shapes
    return {t.name: np.zeros((batch_size, *shapes[t.name]), t.dtype) for t in manifest.inputs}


def _speed(
    pipeline: Pipeline, manifest: Manifest, latencies: Latencies, max_batch_size: int
) -> float:
    """Warm up (the first run at a size allocates); observed over predicted time on the way."""
    slot = pipeline.backend.open_slot()
    try:
        for size in range(max_batch_size, 0, -1):
            pipeline.warm_up(slot, zeros(manifest, size))
        ratios = []
        for size in {1, max_batch_size}:
            batch = zeros(manifest, size)
            predicted_s = latencies.span_s(0, latencies.stages - 1, size)
            ratios.append(
                min(_seconds(pipeline, slot, batch) for _ in range(_TIMED_RUNS)) / predicted_s
            )
        return float(np.mean(ratios))
    finally:
        slot.close()


def _seconds(pipeline: Pipeline, slot: Slot, batch: Mapping[str, NDArray[Any]]) -> float:
    started_s = time.perf_counter()
    pipeline.warm_up(slot, batch)
    return time.perf_counter() - started_s


def _in_force(policy: ExitPolicy, plan: Plan) -> ExitPolicy:
    if plan.mode is Mode.OFF:
        return replace(policy, active=(), promise=None)
    return policy
