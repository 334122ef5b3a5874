"""Time of the Python path, executor and scheduler, without a model.

Two measurements on the fake backend, whose own time is subtracted:

* the executor's time per stage: from the end of one stage on a stream to the start of the next
  (answers, scheduling, compaction, gathering), median over batches of 8 one-sample requests. The
  requests are all queued before the first stage ends, or (``beside``) are sent during the stages:
  then most of the time is that of the event loop, which holds the interpreter while it accepts one;
* the scheduler's time per decision, policy by policy: ``next`` forming a batch of 8 from a queue of
  1,000 samples with deadlines.

    python -m benchmarks.executor [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.bundle import Answer, ExitPolicy, TensorSpec
from offramp.certify.decision import MODEL_END
from offramp.engine.core import Engine
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.scheduling import Latencies, OperatingPoint, OperatingPoints, Run, Submission
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.engine.stages.backend_protocol import StageResult, TensorBatch
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec
from offramp.testing.backend import SCRIPT, FakeBackend, FakeSlot
from offramp.tools.bench.common.output import describe_environment, write_json

BATCH = 8
STAGES = 4
REQUESTS = 8_000
QUEUE = 1_000
DECISIONS = 2_000
POLICIES = (
    "run-through",
    "refill",
    "rebatch",
    "slackfit",
    "max-accuracy",
    "max-batch",
    "fixed:1",
    "cheapest",
    "clockwork",
    "delay",
)


class StampedSlot(FakeSlot):
    """A fake slot that records when it begins and ends each stage."""

    stamps: list[tuple[int, float, float]]

    def run(
        self, stage: StageSpec, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Run a stage, and record the times before and after it."""
        began_s = time.perf_counter()
        result = super().run(stage, batch, threshold)
        self.stamps.append((stage.index, began_s, time.perf_counter()))
        return result


class StampingBackend(FakeBackend):
    """A fake backend whose slots record their times."""

    def open_slot(self) -> StampedSlot:
        """Open a slot; all slots share one list of times."""
        slot = StampedSlot(self)
        slot.stamps = self.stamps
        self.open_slots += 1
        return slot

    @property
    def stamps(self) -> list[tuple[int, float, float]]:
        """Stage, start time and end time of every run."""
        found: list[tuple[int, float, float]] = self.__dict__.setdefault("_stamps", [])
        return found


def main() -> None:
    """Measure gaps between stages and times of decisions, and print their medians."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = [
        asyncio.run(stage_gaps_us(beside=False)) | asyncio.run(stage_gaps_us(beside=True))
        for _ in range(options.rounds)
    ]
    executor = {name: float(np.median([r[name] for r in rounds])) for name in rounds[0]}
    decisions = {
        name: float(np.median([decision_us(name) for _ in range(options.rounds)]))
        for name in POLICIES
    }
    print(f"executor, µs a stage at batch {BATCH} (median of {options.rounds} rounds of medians):")
    for name, value in executor.items():
        print(f"  {name:24} {value:6.1f}")
    print(f"scheduler, µs a decision from a queue of {QUEUE}:")
    for name, value in decisions.items():
        print(f"  {name:24} {value:6.1f}")
    if options.json is not None:
        document = {
            "executor_us": executor,
            "decision_us": decisions,
            "environment": describe_environment(batch_size=BATCH, rounds=options.rounds),
        }
        write_json(options.json, document)


async def stage_gaps_us(*, beside: bool) -> dict[str, float]:
    """Return the median microseconds between the end of a stage and the start of the next.

    ``beside`` is true if requests are accepted at the same time.
    """
    queued = threading.Event()

    def wait(_stage: int, _rows: int) -> None:
        queued.wait()

    backend = StampingBackend(on_run=wait)
    engine = Engine({"fake": fake_model(backend)}, backend)
    try:
        script = scripts(REQUESTS)
        if beside:
            queued.set()
        answers = asyncio.gather(
            *(engine.infer("fake", {SCRIPT: script[i : i + 1]}) for i in range(REQUESTS))
        )
        await asyncio.sleep(0)  # every request is sent
        queued.set()
        await answers
    finally:
        await engine.close()
    gaps: dict[str, list[float]] = {"next stage": [], "new batch": []}
    stamps = backend.stamps
    for (_, _, ended_s), (stage, began_s, _) in itertools.pairwise(stamps):
        gaps["next stage" if stage else "new batch"].append((began_s - ended_s) * 1e6)
    every = [gap for values in gaps.values() for gap in values]
    suffix = ", beside" if beside else ""
    return {f"any stage{suffix}": float(np.median(every))} | {
        f"{name}{suffix}": float(np.median(values)) for name, values in gaps.items()
    }


def scripts(count: int) -> NDArray[np.float32]:
    """Return answers [count, stages, 2]; each stage is sure of about a quarter of them."""
    sure = np.random.default_rng(0).random((count, STAGES, 1)) < 0.25
    first = np.where(sure, np.float32(0.95), np.float32(0.6)).astype(np.float32)
    return np.concatenate([first, 1 - first], axis=-1)


def fake_model(backend: FakeBackend) -> ServedModel:
    """Return a model of four stages on the fake backend."""
    specs = tuple(
        StageSpec(
            index=index,
            first_segment=index,
            last_segment=index,
            exit=MODEL_END if index == STAGES - 1 else index,
            load=bytes,
            inputs=(SCRIPT,),
            carried=() if index == STAGES - 1 else (SCRIPT,),
            answer="answer",
            form="probabilities",
            threshold=0.0 if index == STAGES - 1 else 0.9,
        )
        for index in range(STAGES)
    )
    points = operating_points()
    return ServedModel(
        inputs=(TensorSpec(name=SCRIPT, dtype="float32", shape=("batch", STAGES, 2)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", 2)),),
        answer=Answer(output="answer", classes=2, form="probabilities"),
        mode=Mode.LEAVE,
        options=ModelOptions(max_batch_size=BATCH, max_queue_samples=REQUESTS),
        deployment=Deployment(
            number=0,
            policy=ExitPolicy(version=1, active=()),
            pipeline=Pipeline(backend, Plan(stages=specs, policy_version=1, mode=Mode.LEAVE)),
            points=points,
            batch_size=BATCH,
        ),
        scheduler=make_scheduler(
            PolicyName("run-through"), points, max_batch_size=BATCH, max_queue=REQUESTS
        ),
        good_inputs=_one_sample(),
    )


def _one_sample() -> Mapping[str, NDArray[Any]]:
    return {SCRIPT: np.zeros((1, STAGES, 2), np.float32)}


def operating_points() -> OperatingPoints:
    """Return four points; a stage takes 1 ms for a sample and 0.1 ms for each further one."""
    table = [[0.0, *(1e-3 + 1e-4 * n for n in range(BATCH))]] * STAGES
    points = tuple(
        OperatingPoint(
            deepest=index,
            exit=MODEL_END if index == STAGES - 1 else index,
            agreement=0.9 + index / 40,
        )
        for index in range(STAGES)
    )
    return OperatingPoints(points=points, latencies=Latencies(table))


def decision_us(policy: str) -> float:
    """Return the mean microseconds of ``next`` when it forms a batch from a long queue."""
    scheduler = make_scheduler(
        PolicyName.parse(policy), operating_points(), max_batch_size=BATCH, max_queue=10**6
    )
    submitted, spent_s, now_s = 0, 0.0, 0.0
    for _ in range(DECISIONS):
        while scheduler.queued < QUEUE:
            scheduler.submit(Submission(submitted, 1, now_s + 0.05 + submitted * 1e-4), now_s)
            submitted += 1
        began_s = time.perf_counter()
        run = scheduler.next(0, now_s)
        spent_s += time.perf_counter() - began_s
        assert isinstance(run, Run)
        scheduler.update(0, np.ones(len(run.requests), np.bool_), now_s)
        now_s += 1e-4 * len(run.requests)
    return spent_s / DECISIONS * 1e6


if __name__ == "__main__":
    main()
