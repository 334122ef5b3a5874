"""Memory of large messages, and its return to the system, with the glibc allocator.

By default glibc maps and unmaps a large block each time. When a message of 57 MiB is received, page
faults then take most of the time (110 of 125 ms of processor time in our measurement), on the event
loop. Blocks of medium size, in which gRPC receives a message, stay in the heap under other blocks
in use. So we make glibc keep large blocks as well, and return all free memory some time after a
peak.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

from offramp.server.arguments.options import MIB

PEAK_BYTES: Final = 64 * MIB
"""Total size of messages below which little memory stays free, so that no return is needed."""

LARGE_BYTES: Final = MIB
"""Size from which even a single message leaves free memory: gRPC's own copy, made before we know of
the message. Several such copies may exist while we know of one message."""

DELAY_S: Final = 5.0
"""Seconds from the last large message to the return of memory; the next may follow soon."""

_MAX_DELAYS: Final = 6
"""Number of delays after which memory is returned even if large messages keep arriving."""

_KEPT_BYTES: Final = 256 * MIB
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""


def keep_large_blocks(size_bytes: int) -> bool:
    """Make the process keep freed blocks up to this size, 256 MiB in total; return success."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, size_bytes) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    )


class MemoryReturn:
    """Returns free memory to the system after peaks; used on the event loop's thread."""

    def __init__(
        self, trim: Callable[[], object] | None = None, delay_s: float | None = None
    ) -> None:
        """``trim`` replaces the allocator's function."""
        self._trim = trim or _malloc_trim
        self._delay_s = DELAY_S if delay_s is None else delay_s
        self._peak_bytes = 0
        self._large_bytes = 0
        """Bytes of large messages since memory was last returned."""
        self._grew_since = False
        """True if a large message arrived since the delay began."""
        self._waiting = False
        self._running: asyncio.Future[object] | None = None

    def record_growth(self, size_bytes: int, held_bytes: int, *, left_bytes: int = 0) -> None:
        """Record a new message of ``size_bytes``; ``held_bytes`` includes it.

        ``left_bytes`` remain in gRPC regardless of the message's size.
        """
        self._peak_bytes = max(self._peak_bytes, held_bytes)
        self._large_bytes += left_bytes
        if size_bytes >= LARGE_BYTES:
            self._large_bytes += size_bytes
            self._grew_since = True

    def record_shrink(self, held_bytes: int) -> None:
        """Record a smaller ``held_bytes``; a peak is over once it has fallen by half."""
        peak_over = self._peak_bytes >= PEAK_BYTES and held_bytes <= self._peak_bytes // 2
        if peak_over:
            self._peak_bytes = held_bytes
        if (peak_over or self._large_bytes >= PEAK_BYTES) and not self._waiting:
            self._waiting = True
            self._wait(_MAX_DELAYS)

    def _wait(self, delays: int) -> None:
        self._grew_since = False
        asyncio.get_running_loop().call_later(self._delay_s, self._waited, delays - 1)

    def _waited(self, delays_left: int) -> None:
        if self._grew_since and delays_left:
            self._wait(delays_left)
            return
        self._waiting = False
        self._large_bytes = 0
        # The future is kept because the loop keeps no reference. Trimming takes long, so a thread
        # does it.
        self._running = asyncio.get_running_loop().run_in_executor(None, self._trim)


def _malloc_trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    if trim is not None:
        trim(0)
