"""The HTTP port: the protocol over REST, the status page, and metrics."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from offramp.server.common.catalog import Catalog
from offramp.server.common.served import ServedEngine
from offramp.server.pages.history import History, HistoryRecorder
from offramp.server.pages.metrics import CONTENT_TYPE, render_metrics
from offramp.server.pages.status import read_refresh, render_status
from offramp.server.ports.sockets import (
    HANDSHAKE_S,
    MAX_HTTP_CONNECTIONS,
    HttpConnections,
    bind,
)
from offramp.server.requests.http_access import token_check
from offramp.server.rest.routes import RestApi
from offramp.server.security.tls import ServerTls
from offramp.server.services.protocol_services import ProtocolServices

logger = logging.getLogger(__name__)

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response; the page only needs its own style sheet."""

_LAST_PAGES_S: Final = 0.5
"""Seconds to send the last pages when the server stops; aiohttp may wait for twice as long."""


class HttpEndpoint:
    """An aiohttp server; made and used on the event loop's thread."""

    def __init__(
        self,
        services: ProtocolServices,
        *,
        max_message_bytes: int,
        max_connections: int = MAX_HTTP_CONNECTIONS,
        tls: ServerTls | None = None,
    ) -> None:
        """Without ``tls`` nothing is encrypted."""
        self._secure: dict[str, Any] = {}
        if tls is not None:
            self._secure = {"ssl": tls.context(), "ssl_handshake_timeout": HANDSHAKE_S}
        application = make_application(services, max_message_bytes)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=_LAST_PAGES_S,
            handler_cancellation=True,  # a client that hangs up withdraws its request
        )
        self._backlog = max_connections  # accepted together, before idle ones are closed
        self._connections = HttpConnections(
            self._running_server,
            most=max_connections,
            handshake_s=0.0 if tls is None else HANDSHAKE_S,
        )
        application.middlewares.append(self._connections.note_use)
        self._closing_idle: asyncio.Task[None] | None = None
        self._sockets: list[socket.socket] = []
        self._listeners: list[asyncio.Server] = []

    def listen(self, host: str, port: int) -> int:
        """Let clients connect, or raise StartError; return the port (port 0: any free port).

        Nothing is answered before :meth:`start`, because clients take any answer to mean that the
        server is ready.
        """
        self._sockets.extend(bind(host, port, option="--http-port"))
        for one in self._sockets:
            one.listen(self._backlog)
        return int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Answer requests, also those of clients that connected before."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for one in self._sockets:
            listener = await loop.create_server(
                self._connections.accept, sock=one, backlog=self._backlog, **self._secure
            )
            self._listeners.append(listener)
        self._closing_idle = asyncio.create_task(self._connections.close_idle(), name="idle HTTP")

    async def stop(self) -> None:
        """Close all connections; harmless if it never started."""
        if self._closing_idle is not None:
            self._closing_idle.cancel()
        for listener in self._listeners:
            listener.close()
        for one in self._sockets:
            one.close()
        left = self._connections.transports()
        await self._runner.cleanup()
        for each in left:  # close() would wait for the peer to read
            each.abort()

    def _running_server(self) -> web.Server:
        assert self._runner.server is not None, "start() sets it up first"
        return self._runner.server


_Responder: TypeAlias = Callable[[web.Request], web.Response]


def make_application(services: ProtocolServices, max_message_bytes: int) -> web.Application:
    """Return an application with the pages and the protocol over HTTP."""
    engine, admission, catalog = services.engine, services.admission, services.repository.catalog
    application = web.Application(middlewares=[token_check(admission), _yield_between_pages()])
    recorder = HistoryRecorder(engine, admission.refused)
    application.cleanup_ctx.append(recorder.recorded)
    routes: dict[str, _Responder] = {
        "/": lambda request: _status(engine, recorder.history, request),
        "/history.json": lambda _: web.json_response(recorder.history.to_json()),
        "/health/live": lambda _: _liveness(engine),
        "/health/ready": lambda _: _readiness(engine, catalog),
        "/metrics": lambda _: web.Response(
            body=render_metrics(engine, admission.refused, failed_loads=len(catalog.failed)),
            headers={"Content-Type": CONTENT_TYPE},
        ),
    }
    for path, respond in routes.items():
        application.router.add_get(path, _handler(respond))
    RestApi(services, max_body_bytes=max_message_bytes).add_to(application)
    return application


def _yield_between_pages() -> Middleware:
    """Return a middleware that lets other work of the event loop run between two pages.

    Many connections may send requests together, and each may send many without waiting. Requests
    are served in order of arrival, so that a health probe is not starved.
    """
    turn = asyncio.Lock()

    @web.middleware
    async def wait_and_handle(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/v2/"):  # inference does not wait for pages
            return await handler(request)
        async with turn:
            await asyncio.sleep(0)
            return await handler(request)

    return wait_and_handle


def _handler(respond: _Responder) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        response = respond(request)
        response.headers.update(SECURITY_HEADERS)
        return response

    return handle


def _status(engine: ServedEngine, history: History, request: web.Request) -> web.Response:
    text = render_status(engine, history, refresh_s=read_refresh(request.query.get("refresh", "")))
    return web.Response(text=text, content_type="text/html")


def _readiness(engine: ServedEngine, catalog: Catalog) -> web.Response:
    if catalog.missing:
        names = ", ".join(sorted(catalog.missing))
        return _text(f"not ready: {names} could not be loaded: see the log\n", status=503)
    waiting = [model.name for model in engine.models() if not engine.ready(model.name)]
    if waiting:
        reason = "shutting down, or out of service: see the log"
        return _text(f"not ready: {', '.join(waiting)} ({reason})\n", status=503)
    return _text("ready\n") if engine.ready() else _text("not ready: shutting down\n", status=503)


def _liveness(engine: ServedEngine) -> web.Response:
    if engine.live():
        return _text("live\n")
    return _text("not live: no model could be served for too long, see the log\n", status=503)


def _text(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)
