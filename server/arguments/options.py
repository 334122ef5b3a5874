"""The options of a server, without the engine's options."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from offramp.engine.stages.plan import Mode

MIB: Final = 1024 * 1024

DEFAULT_MODE: Final = Mode.AUDIT
"""Default mode of a server: audits measure the disagreement that the promise limits."""

MAX_FRONTENDS: Final = 64
MAX_MESSAGE_MIB: Final = 2047
"""Largest message size, in MiB: gRPC counts bytes in a signed 32-bit integer."""


MAX_COUNT: Final = 2**31 - 1
"""Largest value of every count; gRPC accepts no larger number of connections."""

MAX_CONNECTIONS: Final = 1024
"""Default limit on open gRPC connections, if file descriptors suffice for it."""


_LONGEST_HOST: Final = 253
"""Number of characters of the longest DNS name."""

_URLS: Final = ("http://", "https://")

WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - used only on the operator's request
"""Hosts that mean all interfaces: of IPv4, and of IPv6."""

_ANY: Final = "*"
"""Host that other servers read as all interfaces."""


def parse_host(text: str) -> str:
    """Return a host without an IPv6 address's brackets; ``*`` becomes ``0.0.0.0``.

    Raises:
        ValueError: The text is neither a name nor an address.
    """
    if text == _ANY:
        return WILDCARDS[0]
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        if text.startswith("[") or ":" in host:
            address = ipaddress.IPv6Address(host)
            return str(address.ipv4_mapped or address)
        named = host.encode("idna")  # raises UnicodeError, which is a ValueError
    except ValueError:
        named = b""
    if not 0 < len(named) <= _LONGEST_HOST or not host.isprintable() or " " in host:
        raise ValueError(
            f"{text!r:.80} is not a host; expected a name or an address without a port, for "
            "instance 127.0.0.1, ::1, 0.0.0.0, :: or *"
        )
    return host


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepaliveOptions:
    """HTTP/2 pings of the gRPC port; fields have Triton's names.

    Triton keeps gRPC's defaults, which close the connection of a client that pings more often than
    every five minutes on an idle stream, or every two hours without a call. The defaults here
    accept clients and load balancers that ping every ten seconds.
    """

    grpc_keepalive_time_ms: int = 60_000
    """Time without traffic, in ms, after which the server pings a connection."""
    grpc_keepalive_timeout_ms: int = 20_000
    """Time, in ms, in which a ping must be answered before the server closes the connection."""
    grpc_keepalive_permit_without_calls: bool = True
    """If true, pings are sent and accepted on connections without a call."""
    grpc_http2_max_pings_without_data: int = 0
    """Pings that the server may send while it has no data to send; 0 is no limit."""
    grpc_http2_min_recv_ping_interval_without_data_ms: int = 1_000
    """Shortest time, in ms, between two pings of a client to which no data are sent."""
    grpc_http2_max_ping_strikes: int = 2
    """Number of pings, each sent too early, after which the server closes the connection; 0 is no
    limit."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            if not 0 <= getattr(self, name) <= MAX_COUNT:
                raise ValueError(f"{name} {getattr(self, name)} is not in 0 to {MAX_COUNT}")
        for name in ("grpc_keepalive_time_ms", "grpc_keepalive_timeout_ms"):
            if not getattr(self, name):
                raise ValueError(f"{name} is 0; expected a time, for instance 60000")


class RepositoryControl(StrEnum):
    """Source of loads and unloads while the server runs; values have Triton's names."""

    NONE = "none"
    """No source: the models that were loaded at the start stay."""
    EXPLICIT = "explicit"
    """Clients, by load and unload calls."""
    POLL = "poll"
    """The repository folder: models that are added, changed or removed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChoice:
    """Versions of a model to serve, as in Triton's version policy."""

    latest: int = 1
    """Number of newest versions to serve."""
    named: tuple[str, ...] = ()
    """Exact versions to serve; if set, ``latest`` is ignored."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``latest``, ``latest:2``, ``all`` or ``1,3``; ValueError for any other text."""
        if text == "all":
            return cls(latest=2**31 - 1)
        kind, _, count = text.partition(":")
        if kind == "latest" and (not count or (count.isdigit() and int(count) > 0)):
            return cls(latest=int(count or 1))
        names = [part.strip() for part in text.split(",")]
        if all(name.isascii() and name.isdigit() and int(name) > 0 for name in names):
            return cls(named=tuple(str(int(name)) for name in names))
        raise ValueError(
            f"versions {text!r:.80} are not latest, latest:N, all, or numbers such as 1,3"
        )

    def choose(self, versions: Mapping[str, Path]) -> Sequence[str]:
        """Return the versions to serve, newest first; ValueError if a named one is missing."""
        if missing := [name for name in self.named if name not in versions]:
            there = ", ".join(versions) or "none"
            raise ValueError(f"there is no version {', '.join(missing)}; there are: {there}")
        if self.named:
            return sorted(self.named, key=int, reverse=True)
        return list(versions)[: self.latest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRepositoryOptions:
    """The folder of a server's models, and the source of its changes."""

    model_repository: Path | None = None
    """Folder with one folder a model; ``None`` if models are named only by their paths."""
    model_control: RepositoryControl = RepositoryControl.NONE
    repository_poll_s: float | None = None
    """Seconds between two checks of the folder, with control ``poll``; ``None``: 15."""
    load_model: tuple[str, ...] = ()
    """Models to load at the start, with explicit control."""
    model_versions: VersionChoice = VersionChoice()
    """Versions to serve of each model of the repository."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "load_model", tuple(self.load_model))
        if self.repository_poll_s is not None:
            if not self.repository_poll_s > 0:
                raise ValueError(f"repository_poll_s {self.repository_poll_s} is not above 0")
            if self.model_control is not RepositoryControl.POLL:
                raise ValueError(
                    "--repository-poll-s is how often the folder is checked with --model-control "
                    f"poll, and --model-control is {self.model_control} here; leave it out, or "
                    "choose poll"
                )
        if self.model_repository is None and self.model_control is RepositoryControl.POLL:
            raise ValueError("--model-control poll needs a folder to check: --model-repository")
        if self.load_model and self.model_control is not RepositoryControl.EXPLICIT:
            raise ValueError(
                "--load-model chooses models for --model-control explicit; the other controls load "
                "all models of the repository"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """Files of certificates and tokens; a file is read again when it changes."""

    tls_certificate: Path | None = None
    """PEM file of the certificate for both ports; ``None`` serves without encryption."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, unencrypted."""
    tls_client_ca: Path | None = None
    """PEM file of authorities; clients must then present a certificate that one of them signed."""
    token_file: Path | None = None
    """Tokens of clients; ``None`` requires no token."""
    admin_token_file: Path | None = None
    """Tokens of clients that may change the server."""

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "--tls-certificate and --tls-key belong together; give both, or neither"
            )
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError(
                "--tls-client-ca asks clients for certificates, which only TLS carries; add "
                "--tls-certificate and --tls-key"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The addresses that a server listens on, and its limits."""

    host: str = "127.0.0.1"
    """Name or address of the interface, for both ports; ``0.0.0.0``, ``::`` and ``*`` mean all
    interfaces, by IPv4 and IPv6. An IPv6 address may be in brackets."""
    grpc_port: int = 8001
    """Port of gRPC; 0 chooses any free port."""
    http_port: int = 8000
    """Port of HTTP; 0 chooses any free port."""
    frontends: int = 0
    """Processes that hold the gRPC connections; with 0, the engine's process holds them."""
    max_message_mib: int = 64
    """Largest gRPC request, in MiB; gRPC refuses a larger one with RESOURCE_EXHAUSTED."""
    max_connections: int = MAX_CONNECTIONS
    """Largest number of open gRPC connections; further ones are closed immediately."""
    max_concurrent_requests: int = 8192
    """Largest number of requests in progress, over all models and streams; further ones are
    refused. The default is twice a model's default queue limit in samples, so that the queue fills
    first."""
    max_queue_mib: int = 1024
    """Memory for the messages of requests in progress, in MiB; further requests are refused. The
    default holds 16 messages of the largest default size."""
    repository: ModelRepositoryOptions = field(default_factory=ModelRepositoryOptions)
    """Options of the folder from which clients load models."""
    keepalive: KeepaliveOptions = field(default_factory=KeepaliveOptions)
    """Pings of the gRPC port."""
    security: SecurityOptions = field(default_factory=SecurityOptions)
    """Options on certificates and tokens."""
    access_log: bool = False
    """If true, every request is logged in one line."""
    trace_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over gRPC; ``None`` traces nothing."""
    trace_rate: int = 1000
    """One request in this many is traced, in addition to those that the caller traces."""
    drain_delay_s: float = 5.0
    """Seconds for which new requests are answered after readiness ends; none after SIGINT."""
    shutdown_timeout_s: float = 30.0
    """Longest wait, in seconds, for requests in flight once new ones are refused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", parse_host(self.host))
        for name, port in (("grpc_port", self.grpc_port), ("http_port", self.http_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} {port} is not in 0 to 65535")
        if self.grpc_port == self.http_port != 0:
            raise ValueError(
                f"--grpc-port and --http-port are both {self.grpc_port}; "
                "gRPC and HTTP need a port each"
            )
        if not 0 <= self.frontends <= MAX_FRONTENDS:
            raise ValueError(f"frontends {self.frontends} is not in 0 to {MAX_FRONTENDS}")
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise ValueError(f"max_message_mib {self.max_message_mib} is not in 1 to 2047")
        for name in ("max_connections", "max_concurrent_requests", "max_queue_mib"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise ValueError(f"{name} {getattr(self, name)} is not in 1 to {MAX_COUNT}")
        if self.max_queue_mib < self.max_message_mib:
            raise ValueError(
                f"--max-queue-mib {self.max_queue_mib} is below --max-message-mib "
                f"{self.max_message_mib}: the largest request would always be refused; "
                f"set --max-queue-mib {self.max_message_mib} or more"
            )
        if self.trace_endpoint is not None and not self.trace_endpoint.startswith(_URLS):
            raise ValueError(
                f"trace_endpoint {self.trace_endpoint!r:.80} is not the URL of a collector, for "
                "instance http://localhost:4317"
            )
        if not 1 <= self.trace_rate <= MAX_COUNT:
            raise ValueError(f"trace_rate {self.trace_rate} is not in 1 to {MAX_COUNT}")
        for name in ("drain_delay_s", "shutdown_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} is below 0")
