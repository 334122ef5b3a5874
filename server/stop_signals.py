"""SIGTERM and SIGINT: the first asks the server to leave, the second to leave at once."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StopSignals:
    """What was asked for so far."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        """Set by the first signal."""
        self.forced = asyncio.Event()
        """Set by the second."""

    def request(self, name: str) -> None:
        """Ask once more; ``name`` is who asks, for the log."""
        if not self.requested.is_set():
            logger.info("%s: leaving once the requests in flight are answered", name)
            self.requested.set()
        else:
            logger.warning("%s again: leaving at once", name)
            self.forced.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to the signals of the process; on its main thread, in a running loop."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self.request, number.name)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
