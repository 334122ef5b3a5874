"""A fake engine behind real sockets, on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from offramp.server.endpoints import GrpcEndpoint, HttpEndpoint
from offramp.server.options import MIB
from offramp.testing.engine import FakeEngine

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Served:
    """The server under test, from the view of the test's thread."""

    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    address: str = ""
    url: str = ""
    grpc: GrpcEndpoint = field(init=False)
    http: HttpEndpoint = field(init=False)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do ``work`` on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def start(self) -> None:
        self.grpc = GrpcEndpoint(self.engine, max_message_bytes=MIB)
        self.http = HttpEndpoint(self.engine)
        self.address = f"127.0.0.1:{await self.grpc.start('127.0.0.1', 0)}"
        self.url = f"http://127.0.0.1:{await self.http.start('127.0.0.1', 0)}"
        await self.grpc.serving()

    async def stop(self) -> None:
        await self.grpc.stop(0.0)
        await self.http.stop()

    def hold(self) -> None:
        """From now on requests wait."""
        self.engine.hold = asyncio.Event()

    def release(self) -> None:
        """Let the waiting requests go."""
        assert self.engine.hold is not None
        self.loop.call_soon_threadsafe(self.engine.hold.set)


@pytest.fixture
def served() -> Iterator[Served]:
    """A running server over a :class:`FakeEngine`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    served = Served(engine=FakeEngine(), loop=loop)
    try:
        served.run(served.start())
        yield served
    finally:
        served.run(served.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
