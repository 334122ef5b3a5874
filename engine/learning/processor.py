"""How busy the machine's processors are: whether a process that only takes idle time gets on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Columns of idle time, and of time spent waiting for the disk."""
_LEAST_TICKS: Final = 500
"""Ticks of all processors that a share is taken over: some seconds."""


class IdleShare:
    """Measures the share of time that the machine's processors are idle."""

    def __init__(self, stat: Path = _STAT) -> None:
        """Begin to measure; ``stat`` is the file that Linux tells it in."""
        self._stat = stat
        self._before = self._read()
        self.share: float | None = None
        """Share over the last seconds; ``None`` where it is not known."""

    def look(self) -> None:
        """Take the share since the last look, once that is long enough."""
        now, before = self._read(), self._before
        if now is None or before is None or sum(now) - sum(before) < _LEAST_TICKS:
            return
        idle = sum(now[column] - before[column] for column in _IDLE)
        self.share = idle / (sum(now) - sum(before))
        self._before = now

    def _read(self) -> list[int] | None:
        try:
            with self._stat.open() as file:
                word, *ticks = file.readline().split()
            return [int(tick) for tick in ticks[:8]] if word == "cpu" else None
        except (OSError, ValueError):  # another system
            return None
