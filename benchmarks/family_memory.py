"""The memory of a process and all that it started, sampled while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_PERIOD_S = 0.02
_BEFORE = "start, and imports"


@dataclass
class StepMemory:
    """Largest memory that was seen during a step, in bytes."""

    resident: int = 0
    anonymous: int = 0
    seconds: float = 0.0


@dataclass
class WatchedFamily:
    """A process with its children, whose memory is sampled, step by step."""

    process: int
    step: str = _BEFORE
    steps: dict[str, StepMemory] = field(default_factory=dict)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample the memory fifty times a second during the context."""
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), daemon=True)
        thread.start()
        yield
        ended.set()
        thread.join()

    def _sample(self, ended: threading.Event) -> None:
        last = time.monotonic()
        while not ended.wait(_PERIOD_S):
            seen = self.steps.setdefault(self.step, StepMemory())
            resident, anonymous = np.sum([_memory(p) for p in _family(self.process)], axis=0)
            seen.resident = max(seen.resident, int(resident))
            seen.anonymous = max(seen.anonymous, int(anonymous))
            now = time.monotonic()
            seen.seconds += now - last
            last = now


def _family(process: int) -> list[int]:
    """Return the process, its children and their descendants, by id."""
    found = [process]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended
                continue
    return found


def _memory(process: int) -> tuple[int, int]:
    """Return the resident and anonymous bytes of a process; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    told = dict(line.split(":", 1) for line in lines)
    resident, anonymous = (
        int(told.get(name, "0 kB").split()[0]) << 10 for name in ("VmRSS", "RssAnon")
    )
    return resident, anonymous
