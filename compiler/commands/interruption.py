"""Ending in order on signals: clean up unfinished work, and report files that were written."""

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
    """A signal other than Ctrl-C's SIGINT asked the process to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def raising_signals() -> Iterator[None]:
    """Raise :class:`SignalledError` on SIGTERM and SIGHUP; a second signal ends the process.

    A signal that is ignored, as after ``nohup``, stays ignored. Outside the main thread this does
    nothing, because other threads cannot handle signals.
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
    """Return the exit status of a stopped process, by the convention of shells."""
    return 128 + (error.number if isinstance(error, SignalledError) else signal.SIGINT)


class Target:
    """Output of a command, to report after an interruption whether it was written."""

    def __init__(self, path: Path) -> None:
        """Remember which file or folder is at ``path`` now."""
        self.path = path
        self._before = self._identity()

    def describe(self, error: KeyboardInterrupt) -> str:
        """Return the reason why the command ended, and whether its target was written."""
        written = "nothing was written"
        if self._identity() != self._before:  # a replacement is another file or folder
            written = f"{self.path} is written completely"
        return f"{str(error) or 'interrupted'}; {written}"

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino
