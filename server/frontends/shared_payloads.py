"""Large payloads, written once to shared memory that the other process maps without waiting.

A socket would copy them twice, and small frames would wait for them.
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
"""Size above which payloads go through shared memory."""

_FORM: Final = struct.Struct("<IIQ")
SHARED_BYTES: Final = _FORM.size
"""Size of :meth:`SharedPayload.encode` in bytes."""


class SharedPayload(NamedTuple):
    """Location of a payload for the other process."""

    process: int
    descriptor: int
    """File descriptor in the sender, which closes it once the payload is mapped."""
    size_bytes: int

    @classmethod
    async def of(cls, payload: bytes | memoryview) -> Self:
        """Write a payload on a thread; OSError if memory runs out."""
        writing = asyncio.get_running_loop().run_in_executor(None, _written, payload)
        try:
            descriptor = await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_drop)
            raise
        return cls(os.getpid(), descriptor, len(payload))

    def encode(self) -> bytes:
        """Return the location as bytes."""
        return _FORM.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse the bytes of a location."""
        return cls(*_FORM.unpack(data))

    def map(self) -> memoryview:
        """Return the payload; the mapping lasts as long as a reference to it."""
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
    """Close the memory of a payload that nobody waits for any more, if it was written."""
    if writing.exception() is None:
        os.close(writing.result())


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; those that are closed already are skipped."""
    for each in descriptors:
        with suppress(OSError):
            os.close(each)
