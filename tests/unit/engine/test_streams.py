"""Streams that break are taken out of service, tried again, and come back."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.fakes import fake_model, script
from tests.unit.engine.serving import LIMIT_S, Gate, until, with_engine

from offramp.engine.common.errors import BackendError, OutOfServiceError
from offramp.engine.core import Engine
from offramp.engine.models.served_model import warm_slots
from offramp.engine.serving.stream_health import GIVE_UP_AFTER, MOST_IN_A_ROW, TRUST_S, StreamHealth
from offramp.testing.backend import SCRIPT, FakeBackend, FakeSlot

SURE = {SCRIPT: script([0.95, 0.5])}


def in_service(engine: Engine) -> int:
    return engine.statistics()["fake"].streams_in_service


def test_one_failure_raises_no_suspicion_and_a_second_in_a_row_does() -> None:
    health = StreamHealth(2)
    assert not health.failed(0, 0.0)
    health.succeeded(0)
    assert not health.failed(0, 0.0)
    assert not health.failed(1, 0.0)
    assert health.failed(0, 0.0)
    assert health.in_service == 2


def test_failures_of_one_model_are_not_those_of_another() -> None:
    health = StreamHealth(1)
    assert not health.failed(0, 0.0, "a")
    assert not health.failed(0, 0.0, "b")
    health.succeeded(0, "b")
    assert health.failed(0, 0.0, "a")
    assert not health.failed(0, 0.0, "b")


def test_a_stream_that_passed_is_trusted_for_a_while_unless_nothing_succeeds() -> None:
    health = StreamHealth(1)
    health.passed(0, 10.0)
    just_before_s = 10.0 + TRUST_S - 0.01
    assert not any(health.failed(0, just_before_s) for _ in range(MOST_IN_A_ROW))
    assert health.failed(0, just_before_s)
    health.passed(0, 20.0)
    assert not health.failed(0, 20.0 + TRUST_S)
    assert health.failed(0, 20.0 + TRUST_S)


def test_a_stream_vouches_for_a_failure_once_something_else_succeeded() -> None:
    health = StreamHealth(1)
    health.failed(0, 0.0)
    assert not health.is_batch_fault(0, 0.0), "nothing ever ran"
    health.succeeded(0)
    health.failed(0, 0.0)
    assert health.is_batch_fault(0, 0.0)
    health.failed(0, 0.0)
    assert not health.is_batch_fault(0, 0.0), "twice in a row"
    health.passed(0, 0.0)
    assert health.is_batch_fault(0, 0.5 * TRUST_S)


def test_pauses_double_up_to_a_limit_and_reset_after_a_start() -> None:
    health = StreamHealth(1)
    pauses = [health.start_failed(0) for _ in range(10)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert (health.in_service, health.restarts) == (0, 10)
    health.started(0, restarted=True)
    assert (health.in_service, health.restarts) == (1, 11)
    assert health.start_failed(0) == 0.05
    for _ in range(5000):
        assert health.start_failed(0) <= 10.0


def test_hope_ends_when_every_stream_has_failed_often_enough() -> None:
    health = StreamHealth(2)
    for _ in range(GIVE_UP_AFTER):
        health.start_failed(0)
    for _ in range(GIVE_UP_AFTER - 1):
        health.start_failed(1)
        assert not health.given_up(range(2))
    health.start_failed(1)
    assert health.given_up(range(2))


class Device(FakeBackend):
    """Breaks and recovers."""

    def __init__(self) -> None:
        super().__init__(on_run=self._fail)
        self.broken = threading.Event()
        self.gate = Gate()

    def _fail(self, stage: int, rows: int) -> None:
        self.gate(stage, rows)
        if self.broken.is_set():
            raise BackendError("device lost")


@pytest.mark.parametrize("streams", [1, 2])
def test_a_broken_device_is_given_up_and_taken_back(
    streams: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("offramp.engine.serving.stream_health.LONGEST_PAUSE_S", 0.1)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert isinstance(backend, Device)
        backend.broken.set()
        tasks = [asyncio.create_task(engine.infer("fake", SURE)) for _ in range(40)]
        await backend.gate.wait_entered()
        assert engine.ready("fake")
        backend.gate.open()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {OutOfServiceError}
        assert {str(e) for e in errors} == {"out of service, no stream can start: device lost"}
        assert not engine.ready()
        with pytest.raises(
            OutOfServiceError, match=facts("out of service", "no stream", "device lost")
        ):
            await engine.infer("fake", SURE)
        statistics = engine.statistics()["fake"]
        assert (statistics.streams, statistics.streams_in_service) == (streams, 0)
        assert statistics.restarts >= GIVE_UP_AFTER
        assert statistics.failed == {"backend_error": 40}
        assert (statistics.queued, statistics.in_flight) == (0, 0)
        backend.broken.clear()
        await until(engine.ready)
        for _ in range(5):
            assert (await engine.infer("fake", SURE)).exits.tolist() == [0]

    with_engine(body, backend_type=Device, streams=streams)
    if streams == 1:
        said = re.findall(r"next try in ([0-9.]+) s: device lost", caplog.text)
        assert said[:5] == ["0.001", "0.002", "0.004", "0.008", "0.016"]


def test_a_slot_that_opens_at_the_third_try_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)

    class Late(FakeBackend):
        tries = 0

        def open_slot(self) -> FakeSlot:
            Late.tries += 1
            if Late.tries < 3:
                raise BackendError("no device yet")
            return super().open_slot()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert engine.ready()
        assert engine.statistics()["fake"].restarts == 3  # two that failed, one that did not
        assert backend.runs == [(0, 1), (1, 1), (0, 1)]  # it had to run a probe first

    with_engine(body, backend_type=Late)


def test_an_engine_of_which_nothing_runs_for_too_long_is_not_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("offramp.engine.serving.stream_health.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("offramp.engine.serving.availability.NOT_LIVE_AFTER_S", 0.05)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert isinstance(backend, Device)
        backend.gate.open()
        assert engine.live()
        backend.broken.set()
        with pytest.raises(BackendError):
            await engine.infer("fake", SURE)
        await until(lambda: not engine.live())
        backend.broken.clear()
        await until(engine.live)
        assert engine.ready()

    with_engine(body, backend_type=Device)


class OnDevice(FakeBackend):
    """Each of its slots is cold."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(on_cpu=False, **settings)


def test_on_a_device_every_slot_has_run_every_batch_size_twice_before_it_serves() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        once = [(stage, size) for size in (3, 2, 1) for _ in range(2) for stage in (0, 1)]
        assert backend.runs == [*once, (0, 1)]

    with_engine(body, backend_type=OnDevice, max_batch_size=3)


def test_bad_requests_do_not_cost_a_device_its_slot() -> None:
    """Two failures in a row: the slot runs a probe as it is, and is kept."""
    slots = []

    class Counted(OnDevice):
        def open_slot(self) -> FakeSlot:
            slots.append(1)
            return super().open_slot()

    def refuse_pairs(stage: int, rows: int) -> None:
        if armed and rows == 2:
            raise BackendError("no profile holds 2 rows")

    armed: list[int] = []

    async def body(engine: Engine, backend: FakeBackend) -> None:
        await engine.infer("fake", SURE)
        armed.append(1)
        pair = {SCRIPT: np.repeat(SURE[SCRIPT], 2, axis=0)}
        for _ in range(3):
            with pytest.raises(BackendError, match="no profile holds 2 rows"):
                await engine.infer("fake", pair)
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert engine.statistics()["fake"].restarts == 0

    with_engine(body, refuse_pairs, Counted, max_batch_size=2)
    assert len(slots) == 1


def test_a_device_that_fails_its_probe_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)
    broken = threading.Event()

    def fail(stage: int, rows: int) -> None:
        if broken.is_set():
            raise BackendError("device lost")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        await engine.infer("fake", SURE)
        broken.set()
        with pytest.raises(BackendError, match="device lost"):
            await engine.infer("fake", SURE)
        await until(lambda: not engine.ready())
        broken.clear()
        await until(engine.ready)
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert engine.statistics()["fake"].restarts > 1

    with_engine(body, fail, OnDevice, max_batch_size=2)


def test_slots_are_open_and_warm_before_an_engine_is_said_to_be_ready() -> None:
    backend = OnDevice()
    model = fake_model(backend, max_batch_size=2)
    slots = warm_slots(backend, {"fake": model}, 2)
    once = [(stage, size) for size in (2, 1) for _ in range(2) for stage in (0, 1)]
    assert (backend.runs, backend.open_slots) == ([*once, *once], 2)

    async def body() -> None:
        engine = Engine({"fake": model}, backend, streams=2, slots=slots)
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert backend.runs == [*once, *once, (0, 1)]
        await engine.close()

    asyncio.run(body())
    backend.close()  # finds no slot open
    assert warm_slots(FakeBackend(), {"fake": model}, 2) == []


def test_where_a_slot_cannot_be_warmed_up_none_stays_open() -> None:
    left = [1] * 8  # runs of the first slot

    def fail_later(stage: int, rows: int) -> None:
        if not left:
            raise BackendError("out of memory")
        left.pop()

    backend = OnDevice(on_run=fail_later)
    with pytest.raises(BackendError, match="out of memory"):
        warm_slots(backend, {"fake": fake_model(backend, max_batch_size=2)}, 2)
    backend.close()


def test_a_slot_that_cannot_be_warmed_up_is_a_stream_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)
    left = [BackendError("out of memory on the device")]

    def fail_once(stage: int, rows: int) -> None:
        if left:
            raise left.pop()

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert engine.statistics()["fake"].failed == {}

    with_engine(body, fail_once, OnDevice, max_batch_size=2)
    assert "cannot start" in caplog.text
    assert "out of memory on the device" in caplog.text


def test_a_stream_that_never_opens_fails_all_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)

    class CannotOpen(FakeBackend):
        def open_slot(self) -> FakeSlot:
            raise BackendError("no device")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(OutOfServiceError, match=r"out of service.*no device"):
            await engine.infer("fake", SURE)
        assert not engine.ready("fake")

    with_engine(body, backend_type=CannotOpen)


def test_a_stream_that_pauses_takes_no_wake_up_from_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does closing wait for the end of its pause."""
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("offramp.engine.serving.stream_health.LONGEST_PAUSE_S", 3600.0)

    class Half(FakeBackend):
        def open_slot(self) -> FakeSlot:
            if threading.current_thread().name == "fake-stream-0":
                raise BackendError("no device")
            return super().open_slot()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        await until(lambda: in_service(engine) == 1)
        for _ in range(20):
            assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert engine.ready()
        assert in_service(engine) == 1

    with_engine(body, backend_type=Half, streams=2)


def test_what_failed_on_a_stream_is_tried_there_if_the_other_is_out_of_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("offramp.engine.serving.stream_health.LONGEST_PAUSE_S", 3600.0)
    ready = threading.Event()
    failures = iter([True])

    class Half(FakeBackend):
        def open_slot(self) -> FakeSlot:
            if threading.current_thread().name == "fake-stream-0":
                raise BackendError("no device")
            assert ready.wait(LIMIT_S)
            return super().open_slot()

    def on_run(stage: int, rows: int) -> None:
        if next(failures, False):
            raise BackendError("out of memory")

    async def body(engine: Engine, backend: FakeBackend) -> None:
        await until(lambda: in_service(engine) == 1)
        ready.set()
        assert (await engine.infer("fake", SURE)).exits.tolist() == [0]
        assert engine.statistics()["fake"].retried == 1

    with_engine(body, on_run, backend_type=Half, streams=2)


def test_a_model_is_tried_again_on_a_stream_after_pauses_that_double() -> None:
    health = StreamHealth(2)
    assert (health.due_s(0), health.broken(0)) == (math.inf, [])
    assert [health.model_failed(0, "b", now_s) for now_s in (0.0, 1.0, 2.0)] == [0.05, 0.1, 0.2]
    assert (health.due_s(0), health.due_s(1)) == (2.2, math.inf)
    assert (health.due(0, 2.1), health.due(0, 2.2)) == ([], ["b"])
    assert health.serves(0) and health.serves(0, "a") and health.serves(1, "b")
    assert not health.serves(0, "b")
    health.model_recovered(0, "b")
    assert health.serves(0, "b") and health.due_s(0) == math.inf


def test_a_model_that_is_added_is_due_to_be_warmed_up_on_each_stream_until_it_passes() -> None:
    health = StreamHealth(2)
    for stream in range(2):
        health.model_added(stream, "b", 1.0)
    assert [health.is_cold(s, "b") for s in range(2)] == [True, True]
    assert not health.is_cold(0, "a") and not health.serves(0, "b") and health.serves(0, "a")
    assert (health.due_s(0), health.due(0, 1.0)) == (1.0, ["b"])
    health.model_failed(0, "b", 1.0)
    assert not health.is_cold(0, "b") and health.is_cold(0, "b", tried=True)
    health.model_recovered(0, "b")
    assert health.serves(0, "b") and not health.is_cold(0, "b", tried=True)
    assert not health.serves(1, "b")


def test_nothing_is_known_of_a_model_that_was_forgotten() -> None:
    health = StreamHealth(1)
    health.passed(0, 0.0, "b")
    health.failed(0, 0.1, "b")
    health.model_failed(0, "b", 0.1)
    health.failed(0, 0.1, "a")
    health.forget("b")
    assert health.serves(0, "b") and not health.is_batch_fault(0, 0.2, "b")
    assert health.due_s(0) == math.inf
    assert not health.failed(0, 0.2, "b")
    assert health.failed(0, 0.2, "a"), "the other model's are not forgotten"


def test_a_model_is_given_up_once_it_failed_often_enough_on_every_stream() -> None:
    health = StreamHealth(2)
    for stream in range(2):
        for _ in range(GIVE_UP_AFTER):
            assert not health.given_up(range(2), "b")
            health.model_failed(stream, "b", 0.0)
    assert health.given_up(range(2), "b")
    assert not health.given_up(range(2), "a") and not health.given_up(range(2))


@pytest.mark.parametrize("streams", [1, 2])
def test_a_model_that_breaks_leaves_the_others_in_service(
    streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ``b`` has a third stage, which fails from some time on, for a while."""
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("offramp.engine.serving.stream_health.LONGEST_PAUSE_S", 0.01)
    broken = threading.Event()

    def on_run(stage: int, rows: int) -> None:
        if broken.is_set() and stage == 2:
            raise BackendError("its weights are gone")

    async def body() -> None:
        backend = FakeBackend(on_run=on_run)
        models = {
            "a": fake_model(backend, streams=streams),
            "b": fake_model(backend, thresholds=(0.9, 0.9), streams=streams),
        }
        engine = Engine(models, backend, streams=streams)
        well, unsure = SURE, {SCRIPT: script([0.5, 0.5, 0.5])}
        try:
            assert (await engine.infer("b", unsure)).exits.tolist() == [-1]
            broken.set()
            while engine.ready("b"):
                with pytest.raises(BackendError, match="its weights are gone"):
                    await engine.infer("b", unsure)
            for _ in range(20):
                assert (await engine.infer("a", well)).exits.tolist() == [0]
                assert engine.ready("a")
            with pytest.raises(OutOfServiceError, match=facts("b: out of service", "no stream")):
                for _ in range(1000):
                    await engine.infer("b", unsure)
            broken.clear()
            await until(lambda: engine.ready("b"))
            assert (await engine.infer("b", unsure)).exits.tolist() == [-1]
            assert engine.statistics()["a"].failed == {}
            assert engine.statistics()["a"].restarts == 0
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
