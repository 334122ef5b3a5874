"""The sockets of the gRPC port, which gRPC gives no access to: closed, or told to leave."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

DESCRIPTORS: Final = Path("/dev/fd")
"""A folder with an entry for each open file descriptor of the process."""

_PASSES: Final = 100
_SO_ATTACH_FILTER: Final = 26

_GOAWAY: Final = struct.pack(">HBBBIII", 0, 8, 7, 0, 0, 2**31 - 1, 0)
"""HTTP/2's frame of that name, without an error, for streams that are opened after it is read
(RFC 9113, 6.8). Calls that were under way are answered."""

_GREETED_BYTES: Final = 9
"""Of gRPC's first frame, SETTINGS; a peer that has acknowledged so many bytes gets it whole."""

_TCP_INFO_BYTES: Final = 128
_BYTES_ACKED: Final = 120
"""Offset in ``struct tcp_info`` of Linux."""


def refuse_connections(port: int) -> None:
    """Let no more connections come to a port of this process."""
    for one in _sockets(port):
        if not _connected(one):
            _refuse(one)


@dataclass(frozen=True, slots=True)
class OpenConnections:
    """The peers of a port's connections."""

    peers: frozenset[tuple[str, int]]
    greeted: frozenset[tuple[str, int]]
    """Those that have received the first frame of gRPC's, which has to come before any other."""


def open_connections(port: int) -> OpenConnections:
    """Return the connections of a port of this process."""
    peers, greeted = set(), set()
    for one in _sockets(port):
        with suppress(OSError):  # the peer has left, or it is the listening one
            peer = _peer_of(one)
            peers.add(peer)
            if _greeted(one):
                greeted.add(peer)
    return OpenConnections(frozenset(peers), frozenset(greeted))


def send_away(port: int, peers: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Tell peers of a port to open no more calls on their connections; return those that took it.

    gRPC itself can do that only while it stops, and from then on it cancels each call that it has
    not handed over yet, with a status that clients do not retry. To be called while gRPC writes
    nothing to these peers, so that the frame comes between two of its own, and once for each.
    """
    told = set()
    for one in _sockets(port):
        with suppress(OSError):  # the peer has left, or reads nothing
            peer = _peer_of(one)
            if peer in peers and one.send(_GOAWAY, socket.MSG_DONTWAIT) == len(_GOAWAY):
                told.add(peer)
    return told


def close_connections(port: int, peers: Collection[tuple[str, int]]) -> None:
    """Close connections of a port of this process by their peers."""
    for one in _sockets(port):
        with suppress(OSError):  # the peer was faster, or it is the listening one
            if _peer_of(one) in peers:
                one.shutdown(socket.SHUT_RDWR)


def hang_up(port: int) -> None:
    """End all connections of a port of this process, and let none come; the kernel tells the peers.

    gRPC answers CANCELLED to calls that come while its server stops: clients do not retry that,
    and it says that they hung up themselves. A connection that ends is UNAVAILABLE to all its
    calls. So there must be no connection left when the server is stopped.
    """
    refuse_connections(port)
    for _ in range(_PASSES):  # those that were accepted in the meantime come up in the next
        connected = 0
        for one in filter(_connected, _sockets(port)):
            with suppress(OSError):  # the peer was faster
                one.shutdown(socket.SHUT_RDWR)
                connected += 1
        if not connected:
            return


def _refuse(listener: socket.socket) -> None:
    """Let no more connections come, by a packet filter (man 7 socket) that drops everything.

    Shutting the listener down would do as well, but for an error that gRPC prints.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF_RET: 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:  # not on Linux
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[socket.socket]:
    """Yield the TCP sockets of this process at a port, each a duplicate to be used at once."""
    for entry in tuple(DESCRIPTORS.iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:  # closed in the meantime
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
    """Return the local port; ``None`` where the peer has just reset it, as macOS reports."""
    with suppress(OSError):
        return int(one.getsockname()[1])
    return None


def _connected(one: socket.socket) -> bool:
    return not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _greeted(one: socket.socket) -> bool:
    """Return whether the peer has received the first frame of gRPC's."""
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
    """Return hosts and ports of peers as gRPC names them, such as ``ipv6:%5B::1%5D:5000``.

    Those that it gives no name (``""``) are left out.
    """
    found = set()
    for peer in peers:
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdigit():
            found.add((host.strip("[]"), int(port)))
    return found
