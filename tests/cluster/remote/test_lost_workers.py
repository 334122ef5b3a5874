"""Workers are killed and hang at every point of the protocol; nothing is lost, double or wrong."""

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
from tests.facts import facts
from tests.fakes import fake_plan, script
from tests.unit.engine.serving import until

from offramp.cluster.remote.orders import Orders
from offramp.cluster.remote.transport import Connection
from offramp.cluster.remote.worker_messages import Ping, Ready, encode
from offramp.cluster.remote.worker_slot import FIRST_LIMIT_S, RemoteStage
from offramp.engine.common.errors import OutOfServiceError, WorkerLostError
from offramp.engine.core import Engine
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving import stream_health
from offramp.engine.stages.plan import StageSpec
from offramp.testing.backend import SCRIPT

SCRIPTS = random_scripts(60)


@pytest.mark.parametrize("policy", ["run-through", "refill"])
def test_killed_workers_cost_no_answer(policy: str, faults: Path) -> None:
    break_at(faults, *(f"kill@{point}@{n + 1}" for n, point in enumerate(POINTS)))
    expected = in_process(SCRIPTS)
    with scripted_workers(2) as backend:

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS) == expected
            statistics = engine.statistics()["fake"]
            assert statistics.answered == sum(map(len, SCRIPTS))
            assert (statistics.failed, statistics.retried) == ({}, 0)
            assert statistics.resumed >= len(POINTS)

        serve(backend, body, streams=2, scheduling=PolicyName(policy), max_batch_size=4)
        assert backend.restarts >= len(POINTS)
    assert left(faults) == []


def test_a_lost_worker_is_started_again_by_its_own_stream() -> None:
    expected = in_process(SCRIPTS[:8])
    with scripted_workers(2) as backend:

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS[:8]) == expected
            os.kill(backend.pids[0], signal.SIGKILL)
            while not backend.restarts:  # it is noticed at a request of its own
                assert await answers_of(engine, SCRIPTS[:8]) == expected
            await until(lambda: backend.in_service == 2)

        serve(backend, body, streams=2)


def test_a_worker_that_ends_while_it_loads_is_replaced(faults: Path) -> None:
    break_at(faults, "kill@before-prepare@4", "kill@before-run@2")
    expected = in_process(SCRIPTS[:6])
    with scripted_workers(1) as backend:

        async def body(engine: Engine) -> None:
            # The second worker has three stages to load; the fourth is asked for here.
            assert await answers_of(engine, SCRIPTS[:6]) == expected
            with pytest.raises(WorkerLostError, match="its process was ended by SIGKILL"):
                backend.prepare(fake_plan([0.9]).stages[0])
            assert await answers_of(engine, SCRIPTS[:6]) == expected

        serve(backend, body, streams=1)
        assert backend.restarts == 2
    assert left(faults) == []


def test_a_worker_that_hangs_is_killed_and_its_batch_resumed(faults: Path) -> None:
    break_at(faults, "hang@mid-run@5")
    scripts = [script([0.1, 0.2, 0.3]), *SCRIPTS[:8]]  # the first runs every stage
    expected = in_process(scripts)
    with scripted_workers(1, least_s=1.0) as backend:

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, scripts[:1]) == expected[:1]
            first = backend.pids
            assert await answers_of(engine, scripts[1:]) == expected[1:]
            assert backend.pids != first
            statistics = engine.statistics()["fake"]
            assert (statistics.failed, statistics.retried) == ({}, 0)
            assert statistics.resumed >= 1

        serve(backend, body, streams=1)
    assert left(faults) == []


def test_an_answer_to_an_order_that_has_a_body_loses_the_worker() -> None:
    ours, theirs = Connection.pair()
    other = Connection(theirs)
    other.send(encode(Ready(pid=1)), [bytes(8)])
    with pytest.raises(WorkerLostError, match=facts("8 bytes", "at most 0")):
        Orders(ours, WorkerLostError).ask(Ping(), 30.0)
    other.close()
    ours.close()


def test_what_is_slow_does_not_hang() -> None:
    (spec, *_) = fake_plan([0.9]).stages
    stage = RemoteStage(1, spec, "", b"")
    assert stage.limit_s(100, 1.0) == FIRST_LIMIT_S
    stage.observe(100, 0.5)
    stage.observe(50, 0.2)
    assert stage.limit_s(100, 1.0) == 5.0, "five times as slow as ever is half of it"
    assert stage.limit_s(300, 1.0) == 15.0, "more than ever was given may take longer"
    assert stage.limit_s(10, 7.0) == 7.0


def test_without_any_worker_requests_are_told_so_until_one_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_health, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(stream_health, "GIVE_UP_AFTER", 2)
    expected = in_process(SCRIPTS[:1])
    with scripted_workers(2) as backend:

        async def body(engine: Engine) -> None:
            assert await answers_of(engine, SCRIPTS[:1]) == expected
            launch_as(backend, MISSING)
            for pid in backend.pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(OutOfServiceError, match="no stream can start: worker"):
                while True:  # each stream notices at a request of its own
                    await answers_of(engine, SCRIPTS[:8])
            assert not engine.ready()
            assert backend.in_service == 0
            launch_as(backend, COMMAND)
            await until(engine.ready)
            assert await answers_of(engine, SCRIPTS[:1]) == expected

        serve(backend, body, streams=2)


def test_a_lost_slot_says_why_and_keeps_what_it_was_given() -> None:
    stages: tuple[StageSpec, ...] = fake_plan([0.9]).stages
    with scripted_workers(1) as backend:
        prepared = [backend.prepare(spec) for spec in stages]
        slot = backend.open_slot()
        carry = slot.run(prepared[0], slot.upload({SCRIPT: script([0.5, 0.7])})).carry
        assert carry is not None
        (pid,) = backend.pids
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match=f"worker {pid} was lost"):
                slot.run(prepared[1], carry)
        kept = slot.buffer(carry, np.arange(1))
        slot.close()
        again = backend.open_slot()
        answer = again.run(prepared[1], again.merge([(kept, np.arange(1))])).answer
        assert answer is not None
        np.testing.assert_array_equal(answer, script([0.5, 0.7])[:, 1])
        again.close()
        assert backend.restarts == 1


def test_a_backend_whose_workers_do_not_start_says_what_to_look_at() -> None:
    with scripted_workers(1) as backend:
        launch_as(backend, MISSING)
        with pytest.raises(WorkerLostError, match=facts("lost", "exit status 1")):
            backend.prepare(fake_plan([0.9]).stages[0])
