"""Large payloads: written once to memory that the other process maps, as it does not wait then.

Through the socket they would be copied twice, and small frames would wait behind them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Self

LARGE_BYTES: Final = 256 * 1024
"""Payloads above it go by memory."""

_FORM: Final = struct.Struct("<IIQ")
SHARED_BYTES: Final = _FORM.size
"""Of :meth:`SharedPayload.encode`."""


class SharedPayload(NamedTuple):
    """Where the other process finds a payload."""

    process: int
    descriptor: int
    """Of the sender, which closes it once the payload is mapped."""
    size_bytes: int

    @classmethod
    async def of(cls, payload: bytes | memoryview) -> Self:
        """Write a payload on a thread; OSError where there is no memory for it."""
        writing = asyncio.get_running_loop().run_in_executor(None, _written, payload)
        try:
            descriptor = await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_drop)
            raise
        return cls(os.getpid(), descriptor, len(payload))

    def encode(self) -> bytes:
        """Return its bytes."""
        return _FORM.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read its bytes."""
        return cls(*_FORM.unpack(data))

    def map(self) -> memoryview:
        """Return the payload; it stays as long as anything refers to it."""
        descriptor = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDONLY)
        try:
            return memoryview(mmap.mmap(descriptor, self.size_bytes, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)


def _written(payload: bytes | memoryview) -> int:
    descriptor = os.memfd_create("offramp")
    try:
        left = memoryview(payload)
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _drop(writing: asyncio.Future[int]) -> None:
    """Close the memory of a payload that is of no use any more, if there was room for it."""
    if writing.exception() is None:
        os.close(writing.result())


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors, whether or not they are open."""
    for each in descriptors:
        with suppress(OSError):
            os.close(each)
