"""Connections that carry frames, and memory that two processes share; nothing here knows models.

Rejected: :mod:`multiprocessing.connection`, which unpickles; ``SOCK_SEQPACKET``, whose messages are
no larger than the socket's buffer, and of which there is none over a network.
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
"""Bytes of a body that memory is taken for before they have come."""
_MOST_FDS: Final = 4
_NEARLY: Final = 0.9
"""Part of a limit that is as good as all of it, and saves calls of the system to set it anew."""
_GONE: Final = getattr(select, "POLLRDHUP", 0)
"""Event of an end that says no more; that it is gone altogether is told unasked."""


class ConnectionLostError(Exception):
    """The other end is gone, or what it says is no frame."""


class TooLateError(Exception):
    """The other end did not answer in time."""


class Frame(NamedTuple):
    """What came over a connection at once."""

    header: bytes
    body: bytearray
    fds: tuple[int, ...] = ()
    """File descriptors that came along, which are the receiver's now."""


class Connection:
    """A connected stream socket; one thread sends and receives at a time.

    ``most_body`` is the most bytes of a body that it receives.
    """

    def __init__(self, connected: socket.socket, *, most_body: int = MOST_BODY) -> None:
        self._socket = connected
        self._most_body = most_body
        self._in_clear = type(connected) is socket.socket
        self._limit_s: float | None = 0.0
        """Of what is sent and received; 0 if it is not set yet."""
        self._left = b""

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """Make a connection, and the socket of the other end, for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def send(
        self,
        header: bytes,
        body: Sequence[NDArray[Any] | bytes] = (),
        limit_s: float | None = None,
    ) -> None:
        """Send a frame whose body is those arrays, each aligned.

        ConnectionLostError; TooLateError if not all of a frame with a body is taken within
        ``limit_s``.
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
                raise TooLateError(f"it did not take a message within {limit_s:g} s") from error
            raise ConnectionLostError(str(error)) from error

    def send_fds(self, header: bytes, fds: Sequence[int]) -> None:
        """Send a frame with file descriptors; ConnectionLostError."""
        content = pack_head(header, 0) + header
        try:
            sent = socket.send_fds(self._socket, [content], list(fds))
            self._socket.sendall(content[sent:])
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(
        self, limit_s: float | None = None, *, fds: bool = False, most_body: int | None = None
    ) -> Frame:
        """Wait for a frame, for at most ``limit_s``, or a tenth longer, until all of it is there.

        With ``fds`` it may bring file descriptors. ConnectionLostError, TooLateError, or
        LargeBodyError for a body of more than ``most_body`` bytes, or what the connection receives
        at most, before anything is allocated for it.
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
                raise TooLateError(f"no answer within {limit_s:g} s") from error
            raise ConnectionLostError(str(error)) from error
        return Frame(data[HEAD.size : start], body, tuple(found))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @contextmanager
    def watched(self, gone: Callable[[], None]) -> Iterator[None]:
        """Have a thread call ``gone`` should the other end leave meanwhile, whatever ours do."""
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
                thread.join()  # before the number of the descriptor is another's

    def _limit(self, limit_s: float | None) -> None:
        """Have sockets wait no longer; of those in the clear the system sees to it.

        A limit of Python's makes a call of the system more of everything that is sent or received.
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
        """Have the socket wait until then, or a tenth longer, for what is left of a frame.

        TimeoutError if it is then already: whoever drips is late, however soon each piece comes.
        """
        if ends_s is not None:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if left_s < _NEARLY * (self._limit_s or left_s):
                self._limit(left_s)

    def _send_until(self, ends_s: float, pieces: Sequence[Any]) -> None:
        """Send all of some pieces; the socket has that limit already, for what it takes at once."""
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

        Beyond some MiB no more memory is taken than twice what has come. Rejected: ``MSG_WAITALL``,
        which made bodies of 300 kB a tenth slower, and cannot be had with TLS.
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
    """Say whether a limit is over; the system has a TimeoutError of its own for lost networks."""
    return isinstance(error, BlockingIOError) or (
        isinstance(error, TimeoutError) and error.errno is None
    )


def _timeval(limit_s: float | None) -> bytes:
    """Give a limit as the system takes it, where 0 is none."""
    micros = 0 if limit_s is None else max(round(1e6 * limit_s), 1)
    return struct.pack("@ll", *divmod(micros, 1_000_000))


@lru_cache(maxsize=1024)  # the same are sent again and again
def _framed(header: bytes) -> bytes:
    """Give a frame without a body."""
    return pack_head(header, 0) + header


def _pieces(header: bytes, body: Sequence[NDArray[Any] | bytes]) -> Sequence[Any]:
    """Give a frame with a body, in one piece if it is small."""
    parts: list[Any] = []
    end = 0
    for part in body:
        content = part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data
        parts += [bytes(aligned(end) - end), content]
        end = aligned(end) + len(content)
    whole = [pack_head(header, end), header, *parts]
    return [b"".join(whole)] if end <= _CHUNK else list(_joined(whole))


def _joined(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Give parts in pieces to send; small ones together, as each may wake the other end."""
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
    """Memory that another process has too, by its file descriptor.

    It lasts as long as this or an array in it.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map memory; OSError if it is smaller, or cannot be mapped. The descriptor is kept."""
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """Make new memory, of zeros; OSError if there is none."""
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
        """View an array in it; FrameError if it is not all within."""
        if offset < 0 or offset + form.size_bytes > self.size_bytes:
            raise FrameError(
                f"array {form.name!r:.60} has {form.size_bytes} bytes at {offset}, expected "
                f"within {self.size_bytes}"
            )
        return np.ndarray(form.shape, form.dtype, self._map, offset)

    def close_fd(self) -> None:
        """Close the descriptor; what is mapped stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MemoryBlock:
    """A part of shared memory that is taken as long as this lasts."""

    __slots__ = ("_taken", "size_bytes", "start")

    def __init__(self, taken: dict[int, int], start: int, size_bytes: int) -> None:
        self._taken, self.start, self.size_bytes = taken, start, size_bytes

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.start + self.size_bytes

    def __del__(self) -> None:
        self._taken.pop(self.start, None)


class Regions:
    """Which parts of some memory are taken, and the first that is free; used by one thread."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: dict[int, int] = {}
        """Ends by beginning; blocks leave it whenever and wherever they go."""

    def take(self, size_bytes: int) -> MemoryBlock | None:
        """Take a part of this size, aligned; ``None`` if there is no room."""
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
