"""The compilation of a served model from recorded requests, in a separate process."""

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
"""File of a learn folder with a compilation's progress."""
_WORKER: Final = "offramp.engine.learning.compile_worker"
_NEEDED: Final = ("onnx", "onnx_graphsurgeon", "onnxslim", "torch")
"""Packages of the extra ``compile`` that a compilation imports."""
_READ_BYTES: Final = 4096
_LEAST_IDLE_SHARE: Final = 0.25
"""Smallest share of idle processor time with which a process of idle priority makes progress."""
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Columns of ``/proc/stat`` with idle time, and with the time of waiting for the disk."""
_LEAST_TICKS: Final = 500
"""Smallest number of clock ticks, summed over all processors, for measuring the idle share: a few
seconds."""


class Compilation(Protocol):
    """A running compilation of a served model from recorded requests (``--learn``)."""

    def poll(self) -> int | None:
        """Return the exit status, ``None`` before the end."""
        ...

    def last_words(self) -> str:
        """Return the last line that the compilation wrote."""
        ...

    def end(self) -> None:
        """Kill the process of the compilation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileProgress:
    """Progress of a compilation, as last reported in its progress file."""

    step: int
    steps: int
    title: str
    share: float
    """Completed share of this step, from 0 to 1."""

    def describe(self) -> str:
        """Describe the progress: ``step 4 of 9: Train the heads, 40 %``."""
        of = f" of {self.steps}" if self.steps else ""
        return f"step {self.step}{of}: {self.title}, {100 * self.share:.0f} %"


def start_compilation(arguments: Sequence[str], cores: int, priority: str) -> Compilation:
    """Start ``eecompile`` in a process of low priority; OSError if it cannot start."""
    return BuildProcess([str(cores), priority, *arguments], worker=_WORKER)


def priority_for(idle_share: float | None) -> str:
    """Return a compilation's priority on a machine that is idle for this share of time."""
    is_busy = idle_share is not None and idle_share < _LEAST_IDLE_SHARE
    return NICE if is_busy else IDLE


def missing_packages() -> list[str]:
    """Return the packages that compiling lacks, without importing any."""
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
    """Return the arguments of ``eecompile``; ``asked`` are options that the server passes on."""
    return [
        str(model.absolute()),
        f"--data={data.absolute()}",
        f"--output={output.absolute()}",
        f"--progress-file={progress.absolute()}",
        "--backend=onnxruntime",  # building engines would use GPU memory of serving
        *asked,
    ]


def read_progress(path: Path) -> CompileProgress | None:
    """Return the last reported progress of a compilation; ``None`` if there is none yet."""
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
    """Describe the end of a compilation that wrote no bundle."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"its process was ended by {name}"
    if not status:
        return "it wrote no complete bundle"
    return f"{last_words.removeprefix('eecompile: ')} (exit status {status})"


class IdleShare:
    """Measures the share of time that the machine's processors are idle."""

    def __init__(self, stat: Path = _STAT) -> None:
        """Begin to measure; ``stat`` is Linux's file of processor times."""
        self._stat = stat
        self._before = self._read()
        self.share: float | None = None
        """Idle share during the last seconds; ``None`` if unknown."""

    def update(self) -> None:
        """Measure the idle share since the last update, if enough time has passed."""
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
