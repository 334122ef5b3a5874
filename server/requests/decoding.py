"""Decoding of messages without blocking the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from offramp.engine.requests.results import ModelInfo
from offramp.proto.request_bytes import (
    MAX_FIELDS,
    QUICK_BYTES,
    SMALL_BYTES,
    InferMessage,
    MessageError,
    MessageLimitError,
    MessageParts,
    split_message,
)
from offramp.server.common.errors import RequestLimitError, UndecodableError
from offramp.server.requests.codec import InferCall, read_request
from offramp.server.requests.shared_memory import SharedRegions, shared_bytes

_SMALL_MESSAGE_BYTES: Final = 4096
_MANY_FIELDS: Final = 64
"""Number of fields in a request above which decoding yields to the event loop."""


_T = TypeVar("_T")


class RequestDecoder:
    """Decodes requests on the event loop, and large ones on a thread, one at a time.

    A large request takes tens of milliseconds, and many may arrive together. A request with many
    fields takes a millisecond, so other work of the event loop runs between two of these.
    """

    def __init__(self, regions: SharedRegions | None = None) -> None:
        """``regions`` are shared memory regions that may hold requests' tensors."""
        self._regions = regions or SharedRegions()
        self._turn = asyncio.Lock()
        self._turn_on_loop = asyncio.Lock()

    async def message(self, data: bytes) -> InferMessage:
        """Decode the bytes of a request.

        Raises:
            UndecodableError: The bytes are not a ``ModelInferRequest``.
            RequestLimitError: A limit of :mod:`offramp.proto.request_bytes` is exceeded.
        """
        try:
            parts = await self._parts(data)
            return await self._run(parts.decode) if parts.slow else parts.decode()
        except MessageLimitError as error:
            raise RequestLimitError(str(error)) from None
        except MessageError as error:
            raise UndecodableError(str(error)) from None

    async def _parts(self, data: bytes) -> MessageParts:
        if len(data) <= SMALL_BYTES:
            return split_message(data)
        async with self._turn_on_loop:
            fields = MAX_FIELDS
            try:
                parts = split_message(data)
                fields = parts.fields
                return parts
            finally:
                if fields > _MANY_FIELDS:
                    await asyncio.sleep(0)

    async def call(
        self,
        message: InferMessage,
        model: ModelInfo,
        *,
        time_remaining_s: float | None,
    ) -> InferCall:
        """Decode the tensors and parameters of a request, as :func:`read_request` does."""
        read = partial(
            read_request,
            message,
            model,
            now_s=time.monotonic(),
            time_remaining_s=time_remaining_s,
            regions=self._regions,
        )
        slow = message.slow or shared_bytes(message.head) > QUICK_BYTES
        return await self.run(read, slow=slow)

    async def run(self, work: Callable[[], _T], *, slow: bool) -> _T:
        """Run a decoding or encoding function; slow ones run on a thread, one at a time."""
        return await self._run(work) if slow else work()

    async def _run(self, work: Callable[[], _T]) -> _T:
        async with self._turn:
            working = asyncio.create_task(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            finally:  # a thread cannot be stopped: hold the lock until it ends, even if cancelled
                while not working.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait((working,))


def decode_small(data: bytes, decode: Callable[[bytes], _T]) -> _T:
    """Decode a message that only holds names.

    Raises:
        UndecodableError: ``decode`` refuses the message.
        RequestLimitError: The message is larger than this kind of message can be.
    """
    if len(data) > _SMALL_MESSAGE_BYTES:
        raise RequestLimitError(
            f"the message has {len(data)} bytes, expected at most {_SMALL_MESSAGE_BYTES}: "
            "messages of this method only hold names and settings; put files into the repository"
        )
    try:
        return decode(data)
    except DecodeError as error:
        raise UndecodableError(f"the message is not one that this method takes ({error})") from None
