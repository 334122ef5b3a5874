"""The thread that runs a generating model's backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from offramp.engine.common.errors import OutOfServiceError
from offramp.generation.serving.step_loop import StepLoop

_log = logging.getLogger(__name__)


class TextThread(threading.Thread):
    """Runs a step loop until it is stopped; then it releases the backend."""

    def __init__(self, loop: StepLoop, broken: Callable[[OutOfServiceError], None]) -> None:
        """Create the thread; ``broken`` is called once, under the lock, if the loop fails."""
        super().__init__(name="text", daemon=True)
        self._loop, self._broken = loop, broken
        self._stopped = False

    def stop(self) -> None:
        """Stop after the running step."""
        with self._loop.changed:
            self._stopped = True
            self._loop.changed.notify_all()

    def run(self) -> None:
        """Run the scheduler's steps until the thread is stopped."""
        try:
            while not self._stopped:
                if not self._loop.turn():
                    self._wait()
        except Exception as error:  # callers that wait must receive it
            _log.exception("generating text is out of service")
            with self._loop.changed:
                self._broken(OutOfServiceError(f"out of service: {error!r}"))
        finally:
            self._loop.close()

    def _wait(self) -> None:
        """Wait until there is a sequence: then there is a step to run."""
        with self._loop.changed:
            while not self._stopped and not self._loop.scheduler.sequences:
                self._loop.changed.wait()
