"""Workers that hold parts of a model: who runs what, what moves on, and what kills cost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.cluster.remote.workers import (
    COMMAND,
    MISSING,
    POINTS,
    answers_of,
    break_at,
    in_process,
    launch_as,
    left,
    random_scripts,
    scripted_workers,
    serve,
)
from tests.fakes import fake_plan, script
from tests.unit.engine.serving import until

from offramp.engine.common.errors import BackendError, OutOfServiceError, WorkerLostError
from offramp.engine.core import Engine
from offramp.engine.scheduling import DeviceKind, Placement, StreamPlacement
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving import stream_health
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import StageSpec
from offramp.testing.backend import SCRIPT

SCRIPTS = random_scripts(80, seed=3)
SPLITS = ({0}, {0}, {1, 2}, {1, 2})
"""The stages of each of four workers."""


def placed(*splits: set[int]) -> Placement:
    """Streams that hold their split and no more."""
    streams = [
        StreamPlacement(kind="cpu", prefers=frozenset(split), holds=frozenset(split))
        for split in splits
    ]
    kind = DeviceKind(name="cpu")
    return Placement(stages=3, streams=tuple(streams), kinds=(kind,))


def holds(number: int, spec: StageSpec) -> bool:
    return spec.index in SPLITS[number]


@pytest.mark.parametrize("kills", [False, True])
def test_two_splits_on_four_workers_answer_as_one_process(kills: bool, faults: Path) -> None:
    if kills:
        break_at(faults, *(f"kill@{point}@{n + 2}" for n, point in enumerate(POINTS)))
    expected = in_process(SCRIPTS)
    with scripted_workers(4) as backend:
        backend.hold(holds)

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS) == expected
            statistics = engine.statistics()["fake"]
            assert statistics.answered == sum(map(len, SCRIPTS))
            assert (statistics.failed, statistics.retried) == ({}, 0)

        serve(
            backend,
            body,
            streams=4,
            placement=placed(*SPLITS),
            scheduling=PolicyName("refill"),
            max_batch_size=4,
        )
        assert [len(entry.worker.stages) for entry in backend._pool if entry.worker] == [1, 1, 2, 2]
    assert left(faults) == []


def test_a_split_without_workers_is_reported_until_one_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_health, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(stream_health, "GIVE_UP_AFTER", 2)
    expected = in_process(SCRIPTS[:8])
    with scripted_workers(3) as backend:
        backend.hold(lambda worker, spec: (spec.index > 0) == (worker == 2))

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS[:8]) == expected
            launch_as(backend, MISSING)
            (worker,) = [entry.worker for entry in backend._pool[2:] if entry.worker]
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(OutOfServiceError, match="no stream can start"):
                await answers_of(engine, SCRIPTS[:8])
            assert not engine.ready()
            with pytest.raises(OutOfServiceError):
                await answers_of(engine, [script([0.95, 0.6, 0.7])])
            launch_as(backend, COMMAND)
            await until(engine.ready)
            assert await answers_of(engine, SCRIPTS[:8]) == expected

        serve(
            backend,
            body,
            streams=3,
            placement=placed({0}, {0}, {1, 2}),
            scheduling=PolicyName("refill"),
            max_batch_size=4,
        )


def test_a_slot_runs_elsewhere_what_its_worker_does_not_hold() -> None:
    plan = fake_plan([0.9, 0.8])
    inputs = {SCRIPT: script([0.5, 0.95, 0.6], [0.95, 0.6, 0.7], [0.5, 0.6, 0.7])}
    with scripted_workers(4) as backend:
        backend.hold(holds)
        pipeline = Pipeline(backend, plan)
        for number in range(4):
            slot = backend.open_slot_of(number)
            left_at = {d.stage: d.rows.tolist() for d in pipeline.run(slot, inputs)}
            assert left_at == {0: [1], 1: [0], 2: [2]}
            slot.close()


def test_a_slot_of_no_stream_is_of_a_worker_that_is_there() -> None:
    plan = fake_plan([0.9, 0.8])
    with scripted_workers(3) as backend:
        pipeline = Pipeline(backend, plan)
        kept = [backend.open_slot_of(number) for number in (1, 2)]
        launch_as(backend, MISSING)
        (worker,) = [entry.worker for entry in backend._pool[:1] if entry.worker]
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.lose("")
        slot = backend.open_slot()
        pipeline.warm_up(slot, {SCRIPT: script([0.5, 0.6, 0.7])})
        for each in (slot, *kept):
            each.close()


def test_a_worker_is_probed_while_those_of_other_stages_are_gone() -> None:
    plan = fake_plan([0.9, 0.8])
    good, other = ({SCRIPT: script([0.5, last, 0.7])} for last in (0.6, 0.7))
    with scripted_workers(2) as backend:
        backend.hold(lambda worker, spec: (spec.index > 0) == (worker > 0))
        pipeline = Pipeline(backend, plan)
        slot = backend.open_slot_of(1)
        pipeline.warm_up(slot, good)
        slot.close()
        launch_as(backend, MISSING)
        (worker,) = [entry.worker for entry in backend._pool[1:] if entry.worker]
        os.kill(worker.pid, signal.SIGKILL)
        slot = backend.open_slot_of(0)
        pipeline.warm_up(slot, good)
        with pytest.raises(WorkerLostError):
            pipeline.warm_up(slot, other)
        slot.close()


def test_who_holds_what_changes_while_workers_serve() -> None:
    plan = fake_plan([0.9, 0.8])
    with scripted_workers(2) as backend:
        pipeline = Pipeline(backend, plan)
        stages = [entry.worker.stages for entry in backend._pool if entry.worker]
        assert list(map(len, stages)) == [3, 3]
        backend.hold(lambda worker, spec: (spec.index > 0) == (worker > 0))
        assert list(map(len, stages)) == [1, 2]
        backend.hold(lambda worker, spec: (spec.index > 0) != (worker > 0))
        assert list(map(len, stages)) == [2, 1]
        slot = backend.open_slot()
        (departure,) = pipeline.run(slot, {SCRIPT: script([0.5, 0.6, 0.7])})
        np.testing.assert_array_equal(departure.answer, script([0.5, 0.6, 0.7])[:, 2])
        backend.hold(lambda _, spec: spec.index > 0)
        assert list(map(len, stages)) == [2, 2]
        with pytest.raises(BackendError, match="no worker holds segments 0 to 0"):
            backend.prepare(plan.stages[0])
        (again,) = pipeline.run(slot, {SCRIPT: script([0.5, 0.6, 0.7])})
        np.testing.assert_array_equal(again.answer, departure.answer)
        assert sorted(map(len, stages)) == [2, 3], "who runs what nobody holds loads it for that"
        slot.close()


def test_workers_with_two_batches_at_a_time_answer_as_one_process() -> None:
    expected = in_process(SCRIPTS)
    with scripted_workers(2) as backend:
        backend.hold(lambda worker, spec: (spec.index > 0) == (worker > 0))

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS) == expected
            assert [entry.open_slots for entry in backend._pool] == [2, 2]

        serve(
            backend,
            body,
            streams=4,
            placement=placed({0}, {1, 2}, {0}, {1, 2}),
            scheduling=PolicyName("refill"),
            max_batch_size=4,
        )
