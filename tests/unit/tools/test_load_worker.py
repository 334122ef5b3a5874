"""The sender, over a real channel to a fake engine on the same loop: no process, no waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.facts import tells

from offramp.certify.decision import MODEL_END
from offramp.engine.common.errors import BackendError, DeadlineExceededError, QueueFullError
from offramp.server.arguments.options import MIB
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.ports.http_endpoint import HttpEndpoint
from offramp.server.services.protocol_services import ProtocolServices
from offramp.testing.engine import FakeEngine
from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.load.alarm import LoopAlarm, make_alarm
from offramp.tools.bench.load.load_settings import LoadSettings
from offramp.tools.bench.load.sender import Report, Sender, Task
from offramp.tools.bench.load.shares import Share, serialise_requests
from offramp.tools.bench.load.transports import PROTOCOLS, Transport, make_transport

SAMPLES = 6


def task(
    *,
    arrivals_s: list[float] | None = None,
    concurrency: int | None = None,
    answer: str | None = "logits",
    **settings: Any,
) -> Task:
    made = LoadSettings(
        **{
            "address": "127.0.0.1:1",
            "model": "fake",
            "duration_s": 5.0,
            "warm_up_s": 0.0,
            "concurrency": concurrency,
            **settings,
        }
    )
    x = np.zeros((SAMPLES, 4), np.float32)
    x[:, 1], x[:, 3] = 1.0, [0.95, 0.5] * 3  # exit 0, the model's end, exit 0 …
    x[:, 2] = np.arange(SAMPLES) / 10
    samples = np.arange(SAMPLES if arrivals_s is None else len(arrivals_s)) % SAMPLES
    return Task(
        settings=made,
        share=Share(
            arrivals_s=None if arrivals_s is None else np.array(arrivals_s),
            concurrency=concurrency,
            samples=samples,
        ),
        requests=serialise_requests(made, {"x": x}, samples),
        answer=answer,
    )


@asynccontextmanager
async def transport_to(engine: FakeEngine, given: Task) -> AsyncIterator[Transport]:
    """Serve an engine, and connect in the way that the task says."""
    services = ProtocolServices(engine)
    endpoint = GrpcEndpoint(services, max_message_bytes=MIB)
    pages = HttpEndpoint(services, max_message_bytes=MIB)
    rest = given.settings.protocol == "rest"
    ports = await endpoint.start("127.0.0.1", 0), pages.listen("127.0.0.1", 0)
    await pages.start()
    try:
        transport = make_transport(
            given.settings.protocol, f"127.0.0.1:{ports[rest]}", given.requests, given.access
        )
        await transport.open()
        try:
            yield transport
        finally:
            await transport.close()
    finally:
        await endpoint.stop(0.0)
        await pages.stop()
        services.close()


def sent(engine: FakeEngine, given: Task) -> Report:
    async def scenario() -> Report:
        async with transport_to(engine, given) as transport, asyncio.timeout(60):
            sender = Sender(given, transport, start_s=time.monotonic())
            concurrency = given.share.concurrency
            return await (sender.closed_loop(concurrency) if concurrency else sender.open_loop())

    return asyncio.run(scenario())


EVERY_WAY = pytest.mark.parametrize("protocol", PROTOCOLS)


@EVERY_WAY
def test_an_open_loop_sends_each_request_once_and_reads_its_answer(protocol: str) -> None:
    engine = FakeEngine()
    due = [k / 1000 for k in range(20)]
    report = sent(engine, task(arrivals_s=due, protocol=protocol, http="127.0.0.1:1"))
    records = report.records
    assert (records.status == Status.OK).all()
    assert records.sample.tolist() == [k % SAMPLES for k in range(20)]
    assert records.exit.tolist() == [0, MODEL_END] * 10
    assert (records.prediction == 1).all()
    arrived = sorted(round(float(call.inputs["x"][0, 2]) * 10) for call in engine.calls)
    assert arrived == sorted(k % SAMPLES for k in range(20))
    assert report.causes == {}
    assert (records.sent_s >= records.intended_s).all()
    assert (records.ended_s >= records.sent_s).all()


def test_what_is_due_is_sent_late_rather_than_not() -> None:
    report = sent(FakeEngine(), task(arrivals_s=[0.0] * 30))
    assert (report.records.status == Status.OK).all()
    assert (report.records.intended_s == 0.0).all()


@EVERY_WAY
@pytest.mark.parametrize(
    ("failure", "status", "cause"),
    [
        (QueueFullError("9 of 9 wait"), Status.REJECTED, "RESOURCE_EXHAUSTED: 9 of 9 wait"),
        (DeadlineExceededError("late"), Status.EXPIRED, "DEADLINE_EXCEEDED: late"),
        (BackendError("broken"), Status.FAILED, "INTERNAL: broken"),
    ],
)
def test_failures_are_counted_by_kind(
    failure: Exception, status: Status, cause: str, protocol: str
) -> None:
    given = task(arrivals_s=[0.0, 0.001, 0.002], protocol=protocol, http="127.0.0.1:1")
    report = sent(FakeEngine(failure=failure), given)
    assert (report.records.status == status).all()
    assert report.causes == {cause: 3}


def test_causes_are_those_after_the_warm_up() -> None:
    engine = FakeEngine(failure=QueueFullError("full"))
    report = sent(engine, task(arrivals_s=[0.0, 0.001, 0.01], warm_up_s=0.005))
    assert report.causes == {"RESOURCE_EXHAUSTED: full": 1}
    assert len(report.records.sample) == 3


def test_an_answer_that_is_not_there_fails_its_request() -> None:
    report = sent(FakeEngine(), task(arrivals_s=[0.0], answer="scores"))
    assert report.records.status.tolist() == [Status.FAILED]
    [said] = list(report.causes)
    tells(said, "unreadable response", "'scores'")


async def _held(engine: FakeEngine, given: Task) -> Report:
    engine.hold = asyncio.Event()
    async with transport_to(engine, given) as transport, asyncio.timeout(60):
        return await Sender(given, transport, start_s=time.monotonic()).open_loop()


def test_what_is_not_answered_in_the_end_is_withdrawn() -> None:
    report = asyncio.run(_held(FakeEngine(), task(arrivals_s=[0.0, 0.001], drain_s=0.05)))
    assert report.records.status.tolist() == [Status.UNANSWERED] * 2
    assert report.causes == {"no answer within 0.05 s of the end (--drain-s)": 2}
    assert np.isfinite(report.records.sent_s).all()


def test_beyond_the_limit_in_flight_requests_are_counted_and_not_sent() -> None:
    given = task(arrivals_s=[k / 1000 for k in range(10)], max_in_flight=4, drain_s=0.05)
    engine = FakeEngine()
    report = asyncio.run(_held(engine, given))
    assert (report.records.status == Status.UNANSWERED).all()
    assert np.isfinite(report.records.sent_s).tolist() == [True] * 4 + [False] * 6
    assert report.causes["not sent: 4 were under way (--max-in-flight)"] == 6
    assert sum(report.causes.values()) == 10
    assert len(engine.calls) == 4


def test_a_closed_loop_begins_no_earlier_than_the_load_though_timers_ring_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep = asyncio.sleep

    async def rings_early(delay_s: float) -> None:
        await sleep(max(delay_s - 0.05, 0.0))

    async def scenario() -> Report:
        async with transport_to(FakeEngine(), given) as transport, asyncio.timeout(60):
            sender = Sender(given, transport, start_s=time.monotonic() + 0.1)
            monkeypatch.setattr(asyncio, "sleep", rings_early)
            return await sender.closed_loop(2)

    given = task(concurrency=2, duration_s=0.2)
    records = asyncio.run(scenario()).records
    assert records.intended_s.min() >= 0.0
    assert (records.status == Status.OK).all()


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    engine = FakeEngine()
    report = sent(engine, task(concurrency=3, duration_s=0.5))
    assert len(engine.calls) == len(report.records.sample) >= 3
    assert (report.records.status == Status.OK).all()
    assert report.records.peak_in_flight() <= 3
    assert report.records.sample.tolist() == [k % SAMPLES for k in range(len(engine.calls))]


async def _rung(make: Callable[[Callable[[], None]], Any]) -> list[float]:
    rung: list[float] = []
    done = asyncio.Event()

    def ring() -> None:
        rung.append(time.monotonic())
        if len(rung) < 3:
            alarm.set(rung[-1] + 0.002)
        else:
            done.set()

    alarm = make(ring)
    alarm.set(0.0)  # long past: at once
    await asyncio.wait_for(done.wait(), 60)
    alarm.set(time.monotonic() + 0.001)
    alarm.close()
    await asyncio.sleep(0.01)  # no more after close
    return rung


def _loop_alarm(callback: Callable[[], None]) -> LoopAlarm:
    return LoopAlarm(asyncio.get_running_loop(), callback)


@pytest.mark.parametrize("make", [make_alarm, _loop_alarm])
def test_an_alarm_rings_when_it_was_set_and_not_before(make: Any) -> None:
    first, second, third = asyncio.run(_rung(make))
    # the loop's clock may be a millisecond ahead of the monotonic one
    assert second - first >= 0.002 - 0.001
    assert third - second >= 0.002 - 0.001
