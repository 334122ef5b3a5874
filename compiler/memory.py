"""Giving memory back that was used for a while: the next step of compiling needs its own."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Free what nothing refers to, and have the allocator give the system what is free."""
    gc.collect()
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    except (OSError, TypeError):  # Windows
        return
    if trim is not None:
        trim(0)
