"""Frames between a front end and the engine's process, over a private socket."""

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
"""Frame header: payload size in bytes, call number, kind."""

_SCRATCH_BYTES: Final = 1024 * 1024
"""Size of the receive buffer: larger than any frame, as large messages use shared memory."""
_HIGH_BYTES: Final = 4 * 1024 * 1024
"""Size of the send queue, in bytes, above which no further message is accepted."""
_SHARED: Final = 128
"""Number that is added to the kind of a frame if the frame ends with a :class:`SharedPayload`."""


class FrameKind(IntEnum):
    """Kinds of frames, each with its sender."""

    CALL = 0
    """Front end: a call with its only message, preceded by its :class:`CallHead`."""
    OPEN = 1
    """Front end: the head of a call whose messages follow."""
    MESSAGE = 2
    """Either: a message of an open call. The next one follows once this one is taken."""
    TAKEN = 3
    """Either: the last message was taken, or was written to the client."""
    END = 4
    """Front end: the client sends no more messages."""
    DONE = 5
    """Front end: gRPC is done with the call; if it was not answered, it is withdrawn."""
    ANSWER = 6
    """Engine: the only answer, with status OK."""
    STATUS = 7
    """Engine: the call ends with this :class:`CallStatus`."""
    ORDER = 8
    """Engine: an order to a front end that concerns no call."""
    REPLY = 9
    """Front end: the result of the last order."""
    LOG = 10
    """Front end: a line for the log."""
    REFUSED = 11
    """Front end: it refused a call; status code and reason."""
    MAPPED = 12
    """Either: the receiver has mapped the payload of this descriptor."""


Payload: TypeAlias = bytes | memoryview

Receiver: TypeAlias = Callable[[FrameKind, int, Payload, memoryview | None], None]
"""Function that takes a frame's kind, call and payload, and its message if that is in shared
memory."""


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
        """Descriptors of shared memory that the other end has not mapped yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of a new connection; asyncio calls this."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(_HIGH_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Release shared memory and waiting senders; asyncio calls this at the end."""
        self._transport = None
        self._writable.set()
        close_all([*self._sent_by_memory])
        self._lost()

    def pause_writing(self) -> None:
        """Let senders wait; asyncio calls this while its buffer is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders continue; asyncio calls this once its buffer has space."""
        self._writable.set()

    async def writable(self) -> None:
        """Wait until the queue can take another message."""
        await self._writable.wait()

    def send(self, kind: FrameKind, call: int = 0, payload: Payload = b"") -> None:
        """Send a small frame; do nothing if the other end is gone."""
        if self._transport is not None:
            self._transport.write(b"".join((_HEAD.pack(len(payload), call, kind), payload)))

    async def send_message(
        self, kind: FrameKind, call: int, message: Payload, *, head: bytes = b""
    ) -> None:
        """Send a head with a message of any size; do nothing if the other end is gone."""
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
        """Close the connection; unsent frames are lost."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return the memory into which asyncio receives bytes."""
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the complete frames among the bytes that asyncio received."""
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
