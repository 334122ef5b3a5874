"""Progress of long steps: a protocol, and its forms for terminals, logs, programs, and silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, Protocol, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

Advance: TypeAlias = Callable[[int], None]
"""Callback that is passed the amount of work done since its last call."""


class Progress(Protocol):
    """Protocol by which long steps report their progress."""

    def step(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Begin a step of ``total`` units; it is done when the context ends."""
        ...


class SilentProgress:
    """Progress that is not reported."""

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:  # noqa: ARG002
        """Begin a step that shows nothing."""
        yield lambda _: None


SILENT = SilentProgress()


class TerminalProgress:
    """Progress on standard error: a bar per step, or in a log a line when each step begins.

    Output counts as a log if bars cannot be redrawn there: in a file, a pipe, a dumb terminal.
    Lines of the log begin with the time since the start, in seconds.
    """

    def __init__(self, console: Console) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        redraws = console.is_terminal and not console.is_dumb_terminal
        self._in_log = not (redraws or console.is_jupyter)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        if not self._in_log:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bars as they are."""
        if not self._in_log:
            self._bars.stop()

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:
        """Begin a step: a new bar, or a line if the output is not a terminal."""
        if self._in_log:
            line = f"{time.monotonic() - self._began_s:5.0f} s  {title}"
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        task = self._bars.add_task(title, total=total)
        yield lambda amount: self._bars.advance(task, amount)
        self._bars.update(task, completed=total)


STAGES: Final = (
    ("Read and simplify the model",),
    ("Read the data",),
    ("Slice and verify", "Compare batches"),
    ("Profile the segments",),
    ("Find components of tokens", "Record features"),
    ("Try ", "Train ", "Profile the heads"),
    ("Profile the stages", "Tune the exits"),
    ("Certify the policy", "Measure the policy"),
    ("Look at the range of the data", "Try padding", "Write the bundle"),
)
"""Stages of a compilation with heads on the unchanged model. Each stage is a tuple of the
beginnings of its steps' titles. Steps of other compilations count as part of the stage before
them."""


class FileProgress:
    """Progress for programs: one JSON object per line, appended to a file.

    ``step`` and ``steps`` count the stages of a compilation; ``title`` and ``share`` (the share of
    its work that is done) describe the running step.
    """

    def __init__(self, path: Path, progress: Progress, *, pause_s: float = 0.5) -> None:
        """Report to a file and to ``progress``.

        Two lines of one step are ``pause_s`` apart or more.
        """
        self._file = path.open("w", encoding="utf-8")
        self._progress, self._pause_s = progress, pause_s
        self._stage = 1
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the progress file."""
        self._file.close()

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:
        """Begin a step, and write its progress to the file as it advances."""
        self._stage = max(self._stage, stage_of(title) or 1)
        done, written_s = 0, time.monotonic()
        self._write(title, 0.0)

        def advance(amount: int) -> None:
            nonlocal done, written_s
            inner(amount)
            with self._lock:  # steps advance from several threads
                done += amount
                if (now_s := time.monotonic()) - written_s >= self._pause_s:
                    written_s = now_s
                    self._write(title, min(done / max(total, 1), 1.0))

        with self._progress.step(title, total) as inner:
            yield advance
        self._write(title, 1.0)

    def _write(self, title: str, share: float) -> None:
        told = {"step": self._stage, "steps": len(STAGES), "title": title, "share": share}
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()


def stage_of(title: str) -> int | None:
    """Return the stage that a step belongs to, from 1; ``None`` if it has no stage."""
    found = [
        (len(beginning), number)
        for number, beginnings in enumerate(STAGES, 1)
        for beginning in beginnings
        if title.startswith(beginning)
    ]
    return max(found)[1] if found else None
