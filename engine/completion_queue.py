"""From the streams' threads to the event loop: one wake-up however many requests are finished."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from offramp.engine.requests import PendingRequest

_log = logging.getLogger(__name__)

_MEMORY = 1 / 32
"""Weight of one delivery in the running means."""
_MOST, _LEAST_BOUND_S = 2.0, 1e-3


class CompletionQueue:
    """Finished requests on their way; filled and woken under the executor's lock."""

    def __init__(self, lock: threading.Lock, clock: Callable[[], float]) -> None:
        """Start empty; ``lock`` and ``clock`` are the executor's."""
        self._lock = lock
        self._clock = clock
        self._woken_s = 0.0
        self._delay_s = 0.0
        self._spread_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished: list[tuple[asyncio.Future[PendingRequest], PendingRequest]] = []
        self._waking = False

    @property
    def delay_s(self) -> float:
        """How long an answer takes into the event loop: the running mean, and two deviations.

        What has to be answered by a time has to be finished so much earlier.
        """
        return self._delay_s + 2.0 * self._spread_s

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver in this loop."""
        self._loop = loop

    def add(self, request: PendingRequest) -> None:
        """Put a finished request in; the lock is held."""
        self._finished.append((request.future, request))

    def add_followup(self, request: PendingRequest) -> None:
        """Put the final answers of an answered request in; the lock is held."""
        if request.followup is not None:
            self._finished.append((request.followup, request))

    def wake(self) -> None:
        """Have the event loop deliver what is in; the lock is held."""
        if self._finished and not self._waking and self._loop is not None:
            self._waking = True
            self._woken_s = self._clock()
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: nobody waits any more
                _log.debug("the event loop is closed")

    def _deliver(self) -> None:
        """Resolve futures; runs in the event loop."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._waking = False
            # A stall of the loop is no reason to refuse what comes after it: one observation
            # counts for at most a few times the usual.
            most_s = _MOST * self.delay_s + _LEAST_BOUND_S
            delay_s = min(self._clock() - self._woken_s, most_s)
            self._spread_s += _MEMORY * (abs(delay_s - self._delay_s) - self._spread_s)
            self._delay_s += _MEMORY * (delay_s - self._delay_s)
        for future, request in finished:
            if not future.done():  # its caller may have left
                future.set_result(request)
