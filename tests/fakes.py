"""The fake model that the engine's tests serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offramp.bundle import NEVER, Answer, ExitPolicy, TensorSpec
from offramp.engine.backends.fake import SCRIPT, FakeBackend
from offramp.engine.options import ModelOptions
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, StageSpec
from offramp.engine.scheduling import (
    Latencies,
    OperatingPoint,
    OperatingPoints,
    ParallelLimit,
    make_scheduler,
)
from offramp.engine.served_model import ServedModel


def fake_plan(thresholds: Sequence[float]) -> Plan:
    """A plan of one exit per threshold, then the end; stages that carry the script."""
    stages = []
    for index, threshold in enumerate([*thresholds, 0.0]):
        final = index == len(thresholds)
        stages.append(
            StageSpec(
                index=index,
                first_segment=index,
                last_segment=index,
                exit=None if final else index,
                load=bytes,
                inputs=(SCRIPT,),
                carried=() if final else (SCRIPT,),
                answer=None if threshold == NEVER else "answer",
                form="probabilities",
                threshold=threshold,
            )
        )
    return Plan(stages=tuple(stages), policy_version=7, mode=Mode.LEAVE)


def fake_model(
    backend: FakeBackend,
    thresholds: Sequence[float] = (0.9,),
    *,
    classes: int = 2,
    streams: int = 1,
    max_delay_s: float = 0.0,
    stage_s: float = 1e-3,
    parallel: ParallelLimit | None = None,
    **options: Any,
) -> ServedModel:
    """A served model that answers by script [n, stages, classes], float32.

    A stage is taken to last ``stage_s`` for a sample and a tenth of it for each further one; an
    exit forced at stage k is taken to agree in (k + 1) of (stages) cases.
    """
    plan = fake_plan(thresholds)
    stages = len(plan.stages)
    settings = ModelOptions(**{"max_batch_size": 8, **options})
    size = settings.max_batch_size
    latencies = Latencies([[0.0, *(stage_s * (1 + 0.1 * n) for n in range(size))]] * stages)
    points = tuple(
        OperatingPoint(deepest=s.index, exit=s.exit, agreement=(s.index + 1) / stages)
        for s in plan.stages
        if s.answer is not None
    )
    allowed = OperatingPoints(
        points=points if settings.forced_exits else points[-1:], latencies=latencies
    )
    return ServedModel(
        inputs=(TensorSpec(name=SCRIPT, dtype="float32", shape=("batch", stages, classes)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", classes)),),
        answer=Answer(output="answer", classes=classes, form="probabilities"),
        policy=ExitPolicy(version=7, active=()),
        mode=Mode.LEAVE,
        options=settings,
        pipeline=Pipeline(backend, plan),
        scheduler=make_scheduler(
            settings.scheduling,
            allowed,
            max_batch_size=size,
            max_delay_s=max_delay_s,
            max_queue=settings.max_queue_samples,
            streams=streams,
            parallel=parallel,
        ),
        good_inputs={SCRIPT: np.zeros((1, stages, classes), np.float32)},
    )


def script(*rows: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A script from the probability of class 0 at each stage, a row a sample."""
    first = np.array(rows, np.float32)
    return np.stack([first, 1 - first], axis=-1)
