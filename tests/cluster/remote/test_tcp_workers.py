"""Workers over a network answer like a single process, and no answer is lost when they end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cluster.remote.listening import Worker, listening_worker, reaching
from tests.cluster.remote.workers import (
    POINTS,
    answers_of,
    break_at,
    in_process,
    left,
    random_scripts,
    serve,
)
from tests.fakes import fake_plan, script
from tests.unit.engine.serving import until

from offramp.engine.common.errors import OutOfServiceError, WorkerLostError
from offramp.engine.core import Engine
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving import stream_health

SCRIPTS = random_scripts(60)


def test_killed_workers_cost_no_answer(faults: Path, tmp_path: Path) -> None:
    break_at(faults, *(f"kill@{point}@{n + 1}" for n, point in enumerate(POINTS)))
    expected = in_process(SCRIPTS)
    with (
        listening_worker(tmp_path) as one,
        listening_worker(tmp_path) as other,
        reaching([one.address, other.address]) as backend,
    ):

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS) == expected
            statistics = engine.statistics()["fake"]
            assert statistics.answered == sum(map(len, SCRIPTS))
            assert (statistics.failed, statistics.retried) == ({}, 0)
            assert statistics.resumed >= len(POINTS)

        serve(backend, body, streams=2, scheduling=PolicyName("refill"), max_batch_size=4)
        assert backend.restarts >= len(POINTS)
    assert left(faults) == []


def test_a_worker_that_ends_while_it_is_asked_for_service_is_reached_again(
    faults: Path, tmp_path: Path
) -> None:
    break_at(faults, "kill@before-hello@1", "kill@before-slot@1", "kill@before-prepare@4")
    expected = in_process(SCRIPTS[:6])
    with listening_worker(tmp_path) as worker, reaching([worker.address]) as backend:
        with pytest.raises(WorkerLostError, match=f"worker {worker.address} was lost: its conn"):
            backend.open_slot()

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS[:6]) == expected
            with pytest.raises(WorkerLostError):
                backend.prepare(fake_plan([0.9]).stages[0])
            assert await answers_of(engine, SCRIPTS[:6]) == expected

        serve(backend, body, streams=1)
        assert "ended with status -9" in worker.said()
    assert left(faults) == []


def test_a_worker_that_hangs_is_dropped_and_its_batch_resumed(faults: Path, tmp_path: Path) -> None:
    break_at(faults, "hang@mid-run@5")
    scripts = [script([0.1, 0.2, 0.3]), *SCRIPTS[:8]]  # the first runs every stage
    expected = in_process(scripts)
    with (
        listening_worker(tmp_path) as worker,
        reaching([worker.address], least_s=1.0) as backend,
    ):

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, scripts[:1]) == expected[:1]
            first = backend.pids
            assert await answers_of(engine, scripts[1:]) == expected[1:]
            assert backend.pids != first, "the serving process ended with its router's session"
            statistics = engine.statistics()["fake"]
            assert (statistics.failed, statistics.retried) == ({}, 0)
            assert statistics.resumed >= 1

        serve(backend, body, streams=1)
    assert left(faults) == []


def test_a_router_that_comes_after_another_finds_nothing_of_it(tmp_path: Path) -> None:
    expected = in_process(SCRIPTS[:4])

    async def body(engine: Engine) -> None:
        assert await answers_of(engine, SCRIPTS[:4]) == expected

    pids = []
    with listening_worker(tmp_path) as worker:
        while len(pids) < 2:
            with reaching([worker.address]) as backend:
                try:
                    serve(backend, body, streams=1)
                except WorkerLostError:
                    continue  # it was the process of the one before, which ends
                pids += backend.pids
        assert len(set(pids)) == 2
        assert worker.stop() == 0


def test_a_worker_that_is_started_again_is_reached_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_health, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(stream_health, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(stream_health, "GIVE_UP_AFTER", 2)
    expected = in_process(SCRIPTS[:4])
    first = Worker(tmp_path)
    with reaching([first.address]) as backend:

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS[:4]) == expected
            assert first.stop() == 0
            with pytest.raises(OutOfServiceError, match="no stream can start: the worker at"):
                while True:
                    await answers_of(engine, SCRIPTS[:1])
            assert (engine.ready(), backend.in_service) == (False, 0)
            again = await asyncio.to_thread(Worker, tmp_path, listen=str(first.address))
            try:
                await until(engine.ready)
                assert await answers_of(engine, SCRIPTS[:4]) == expected
            finally:
                again.stop()

        serve(backend, body, streams=1)
