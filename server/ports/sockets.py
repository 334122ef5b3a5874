"""Sockets of both ports: addresses, limits of connections, and closing of connections.

gRPC does not expose its sockets, so they are found among the process's file descriptors.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import math
import os
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from aiohttp import web

from offramp.server.arguments.options import WILDCARDS
from offramp.server.common.errors import StartError

_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors for an address that this machine does not have."""


def join_address(host: str, port: int) -> str:
    """Return an address such as ``127.0.0.1:8001`` or ``[::1]:8001``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, *, option: str, shared: bool = False) -> tuple[socket.socket, ...]:
    """Return TCP sockets bound to all addresses of a host, at one port.

    A name may have addresses that this machine does not have, such as ``::1`` without IPv6. They
    are skipped if another address works.

    ``0.0.0.0`` and ``::`` both mean every interface, by IPv4 and, if available, IPv6, as in gRPC.
    Port 0 chooses any free port. ``option`` is the port's command line option, for the message of
    the StartError. Other sockets may share a ``shared`` port.
    """
    try:
        return _bind(host, port, shared=shared)
    except OSError as error:
        raise StartError(_reason(error, host, port, option)) from error


def check_free(host: str, port: int, *, option: str) -> None:
    """Raise StartError if a port is not available, before models are loaded in vain.

    gRPC would report a used port in its own lines on stderr, and the exception would not have the
    reason.
    """
    for bound in bind(host, port, option=option):
        bound.close()


def _bind(host: str, port: int, *, shared: bool) -> tuple[socket.socket, ...]:
    bound: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as stack:
        for family, address in _addresses(host, port):
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                place = (address[0], chosen, *address[2:])
                one = _bound(family, place, dual=host in WILDCARDS, shared=shared)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
            else:
                bound.append(stack.enter_context(one))
        if absent is not None and not bound:
            raise absent
        stack.pop_all()
    return tuple(bound)


def _bound(
    family: socket.AddressFamily, address: tuple[object, ...], *, dual: bool, shared: bool
) -> socket.socket:
    with ExitStack() as stack:
        one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        one.bind(address)
        stack.pop_all()
    return one


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, tuple[object, ...]]]:
    if host in WILDCARDS:
        if socket.has_dualstack_ipv6():
            return [(socket.AF_INET6, ("::", port))]
        return [(socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _reason(error: OSError, host: str, port: int, option: str) -> str:
    where = join_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use on {host}; stop the process that listens there, "
            f"or choose another port with {option} (0 chooses any free port)"
        )
    if error.errno == errno.EACCES:
        return f"no permission to listen on {where}; choose a port from 1024 on with {option}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host!r} is not an address of this machine ({error.strerror}); choose one with "
            "--host, or 0.0.0.0 or :: for all of them"
        )
    return f"cannot listen on {where}: {error.strerror}"


DESCRIPTORS: Final = Path("/dev/fd")
"""Folder with one entry for each open file descriptor of the process."""

_PASSES: Final = 100
_SO_ATTACH_FILTER: Final = 26

_GOAWAY: Final = struct.pack(">HBBBIII", 0, 8, 7, 0, 0, 2**31 - 1, 0)
"""HTTP/2's GOAWAY frame without an error, for streams opened after it is read (RFC 9113, 6.8).
Calls in progress are answered."""

_GREETED_BYTES: Final = 9
"""Size of gRPC's first frame, SETTINGS; a peer that acknowledged this many bytes has received
it."""

_TCP_INFO_BYTES: Final = 128
_BYTES_ACKED: Final = 120
"""Offset in Linux's ``struct tcp_info``."""


def refuse_connections(port: int) -> None:
    """Accept no more connections on a port of this process."""
    for one in _sockets(port):
        if not _connected(one):
            _refuse(one)


@dataclass(frozen=True, slots=True)
class OpenConnections:
    """Peers of a port's connections."""

    peers: frozenset[tuple[str, int]]
    greeted: frozenset[tuple[str, int]]
    """Peers that have received gRPC's first frame, which must precede any other frame."""


def open_connections(port: int) -> OpenConnections:
    """Return the connections of a port of this process."""
    peers, greeted = set(), set()
    for one in _sockets(port):
        with suppress(OSError):  # the peer has left, or it is the listening socket
            peer = _peer_of(one)
            peers.add(peer)
            if _greeted(one):
                greeted.add(peer)
    return OpenConnections(frozenset(peers), frozenset(greeted))


def send_goaway(port: int, peers: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Ask peers of a port to open no more calls on their connections; return the notified peers.

    gRPC itself can only do so while it stops, and then cancels each call that it has not yet passed
    to Python, with a status that clients do not retry. Call this while gRPC writes nothing to these
    peers, so that the frame is placed between gRPC's frames, and once per peer.
    """
    told = set()
    for one in _sockets(port):
        with suppress(OSError):  # the peer has left, or reads nothing
            peer = _peer_of(one)
            if peer in peers and one.send(_GOAWAY, socket.MSG_DONTWAIT) == len(_GOAWAY):
                told.add(peer)
    return told


def close_connections(port: int, peers: Collection[tuple[str, int]]) -> None:
    """Close a port's connections to the given peers."""
    for one in _sockets(port):
        with suppress(OSError):  # the peer has left, or it is the listening socket
            if _peer_of(one) in peers:
                one.shutdown(socket.SHUT_RDWR)


def close_port_connections(port: int) -> None:
    """Close all connections of a port of this process, and accept no more; peers see the close.

    gRPC answers CANCELLED to calls that arrive while its server stops. Clients do not retry that
    status, because it means that they cancelled themselves. A closed connection is UNAVAILABLE to
    all its calls. So no connection may be left when the server is stopped.
    """
    refuse_connections(port)
    for _ in range(_PASSES):  # the next pass finds connections accepted during this one
        connected = 0
        for one in filter(_connected, _sockets(port)):
            with suppress(OSError):  # the peer has left
                one.shutdown(socket.SHUT_RDWR)
                connected += 1
        if not connected:
            return


def _refuse(listener: socket.socket) -> None:
    """Stop accepting connections, by a packet filter (man 7 socket) that drops everything.

    A shutdown of the listener would also work, but makes gRPC print an error.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF_RET: 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:  # not on Linux
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets at a port; each is closed before the next."""
    for entry in tuple(DESCRIPTORS.iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:  # closed since
            continue
        try:
            one = socket.socket(fileno=duplicate)
        except OSError:  # a file
            os.close(duplicate)
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and _port(one) == port:
                yield one


def _port(one: socket.socket) -> int | None:
    """Return the local port; ``None`` if the peer has just reset the connection (macOS)."""
    with suppress(OSError):
        return int(one.getsockname()[1])
    return None


def _connected(one: socket.socket) -> bool:
    return not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _greeted(one: socket.socket) -> bool:
    """Return whether the peer has received gRPC's first frame."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return False
    return bool(struct.unpack_from("Q", info, _BYTES_ACKED)[0] >= _GREETED_BYTES)


def _peer_of(one: socket.socket) -> tuple[str, int]:
    host, port = one.getpeername()[:2]
    return str(host).removeprefix("::ffff:"), int(port)


def addresses_of(peers: Iterable[str]) -> set[tuple[str, int]]:
    """Return hosts and ports of peers in gRPC's notation, such as ``ipv6:%5B::1%5D:5000``.

    Peers without a name (``""``) are left out.
    """
    found = set()
    for peer in peers:
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdigit():
            found.add((host.strip("[]"), int(port)))
    return found


logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS: Final = 32
"""Descriptors kept free for files, pipes, threads, and connections about to be refused."""

LEAST_CONNECTIONS: Final = 16
"""A server starts only if at least this number of connections of each kind is possible."""

MAX_HTTP_CONNECTIONS: Final = 256
"""Largest number of open HTTP connections; a further connection replaces the one that is idle
longest."""

HTTP_IDLE_S: Final = 20.0
"""Seconds without a request after which an HTTP connection is closed."""


HANDSHAKE_S: Final = 5.0
"""Seconds after which a connection with an unfinished TLS handshake is closed, on either port."""

_LOOK_S: Final = 1.0
"""Seconds between two searches for idle connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Largest number of open connections of each port."""

    grpc: int
    http: int


def fit_limits(wanted: int) -> ConnectionLimits:
    """Return limits, up to ``wanted`` gRPC connections, for which file descriptors suffice.

    The soft limit of descriptors is raised up to the hard limit. Call this when everything else is
    open. Raise StartError if too few connections are left.
    """
    in_use = len(list(DESCRIPTORS.iterdir())) + SPARE_DESCRIPTORS
    needed = in_use + 2 * MAX_HTTP_CONNECTIONS + wanted  # as many again may wait to be accepted
    allowed = raise_descriptors(needed)
    if allowed >= needed:
        return ConnectionLimits(grpc=wanted, http=MAX_HTTP_CONNECTIONS)
    left = allowed - in_use
    if left < 3 * LEAST_CONNECTIONS:
        raise StartError(
            f"the limit of open files is {allowed}, which leaves {max(left, 0)} for connections, "
            f"and at least {3 * LEAST_CONNECTIONS} are needed; raise it: ulimit -n {needed}"
        )
    http = min(MAX_HTTP_CONNECTIONS, max(LEAST_CONNECTIONS, left // 8))
    grpc = min(wanted, left - 2 * http)
    logger.warning(
        "the limit of open files is %d: gRPC takes %d connections at once, not %d as "
        "--max-connections asks; for all of them: ulimit -n %d",
        allowed, grpc, wanted, needed,
    )  # fmt: skip
    return ConnectionLimits(grpc=grpc, http=http)


def raise_descriptors(needed: int) -> int:
    """Raise the soft limit of file descriptors towards ``needed``; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return max(soft, needed)
    goal = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # some systems have lower bounds
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class HttpConnections:
    """Limits the connections of an aiohttp server, and closes idle ones.

    aiohttp itself waits without limit for the first request of a connection, and for the rest of a
    request's head. Used on the event loop's thread.
    """

    def __init__(
        self, server: Callable[[], web.Server], *, most: int, handshake_s: float = 0.0
    ) -> None:
        """``handshake_s`` is the time that TLS may take before a connection counts as connected."""
        self._server = server
        self._most = most
        self._connecting_s = handshake_s + _LOOK_S
        self._used_s: dict[web.RequestHandler, float] = {}
        """Time at which each connection's last request ended, or it was accepted, in that order;
        infinity while a request is being answered."""

    def accept(self) -> web.RequestHandler:
        """Return the protocol of a new connection.

        At the limit, the connection that is idle longest is closed, or the new one if all are in
        use.
        """
        loop = asyncio.get_running_loop()
        new = self._server()()
        if len(self._used_s) >= self._most:
            self._forget_closed()
        while len(self._used_s) >= self._most:
            idle = (one for one, used_s in self._used_s.items() if used_s < math.inf)
            if (idlest := next(idle, None)) is None:
                loop.call_soon(_abort, new)
                return new
            del self._used_s[idlest]
            _abort(idlest)
        self._used_s[new] = loop.time()
        return new

    @web.middleware
    async def note_use(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Mark the connection of a request as used; this is a middleware."""
        one, loop = request.protocol, asyncio.get_running_loop()
        if one in self._used_s:
            self._used_s[one] = math.inf
        try:
            return await handler(request)
        finally:
            if self._used_s.pop(one, None) is not None:
                self._used_s[one] = loop.time()

    async def close_idle(self) -> None:
        """Close connections that are idle for too long, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._forget_closed()
            idle_since_s = asyncio.get_running_loop().time() - HTTP_IDLE_S
            for one, used_s in self._used_s.items():
                if used_s < idle_since_s:
                    _abort(one)

    def transports(self) -> list[asyncio.Transport]:
        """Return the transports of all open connections."""
        return [one.transport for one in self._used_s if one.transport is not None]

    def _forget_closed(self) -> None:
        """Forget closed connections; a recently accepted one may not be connected yet."""
        recent_s = asyncio.get_running_loop().time() - self._connecting_s
        self._used_s = {
            one: used_s
            for one, used_s in self._used_s.items()
            if one.connected or used_s >= recent_s
        }


def _abort(one: web.RequestHandler) -> None:
    """Close a connection immediately: a normal close would wait for its peer to read."""
    transport = one.transport  # force_close() forgets it
    one.force_close()
    if transport is not None:
        transport.abort()
