"""An orderly end on signals: what was begun is cleaned up, and what was written is told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP


class SignalledError(KeyboardInterrupt):
    """The process was asked to end, by another signal than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def raising_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP a :class:`SignalledError`; a second one ends the process at once.

    A signal that is ignored, as after ``nohup``, stays so. Other threads than the main one can do
    nothing about signals, and do nothing here.
    """

    def stop(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise SignalledError(number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.getsignal(n) for n in (_SIGNALS if is_main else ())}
    try:
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, handler)


def status_of(error: KeyboardInterrupt) -> int:
    """Give the exit status of a process that was stopped, as shells have it."""
    return 128 + (error.number if isinstance(error, SignalledError) else signal.SIGINT)


class Target:
    """What a command writes, to tell afterwards whether it was written."""

    def __init__(self, path: Path) -> None:
        """Look at what is there before."""
        self.path = path
        self._before = self._identity()

    def describe(self, error: KeyboardInterrupt) -> str:
        """Say for what reason the command ended, and what it leaves."""
        written = "nothing was written"
        if self._identity() != self._before:  # what replaces something is another file or folder
            written = f"{self.path} is written and whole"
        return f"{str(error) or 'interrupted'}; {written}"

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino
