"""From the streams' threads to the event loop: one wake-up however many requests are finished."""

from __future__ import annotations

import asyncio
import logging
import threading

from offramp.engine.requests import PendingRequest

_log = logging.getLogger(__name__)


class Outbox:
    """Finished requests on their way; filled and woken under the executor's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        """Start empty; ``lock`` is the executor's."""
        self._lock = lock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished: list[PendingRequest] = []
        self._waking = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver in this loop."""
        self._loop = loop

    def add(self, request: PendingRequest) -> None:
        """Put a finished request in; the lock is held."""
        self._finished.append(request)

    def wake(self) -> None:
        """Have the event loop deliver what is in; the lock is held."""
        if self._finished and not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: nobody waits any more
                _log.debug("the event loop is closed")

    def _deliver(self) -> None:
        """Resolve futures; runs in the event loop."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._waking = False
        for request in finished:
            if not request.future.done():  # its caller may have left
                request.future.set_result(request)
