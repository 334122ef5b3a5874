"""Log lines that others cause from outside: one line each, and only so many of a kind at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LINES: Final = 5
"""Of a kind within :data:`WINDOW_S`; the others are counted."""
WINDOW_S: Final = 1.0

_MAX_CHARS: Final = 500
_CONTROL: Final = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029), "\ufffd")


def one_line(text: str, max_chars: int = _MAX_CHARS) -> str:
    """What a client sent, fit for a log: no line breaks or other control characters, and short."""
    short = text if len(text) <= max_chars else f"{text[:max_chars]}…"
    return short.translate(_CONTROL)


@dataclass(slots=True)
class _Window:
    began_s: float
    lines: int = 0
    left_out: int = 0


class LineLimit:
    """Decides which lines are written; kinds are from a fixed set."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        lines: int = LINES,
        window_s: float = WINDOW_S,
    ) -> None:
        """Admit up to ``lines`` of a kind in every window."""
        self._clock, self._lines, self._window_s = clock, lines, window_s
        self._windows: dict[object, _Window] = {}

    def admit(self, kind: object) -> str | None:
        """What to append to the next line of a kind; ``None`` if it is not to be written."""
        now_s = self._clock()
        window = self._windows.get(kind)
        if window is None or now_s - window.began_s >= self._window_s:
            left_out = window.left_out if window else 0
            self._windows[kind] = _Window(began_s=now_s, lines=1)
            return f" (… and {left_out} more like it)" if left_out else ""
        if window.lines < self._lines:
            window.lines += 1
            return ""
        window.left_out += 1
        return None


_LOST_CALL: Final = "ExecuteBatchError raised in core"
"""How gRPC begins to tell that the client of an answer has left; the access log has it too."""


class OneLineFilter(logging.Filter):
    """Limits the records of a logger, and leaves out their tracebacks.

    A kind is a place in the code that logs. That a client did not wait for its answer is no record.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a record pass as one line, or not at all."""
        if str(record.msg).startswith(_LOST_CALL):
            return False
        suffix = self._limit.admit((record.levelno, record.pathname, record.lineno))
        if suffix is None:
            return False
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]!r}"
        record.msg, record.args = f"{one_line(text)}{suffix}", ()
        record.exc_info = record.exc_text = None
        return True
