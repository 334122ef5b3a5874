"""Connections to workers on other hosts: addresses, TLS, and detection of lost peers."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from offramp.engine.common.network import (
    NetworkError,
    is_loopback,
    load_authorities,
    load_certificate,
)

_IDLE_S: Final = 10
"""Seconds of silence after which the system probes the other end."""
_BETWEEN_S: Final = 5
_LEAVE_S: Final = 1.0
"""Time limit, in seconds, of an orderly close."""
_MOST_ASKED: Final = 3
_MOST_WAITING: Final = 64
"""Largest number of connections that wait for a worker to start."""
_UNACKNOWLEDGED_MS: Final = 1000 * (_IDLE_S + _MOST_ASKED * _BETWEEN_S)
"""Time in ms after which unacknowledged data ends a connection."""


class HostPort(NamedTuple):
    """Address of a listening socket."""

    host: str
    """Host name, or an address without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """``True`` if the host is certainly this host: a loopback address, or ``localhost``."""
        return is_loopback(self.host)


def parse_address(text: str, *, least_port: int = 1) -> HostPort:
    """Parse ``HOST:PORT``, ``[::1]:PORT``; NetworkError if malformed."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    whole = port.isascii() and port.isdecimal() and len(port) <= 5
    fine = colon and host and host.isprintable() and " " not in host and len(host) <= 255
    if not fine or not whole or bracketed != (":" in host) or not (least_port <= int(port) < 65536):
        raise NetworkError(
            f"{text!r:.80} is not an address, expected HOST:PORT with a port from {least_port} to "
            "65535, for instance 10.0.0.2:7070 or [::1]:7070"
        )
    return HostPort(host, int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsTrust:
    """Authorities that a router trusts, and its own certificate."""

    ca: Path
    """Certificates, in PEM, of the authorities that verify workers' certificates."""
    certificate: Path | None = None
    """The router's certificate, for workers that require one."""
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of connections; NetworkError if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, self.ca)
        if self.certificate is not None:
            load_certificate(context, self.certificate, self.key)
        return context


def listen_on(address: HostPort) -> socket.socket:
    """Return a socket that listens on an address; OSError if that is not possible."""
    (family, _, _, _, where), *_ = socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_MOST_WAITING)
    except BaseException:
        listening.close()
        raise
    return listening


def tune(connected: socket.socket) -> None:
    """Make a connection send immediately, and end when the other host is lost."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _BETWEEN_S),
        ("TCP_KEEPCNT", _MOST_ASKED),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        number = getattr(socket, name, None)  # some systems lack some options
        if number is not None:
            connected.setsockopt(socket.IPPROTO_TCP, number, value)


def cut(connected: socket.socket) -> None:
    """End a connection for both ends, and for all threads that wait for it."""
    with contextlib.suppress(OSError):
        # The method of a TLS socket would let another thread send without encryption.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def close_gracefully(connected: socket.socket) -> None:
    """Allow the other end to read the last message before the connection closes.

    If received data were unread at the close, the system would discard that message.
    """
    with contextlib.suppress(OSError):
        connected.settimeout(_LEAVE_S)
        socket.socket.shutdown(connected, socket.SHUT_WR)
        socket.socket.recv(connected, 1 << 16)


def has_ended(connected: socket.socket) -> bool:
    """Return, without waiting, whether the other end is gone or sent unexpected data."""
    try:
        ready = select.poll()
        ready.register(connected, select.POLLIN)
        if not ready.poll(0):
            return False
        limit_s = connected.gettimeout()
        connected.settimeout(0.0)
        try:
            connected.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            connected.settimeout(limit_s)
            return False
    except (OSError, ValueError):
        pass
    return True
