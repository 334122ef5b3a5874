"""Connections that carry frames, and memory shared by two processes; independent of models.

Rejected: :mod:`multiprocessing.connection`, which unpickles data; ``SOCK_SEQPACKET``, whose
messages cannot exceed the socket's buffer, and which does not work over networks.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.worker_messages import (
    ALIGNMENT,
    HEAD,
    MOST_BODY,
    FrameError,
    LargeBodyError,
    TensorForm,
    aligned,
    pack_head,
    unpack_head,
)

_CHUNK: Final = 1 << 16
_AT_ONCE: Final = 1 << 24
"""Largest memory, in bytes, allocated for a body before its data have arrived."""
_MOST_FDS: Final = 4
_NEARLY: Final = 0.9
"""Share of the socket's time limit: while at least this share is left, the limit is not set again,
which saves system calls."""
_GONE: Final = getattr(select, "POLLRDHUP", 0)
"""Poll event of a half-closed connection; a full close is always reported."""


class ConnectionLostError(Exception):
    """The other end is gone, or its data are not a frame."""


class TransportTimeoutError(Exception):
    """The other end did not answer in time."""


class Frame(NamedTuple):
    """A message as received: header, body and file descriptors."""

    header: bytes
    body: bytearray
    fds: tuple[int, ...] = ()
    """Received file descriptors, which the receiver owns."""


class Connection:
    """A connected stream socket; one thread sends and receives at a time.

    ``most_body`` is the largest body that the connection receives, in bytes.
    """

    def __init__(self, connected: socket.socket, *, most_body: int = MOST_BODY) -> None:
        self._socket = connected
        self._most_body = most_body
        self._in_clear = type(connected) is socket.socket
        self._limit_s: float | None = 0.0
        """Time limit that is set on the socket; 0 if none is set yet."""
        self._left = b""

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """Return a connection, and the socket of the other end, for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def send(
        self,
        header: bytes,
        body: Sequence[NDArray[Any] | bytes] = (),
        limit_s: float | None = None,
    ) -> None:
        """Send a frame whose body consists of arrays, each aligned.

        Raises ConnectionLostError, or TransportTimeoutError if a frame with a body is not sent
        whole within ``limit_s``.
        """
        pieces: Sequence[Any] = (_framed(header),) if not body else _pieces(header, body)
        try:
            if body and limit_s != self._limit_s:
                self._limit(limit_s)
            if body and limit_s is not None:
                self._send_until(time.monotonic() + limit_s, pieces)
            else:
                for piece in pieces:
                    self._socket.sendall(piece)
        except OSError as error:
            if _is_late(error):
                raise TransportTimeoutError(
                    f"it did not accept a message within {limit_s:g} s"
                ) from error
            raise ConnectionLostError(str(error)) from error

    def send_fds(self, header: bytes, fds: Sequence[int]) -> None:
        """Send a frame with file descriptors; ConnectionLostError if the other end is gone."""
        content = pack_head(header, 0) + header
        try:
            sent = socket.send_fds(self._socket, [content], list(fds))
            self._socket.sendall(content[sent:])
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(
        self, limit_s: float | None = None, *, fds: bool = False, most_body: int | None = None
    ) -> Frame:
        """Receive a frame within ``limit_s``, or up to a tenth longer.

        With ``fds`` the frame may carry file descriptors. Raises ConnectionLostError,
        TransportTimeoutError, or LargeBodyError. The last is raised for a body that exceeds
        ``most_body`` bytes or the connection's limit, before any memory is allocated for the body.
        """
        found: list[int] = []
        try:
            if limit_s != self._limit_s:
                self._limit(limit_s)
            ends_s = None if limit_s is None else time.monotonic() + limit_s
            data = self._left or self._some(found if fds else None)
            while len(data) < HEAD.size:
                self._shorten_limit(ends_s)
                data += self._some(found if fds else None)
            header_bytes, body_bytes = unpack_head(data[: HEAD.size])
            most = self._most_body if most_body is None else most_body
            if body_bytes > most:
                raise LargeBodyError(
                    f"it sent a body of {body_bytes} bytes, expected at most {most}"
                )
            start = HEAD.size + header_bytes
            end = start + body_bytes
            while len(data) < start:
                self._shorten_limit(ends_s)
                data += self._some(found if fds else None)
            body = bytearray(data[start:end])
            self._left = data[end:]
            if len(data) < end:
                body = self._rest(body, body_bytes, ends_s)
        except (OSError, FrameError) as error:
            for fd in found:
                os.close(fd)
            if isinstance(error, LargeBodyError):
                raise
            if _is_late(error):
                raise TransportTimeoutError(f"no answer within {limit_s:g} s") from error
            raise ConnectionLostError(str(error)) from error
        return Frame(data[HEAD.size : start], body, tuple(found))

    def close(self) -> None:
        """Close the socket; the other end sees the connection end."""
        self._socket.close()

    @contextmanager
    def watched(self, gone: Callable[[], None]) -> Iterator[None]:
        """Let a thread call ``gone`` if the other end closes while this context is active."""
        ending, ended = socket.socketpair()
        watched = self._socket.fileno()
        events = select.poll()
        events.register(watched, _GONE)
        events.register(ended, select.POLLIN)

        def watch() -> None:
            if any(fd == watched for fd, _ in events.poll()):
                gone()

        with ending, ended:
            thread = threading.Thread(target=watch, name="watch", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ending.send(b".")
                thread.join()  # before the descriptor's number is reused

    def _limit(self, limit_s: float | None) -> None:
        """Set the socket's time limit; for unencrypted sockets, let the operating system apply it.

        Python's own limit costs an additional system call for every send and receive.
        """
        if not self._in_clear:
            self._socket.settimeout(limit_s)
        else:
            self._socket.settimeout(None)
            timeval = _timeval(limit_s)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._limit_s = limit_s

    def _shorten_limit(self, ends_s: float | None) -> None:
        """Limit the socket's wait for the rest of a frame to this time, or up to a tenth longer.

        TimeoutError if the time is over. The limit is for the whole frame, also if its data arrive
        in small pieces.
        """
        if ends_s is not None:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if left_s < _NEARLY * (self._limit_s or left_s):
                self._limit(left_s)

    def _send_until(self, ends_s: float, pieces: Sequence[Any]) -> None:
        """Send all pieces; the socket already has the limit for its first send."""
        waits = False
        for piece in pieces:
            sent = 0
            while sent < len(piece):
                if waits:
                    self._shorten_limit(ends_s)
                waits = True
                sent += self._socket.send(memoryview(piece)[sent:] if sent else piece)

    def _some(self, fds: list[int] | None) -> bytes:
        if fds is None:
            data = self._socket.recv(_CHUNK)
        else:
            data, found, _, _ = socket.recv_fds(self._socket, _CHUNK, _MOST_FDS)
            fds += found
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        return data

    def _rest(self, body: bytearray, size: int, ends_s: float | None) -> bytearray:
        """Receive the rest of a body.

        Beyond 16 MiB, memory of at most twice the received size is allocated. Rejected:
        ``MSG_WAITALL``, which made bodies of 300 kB a tenth slower, and does not exist with TLS.
        """
        have = len(body)
        while have < size:
            body += bytes(min(size, max(2 * have, _AT_ONCE)) - len(body))
            with memoryview(body) as view:
                while have < len(body):
                    self._shorten_limit(ends_s)
                    count = self._socket.recv_into(view[have:])
                    if not count:
                        raise ConnectionResetError("the other end closed the connection")
                    have += count
        return body


def _is_late(error: Exception) -> bool:
    """Return whether an error means that a time limit is over.

    A TimeoutError that has an ``errno`` comes from a lost network instead.
    """
    return isinstance(error, BlockingIOError) or (
        isinstance(error, TimeoutError) and error.errno is None
    )


def _timeval(limit_s: float | None) -> bytes:
    """Encode a time limit for the operating system, which reads 0 as no limit."""
    micros = 0 if limit_s is None else max(round(1e6 * limit_s), 1)
    return struct.pack("@ll", *divmod(micros, 1_000_000))


@lru_cache(maxsize=1024)  # the same headers are sent repeatedly
def _framed(header: bytes) -> bytes:
    """Return a frame without a body."""
    return pack_head(header, 0) + header


def _pieces(header: bytes, body: Sequence[NDArray[Any] | bytes]) -> Sequence[Any]:
    """Return a frame with a body, in one piece if it is small."""
    parts: list[Any] = []
    end = 0
    for part in body:
        content = part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data
        parts += [bytes(aligned(end) - end), content]
        end = aligned(end) + len(content)
    whole = [pack_head(header, end), header, *parts]
    return [b"".join(whole)] if end <= _CHUNK else list(_joined(whole))


def _joined(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the pieces to send; small parts are joined: each piece may wake the other end."""
    small = b""
    for part in parts:
        small += part[:_CHUNK]
        if len(small) >= _CHUNK:
            yield small
            small = b""
            if len(part) > _CHUNK:
                yield memoryview(part)[_CHUNK:]
    if small:
        yield small


class SharedMemory:
    """Memory shared with another process by its file descriptor.

    The memory exists while this object, or an array in the memory, exists.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map memory, and keep the descriptor; OSError if it is too small or cannot be mapped."""
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """Allocate new memory, filled with zeros; OSError if that fails."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("offramp-worker")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, size_bytes)
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    def array(self, form: TensorForm, offset: int) -> NDArray[Any]:
        """Return a view of an array in this memory; FrameError if it is out of bounds."""
        if offset < 0 or offset + form.size_bytes > self.size_bytes:
            raise FrameError(
                f"array {form.name!r:.60} has {form.size_bytes} bytes at {offset}, expected "
                f"within {self.size_bytes}"
            )
        return np.ndarray(form.shape, form.dtype, self._map, offset)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MemoryBlock:
    """A block of shared memory, reserved while this object exists."""

    __slots__ = ("_taken", "size_bytes", "start")

    def __init__(self, taken: dict[int, int], start: int, size_bytes: int) -> None:
        self._taken, self.start, self.size_bytes = taken, start, size_bytes

    @property
    def end(self) -> int:
        """Offset of the first byte after the block."""
        return self.start + self.size_bytes

    def __del__(self) -> None:
        self._taken.pop(self.start, None)


class Regions:
    """The reserved blocks of some memory, with first-fit allocation; used by one thread."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: dict[int, int] = {}
        """End offset of each reserved block, by its start offset. A block removes its entry when
        the block is deleted, in any thread."""

    def take(self, size_bytes: int) -> MemoryBlock | None:
        """Reserve an aligned block of this size; ``None`` if there is no space."""
        size_bytes = -(-size_bytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        start, taken = 0, self._taken
        if taken:
            for begins, ends in sorted(taken.items()):
                if begins - start >= size_bytes:
                    break
                start = ends
        if start + size_bytes > self._size_bytes:
            return None
        taken[start] = start + size_bytes
        return MemoryBlock(taken, start, size_bytes)
