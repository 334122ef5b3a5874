"""The fake model that the engine's tests serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offramp.bundle import NEVER, Answer, ExitPolicy, TensorSpec
from offramp.engine.backends.fake import SCRIPT, FakeBackend
from offramp.engine.executor import Executor
from offramp.engine.pipeline import Pipeline
from offramp.engine.plan import Mode, Plan, StageSpec
from offramp.engine.scheduling import RunThroughScheduler
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
    **scheduling: Any,
) -> ServedModel:
    """A served model that answers by script [n, stages, classes], float32."""
    plan = fake_plan(thresholds)
    settings = {"max_batch_size": 8, **scheduling}
    stages = len(plan.stages)
    return ServedModel(
        inputs=(TensorSpec(name=SCRIPT, dtype="float32", shape=("batch", stages, classes)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", classes)),),
        answer=Answer(output="answer", classes=classes, form="probabilities"),
        policy=ExitPolicy(version=7, active=()),
        mode=Mode.LEAVE,
        backend_name=backend.name,
        executor=Executor(
            "fake", Pipeline(backend, plan), RunThroughScheduler(**settings), streams=streams
        ),
    )


def script(*rows: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A script from the probability of class 0 at each stage, a row a sample."""
    first = np.array(rows, np.float32)
    return np.stack([first, 1 - first], axis=-1)
