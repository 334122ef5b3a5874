"""A server in the test's process: gRPC and HTTP on real sockets, in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from offramp.server.arguments.configuration import model_options
from offramp.server.arguments.options import (
    MIB,
    ModelRepositoryOptions,
    SecurityOptions,
    ServerOptions,
)
from offramp.server.common.served import ServedEngine
from offramp.server.frontends.frontends import FrontendOptions
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.ports.http_endpoint import HttpEndpoint
from offramp.server.repository.repository import ModelRepository
from offramp.server.requests.admission import RequestAdmission
from offramp.server.security.tls import open_tls
from offramp.server.services.protocol_services import ProtocolServices
from offramp.testing.engine import FakeEngine

_T = TypeVar("_T")
_Engine = TypeVar("_Engine", bound=ServedEngine)

_LIMIT_S = 30.0
"""Longest wait of the test's thread, in seconds; a test that hangs fails."""


class FakeServer(Generic[_Engine]):
    """A server with a fake engine; it listens inside the ``with`` block.

    ::

        with FakeServer(FakeEngine()) as server, Client(server.address) as client:
            client.infer("fake", {"x": samples})
    """

    def __init__(self, engine: _Engine, options: ServerOptions | None = None) -> None:
        """Use the limits of ``options``, except its ports and ``max_connections``.

        Without ``options``, messages may have up to 1 MiB.
        """
        self.engine = engine
        """The fake engine; its settings may be changed at any time."""
        security = options.security if options else SecurityOptions()
        self._tls = open_tls(security)
        self.admission = RequestAdmission(options)
        """Admission, with the counts of refusals."""
        self._repository_options = options.repository if options else ModelRepositoryOptions()
        self._max_message_mib = options.max_message_mib if options else 1
        self._frontends = FrontendOptions.of(options or ServerOptions())
        self.loop = asyncio.new_event_loop()
        """The server's event loop, which runs in a separate thread."""
        self.address = ""
        """``host:port`` of the gRPC port."""
        self.url = ""
        """URL of the HTTP port, with metrics and the status page."""
        self.repository: ModelRepository
        """The model repository, which contains at first the models of the engine."""
        self.grpc: GrpcEndpoint
        self.http: HttpEndpoint
        self._thread = threading.Thread(target=self.loop.run_forever, name="server")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._stop())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_LIMIT_S)
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_LIMIT_S)

    def hold(self: FakeServer[FakeEngine]) -> None:
        """Make requests wait from now on, until :meth:`release`."""
        self.engine.hold = asyncio.Event()

    def release(self: FakeServer[FakeEngine]) -> None:
        """Let the waiting requests continue."""
        assert self.engine.hold is not None, "hold() was not called"
        self.loop.call_soon_threadsafe(self.engine.hold.set)

    async def _start(self) -> None:
        named = {model.name: Path() for model in self.engine.models()}
        self.repository = ModelRepository(self.engine, self._repository_options, named=named)
        await self.repository.start()
        self._services = ProtocolServices(
            self.engine,
            admission=self.admission,
            repository=self.repository,
            read_options=model_options,
        )
        limit = self._max_message_mib * MIB
        self.grpc = GrpcEndpoint(
            self._services, max_message_bytes=limit, tls=self._tls, frontends=self._frontends
        )
        self.http = HttpEndpoint(self._services, max_message_bytes=limit, tls=self._tls)
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.http.listen('127.0.0.1', 0)}"
        self.address = f"127.0.0.1:{await self.grpc.start('127.0.0.1', 0)}"
        await self.http.start()
        await self.grpc.serving()

    async def _stop(self) -> None:
        await self.repository.stop()
        await self.grpc.stop(0.0)
        await self.http.stop()
        self._services.close()
