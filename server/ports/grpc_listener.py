"""The gRPC port: its connections, and whatever methods it is given."""

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
    hang_up,
    join_address,
    open_connections,
    refuse_connections,
    send_away,
)
from offramp.server.requests.reception import Reception
from offramp.server.security.tls import ServerTls

QUIET_S: Final = 1.0
"""Without a request for so long, clients that were sent away have no more to say."""

_PAUSE_S: Final = 0.05
"""Between two looks for connections that are to be sent away."""

_LOOK_S: Final = 1.0
"""Between two looks for connections whose clients do not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerOptions:
    """How the gRPC port treats its connections."""

    max_message_bytes: int
    """The largest message that is received."""
    max_connections: int = MAX_CONNECTIONS
    """At once; further ones are closed as soon as they come."""
    keepalive: KeepaliveOptions = field(default_factory=KeepaliveOptions)
    """Pings."""
    shared_port: bool = False
    """Whether other processes listen on the port as well, and each gets some connections."""


class GrpcListener:
    """A grpc.aio server; made and used on the event loop's thread."""

    def __init__(
        self,
        methods: grpc.GenericRpcHandler,
        reception: Reception,
        options: ListenerOptions,
        tls: ServerTls | None = None,
    ) -> None:
        """Without ``tls`` nothing is encrypted."""
        self._tls = tls
        self._reception = reception
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


def _server_options(options: ListenerOptions) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # No algorithm but "identity": gRPC decompresses a message before it compares its size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # By default gRPC lets a second server share the port, and splits the calls between the two.
        ("grpc.so_reuseport", int(options.shared_port)),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        *_CONNECTION_OPTIONS,
        *_keepalive_options(options.keepalive),
    ]
