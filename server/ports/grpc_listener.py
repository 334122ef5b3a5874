"""The gRPC port and its connections; the methods come from outside."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from offramp.server.arguments.options import MAX_CONNECTIONS, KeepaliveOptions
from offramp.server.common.errors import StartError
from offramp.server.ports.sockets import (
    HANDSHAKE_S,
    addresses_of,
    close_connections,
    close_port_connections,
    join_address,
    open_connections,
    refuse_connections,
    send_goaway,
)
from offramp.server.requests.admission import RequestAdmission
from offramp.server.security.tls import ServerTls

QUIET_S: Final = 1.0
"""Seconds without a request after which clients that were asked to leave count as finished."""

_PAUSE_S: Final = 0.05
"""Seconds between two searches for connections whose clients are to be asked to leave."""

_LOOK_S: Final = 1.0
"""Seconds between two searches for connections whose clients do not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerOptions:
    """Limits and settings of the gRPC port's connections."""

    max_message_bytes: int
    """Largest message that is accepted."""
    max_connections: int = MAX_CONNECTIONS
    """Largest number of open connections; further ones are closed immediately."""
    keepalive: KeepaliveOptions = field(default_factory=KeepaliveOptions)
    """Settings of HTTP/2 pings."""
    shared_port: bool = False
    """True if other processes listen on the port as well, and share the connections."""


class GrpcListener:
    """A grpc.aio server; made and used on the event loop's thread."""

    def __init__(
        self,
        methods: grpc.GenericRpcHandler,
        admission: RequestAdmission,
        options: ListenerOptions,
        tls: ServerTls | None = None,
    ) -> None:
        """Without ``tls`` nothing is encrypted."""
        self._tls = tls
        self._admission = admission
        self._port: int | None = None
        self._closing: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(options=_server_options(options))
        self._server.add_generic_rpc_handlers((methods,))

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

    async def send_goaway(self, limit_s: float) -> None:
        """Ask all clients to open their calls elsewhere; calls that still arrive are answered.

        With TLS, clients are not notified: only gRPC can encrypt a frame, so we cannot add one.

        Return when no connection is left or no request has come for :data:`QUIET_S`, after at most
        ``limit_s``. Idle streams end with their connection.
        """
        assert self._port is not None, "start() comes first"
        refuse_connections(self._port)
        told: set[tuple[str, int]] = set()
        now_s = time.monotonic()
        ends_s, quiet_s, admitted = now_s + limit_s, now_s + QUIET_S, self._admission.admitted
        while (there := open_connections(self._port)).peers and now_s < min(ends_s, quiet_s):
            if self._tls is None and (untold := there.greeted - told):
                async with self._admission.answers.held() as writing:
                    told |= send_goaway(self._port, untold - addresses_of(writing))
            if self._admission.requests or self._admission.admitted != admitted:
                admitted, quiet_s = self._admission.admitted, time.monotonic() + QUIET_S
            await asyncio.sleep(_PAUSE_S)
            now_s = time.monotonic()

    async def _close_offenders(self, port: int) -> None:
        """Close connections whose clients reset too many calls or do not read answers."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._admission.offended.wait()
            if offenders := self._admission.offenders():
                close_connections(port, addresses_of(offenders))
                for peer, reason in offenders.items():
                    self._admission.log_closed(peer, reason)

    async def stop(self, grace_s: float) -> None:
        """Close all connections, after at most ``grace_s`` for the last answers to be written.

        All open calls then end with UNAVAILABLE, because they lose their connection.
        """
        if self._closing is not None:
            self._closing.cancel()
        port, self._port = self._port, None
        if port is not None:
            ends_s = time.monotonic() + grace_s
            while self._admission.requests and time.monotonic() < ends_s:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)
            close_port_connections(port)
        await self._server.stop(None)


MAX_CALLS: Final = 1024
"""Largest number of open calls of a connection; gRPC's clients hold further calls back."""

_CONNECTION_OPTIONS: Final = (
    ("grpc.max_concurrent_streams", MAX_CALLS),
    # Disabled, because it would also refuse calls (REFUSED_STREAM) of clients within the limit: it
    # still counts calls that have just ended.
    ("grpc.http.overload_protection", 0),
    # Seconds that a call may wait for Python before it is dropped, so that a flood of calls that
    # are reset immediately ends sooner. gRPC's default is 30 s.
    ("grpc.server_max_unrequested_time_in_server", 5),
    # From accepting a connection to its first SETTINGS; gRPC's default is 120 s.
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1e3)),
    # Without a call; clients reconnect at their next call, with hardly any delay.
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


def _server_options(options: ListenerOptions) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Only "identity": gRPC decompresses a message before it checks the size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # By default gRPC lets a second server share the port, and splits the calls between both.
        ("grpc.so_reuseport", int(options.shared_port)),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        *_CONNECTION_OPTIONS,
        *_keepalive_options(options.keepalive),
    ]
