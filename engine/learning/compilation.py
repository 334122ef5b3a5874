"""The compilation of a recorded model, as a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from offramp.engine.common.compiler_process import BuildProcess
from offramp.engine.learning.compile_worker import IDLE, NICE

_log = logging.getLogger(__name__)

PROGRESS_NAME: Final = "progress.jsonl"
"""File of a learn folder that a compilation tells its progress in."""
_WORKER: Final = "offramp.engine.learning.compile_worker"
_NEEDED: Final = ("onnx", "onnx_graphsurgeon", "onnxslim", "torch")
"""Packages of the extra ``compile``."""
_READ_BYTES: Final = 4096
_LEAST_IDLE_SHARE: Final = 0.25
"""Share of idle time from which a process that only takes idle time gets on."""
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Columns of idle time, and of time spent waiting for the disk."""
_LEAST_TICKS: Final = 500
"""Ticks of all processors that a share is taken over: some seconds."""


class Compilation(Protocol):
    """A compilation at work."""

    def poll(self) -> int | None:
        """Return the exit status, ``None`` before the end."""
        ...

    def last_words(self) -> str:
        """Return the last line that it wrote."""
        ...

    def end(self) -> None:
        """End it, whatever it does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileProgress:
    """How far a compilation is."""

    step: int
    steps: int
    title: str
    share: float
    """Of this step."""

    def describe(self) -> str:
        """``step 4 of 9: Train the heads, 40 %``."""
        of = f" of {self.steps}" if self.steps else ""
        return f"step {self.step}{of}: {self.title}, {100 * self.share:.0f} %"


def start_compilation(arguments: Sequence[str], cores: int, priority: str) -> Compilation:
    """Start ``eecompile`` in a process of low priority; OSError if that is refused."""
    return BuildProcess([str(cores), priority, *arguments], worker=_WORKER)


def priority_for(idle_share: float | None) -> str:
    """Return the priority of a compilation on a machine that is idle for such a share of time."""
    is_busy = idle_share is not None and idle_share < _LEAST_IDLE_SHARE
    return NICE if is_busy else IDLE


def missing_packages() -> list[str]:
    """Return the packages that compiling needs and that are not installed; none is imported."""
    importlib.invalidate_caches()
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def compile_arguments(
    *,
    model: Path,
    data: Path,
    output: Path,
    progress: Path,
    asked: Sequence[str],
) -> list[str]:
    """Return the arguments of ``eecompile``; ``asked`` are those that the server passes on."""
    return [
        str(model.absolute()),
        f"--data={data.absolute()}",
        f"--output={output.absolute()}",
        f"--progress-file={progress.absolute()}",
        "--backend=onnxruntime",  # engines would take the GPU's memory from what is served
        *asked,
    ]


def read_progress(path: Path) -> CompileProgress | None:
    """Return what a compilation said last of its progress; ``None`` if it said nothing yet."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, IndexError):
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ_BYTES))
            *lines, _torn = file.read().split(b"\n")
        said = json.loads(lines[-1])
        return CompileProgress(
            step=int(said["step"]),
            steps=int(said["steps"]),
            title=str(said["title"]),
            share=float(said["share"]),
        )
    return None


def describe_end(status: int, last_words: str) -> str:
    """Say how a compilation ended that wrote no bundle."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"its process was ended by {name}"
    if not status:
        return "it wrote no bundle that is whole"
    return f"{last_words.removeprefix('eecompile: ')} (exit status {status})"


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
