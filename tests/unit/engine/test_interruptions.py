"""A stage whose worker is lost runs again elsewhere: no failure, no retry, no second record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.fakes import ScriptedController, policy_of, script
from tests.unit.engine.serving import Gate, until, with_engine

from offramp.engine.common.errors import BackendError, DeadlineExceededError, WorkerLostError
from offramp.engine.core import Engine
from offramp.engine.requests.results import EngineResult
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.scheduling.scheduler import MOST_LOSSES
from offramp.engine.serving.stream_health import StreamHealth
from offramp.testing.backend import SCRIPT, FakeBackend


def loses_at(*numbers: int) -> Callable[[int, int], None]:
    """Lose the worker in the runs of these numbers, counted from 0, those of a probe included."""
    runs = iter(range(10**9))

    def on_run(stage: int, rows: int) -> None:
        if next(runs) in numbers:
            raise WorkerLostError("killed")

    return on_run


def ask(engine: Engine, *rows: list[float], **how: Any) -> asyncio.Task[EngineResult]:
    return asyncio.create_task(engine.infer("fake", {SCRIPT: script(*rows)}, **how))


@pytest.mark.parametrize("policy", ["run-through", "refill"])
@pytest.mark.parametrize("lost_in", [0, 1])
def test_a_lost_worker_costs_a_request_nothing_but_time(policy: str, lost_in: int) -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        result = await ask(engine, [0.95, 0.5], [0.5, 0.75])
        assert result.exits.tolist() == [0, -1]
        assert result.confidences.tolist() == [np.float32(0.95), 0.75]
        statistics = engine.statistics()["fake"]
        assert (statistics.failed, statistics.retried, statistics.answered) == ({}, 0, 2)
        assert (statistics.resumed, statistics.restarts) == ([2, 1][lost_in], 1)
        probe = [(0, 1), (1, 1)]
        expected = [[(0, 2), *probe, (0, 2), (1, 1)], [(0, 2), (1, 1), *probe, (1, 1)]]
        assert backend.runs == expected[lost_in]

    with_engine(body, loses_at(lost_in), scheduling=PolicyName(policy))


def test_a_sample_is_recorded_once_though_its_first_stage_runs_twice() -> None:
    controller = ScriptedController(policy_of(3, e0=0.9))

    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]
        await until(lambda: sum(map(len, controller.seen)) == 1)
        assert engine.statistics()["fake"].lost_feedback == 0

    with_engine(body, loses_at(0), controller=controller)


def test_what_ends_every_worker_fails_in_the_end_and_alone() -> None:
    def on_run(stage: int, rows: int) -> None:
        if rows == 3:
            raise WorkerLostError("killed")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BackendError, match=r"^killed$"):
            await ask(engine, *[[0.95, 0.5]] * 3)
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]
        statistics = engine.statistics()["fake"]
        assert (statistics.failed, statistics.retried) == ({"backend_error": 3}, 3)
        assert statistics.resumed == 3 * (MOST_LOSSES - 1 + 1), "as a batch, and tried again"

    with_engine(body, on_run)


def test_another_stream_resumes_what_one_lost() -> None:
    gate, lost = Gate(), asyncio.Event()

    class Opening(FakeBackend):
        def open_slot(self) -> Any:
            if lost.is_set():  # the lost stream's new worker takes its time
                gate(0, 0)
            return super().open_slot()

    first = iter([True])

    def on_run(stage: int, rows: int) -> None:
        if next(first, False):
            lost.set()
            raise WorkerLostError("killed")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]
        assert not gate._open.is_set()
        statistics = engine.statistics()["fake"]
        assert (statistics.streams_in_service, statistics.resumed) == (1, 1)
        gate.open()
        await until(lambda: engine.statistics()["fake"].streams_in_service == 2)

    with_engine(body, on_run, Opening, streams=2)


def test_who_has_no_time_left_is_not_resumed() -> None:
    gate = Gate()

    def on_run(stage: int, rows: int) -> None:
        if rows == 2:
            gate(stage, rows)
            raise WorkerLostError("killed")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        deadline_s = time.monotonic() + 0.1
        asked = ask(engine, [0.95, 0.5], [0.95, 0.5], deadline_s=deadline_s)
        await gate.wait_entered()
        await until(lambda: time.monotonic() > deadline_s)
        gate.open()
        with pytest.raises(DeadlineExceededError):
            await asked
        assert engine.statistics()["fake"].resumed == 0
        assert engine.statistics()["fake"].retried == 0

    with_engine(body, on_run)


def test_a_stream_without_a_worker_is_out_of_service_until_it_starts() -> None:
    health = StreamHealth(2)
    health.lost(1)
    assert (health.in_service, health.losses, health.given_up([0, 1])) == (1, 1, False)
    health.start_failed(1)
    health.started(1, restarted=True)
    assert (health.in_service, health.losses, health.restarts) == (2, 1, 2)
