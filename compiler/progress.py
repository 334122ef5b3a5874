"""Progress of long steps: a protocol, a terminal version, and a silent one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

Advance: TypeAlias = Callable[[int], None]
"""Called with how much was done since the last call."""


class Progress(Protocol):
    """The protocol by which long steps report their progress."""

    def step(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Begin a step of ``total`` units; it is done when the context ends."""
        ...


class SilentProgress:
    """Reports nowhere."""

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:  # noqa: ARG002
        """Begin a step."""
        yield lambda _: None


SILENT = SilentProgress()


class TerminalProgress:
    """Progress as bars on standard error, one a step."""

    def __init__(self, console: Console) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leave the bars as they are.

        In a log, where they are written once and at the end, a failure leaves its message alone.
        """
        if kind is None or self._bars.console.is_terminal:
            self._bars.stop()
            return
        self._bars.live.transient = True
        self._bars.live.stop()

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:
        """Begin a step."""
        task = self._bars.add_task(title, total=total)
        yield lambda amount: self._bars.advance(task, amount)
        self._bars.update(task, completed=total)
