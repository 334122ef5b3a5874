"""The two ports of a server: gRPC for inference, health and reflection; HTTP for its pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import grpc.aio
from aiohttp import web
from aiohttp.typedefs import Middleware
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from offramp.proto.descriptors import FILE, SERVICE
from offramp.server.arguments.options import MAX_CONNECTIONS, KeepaliveOptions
from offramp.server.common.catalog import Catalog
from offramp.server.common.errors import StartError
from offramp.server.common.served import ServedEngine
from offramp.server.pages.history import History, HistoryRecorder
from offramp.server.pages.metrics import CONTENT_TYPE, render_metrics
from offramp.server.pages.status import read_refresh, render_status
from offramp.server.requests.http_access import token_check
from offramp.server.rest.routes import RestApi
from offramp.server.security.tls import ServerTls
from offramp.server.services.protocol_services import ProtocolServices
from offramp.server.services.service import GuardedServer, inference_handler
from offramp.server.sockets import (
    HANDSHAKE_S,
    MAX_HTTP_CONNECTIONS,
    HttpConnections,
    addresses_of,
    bind,
    close_connections,
    hang_up,
    join_address,
    open_connections,
    refuse_connections,
    send_away,
)

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Between two looks at the engine; it tells nobody when its readiness changes."""

_STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class HealthReporter:
    """Reports each model as the engine says, and server and service as ready with all models.

    Watchers are told of changes. To be used on the event loop's thread.
    """

    def __init__(self, engine: ServedEngine, catalog: Catalog) -> None:
        self.servicer: Final = health.aio.HealthServicer()
        """To be added to the server."""
        self._engine = engine
        self._catalog = catalog
        self._reported: dict[str, bool] = {}
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report now, and follow the engine from here on."""
        await self._report()
        self._following = asyncio.create_task(self._follow(), name="health")

    async def leave(self) -> None:
        """Report everything as not serving, for good."""
        await self.stop()
        await self.servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Follow the engine no more; harmless if it was never followed."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait((following,))

    async def _follow(self) -> None:
        try:
            while True:
                await asyncio.sleep(POLL_S)
                await self._report()
        except Exception:
            logger.exception("health is no longer followed")

    async def _report(self) -> None:
        readiness = dict(self._readiness())
        gone = self._reported.keys() - readiness.keys()
        for name, ready in [*readiness.items(), *dict.fromkeys(gone, False).items()]:
            if self._reported.get(name) != ready:
                if name in self._reported:
                    logger.warning("%s: %s", name or "server", "ready" if ready else "not ready")
                self._reported[name] = ready
                await self.servicer.set(name, _STATUS[ready])

    def _readiness(self) -> Iterator[tuple[str, bool]]:
        for name in ("", SERVICE):
            yield name, self._engine.ready()
        for name in self._catalog.names():
            yield name, self._catalog.ready(name)


QUIET_S: Final = 1.0
"""Without a request for so long, clients that were sent away have no more to say."""

_PAUSE_S: Final = 0.05
"""Between two looks for connections that are to be sent away."""

_LOOK_S: Final = 1.0
"""Between two looks for connections whose clients do not read."""

REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
"""The service without its preview version, whose messages are the same."""

SERVICES: Final = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1)
"""Names of services that reflection lists."""


class GrpcEndpoint:
    """A grpc.aio server; made and used on the event loop's thread."""

    def __init__(
        self,
        services: ProtocolServices,
        *,
        max_message_bytes: int,
        max_connections: int = MAX_CONNECTIONS,
        keepalive: KeepaliveOptions | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """Without ``tls`` nothing is encrypted."""
        self._tls = tls
        self._reception = reception = services.reception
        self._health = HealthReporter(services.engine, services.repository.catalog)
        self._port: int | None = None
        self._closing: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=[
                *_channel_options(max_message_bytes),
                ("grpc.max_allowed_incoming_connections", max_connections),
                *_CONNECTION_OPTIONS,
                *_keepalive_options(keepalive or KeepaliveOptions()),
            ]
        )
        handler = inference_handler(services.method, reception)
        self._server.add_generic_rpc_handlers((handler,))
        guarded = GuardedServer(self._server, reception)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, guarded)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(SERVICES, pool=_reflection_pool()),
            GuardedServer(self._server, reception, also=(REFLECTION_V1,)),
        )

    @property
    def requests(self) -> int:
        """Inference requests that are being answered."""
        return self._reception.requests

    async def start(self, host: str, port: int) -> int:
        """Listen, or raise StartError; return the port, which the system chooses for port 0."""
        address = join_address(host, port)
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._tls.credentials())
        except RuntimeError as error:
            raise StartError(f"cannot listen for gRPC on {address}: {error}") from error
        await self._server.start()
        self._port = port
        self._closing = asyncio.create_task(self._close_offenders(port), name="offenders")
        return port

    async def serving(self) -> None:
        """Start to report models, service and server as ready as the engine is."""
        await self._health.start()

    async def leaving(self) -> None:
        """Report everything as not serving, for good; calls are answered all the same."""
        await self._health.leave()

    async def send_away(self, limit_s: float) -> None:
        """Have all clients open their calls elsewhere, and answer those that come all the same.

        With TLS they are not told: no frame can be put between gRPC's, which alone encrypts.

        Until no connection is left, or no request has come for a while: streams that idle end with
        their connection. At most for ``limit_s``.
        """
        assert self._port is not None, "start() comes first"
        refuse_connections(self._port)
        told: set[tuple[str, int]] = set()
        now_s = time.monotonic()
        ends_s, quiet_s, admitted = now_s + limit_s, now_s + QUIET_S, self._reception.admitted
        while (there := open_connections(self._port)).peers and now_s < min(ends_s, quiet_s):
            if self._tls is None and (untold := there.greeted - told):
                async with self._reception.answers.held() as writing:
                    told |= send_away(self._port, untold - addresses_of(writing))
            if self._reception.requests or self._reception.admitted != admitted:
                admitted, quiet_s = self._reception.admitted, time.monotonic() + QUIET_S
            await asyncio.sleep(_PAUSE_S)
            now_s = time.monotonic()

    async def _close_offenders(self, port: int) -> None:
        """Close connections that reset too many calls, or do not read their answers."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._reception.offended.wait()
            if offenders := self._reception.offenders():
                close_connections(port, addresses_of(offenders))
                for peer, reason in offenders.items():
                    self._reception.log_closed(peer, reason)

    async def stop(self, grace_s: float) -> None:
        """End all connections, after at most ``grace_s`` for the last answers to be written.

        Calls of whatever state then end with UNAVAILABLE, as the connection is lost to them.
        """
        if self._closing is not None:
            self._closing.cancel()
        await self._health.stop()
        port, self._port = self._port, None
        if port is not None:
            ends_s = time.monotonic() + grace_s
            while self._reception.requests and time.monotonic() < ends_s:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)
            hang_up(port)
        await self._server.stop(None)


MAX_CALLS: Final = 1024
"""Of a connection at once; gRPC's clients keep further ones waiting at their side."""

_CONNECTION_OPTIONS: Final = (
    ("grpc.max_concurrent_streams", MAX_CALLS),
    # It would also refuse calls (REFUSED_STREAM) of clients that keep to the limit, as calls that
    # have just ended still count there.
    ("grpc.http.overload_protection", 0),
    # A call that has waited for so many seconds until Python takes it is dropped: a flood of calls
    # that are reset at once is over as much sooner. gRPC's own default is 30 s.
    ("grpc.server_max_unrequested_time_in_server", 5),
    # From accepting a connection to its first SETTINGS; gRPC's own default is 120 s.
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1e3)),
    # Without a call; clients connect again with their next one, and hardly notice.
    ("grpc.max_connection_idle_ms", 60_000),
)


def _keepalive_options(options: KeepaliveOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.keepalive_time_ms", options.grpc_keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", options.grpc_keepalive_timeout_ms),
        (
            "grpc.keepalive_permit_without_calls",
            int(options.grpc_keepalive_permit_without_calls),
        ),
        ("grpc.http2.max_pings_without_data", options.grpc_http2_max_pings_without_data),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            options.grpc_http2_min_recv_ping_interval_without_data_ms,
        ),
        ("grpc.http2.max_ping_strikes", options.grpc_http2_max_ping_strikes),
    ]


def _channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # No algorithm but "identity": gRPC decompresses a message before it compares its size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # gRPC lets a second server share the port, and splits the calls between the two.
        ("grpc.so_reuseport", 0),
    ]


def _reflection_pool() -> DescriptorPool:
    """Our messages and those of gRPC's own services; their home is the process-wide pool."""
    pool = DescriptorPool()
    for file in (FILE, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    return pool


SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
"""On every response; the page needs nothing but its own style sheet."""

_LAST_PAGES_S: Final = 0.5
"""For readers to take in their pages when the server leaves; aiohttp waits for it up to twice."""


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
        self._backlog = max_connections  # accepted together, before those that give room are closed
        self._connections = HttpConnections(
            self._running_server,
            most=max_connections,
            handshake_s=0.0 if tls is None else HANDSHAKE_S,
        )
        application.middlewares.append(self._connections.note_use)
        self._closing_idle: asyncio.Task[None] | None = None
        self._listeners: list[asyncio.Server] = []

    async def start(self, host: str, port: int) -> int:
        """Listen, or raise StartError; gives the port, which the system chooses for port 0."""
        sockets = bind(host, port, option="--http-port")
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for one in sockets:
            listener = await loop.create_server(
                self._connections.accept, sock=one, backlog=self._backlog, **self._secure
            )
            self._listeners.append(listener)
        self._closing_idle = asyncio.create_task(self._connections.close_idle(), name="idle HTTP")
        return int(sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close all connections; harmless if it never started."""
        if self._closing_idle is not None:
            self._closing_idle.cancel()
        for listener in self._listeners:
            listener.close()
        left = self._connections.transports()
        await self._runner.cleanup()
        for each in left:  # closed, it would still wait for its peer to read
            each.abort()

    def _running_server(self) -> web.Server:
        assert self._runner.server is not None, "start() sets it up first"
        return self._runner.server


_Responder: TypeAlias = Callable[[web.Request], web.Response]


def make_application(services: ProtocolServices, max_message_bytes: int) -> web.Application:
    """Return the pages, and the protocol over HTTP."""
    engine, reception = services.engine, services.reception
    application = web.Application(middlewares=[token_check(reception), _one_a_turn()])
    recorder = HistoryRecorder(engine, reception.refused)
    application.cleanup_ctx.append(recorder.recorded)
    routes: dict[str, _Responder] = {
        "/": lambda request: _status(engine, recorder.history, request),
        "/history.json": lambda _: web.json_response(recorder.history.to_json()),
        "/health/live": lambda _: _liveness(engine),
        "/health/ready": lambda _: _readiness(engine),
        "/metrics": lambda _: web.Response(
            body=render_metrics(engine, reception.refused),
            headers={"Content-Type": CONTENT_TYPE},
        ),
    }
    for path, respond in routes.items():
        application.router.add_get(path, _handler(respond))
    RestApi(services, max_body_bytes=max_message_bytes).add_to(application)
    return application


def _one_a_turn() -> Middleware:
    """A middleware by which the event loop does whatever else it has to do between two pages.

    Many connections may ask at once, and each for many pages without waiting for them. Those that
    wait are served in the order in which they came, so that a probe gets through.
    """
    turn = asyncio.Lock()

    @web.middleware
    async def wait_and_handle(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/v2/"):  # requests for inference wait for nobody
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


def _readiness(engine: ServedEngine) -> web.Response:
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
