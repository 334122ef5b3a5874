"""The thread that runs a generating model's backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from offramp.engine.common.errors import OutOfServiceError
from offramp.generation.serving.step_loop import StepLoop

_log = logging.getLogger(__name__)


class TextThread(threading.Thread):
    """Takes turns of a step loop until it is stopped; then it frees the backend."""

    def __init__(self, loop: StepLoop, broken: Callable[[OutOfServiceError], None]) -> None:
        """``broken`` is told, with the lock held, why there will be no more turns."""
        super().__init__(name="text", daemon=True)
        self._loop, self._broken = loop, broken
        self._stopped = False

    def stop(self) -> None:
        """Take no more turns; the one that runs ends first."""
        with self._loop.changed:
            self._stopped = True
            self._loop.changed.notify_all()

    def run(self) -> None:
        """Take turns."""
        try:
            while not self._stopped:
                if not self._loop.turn():
                    self._wait()
        except Exception as error:  # those who wait must be told
            _log.exception("generating text is out of service")
            with self._loop.changed:
                self._broken(OutOfServiceError(f"out of service: {error!r}"))
        finally:
            self._loop.close()

    def _wait(self) -> None:
        """Wait for a sequence: while there is any, there is something to run."""
        with self._loop.changed:
            while not self._stopped and not self._loop.scheduler.sequences:
                self._loop.changed.wait()
