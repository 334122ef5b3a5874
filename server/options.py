"""The options of a server, apart from the engine's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offramp.engine.plan import Mode

MIB: Final = 1024 * 1024

DEFAULT_MODE: Final = Mode.AUDIT
"""Of a server that is not told otherwise: what it promises, it also measures."""

MAX_MESSAGE_MIB: Final = 2047
"""gRPC counts a message's bytes in a signed 32-bit integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The addresses that a server listens on, and its limits."""

    host: str = "127.0.0.1"
    """Name or address of the interface; ``0.0.0.0`` is all of them."""
    grpc_port: int = 8001
    """0 takes any free one."""
    http_port: int = 8000
    """0 takes any free one."""
    max_message_mib: int = 64
    """Largest request over gRPC; gRPC refuses a larger one with RESOURCE_EXHAUSTED."""
    shutdown_timeout_s: float = 30.0
    """How long requests in flight may take to end after the first signal."""

    def __post_init__(self) -> None:
        for name, port in (("grpc_port", self.grpc_port), ("http_port", self.http_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} {port} is not in 0 to 65535")
        if self.grpc_port == self.http_port != 0:
            raise ValueError(
                f"grpc_port and http_port are both {self.grpc_port}; gRPC and HTTP need a port each"
            )
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise ValueError(f"max_message_mib {self.max_message_mib} is not in 1 to 2047")
        if not self.shutdown_timeout_s >= 0:
            raise ValueError(f"shutdown_timeout_s {self.shutdown_timeout_s} is below 0")
