"""The gRPC port with its methods, in one process or with front ends."""

from __future__ import annotations

from typing import Protocol

from offramp.server.arguments.options import MAX_CONNECTIONS, KeepaliveOptions
from offramp.server.common.methods import MethodTable
from offramp.server.frontends.frontends import FrontendOptions, Frontends
from offramp.server.ports.grpc_listener import GrpcListener, ListenerOptions
from offramp.server.security.tls import ServerTls
from offramp.server.services.grpc_methods import GrpcMethods
from offramp.server.services.protocol_services import ProtocolServices


class GrpcPort(Protocol):
    """The connections of the port, held by a listener of this process or by front ends."""

    async def start(self, host: str, port: int) -> int:
        """Listen, or raise StartError; return the port, which the system chooses for port 0."""

    async def send_goaway(self, limit_s: float) -> None:
        """Ask all clients to open their calls elsewhere; calls that still arrive are answered."""

    async def stop(self, grace_s: float) -> None:
        """Close all connections, after at most ``grace_s`` for the last answers to be written."""


class GrpcEndpoint:
    """The gRPC methods at their port; made and used on the event loop's thread."""

    def __init__(
        self,
        services: ProtocolServices,
        *,
        max_message_bytes: int,
        max_connections: int = MAX_CONNECTIONS,
        keepalive: KeepaliveOptions | None = None,
        tls: ServerTls | None = None,
        frontends: FrontendOptions | None = None,
    ) -> None:
        """Without ``tls`` nothing is encrypted, but ``frontends`` have their own TLS."""
        methods = GrpcMethods(services)
        self._health = methods.health
        self._admission = services.admission
        listener = ListenerOptions(
            max_message_bytes=max_message_bytes,
            max_connections=max_connections,
            keepalive=keepalive or KeepaliveOptions(),
        )
        self._port: GrpcPort
        if frontends is None:
            table = MethodTable(methods.handlers)
            self._port = GrpcListener(table, services.admission, listener, tls)
        else:
            self._port = Frontends(methods.handlers, services.admission, listener, frontends)

    @property
    def requests(self) -> int:
        """Inference requests that are being answered."""
        return self._admission.requests

    async def start(self, host: str, port: int) -> int:
        """Listen, or raise StartError; return the port, which the system chooses for port 0."""
        return await self._port.start(host, port)

    async def serving(self) -> None:
        """Report models, service and server as ready whenever the engine is ready."""
        await self._health.start()

    async def leaving(self) -> None:
        """Report everything as not serving, permanently; calls are still answered."""
        await self._health.leave()

    async def send_goaway(self, limit_s: float) -> None:
        """Ask all clients to open their calls elsewhere; calls that still arrive are answered."""
        await self._port.send_goaway(limit_s)

    async def stop(self, grace_s: float) -> None:
        """Close all connections, after at most ``grace_s`` for the last answers to be written."""
        await self._health.stop()
        await self._port.stop(grace_s)
