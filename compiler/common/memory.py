"""Memory: giving back what was used for a while, and how much was used at most."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offramp.compiler.common.progress import Advance, Progress
from offramp.engine.backends.onnxruntime import shrink_arena

_STATUS = Path("/proc/self/status")
_most_together = 0
"""With a process that was started, as far as was counted."""


def give_back() -> None:
    """Free what nothing refers to, and have all allocators give the system what is free."""
    gc.collect()
    shrink_arena()
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    except (OSError, TypeError):  # Windows
        return
    if trim is not None:
        trim(0)


class GivingBack:
    """Progress whose steps begin without the memory that those before them no longer need."""

    def __init__(self, progress: Progress) -> None:
        """Report to ``progress``."""
        self._progress = progress

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:
        """Begin a step."""
        give_back()
        with self._progress.step(title, total) as advance:
            yield advance


def peak_bytes() -> int | None:
    """The most memory that this process has had, with processes that were counted beside it.

    ``None`` where the system does not say.
    """
    own = _told("VmHWM")
    if own is None:
        try:
            import resource  # noqa: PLC0415 - there is none on Windows
        except ImportError:
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(own, _most_together)


def count_process(its_peak_bytes: int) -> None:
    """Count a process that has just ended, beside which this one had what it has now.

    What the system says of ended children would not do: on Linux they begin with the figure of the
    process that started them.
    """
    global _most_together  # noqa: PLW0603 - of the process, as its own peak is
    _most_together = max(_most_together, (_told("VmRSS") or 0) + its_peak_bytes)


def _told(name: str) -> int | None:
    """What Linux says of this process, in bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None
