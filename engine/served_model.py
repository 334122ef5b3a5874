"""One model in service: its facts, its pipeline, its executor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Bundle, ExitPolicy, TensorSpec
from offramp.engine.backends import Backend
from offramp.engine.executor import Executor
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, make_plan
from offramp.engine.scheduling import RunThroughScheduler
from offramp.engine.statistics import ModelStatistics

_WARM_UP_SEQUENCE = 16
"""Size that symbolic dimensions other than the batch have while warming up."""


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
    ) -> Self:
        """Prepare the stages and warm up every batch size that can occur."""
        plan = make_plan(bundle, mode=mode)
        pipeline = Pipeline(backend, plan)
        warm_up(pipeline, bundle.manifest.inputs, range(1, max_batch_size + 1))
        scheduler = RunThroughScheduler(
            max_batch_size=max_batch_size, max_delay_s=max_delay_s, max_queue=max_queue
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
        counters = self.executor.counters
        queued, in_flight = self.executor.load
        return ModelStatistics(
            mode=self.mode.value,
            backend=self.backend_name,
            policy_version=self.policy.version,
            stages=tuple(stage.snapshot() for stage in counters.stages),
            requests=counters.requests,
            samples=counters.samples,
            answered=counters.answered,
            failed=dict(counters.failed),
            queued=queued,
            in_flight=in_flight,
            queue_s=counters.queue_s.snapshot(),
            latency_s=counters.latency_s.snapshot(),
            uptime_s=time.monotonic() - self.loaded_s,
        )

    def close(self) -> None:
        """Stop the executor; blocks until its threads have ended."""
        self.executor.stop()


def warm_up(pipeline: Pipeline, inputs: Sequence[TensorSpec], batch_sizes: range) -> None:
    """Run every stage once at every batch size: the first run at a size allocates."""
    slot = pipeline.backend.open_slot()
    try:
        for size in reversed(batch_sizes):
            pipeline.warm_up(slot, {spec.name: _zeros(spec, size) for spec in inputs})
    finally:
        slot.close()


def _zeros(spec: TensorSpec, batch_size: int) -> NDArray[Any]:
    sizes = [s if isinstance(s, int) else _WARM_UP_SEQUENCE for s in spec.shape[1:]]
    return np.zeros((batch_size, *sizes), spec.dtype)


def _in_force(policy: ExitPolicy, plan: Plan) -> ExitPolicy:
    if plan.mode is Mode.OFF:
        return ExitPolicy(version=policy.version, active=(), promise=None)
    return policy
