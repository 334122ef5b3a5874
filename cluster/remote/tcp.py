"""Connections to workers on other hosts: addresses, TLS, and how a peer that is gone is noticed."""

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
"""Seconds of silence after which the system asks the other end for a sign of life."""
_BETWEEN_S: Final = 5
_LEAVE_S: Final = 1.0
"""Limit of a farewell."""
_MOST_ASKED: Final = 3
_MOST_WAITING: Final = 64
"""Connections that wait for a worker to start."""
_UNACKNOWLEDGED_MS: Final = 1000 * (_IDLE_S + _MOST_ASKED * _BETWEEN_S)
"""Time after which what was sent and not acknowledged ends a connection."""


class HostPort(NamedTuple):
    """Where something listens."""

    host: str
    """A name, or an address without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host is behind it; a name other than ``localhost`` may be any."""
        return is_loopback(self.host)


def parse_address(text: str, *, least_port: int = 1) -> HostPort:
    """Read ``HOST:PORT``, ``[::1]:PORT``; NetworkError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    whole = port.isascii() and port.isdecimal() and len(port) <= 5
    fine = colon and host and host.isprintable() and " " not in host and len(host) <= 255
    if not fine or not whole or bracketed != (":" in host) or not (least_port <= int(port) < 65536):
        raise NetworkError(
            f"{text!r:.80} is no address, expected HOST:PORT with a port from {least_port} to "
            "65535, for instance 10.0.0.2:7070 or [::1]:7070"
        )
    return HostPort(host, int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsTrust:
    """What a router trusts where connections are encrypted, and what it shows of itself."""

    ca: Path
    """Certificates, in PEM, of the authorities that workers' certificates are compared with."""
    certificate: Path | None = None
    """Its own, for workers that ask for one."""
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Make what connections are encrypted with; NetworkError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, self.ca)
        if self.certificate is not None:
            load_certificate(context, self.certificate, self.key)
        return context


def listen_on(address: HostPort) -> socket.socket:
    """Give a socket that listens there; OSError."""
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
    """Have a connection send at once, and end when the other host is gone without a word."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _BETWEEN_S),
        ("TCP_KEEPCNT", _MOST_ASKED),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        number = getattr(socket, name, None)  # not every system has all of them
        if number is not None:
            connected.setsockopt(socket.IPPROTO_TCP, number, value)


def cut(connected: socket.socket) -> None:
    """End a connection for both ends, whichever thread waits for it."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which would let another thread send in the clear.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def take_leave(connected: socket.socket) -> None:
    """Let the other end read the last word: with what it says unread, the system would unsay it."""
    with contextlib.suppress(OSError):
        connected.settimeout(_LEAVE_S)
        socket.socket.shutdown(connected, socket.SHUT_WR)
        socket.socket.recv(connected, 1 << 16)


def has_ended(connected: socket.socket) -> bool:
    """Say, without waiting, whether the other end is gone, or spoke out of turn."""
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
