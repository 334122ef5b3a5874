"""Frames between a front end and the engine's process, over a socket that only the two have."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, TypeAlias, cast

from offramp.server.frontends.shared_payloads import (
    LARGE_BYTES,
    SHARED_BYTES,
    SharedPayload,
    close_all,
)

_HEAD: Final = struct.Struct("<IIB")
"""Size of the payload in bytes, number of the call, kind."""

_SCRATCH_BYTES: Final = 1024 * 1024
"""More than any frame takes: what is large goes by memory."""
_HIGH_BYTES: Final = 4 * 1024 * 1024
"""Beyond it in the queue for sending, no further message is to be taken."""
_SHARED: Final = 128
"""Added to the kind of a frame whose last bytes are a :class:`SharedPayload`."""


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
    MAPPED = 12
    """Either: the payload of this descriptor is mapped."""


Payload: TypeAlias = bytes | memoryview

Receiver: TypeAlias = Callable[[FrameKind, int, Payload, memoryview | None], None]
"""Takes kind, call and payload of a frame, and its message if that came by memory."""


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
        self._sent_by_memory: set[int] = set()
        """Descriptors that the other end has not mapped yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(_HIGH_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See asyncio."""
        self._transport = None
        self._writable.set()
        close_all([*self._sent_by_memory])
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

    def send(self, kind: FrameKind, call: int = 0, payload: Payload = b"") -> None:
        """Send a frame that is small; to an end that is gone nothing is sent."""
        if self._transport is not None:
            self._transport.write(b"".join((_HEAD.pack(len(payload), call, kind), payload)))

    async def send_message(
        self, kind: FrameKind, call: int, message: Payload, *, head: bytes = b""
    ) -> None:
        """Send a frame with a message that may be large, behind a head; nothing if it is gone."""
        if len(message) <= LARGE_BYTES:
            self.send(kind, call, b"".join((head, message)))
            return
        shared = await SharedPayload.of(message)
        if self._transport is None:
            close_all([shared.descriptor])
            return
        self._sent_by_memory.add(shared.descriptor)
        payload = head + shared.encode()
        self._transport.write(_HEAD.pack(len(payload), call, kind + _SHARED) + payload)

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """See asyncio."""
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        start, end, scratch = 0, self._filled + nbytes, self._scratch
        while end - start >= _HEAD.size:
            size, call, kind = _HEAD.unpack_from(scratch, start)
            begin = start + _HEAD.size
            if begin + size > end:
                break
            start = begin + size
            self._take(kind, call, bytes(scratch[begin:start]))
        left = end - start
        scratch[:left] = bytes(scratch[start:end])
        self._filled = left

    def _take(self, kind: int, call: int, payload: bytes) -> None:
        if kind == FrameKind.MAPPED:
            self._sent_by_memory.discard(call)
            close_all([call])
        elif kind < _SHARED:
            self._receive(FrameKind(kind), call, payload, None)
        else:
            shared = SharedPayload.decode(payload[-SHARED_BYTES:])
            message = shared.map()
            self.send(FrameKind.MAPPED, shared.descriptor)
            self._receive(FrameKind(kind - _SHARED), call, payload[:-SHARED_BYTES], message)
