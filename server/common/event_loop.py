"""The event loop of the server's processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, if installed: it halves the cost of a call."""
    try:
        import uvloop  # noqa: PLC0415 - not available on Windows
    except ImportError:
        return None
    return uvloop.new_event_loop
