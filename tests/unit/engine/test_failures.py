"""Failed batches are retried, in halves and elsewhere; a request that fails alone gets an error."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.fakes import script
from tests.unit.engine.serving import LIMIT_S, Gate, until, with_engine

from offramp.engine.common.errors import BackendError, DeadlineExceededError
from offramp.engine.core import Engine
from offramp.engine.requests.results import EngineResult
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.backend_protocol import Rows, StageResult, TensorBatch
from offramp.testing.backend import SCRIPT, FakeBackend, FakeBatch, FakeSlot

REFILL = PolicyName("refill")
BAD = 0.123
"""A request with this probability is one that no run survives."""


def fails_at(*numbers: int, error: Exception) -> Callable[[int, int], None]:
    """Raise in the runs of these numbers, counted from 0."""
    runs = iter(range(10**9))

    def on_run(stage: int, rows: int) -> None:
        if next(runs) in numbers:
            raise error

    return on_run


class PoisonedSlot(FakeSlot):
    def run(self, stage: Any, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        assert isinstance(batch, FakeBatch)
        if (batch.script[:, 0, 0] == np.float32(BAD)).any():
            raise BackendError("token out of range")
        return super().run(stage, batch, threshold)


class Poisoned(FakeBackend):
    def open_slot(self) -> FakeSlot:
        super().open_slot()
        return PoisonedSlot(self)


def ask(engine: Engine, *rows: list[float], **how: Any) -> asyncio.Task[EngineResult]:
    return asyncio.create_task(engine.infer("fake", {SCRIPT: script(*rows)}, **how))


@pytest.mark.parametrize("error", [BackendError("out of memory"), ZeroDivisionError()])
def test_a_batch_that_fails_once_is_answered_all_the_same(error: Exception) -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        result = await ask(engine, [0.95, 0.5])
        assert result.exits.tolist() == [0]
        statistics = engine.statistics()["fake"]
        assert (statistics.failed, statistics.retried, statistics.answered) == ({}, 1, 1)

    with_engine(body, fails_at(0, error=error))


@pytest.mark.parametrize(
    ("error", "message"),
    [(BackendError("out of memory"), "out of memory"), (ZeroDivisionError(), "ZeroDivision")],
)
def test_a_request_that_fails_twice_is_told_why(error: Exception, message: str) -> None:
    """In between the stream has shown that it runs known good samples."""

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BackendError, match=facts("own data", message)):
            await ask(engine, [0.95, 0.5])
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]
        statistics = engine.statistics()["fake"]
        assert (statistics.failed, statistics.retried) == ({"backend_error": 1}, 1)

    with_engine(body, fails_at(0, 1, error=error))


def test_requests_of_a_failed_batch_are_tried_by_halves_on_the_other_stream() -> None:
    where: list[tuple[str, int]] = []

    def on_run(stage: int, rows: int) -> None:
        where.append((threading.current_thread().name, rows))
        if len(where) == 1:
            raise BackendError("out of memory")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        tasks = [ask(engine, [p, 0.5]) for p in (0.91, 0.92, 0.93)]
        results = await asyncio.gather(*tasks)
        found = [float(result.outputs["answer"][0, 0]) for result in results]
        np.testing.assert_allclose(found, [0.91, 0.92, 0.93], rtol=1e-6)
        assert engine.statistics()["fake"].latency_s.count == 3

    with_engine(body, on_run, streams=2, max_batch_size=3, max_delay_s=3600.0)
    (failed, size), *again = where
    other = {"fake-stream-0": "fake-stream-1", "fake-stream-1": "fake-stream-0"}[failed]
    assert size == 3
    assert again == [(other, 2), (other, 1)]


def test_rows_that_are_tried_again_get_their_own_answers() -> None:
    """Row 1 has left when stage 1 fails: rows 0, 2 and 3 restart without it."""

    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = script([0.5, 0.1], [0.95, 0.2], [0.6, 0.3], [0.7, 0.4])
        result = await engine.infer("fake", {SCRIPT: rows})
        assert result.exits.tolist() == [-1, 0, -1, -1]
        np.testing.assert_array_equal(result.outputs["answer"][[0, 2, 3]], rows[[0, 2, 3], 1])
        np.testing.assert_array_equal(result.outputs["answer"][1], rows[1, 0])
        assert backend.runs == [(0, 4), (1, 3), (0, 3), (1, 3)]

    with_engine(body, fails_at(1, error=BackendError("out of memory")))


def test_without_time_for_a_second_try_there_is_none() -> None:
    """Two stages of 10 s do not fit the 15 s."""

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BackendError, match="out of memory"):
            await ask(engine, [0.95, 0.5])
        assert backend.runs == [(0, 1)]
        assert engine.statistics()["fake"].retried == 0

    fails = fails_at(0, error=BackendError("out of memory"))
    delay = PolicyName("delay")  # which serves what will be late
    with_engine(body, fails, scheduling=delay, stage_s=10.0, slo_ms=15_000.0)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_bad_request_however_often_it_comes_stops_no_stream(streams: int) -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        for _ in range(20):
            with pytest.raises(BackendError, match="token out of range"):
                await ask(engine, [BAD, 0.5])
            assert engine.ready()
            assert engine.statistics()["fake"].streams_in_service == streams
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]
        statistics = engine.statistics()["fake"]
        assert (statistics.failed, statistics.retried) == ({"backend_error": 20}, 20)
        assert statistics.restarts == 0

    with_engine(body, backend_type=Poisoned, streams=streams)


def test_one_bad_request_fails_alone() -> None:
    """Four requests in one batch, one of which no run survives: three get their answers."""

    async def body(engine: Engine, backend: FakeBackend) -> None:
        tasks = [ask(engine, [p, 0.7]) for p in (0.91, BAD, 0.6, 0.93)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], BackendError)
        answered = [r for r in results if isinstance(r, EngineResult)]
        assert [r.exits.tolist() for r in answered] == [[0], [-1], [0]]
        statistics = engine.statistics()["fake"]
        assert statistics.failed == {"backend_error": 1}
        assert (statistics.answered, statistics.retried) == (3, 4 + 2)

    with_engine(body, backend_type=Poisoned, max_batch_size=4, max_delay_s=3600.0)


def test_a_failed_compaction_fails_only_samples_without_answer() -> None:
    class CannotSelect(FakeSlot):
        def select(self, batch: TensorBatch, rows: Rows) -> FakeBatch:
            raise MemoryError

    class Backend(FakeBackend):
        def open_slot(self) -> FakeSlot:
            super().open_slot()
            return CannotSelect(self)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        leaves, stays = ask(engine, [0.95, 0.5]), ask(engine, [0.5, 0.5])
        assert (await leaves).exits.tolist() == [0]
        with pytest.raises(BackendError, match="MemoryError"):
            await stays
        assert (await ask(engine, [0.95, 0.5], [0.95, 0.5])).exits.tolist() == [0, 0]

    with_engine(body, backend_type=Backend, max_batch_size=2, max_delay_s=3600.0)


def test_what_is_left_of_a_failed_request_does_not_run() -> None:
    def on_run(stage: int, rows: int) -> None:
        if rows == 8:
            raise BackendError("broken")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BackendError, match="broken"):
            await ask(engine, *[[0.95, 0.5]] * 24)
        statistics = engine.statistics()["fake"]
        assert statistics.failed == {"backend_error": 24}
        assert [run for run in backend.runs if run[1] == 8] == [(0, 8), (0, 8)]
        assert (statistics.queued, statistics.in_flight) == (0, 0)

    with_engine(body, on_run)


@pytest.mark.parametrize("streams", [1, 2])
def test_survivors_that_cannot_be_buffered_are_tried_again(streams: int) -> None:
    class CannotPark(FakeSlot):
        def buffer(self, batch: TensorBatch, rows: Rows) -> FakeBatch:
            raise MemoryError

    class Backend(FakeBackend):
        def open_slot(self) -> FakeSlot:
            super().open_slot()
            return CannotPark(self)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        tasks = [ask(engine, [p, p]) for p in (0.5, 0.95, 0.6, 0.7)]
        results = await asyncio.gather(*tasks)
        assert [r.exits.tolist() for r in results] == [[-1], [0], [-1], [-1]]
        found = [float(r.outputs["answer"][0, 0]) for r in results]
        np.testing.assert_allclose(found, [0.5, 0.95, 0.6, 0.7], rtol=1e-6)
        assert engine.statistics()["fake"].retried == 3

    with_engine(body, backend_type=Backend, streams=streams, scheduling=REFILL)


@pytest.mark.parametrize("scheduling", ["run-through", "refill", "rebatch"])
def test_under_many_failures_every_request_gets_a_correct_answer_or_an_error(
    scheduling: str,
) -> None:
    counted = iter(range(10**9))

    def on_run(stage: int, rows: int) -> None:
        if next(counted) % 7 == 6:
            raise BackendError("now and then")

    async def one(engine: Engine, seed: int) -> int:
        first = np.random.default_rng(seed).random((1 + seed % 5, 3, 1), np.float32)
        rows = np.concatenate([first, 1 - first], axis=-1)
        try:
            result = await engine.infer("fake", {SCRIPT: rows})
        except BackendError as error:
            assert str(error).endswith("now and then")
            return 0
        stage = np.where(result.exits < 0, 2, result.exits)
        np.testing.assert_array_equal(result.outputs["answer"], rows[np.arange(len(rows)), stage])
        return 1

    async def body(engine: Engine, backend: FakeBackend) -> None:
        answered = sum(await asyncio.gather(*(one(engine, seed) for seed in range(300))))
        assert 150 < answered < 300
        assert await engine.drain(30.0)
        statistics = engine.statistics()["fake"]
        assert statistics.samples == statistics.answered + sum(statistics.failed.values())
        assert (statistics.queued, statistics.in_flight) == (0, 0)
        assert statistics.latency_s.count == answered

    policy = PolicyName(scheduling)
    with_engine(body, on_run, thresholds=(0.7, 0.8), streams=3, scheduling=policy)


def test_a_cancelled_request_is_not_tried_again() -> None:
    gate = Gate()

    def on_run(stage: int, rows: int) -> None:
        gate(stage, rows)
        raise BackendError("broken")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        task = ask(engine, [0.95, 0.5])
        await gate.wait_entered()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert await engine.drain(30.0)
        assert engine.statistics()["fake"].failed == {"cancelled": 1}
        assert backend.runs == [(0, 1)]

    with_engine(body, on_run)


def test_an_answer_of_another_shape_fails_its_request_only() -> None:
    """The two samples of a request leave at exits that disagree on the number of classes."""

    class OddSlot(FakeSlot):
        def run(
            self, stage: Any, batch: TensorBatch, threshold: float | None = None
        ) -> StageResult:
            result = super().run(stage, batch, threshold)
            if stage.index == 0 or result.answer is None:
                return result
            return result._replace(answer=np.zeros((len(batch), 3), np.float32))

    class Odd(FakeBackend):
        def open_slot(self) -> FakeSlot:
            super().open_slot()
            return OddSlot(self)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BackendError, match="stage 1"):
            await ask(engine, [0.95, 0.5], [0.5, 0.5])
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]
        statistics = engine.statistics()["fake"]
        assert (statistics.failed, statistics.answered) == ({"backend_error": 1}, 2)

    with_engine(body, backend_type=Odd)


def test_a_slot_that_cannot_be_closed_blocks_no_other() -> None:
    class StuckSlot(FakeSlot):
        def close(self) -> None:
            super().close()
            raise BackendError("busy")

    class Stuck(FakeBackend):
        def open_slot(self) -> FakeSlot:
            super().open_slot()
            return StuckSlot(self)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(BackendError, match="out of memory"):
            await ask(engine, [0.95, 0.5])
        assert (await ask(engine, [0.95, 0.5])).exits.tolist() == [0]

    with_engine(body, fails_at(0, 1, error=BackendError("out of memory")), backend_type=Stuck)


def test_what_is_left_of_a_late_request_does_not_run() -> None:
    """Half of a request runs while the other half, in the queue, is seen to be too late."""
    gate = Gate()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        deadline_s = time.monotonic() + 0.1
        late = ask(engine, *[[0.5, 0.5]] * 10, deadline_s=deadline_s)
        await gate.wait_entered()
        await until(lambda: time.monotonic() >= deadline_s)
        gate.open()
        with pytest.raises(DeadlineExceededError):
            await late
        assert await engine.drain(LIMIT_S)
        assert backend.runs == [(0, 8)]
        assert engine.statistics()["fake"].failed == {"expired": 10}

    with_engine(body, gate)
