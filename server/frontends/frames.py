"""Frames between a front end and the engine's process, over a socket that only the two have."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, TypeAlias, cast

import numpy as np

_HEAD: Final = struct.Struct("<IIB")
"""Size of the payload in bytes, number of the call, kind."""

_SCRATCH_BYTES: Final = 256 * 1024
_LARGE_BYTES: Final = 64 * 1024
"""Payloads above it are received where they stay, and sent without being copied."""
_HIGH_BYTES: Final = 4 * 1024 * 1024
"""Beyond it in the queue for sending, no further message is to be taken."""


class FrameKind(IntEnum):
    """What a frame says."""

    CALL = 0
    """Front end: a call with its only message, after its :class:`CallHead`."""
    OPEN = 1
    """Front end: the head of a call whose messages follow."""
    MESSAGE = 2
    """Either: a message of such a call. The next one comes once this one is taken."""
    TAKEN = 3
    """Either: the last message was taken, or was written to the client."""
    END = 4
    """Front end: the client sends no more messages."""
    DONE = 5
    """Front end: gRPC has done with the call; if it was not answered, it is withdrawn."""
    ANSWER = 6
    """Engine: the one answer, and status OK."""
    STATUS = 7
    """Engine: the call ends with this :class:`CallStatus`."""
    ORDER = 8
    """Engine: what a front end is to do, beside calls."""
    REPLY = 9
    """Front end: what came of the last order."""
    LOG = 10
    """Front end: a line for the log."""
    REFUSED = 11
    """Front end: it has refused a call by itself; status code and reason."""


Payload: TypeAlias = bytes | memoryview

Receiver: TypeAlias = Callable[[FrameKind, int, Payload], None]
"""Takes kind, call and payload of a frame."""


class FrameLink(asyncio.BufferedProtocol):
    """One end of the socket; used on the event loop's thread."""

    def __init__(self, receive: Receiver, lost: Callable[[], None]) -> None:
        """``lost`` is called when the other process has ended, or :meth:`close` was called."""
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.WriteTransport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._filled = 0
        self._large: memoryview | None = None
        """The payload that is being received in its own place, with its kind and call:"""
        self._large_frame = (FrameKind.MESSAGE, 0)
        self._large_filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(_HIGH_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See asyncio."""
        self._transport = None
        self._writable.set()
        self._lost()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writable.set()

    async def writable(self) -> None:
        """Wait until there is room for another message."""
        await self._writable.wait()

    def send(self, kind: FrameKind, call: int = 0, *payload: Payload) -> None:
        """Send a frame; to an end that is gone nothing is sent."""
        if self._transport is None:
            return
        size = sum(map(len, payload))
        head = _HEAD.pack(size, call, kind)
        if size <= _LARGE_BYTES:
            self._transport.write(b"".join((head, *payload)))
        else:
            self._transport.writelines((head, *payload))

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> Any:  # noqa: ARG002
        """See asyncio."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        if self._large is None:
            self._filled += nbytes
            self._read_scratch()
            return
        self._large_filled += nbytes
        if self._large_filled == len(self._large):
            payload, self._large = self._large.toreadonly(), None
            self._receive(*self._large_frame, payload)

    def _read_scratch(self) -> None:
        start, end, scratch = 0, self._filled, self._scratch
        while end - start >= _HEAD.size:
            size, call, kind = _HEAD.unpack_from(scratch, start)
            begin = start + _HEAD.size
            if size > _LARGE_BYTES and begin + size > end:
                self._begin_large(FrameKind(kind), call, size, scratch[begin:end])
                start = end
            elif begin + size > end:
                break
            else:
                start = begin + size
                self._receive(FrameKind(kind), call, bytes(scratch[begin:start]))
        left = end - start
        scratch[:left] = bytes(scratch[start:end])
        self._filled = left

    def _begin_large(self, kind: FrameKind, call: int, size: int, begun: memoryview) -> None:
        self._large = np.empty(size, np.uint8).data
        self._large[: len(begun)] = begun
        self._large_filled = len(begun)
        self._large_frame = (kind, call)
