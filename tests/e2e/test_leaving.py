"""Servers that are asked to stop, and clients that disconnect.

``--max-queue-delay-ms`` makes requests wait for others, so that there are requests in flight at
that time.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.leaving import codes_while_leaving

from offramp.client import AsyncClient, Client, ConnectionFailedError
from offramp.client.conversion import build_request


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.01)


def held(server: Any) -> float:
    return float(
        server.metric("offramp_queued_samples") + server.metric("offramp_in_flight_samples")
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_answers_what_is_in_flight_and_exits_0(
    launch: Any, bundle_path: Path, number: signal.Signals
) -> None:
    server = launch(
        bundle_path, "--max-batch-size=8", "--max-queue-delay-ms=3000", "--drain-delay-s=0"
    )
    inputs = server.inputs(2)

    async def scenario() -> Any:
        async with AsyncClient(server.address) as client:
            asking = asyncio.create_task(client.infer(server.model, inputs))
            await until(lambda: held(server) == 2)
            server.process.send_signal(number)
            return await asking

    assert len(asyncio.run(scenario()).exits) == 2
    assert server.process.wait(60) == 0
    log = server.log.read_text()
    assert f"{number.name}: stopping once the requests in flight are answered" in log
    assert log.endswith("stopped\n")
    with Client(server.address) as client, pytest.raises(ConnectionFailedError):
        client.server_ready(timeout_s=30)


@pytest.mark.slow
def test_under_load_calls_end_with_ok_or_unavailable(launch: Any, bundle_path: Path) -> None:
    for delay_s in (0, 0.5, 1):
        server = launch(bundle_path, f"--drain-delay-s={delay_s}")
        request = build_request(server.model, server.inputs(1), outputs=None, priority=0)
        codes = asyncio.run(codes_while_leaving(server.address, server.process, request))
        assert server.process.wait(60) == 0
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_a_disconnected_client_affects_no_other_request(launch: Any, bundle_path: Path) -> None:
    server = launch(bundle_path, "--max-batch-size=8", "--max-queue-delay-ms=60000")
    leaving_inputs, staying_inputs, last_inputs = (
        server.inputs(samples, seed) for seed, samples in enumerate((2, 1, 7))
    )

    async def scenario() -> tuple[Any, Any]:
        async with AsyncClient(server.address) as leaver, AsyncClient(server.address) as stayer:
            leaving = asyncio.create_task(leaver.infer(server.model, leaving_inputs))
            staying = asyncio.create_task(stayer.infer(server.model, staying_inputs))
            await until(lambda: held(server) == 3)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await until(lambda: server.metric("offramp_failures_total", cause="cancelled") == 2)
            # 1 + 7 fill the batch, which therefore runs at once.
            filling = await stayer.infer(server.model, last_inputs)
            return await staying, filling

    stayed, filled = asyncio.run(scenario())
    assert (len(stayed.exits), len(filled.exits)) == (1, 7)
    assert held(server) == 0
    with Client(server.address, timeout_s=120) as client:
        again = client.infer(
            server.model, {n: np.repeat(a, 8, 0) for n, a in staying_inputs.items()}
        )
    assert again.exits[0] == stayed.exits[0]
