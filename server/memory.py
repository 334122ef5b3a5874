"""What becomes of the memory of large messages, where the allocator is glibc's.

By itself, glibc maps a large block anew each time and unmaps it after: most of the time that it
takes to receive a message of 57 MiB goes into page faults (110 of 125 ms of processor time where we
measured), on the event loop. And blocks of middle size, which gRPC receives a message in, it keeps
for good below others that are in use. So large blocks are kept as well, and all that is free is
given back some time after a peak.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

from offramp.server.options import MIB

PEAK_BYTES: Final = 64 * MIB
"""Messages of less than this at once leave little behind."""

DELAY_S: Final = 5.0
"""From the end of a peak until its memory is given back: the next may follow at once."""

_KEPT_BYTES: Final = 256 * MIB
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""As in glibc's malloc.h."""


def keep_large_blocks(size_bytes: int) -> bool:
    """Have the process keep freed blocks up to this size, and 256 MiB; whether it can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, size_bytes) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    )


class MemoryReturn:
    """Gives free memory back after peaks; used on the event loop's thread."""

    def __init__(
        self, trim: Callable[[], object] | None = None, delay_s: float | None = None
    ) -> None:
        """``trim`` takes the place of the allocator's own."""
        self._trim = trim or _malloc_trim
        self._delay_s = DELAY_S if delay_s is None else delay_s
        self._peak_bytes = 0
        self._due = False
        self._running: asyncio.Future[object] | None = None

    def grew(self, held_bytes: int) -> None:
        """Messages take so much now."""
        self._peak_bytes = max(self._peak_bytes, held_bytes)

    def shrank(self, held_bytes: int) -> None:
        """They take less now; once it is half of a peak, that is over."""
        if self._peak_bytes >= PEAK_BYTES and held_bytes <= self._peak_bytes // 2:
            self._peak_bytes = held_bytes
            if not self._due:
                self._due = True
                asyncio.get_running_loop().call_later(self._delay_s, self._start)

    def _start(self) -> None:
        self._due = False
        # Kept, as the loop itself keeps none; another thread, as it takes a while.
        self._running = asyncio.get_running_loop().run_in_executor(None, self._trim)


def _malloc_trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    if trim is not None:
        trim(0)
