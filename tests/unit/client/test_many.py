"""Concurrent requests, retried calls, and inputs in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.unit.server.test_service import wait_until

from offramp.client import (
    AsyncClient,
    Client,
    DeadlineError,
    InvalidInputError,
    ServerBusyError,
    ServerUnavailableError,
)
from offramp.engine.common.errors import DrainingError, EngineError, QueueFullError
from offramp.engine.requests.results import EngineResult
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.array([[1, 2, 3, 0.95], [4, 5, 6, 0.25]], np.float32)


def rows(count: int) -> Iterator[dict[str, Any]]:
    for row in range(count):
        yield {"x": np.full((1, 4), row, np.float32)}


class Failing(FakeEngine):
    """Fails its first requests."""

    def __init__(self, error: EngineError, times: int) -> None:
        super().__init__()
        self.errors = [error] * times
        self.asked = 0

    async def infer(self, *arguments: Any, **how: Any) -> EngineResult:
        self.asked += 1
        if self.errors:
            raise self.errors.pop()
        return await super().infer(*arguments, **how)


def test_results_come_in_the_order_of_requests() -> None:
    with FakeServer(FakeEngine()) as server, Client(server.address) as client:
        results = list(client.infer_many("fake", rows(40), concurrency=7))
    assert [float(r.outputs["logits"][0, 0]) for r in results] == list(map(float, range(40)))


def test_requests_are_read_as_they_are_needed_and_withdrawn_if_nobody_waits() -> None:
    read = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal read
        for each in rows(1000):
            read += 1
            yield each

    with FakeServer(FakeEngine()) as server, Client(server.address) as client:
        results = client.infer_many("fake", counted(), concurrency=5)
        assert float(next(results).outputs["logits"][0, 0]) == 0.0
        assert read == 5
        server.engine.failure = QueueFullError("full")
        with pytest.raises(ServerBusyError):
            list(results)
        server.engine.failure = None
        server.hold()
        late = client.infer_many("fake", rows(9), concurrency=9, timeout_s=0.5)
        with pytest.raises(DeadlineError):
            next(late)
        assert wait_until(lambda: server.engine.waiting == 0)
        server.release()


def test_the_asynchronous_client_does_the_same() -> None:
    async def talk(address: str) -> list[float]:
        async with AsyncClient(address) as client:
            found = [
                float(result.outputs["logits"][0, 0])
                async for result in client.infer_many("fake", rows(30), concurrency=4)
            ]
            many = client.infer_many("fake", rows(30), concurrency=4)
            async with aclosing(many):
                async for _ in many:
                    break
            return found

    with FakeServer(FakeEngine()) as server:
        assert asyncio.run(talk(server.address)) == list(map(float, range(30)))
        assert wait_until(lambda: server.admission.requests == 0)


@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_concurrency_below_one_is_refused(concurrency: int) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match="is below 1"):
        next(client.infer_many("m", [], concurrency=concurrency))


def test_calls_that_nobody_answered_are_tried_again() -> None:
    engine = Failing(DrainingError("leaving"), times=2)
    with FakeServer(engine) as server, Client(server.address) as client:
        assert client.infer("fake", {"x": X}).exits.tolist() == [0, -1]
        assert engine.asked == 3
        engine.errors = [DrainingError("leaving")] * 9
        with pytest.raises(ServerUnavailableError, match="leaving"):
            client.infer("fake", {"x": X})
        assert engine.asked == 6


def test_other_errors_are_not_and_none_is_where_it_is_switched_off() -> None:
    engine = Failing(QueueFullError("full"), times=1)
    with FakeServer(engine) as server:
        with Client(server.address) as client, pytest.raises(ServerBusyError):
            client.infer("fake", {"x": X})
        assert engine.asked == 1
        engine.errors = [DrainingError("leaving")]
        with Client(server.address, retries=0) as client, pytest.raises(ServerUnavailableError):
            client.infer("fake", {"x": X})
        assert engine.asked == 2


@pytest.mark.parametrize("retries", [-1, 5])
def test_numbers_of_retries_are_bounded(retries: int) -> None:
    with pytest.raises(ValueError, match=facts(f"retries {retries}", "0 to 4")):
        Client("127.0.0.1:1", retries=retries)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("offramp-*")}


def test_inputs_are_sent_in_shared_memory() -> None:
    before = shared_files()
    with FakeServer(FakeEngine()) as server, Client(server.address) as client:
        with client.shared_inputs(4096) as region:
            for scale in (1.0, 2.0):
                result = client.infer("fake", {"x": X * scale}, shared=region)
                np.testing.assert_array_equal(result.outputs["logits"], X[:, :3] * scale)
            with pytest.raises(InvalidInputError, match=facts("byte 16000", "shared memory")):
                client.infer("fake", {"x": np.zeros((1000, 4), np.float32)}, shared=region)
        with pytest.raises(InvalidInputError, match="no shared memory region"):
            client.infer("fake", {"x": X}, shared=region)
    assert shared_files() == before
