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


MAX_COUNT: Final = 2**31 - 1
"""Of whatever is counted; gRPC takes no larger number of connections."""

MAX_CONNECTIONS: Final = 1024
"""Of gRPC at once, where it is not told otherwise and there are file descriptors for them."""


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
    max_connections: int = MAX_CONNECTIONS
    """Connections of gRPC at once; further ones are closed as soon as they come."""
    max_concurrent_requests: int = 8192
    """Requests being answered, of all models and streams; more are refused. Twice the samples that
    a model's queue takes by default: that one fills first."""
    max_queue_mib: int = 1024
    """Messages of the requests being answered; more are refused. 16 of the largest by default."""
    access_log: bool = False
    """Whether every request has a line in the log."""
    drain_delay_s: float = 5.0
    """How long new requests are answered after readiness fell, but for SIGINT."""
    shutdown_timeout_s: float = 30.0
    """How long requests in flight may take to end once new ones are refused."""

    def __post_init__(self) -> None:
        for name, port in (("grpc_port", self.grpc_port), ("http_port", self.http_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} {port} is not in 0 to 65535")
        if self.grpc_port == self.http_port != 0:
            raise ValueError(
                f"--grpc-port and --http-port are both {self.grpc_port}; "
                "gRPC and HTTP need a port each"
            )
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise ValueError(f"max_message_mib {self.max_message_mib} is not in 1 to 2047")
        for name in ("max_connections", "max_concurrent_requests", "max_queue_mib"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ValueError(f"{name} {getattr(self, name)} is not in 1 to {MAX_COUNT}")
        if self.max_queue_mib < self.max_message_mib:
            raise ValueError(
                f"--max-queue-mib {self.max_queue_mib} is below --max-message-mib "
                f"{self.max_message_mib}: the largest request would never be taken; "
                f"give --max-queue-mib {self.max_message_mib} or more"
            )
        for name in ("drain_delay_s", "shutdown_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} is below 0")
