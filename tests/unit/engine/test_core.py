"""The engine end to end over the fake backend: answers, cancelling, draining, statistics."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.fakes import fake_model, script
from tests.unit.engine.serving import LIMIT_S, Gate, until, with_engine

from offramp.engine.common.errors import (
    BadInputError,
    DeadlineExceededError,
    DrainingError,
    ModelNotServedError,
    QueueFullError,
)
from offramp.engine.core import Engine
from offramp.testing.backend import SCRIPT, FakeBackend


def test_each_sample_exits_on_its_own_and_order_is_kept() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = script([0.95, 0.1], [0.6, 0.2], [0.05, 0.3], [0.5, 0.4])
        result = await engine.infer("fake", {SCRIPT: rows})
        assert result.exits.tolist() == [0, -1, 0, -1]
        np.testing.assert_array_equal(result.outputs["answer"][[0, 2]], rows[[0, 2], 0])
        np.testing.assert_array_equal(result.outputs["answer"][[1, 3]], rows[[1, 3], 1])
        np.testing.assert_allclose(result.confidences, [0.95, 0.8, 0.95, 0.6], rtol=1e-6)
        assert result.policy_version == 7
        assert backend.runs == [(0, 4), (1, 2)]

    with_engine(body)


def test_a_request_larger_than_a_batch_is_split_and_put_together() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = np.random.default_rng(0).random((50, 2, 1), np.float32)
        rows = np.concatenate([rows, 1 - rows], axis=-1)
        result = await engine.infer("fake", {SCRIPT: rows})
        stage = np.where(result.exits == 0, 0, 1)
        np.testing.assert_array_equal(result.outputs["answer"], rows[np.arange(50), stage])
        np.testing.assert_array_equal(result.exits == 0, rows[:, 0].max(axis=1) >= np.float32(0.9))
        statistics = engine.statistics()["fake"]
        assert statistics.latency_s.count == statistics.queue_s.count == 1

    backend = with_engine(body, streams=3)
    assert max(n for _, n in backend.runs) <= 8


def test_concurrent_requests_share_a_batch() -> None:
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        first = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await gate.wait_entered()
        others = [
            asyncio.create_task(engine.infer("fake", {SCRIPT: script([p, 0.5])}))
            for p in (0.91, 0.92, 0.93)
        ]
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(first, *others)
        found = [float(r.outputs["answer"][0, 0]) for r in results]
        np.testing.assert_allclose(found, [0.95, 0.91, 0.92, 0.93], rtol=1e-6)
        assert backend.runs == [(0, 1), (0, 3)]

    with_engine(body, gate)


def test_many_requests_at_once_are_all_answered_rightly() -> None:
    async def one(engine: Engine, seed: int) -> None:
        first = np.random.default_rng(seed).random((1 + seed % 5, 2, 1), np.float32)
        rows = np.concatenate([first, 1 - first], axis=-1)
        result = await engine.infer("fake", {SCRIPT: rows})
        stage = np.where(result.exits == 0, 0, 1)
        np.testing.assert_array_equal(result.outputs["answer"], rows[np.arange(len(rows)), stage])

    async def body(engine: Engine, backend: FakeBackend) -> None:
        await asyncio.gather(*(one(engine, seed) for seed in range(300)))
        statistics = engine.statistics()["fake"]
        assert statistics.requests == 300
        assert statistics.answered == statistics.samples == sum(1 + s % 5 for s in range(300))
        assert statistics.queued == statistics.in_flight == 0
        assert statistics.latency_s.count == 300

    with_engine(body, streams=4)


def test_cancelling_withdraws_and_mates_get_their_answers() -> None:
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        blocker = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.99, 0.5])}))
        await gate.wait_entered()
        leaver = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.5, 0.5])}))
        mate = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.5, 0.7])}))
        await asyncio.sleep(0)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        gate.open()
        assert (await blocker).exits.tolist() == [0]
        np.testing.assert_allclose((await mate).outputs["answer"][0, 0], 0.7, rtol=1e-6)
        assert engine.statistics()["fake"].failed == {"cancelled": 1}
        assert backend.runs == [(0, 1), (0, 1), (1, 1)]

    with_engine(body, gate)


def test_expired_in_the_queue_is_told_and_never_runs() -> None:
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        blocker = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await gate.wait_entered()
        late = asyncio.create_task(
            engine.infer("fake", {SCRIPT: script([0.95, 0.5])}, deadline_s=time.monotonic() + 0.001)
        )
        await asyncio.sleep(0.01)
        gate.open()
        with pytest.raises(DeadlineExceededError, match="no answer within"):
            await late
        await blocker
        assert backend.runs == [(0, 1)]
        assert engine.statistics()["fake"].failed == {"expired": 1}

    with_engine(body, gate)


def test_a_full_queue_refuses_and_says_so() -> None:
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        blocker = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await gate.wait_entered()
        waiting = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match=facts("4 samples", "1 of 4")):
            await engine.infer("fake", {SCRIPT: script(*[[0.95, 0.5]] * 4)})
        assert engine.statistics()["fake"].failed == {"rejected": 4}
        gate.open()
        await asyncio.gather(blocker, waiting)

    with_engine(body, gate, max_queue_samples=4)


def test_wrong_input_and_unknown_model() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(ModelNotServedError, match=r"'fakee'.*did you mean 'fake'"):
            await engine.infer("fakee", {})
        with pytest.raises(BadInputError, match=r"fake: input 'script' is float64"):
            await engine.infer("fake", {SCRIPT: script([0.95, 0.5]).astype(np.float64)})
        with pytest.raises(BadInputError, match=r"dimension 0 \(batch\) is empty"):
            await engine.infer("fake", {SCRIPT: script([0.95, 0.5])[:0]})
        assert backend.runs == []

    with_engine(body)


def test_draining_finishes_what_is_there_and_takes_no_more() -> None:
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        running = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await gate.wait_entered()
        assert engine.ready("fake")
        assert not await engine.drain(0.0)
        assert not engine.ready()
        with pytest.raises(DrainingError):
            await engine.infer("fake", {SCRIPT: script([0.95, 0.5])})
        gate.open()
        assert await engine.drain(LIMIT_S)
        assert (await running).exits.tolist() == [0]

    with_engine(body, gate)


def test_a_leaving_engine_is_not_ready_and_answers() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        engine.leave()
        assert not engine.ready()
        assert not engine.ready("fake")
        answer = await engine.infer("fake", {SCRIPT: script([0.95, 0.5])})
        assert answer.exits.tolist() == [0]

    with_engine(body)


def test_draining_does_not_wait_for_batch_mates() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        lone = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await asyncio.sleep(0)
        assert await engine.drain(LIMIT_S)
        assert (await lone).exits.tolist() == [0]

    with_engine(body, max_delay_s=3600.0)


def test_closing_fails_what_is_unfinished() -> None:
    backend = FakeBackend()

    async def run() -> None:
        engine = Engine({"fake": fake_model(backend, max_delay_s=3600.0)}, backend)
        waiting = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(DrainingError, match="stopped before the answer"):
            await waiting

    asyncio.run(run())
    backend.close()


def test_statistics_count_where_answers_come_from() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = script([0.95, 0.5], [0.95, 0.5], [0.5, 0.5])
        await engine.infer("fake", {SCRIPT: rows})
        statistics = engine.statistics()["fake"]
        assert [(s.label, s.answered) for s in statistics.stages] == [("exit 0", 2), ("final", 1)]
        assert statistics.exit_shares() == {"exit 0": 2 / 3, "final": 1 / 3}
        assert [s.batch_size.total for s in statistics.stages] == [3, 1]

    with_engine(body)


def test_work_for_two_streams_wakes_two() -> None:
    """One request of two batches: both runs have to be under way at the same time."""
    barrier = threading.Barrier(2, timeout=LIMIT_S)

    def on_run(stage: int, rows: int) -> None:
        if stage == 0:
            barrier.wait()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        result = await engine.infer("fake", {SCRIPT: script(*[[0.95, 0.5]] * 16)})
        assert (result.exits == 0).all()

    with_engine(body, on_run, streams=2)


def test_closing_does_not_wait_for_a_stage_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.engine.serving.executor._JOIN_LIMIT_S", 0.05)
    gate = Gate()
    backend = FakeBackend(on_run=gate)

    async def run() -> None:
        engine = Engine({"fake": fake_model(backend)}, backend)
        hanging = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await gate.wait_entered()
        await engine.close()
        with pytest.raises(DrainingError):
            await hanging
        assert engine.statistics()["fake"].failed == {"stopped": 1}

    asyncio.run(run())
    gate.open()


def test_more_samples_than_the_queue_holds_are_the_callers_mistake() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BadInputError, match="send them in several requests"):
            await engine.infer("fake", {SCRIPT: script(*[[0.95, 0.5]] * 5000)})

    with_engine(body)


@pytest.mark.parametrize(
    ("how", "message"),
    [({"priority": 2**63}, "priority"), ({"deadline_s": float("nan")}, "deadline")],
)
def test_a_priority_or_deadline_that_is_none_is_the_callers_mistake(
    how: dict[str, Any], message: str
) -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BadInputError, match=message):
            await engine.infer("fake", {SCRIPT: script([0.95, 0.5])}, **how)
        assert engine.ready()

    with_engine(body)


def test_an_overloaded_engine_refuses_before_a_request_is_made() -> None:
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        held = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await gate.wait_entered()
        admission = engine._executor._models["fake"].scheduler._admission
        waiting = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.95, 0.5])}))
        await until(lambda: engine.statistics()["fake"].queued == 1)
        admission.keep(2, time.monotonic())
        admission.lose(10**9, time.monotonic())  # so that chance lets nobody in
        with pytest.raises(QueueFullError, match=r"overloaded: samples wait in front \(1\).*later"):
            await engine.infer(
                "fake", {SCRIPT: script([0.95, 0.5])}, deadline_s=time.monotonic() + 0.2
            )
        counted = engine.statistics()["fake"]
        assert (counted.requests, counted.failed["rejected"]) == (2, 1)
        gate.open()
        await asyncio.gather(held, waiting)

    with_engine(body, gate)
