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

from offramp.server.arguments.options import MIB

PEAK_BYTES: Final = 64 * MIB
"""Messages of less than this leave little behind: at once, or large ones one after the other."""

LARGE_BYTES: Final = MIB
"""From this on a message leaves something behind even if it is alone: gRPC's own copy, which is
made before we know of it, and several of which may be there while we know of one."""

DELAY_S: Final = 5.0
"""From the last large message until memory is given back: the next may follow at once."""

_MAX_DELAYS: Final = 6
"""After so many, memory is given back although large messages keep coming."""

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
        self._large_bytes = 0
        """Of large messages since memory was given back."""
        self._another_came = False
        """A large message, since the delay began."""
        self._waiting = False
        self._running: asyncio.Future[object] | None = None

    def grew(self, size_bytes: int, held_bytes: int, *, left_bytes: int = 0) -> None:
        """A message came; with it, messages take so much now.

        ``left_bytes`` are left behind however small the message is.
        """
        self._peak_bytes = max(self._peak_bytes, held_bytes)
        self._large_bytes += left_bytes
        if size_bytes >= LARGE_BYTES:
            self._large_bytes += size_bytes
            self._another_came = True

    def shrank(self, held_bytes: int) -> None:
        """Messages take less now; once it is half of a peak, that is over."""
        peak_over = self._peak_bytes >= PEAK_BYTES and held_bytes <= self._peak_bytes // 2
        if peak_over:
            self._peak_bytes = held_bytes
        if (peak_over or self._large_bytes >= PEAK_BYTES) and not self._waiting:
            self._waiting = True
            self._wait(_MAX_DELAYS)

    def _wait(self, delays: int) -> None:
        self._another_came = False
        asyncio.get_running_loop().call_later(self._delay_s, self._waited, delays - 1)

    def _waited(self, delays_left: int) -> None:
        if self._another_came and delays_left:
            self._wait(delays_left)
            return
        self._waiting = False
        self._large_bytes = 0
        # Kept, as the loop itself keeps none; another thread, as it takes a while.
        self._running = asyncio.get_running_loop().run_in_executor(None, self._trim)


def _malloc_trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    if trim is not None:
        trim(0)
