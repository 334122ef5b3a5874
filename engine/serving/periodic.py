"""Loops in parallel with the streams: each runs periodically, on its own thread, until stopped."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

_STOP_S: Final = 10.0
"""Longest time in seconds that :meth:`PeriodicLoop.end` waits for a running :meth:`poll`."""


class PeriodicLoop(ABC):
    """Calls :meth:`poll` after every :meth:`pause_s`, on a daemon thread of a given name."""

    def __init__(self, name: str) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @abstractmethod
    def poll(self) -> None:
        """Do the repeated work of the thread once; it must not raise."""

    @abstractmethod
    def pause_s(self) -> float:
        """Return the seconds until the next poll."""

    @property
    def begun(self) -> bool:
        """True if the thread was started."""
        return self._thread.ident is not None

    def begin(self) -> None:
        """Start the thread, unless it was started or the loop was stopped before."""
        if not self.begun and not self._stopped.is_set():
            self._thread.start()

    def halt(self) -> None:
        """Start no more polls; returns immediately."""
        self._stopped.set()

    def end(self) -> None:
        """Start no more polls, and wait for a running poll; blocks for seconds at most."""
        self.halt()
        if self.begun:
            self._thread.join(_STOP_S)

    def _work(self) -> None:
        while not self._stopped.wait(self.pause_s()):
            self.poll()


class FailureLog:
    """Logs only the first of consecutive failures; serving continues unchanged."""

    def __init__(self, logger: logging.Logger, message: str, *arguments: object) -> None:
        """``message`` and its arguments are logged with the traceback."""
        self._log, self._message, self._arguments = logger, message, arguments
        self._failing = False

    def run(self, step: Callable[[], None]) -> bool:
        """Run a step that may raise; return whether it succeeded."""
        try:
            step()
        except Exception:
            if not self._failing:
                self._log.exception(self._message, *self._arguments)
            self._failing = True
        else:
            self._failing = False
        return not self._failing
