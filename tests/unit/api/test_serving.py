"""A server in a thread of this process."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.facts import Told, facts
from tests.small import compile_small

import offramp
from offramp.bundle import BundleNotFoundError
from offramp.client import AsyncClient, Client, ConnectionFailedError
from offramp.server.common.errors import StartError

Inputs = NDArray[np.float32]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Inputs]:
    bundle, inputs = compile_small(tmp_path_factory.mktemp("api"))
    with np.load(inputs) as archive:
        return bundle.path, archive["x"]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "server" in thread.name}


def test_a_server_answers_in_this_process_as_a_loaded_model_does(
    small: tuple[Path, Inputs],
) -> None:
    path, x = small
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with offramp.load(path, mode="leave", state=False) as model:
        wanted = model.predict(x=x)
    with offramp.serve(path, mode="leave", state=False) as server:
        assert server.models == ("small",)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
        with Client(server.grpc_address) as client:
            found = client.infer("small", {"x": x})
        with urllib.request.urlopen(f"{server.http_address}/health/ready", timeout=30) as response:
            assert response.read() == b"ready\n"
        assert server._repr_html_().startswith(f'<a href="{server.http_address}/"')
        assert repr(server) == (
            f"<Server of small, on {server.grpc_address}, {server.http_address}/>"
        )
    assert np.array_equal(found.outputs["logits"], wanted.outputs["logits"])
    assert np.array_equal(found.exits, wanted.exits)
    assert repr(server) == "<Server of small, closed>"
    with Client(server.grpc_address) as client, pytest.raises(ConnectionFailedError):
        client.server_ready(timeout_s=5)
    server.close()
    assert threads() == set()


def test_two_servers_and_the_callers_own_event_loop(small: tuple[Path, Inputs]) -> None:
    path, x = small

    async def ask(address: str, name: str) -> list[NDArray[np.int32]]:
        async with AsyncClient(address) as client:
            results = await asyncio.gather(*(client.infer(name, {"x": x[:8]}) for _ in range(50)))
            return [result.exits for result in results]

    async def ask_both(first: str, second: str) -> None:
        one, two = await asyncio.gather(ask(first, "a"), ask(second, "b"))
        assert len(one) == len(two) == 50

    with (
        offramp.serve({"a": path}, mode="leave", state=False) as first,
        offramp.serve({"b": path}, mode="off", state=False) as second,
    ):
        asyncio.run(ask_both(first.grpc_address, second.grpc_address))
        asyncio.run(ask_both(first.grpc_address, second.grpc_address))


def test_a_server_that_is_forgotten_is_closed(small: tuple[Path, Inputs]) -> None:
    server = offramp.serve([small[0]], state=False)
    address = server.grpc_address
    assert threads()
    del server
    gc.collect()
    assert threads() == set()
    with Client(address) as client, pytest.raises(ConnectionFailedError):
        client.server_ready(timeout_s=5)


Wrong = Callable[[Path], object]


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        (
            lambda path: offramp.serve([path, path.parent / "small.ee"]),
            ValueError,
            ("'small'", "small.ee", "names: serve({'small': …"),
        ),
        (lambda path: offramp.serve([]), ValueError, ("no model", "name a bundle")),
        (
            lambda path: offramp.serve(path, port=1),  # type: ignore[call-arg]
            TypeError,
            ("serve()", "'port'", "did you mean"),
        ),
        (
            lambda path: offramp.serve(path, grpc_port=70000),
            ValueError,
            ("grpc_port 70000", "0 to 65535"),
        ),
        (
            lambda path: offramp.serve(path, max_message_mib=64, max_queue_mib=32),
            ValueError,
            ("max_queue_mib 32", "max_message_mib 64", "max_queue_mib 64 or more"),
        ),
        (
            lambda path: offramp.serve(path / "nothing"),
            BundleNotFoundError,
            ("nothing is not a bundle",),
        ),
    ],
)
def test_wrong_calls(
    small: tuple[Path, Inputs], wrong: Wrong, kind: type[Exception], told: Told
) -> None:
    with pytest.raises(kind, match=facts(*told)):
        wrong(small[0])
    assert threads() == set()


def test_a_port_that_is_taken(small: tuple[Path, Inputs]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} is in use on 127"):
            offramp.serve(small[0], grpc_port=port)
    assert threads() == set()
