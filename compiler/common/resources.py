"""Memory and temporary disk space of a run: measuring and releasing it.

Features are recorded in a temporary folder and may take gigabytes. A process locks its folder for
as long as it runs. A killed process cannot remove its folder; the next compilation finds it without
a lock and removes it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.scratch import ScratchError, ScratchSpace
from offramp.compiler.common.progress import Advance, Progress
from offramp.engine.backends.onnxruntime import shrink_arena

try:
    import fcntl
except ImportError:  # no such locks on Windows, where nothing is swept
    fcntl = None  # type: ignore[assignment]

_STATUS = Path("/proc/self/status")
_most_together = 0
"""Largest memory in bytes that this process and one counted child process used at the same time."""


def give_back() -> None:
    """Free unreferenced objects, and make all allocators return free memory to the system."""
    gc.collect()
    shrink_arena()
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    except (OSError, TypeError):  # Windows
        return
    if trim is not None:
        trim(0)


class MemoryReleasingProgress:
    """Progress that releases unused memory before each step."""

    def __init__(self, progress: Progress) -> None:
        """Release memory before each step, and report steps to ``progress``."""
        self._progress = progress

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:
        """Begin a step, after unused memory was released."""
        give_back()
        with self._progress.step(title, total) as advance:
            yield advance


def peak_bytes() -> int | None:
    """Return the peak memory in bytes of this process and of its counted child processes.

    ``None`` if the system does not report it.
    """
    own = _reported_bytes("VmHWM")
    if own is None:
        try:
            import resource  # noqa: PLC0415 - there is none on Windows
        except ImportError:
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(own, _most_together)


def count_process(its_peak_bytes: int) -> None:
    """Add the peak of a child process that has just ended to this process's current memory.

    The sum counts for :func:`peak_bytes`. The system's peak for ended children is not used: on
    Linux a child's peak begins at the peak of the process that started it.
    """
    global _most_together  # noqa: PLW0603 - of the process, like its own peak
    _most_together = max(_most_together, (_reported_bytes("VmRSS") or 0) + its_peak_bytes)


def _reported_bytes(name: str) -> int | None:
    """Return a memory figure that Linux reports for this process, in bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None


PREFIX: Final = "offramp-features-"
_OURS: Final = re.compile(rf"{PREFIX}\d+-\w+")
"""Pattern of folder names with a process number. Folders of older versions have neither a number
nor a lock."""


@contextmanager
def feature_folder(scratch: Path | None = None) -> Iterator[Path]:
    """Make a folder in ``scratch``, and remove it with its content at the end."""
    folder, lock = _make(scratch)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def find_scratch(named: Path | None) -> Path:
    """Return the folder for temporary files; DataError if it cannot be written."""
    try:
        folder = Path(tempfile.gettempdir()) if named is None else named
        Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder)).rmdir()
    except OSError as error:
        where = "there is no folder for temporary files" if named is None else f"--scratch {named}"
        raise DataError(
            f"{where}: {error.strerror or error}; name a folder that you can write to by --scratch"
        ) from error
    return folder


def check_space(folder: Path, size_bytes: int) -> None:
    """Raise DataError if a folder has too little free space for features."""
    try:
        ScratchSpace(folder).check_space(size_bytes, "features", "bound them by --scratch-limit")
    except ScratchError as error:
        raise DataError(str(error)) from error


def sweep(scratch: Path | None = None) -> None:
    """Remove the feature folders of this user's processes that ended without removing them.

    OSError if there is no folder for temporary files at all.
    """
    parent = Path(tempfile.gettempdir()) if scratch is None else scratch
    with suppress(OSError):
        for place in parent.iterdir():
            if fcntl is not None and _OURS.fullmatch(place.name):
                _remove_if_left(place)


def _make(scratch: Path | None) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=scratch))
        try:
            lock = _lock(folder) if fcntl is not None else None
        except (BlockingIOError, FileNotFoundError):  # another process is sweeping
            continue
        except OSError:  # a file system without locks, where nothing is swept
            return folder, None
        if lock is None or folder.exists():
            return folder, lock
        os.close(lock)


def _remove_if_left(place: Path) -> None:
    # Only this user can replace a folder of this user.
    with suppress(OSError):
        if place.lstat().st_uid != os.geteuid():
            return
        lock = _lock(place)
        try:
            shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder that is not a link; BlockingIOError if a process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
