"""One model in service: its facts, its pipeline, its executor."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np

from offramp.bundle import Answer, Bundle, ExitPolicy, Manifest, TensorSpec
from offramp.engine.backends import Backend
from offramp.engine.executor import Executor
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, make_plan
from offramp.engine.scheduling import RunThroughScheduler
from offramp.engine.statistics import ModelStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Immutable but for its executor."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    policy: ExitPolicy
    mode: Mode
    backend_name: str
    executor: Executor
    loaded_s: float = field(default_factory=time.monotonic)

    @classmethod
    def load(
        cls,
        name: str,
        bundle: Bundle,
        backend: Backend,
        *,
        mode: Mode,
        max_batch_size: int,
        max_delay_s: float,
        max_queue: int,
        streams: int,
        parallel_below: int | None = None,
    ) -> Self:
        """Prepare the stages and warm up every batch size that can occur."""
        plan = make_plan(bundle, mode=mode)
        pipeline = Pipeline(backend, plan)
        warm_up(pipeline, bundle.manifest, range(1, max_batch_size + 1))
        scheduler = RunThroughScheduler(
            max_batch_size=max_batch_size,
            max_delay_s=max_delay_s,
            max_queue=max_queue,
            parallel_below=parallel_below,
        )
        return cls(
            inputs=bundle.manifest.inputs,
            outputs=bundle.manifest.outputs,
            answer=bundle.manifest.answer,
            policy=_in_force(bundle.policy, plan),
            mode=mode,
            backend_name=backend.name,
            executor=Executor(name, pipeline, scheduler, streams=streams),
        )

    def statistics(self) -> ModelStatistics:
        """A snapshot of the counters."""
        snapshot = self.executor.snapshot()
        counts = {field.name: getattr(snapshot, field.name) for field in fields(snapshot)}
        return ModelStatistics(
            mode=self.mode.value,
            backend=self.backend_name,
            policy_version=self.policy.version,
            uptime_s=time.monotonic() - self.loaded_s,
            **counts,
        )

    def close(self) -> None:
        """Stop the executor; blocks until its threads have ended."""
        self.executor.stop()


def warm_up(pipeline: Pipeline, manifest: Manifest, batch_sizes: range) -> None:
    """Run every stage once at every batch size: the first run at a size allocates.

    Samples have the shapes that the calibration data had.
    """
    shapes = manifest.calibration.sample_shapes
    slot = pipeline.backend.open_slot()
    try:
        for size in reversed(batch_sizes):
            zeros = {t.name: np.zeros((size, *shapes[t.name]), t.dtype) for t in manifest.inputs}
            pipeline.warm_up(slot, zeros)
    finally:
        slot.close()


def _in_force(policy: ExitPolicy, plan: Plan) -> ExitPolicy:
    if plan.mode is Mode.OFF:
        return ExitPolicy(version=policy.version, active=(), promise=None)
    return policy
