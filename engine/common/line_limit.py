"""Log lines: those caused by clients are limited, and logging never blocks a thread."""

from __future__ import annotations

import io
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TextIO

LINES: Final = 5
"""Number of lines of a kind that are written within :data:`WINDOW_S`; further ones are counted."""
WINDOW_S: Final = 1.0

_MAX_CHARS: Final = 500
_CONTROL: Final = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029), "\ufffd")


def one_line(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return a client's text as one short line, without line breaks and control characters."""
    short = text if len(text) <= max_chars else f"{text[:max_chars]}…"
    return short.translate(_CONTROL)


@dataclass(slots=True)
class _Window:
    began_s: float
    lines: int = 0
    left_out: int = 0


class LineLimit:
    """Decides which lines are written; there are few, fixed kinds."""

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
        """Return the suffix for the next line of a kind; ``None`` if the line must not be written.

        The suffix is empty, or reports how many lines were not written before.
        """
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
"""Beginning of gRPC's message that a client has left; the access log records this, too."""


class OneLineFilter(logging.Filter):
    """Limits the records of a logger, and removes their tracebacks.

    Records from one place in the code are one kind. Messages that a client left early are dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record, which is reduced to one line."""
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


MOST_LINES: Final = 10_000
"""Largest number of lines that wait to be written; further ones are dropped and counted."""
_FLUSH_S: Final = 1.0
"""Longest wait, in seconds, for queued lines when the process ends."""


class QueuedHandler(logging.Handler):
    """Writes lines to a stream from its own thread, so that no other thread waits for it.

    A pipe that is not read, or a stopped terminal, blocks its writer, which must not be the event
    loop. When :data:`MOST_LINES` lines wait, further ones are dropped, and a line reports their
    number.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(MOST_LINES)
        self._dropped = 0
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record as a line, or count it as dropped; called with the handler's lock held."""
        line = f"{self.format(record)}\n"
        if self._dropped:
            line = f"({self._dropped} lines of the log were dropped: it was not read)\n{line}"
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1
        else:
            self._dropped = 0

    def flush(self) -> None:
        """Wait until all lines are written, for one second at most."""
        written = self._lines.all_tasks_done
        with written:
            written.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                pass
            finally:
                self._lines.task_done()

    def _write(self, line: str) -> None:
        """Write without the stream's buffer, whose lock would be held at the end of the process."""
        stream = self._stream
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:  # a stream in memory
            stream.write(line)
            return
        content = line.encode(stream.encoding or "utf-8", stream.errors or "replace")
        while content:
            try:
                content = content[os.write(descriptor, content) :]
            except BlockingIOError:  # another owner of the pipe made it non-blocking
                select.select((), (descriptor,), ())
