"""The temporary folder that features are recorded in: gigabytes, which nobody may leave behind.

A process keeps a lock on its folder for as long as it lives. One that was killed could not remove
it; whoever compiles next finds it without a lock, and does.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.scratch import ScratchError, ScratchSpace

try:
    import fcntl
except ImportError:  # no such locks on Windows, where nothing is swept
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "offramp-features-"
_OURS: Final = re.compile(rf"{PREFIX}\d+-\w+")
"""With the number of the process, which those of older versions lack: they had no locks."""


@contextmanager
def feature_folder(scratch: Path | None = None) -> Iterator[Path]:
    """Make a folder in ``scratch``, and remove it with all that is in it."""
    folder, lock = _make(scratch)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def find_scratch(named: Path | None) -> Path:
    """Find the folder for temporary files; DataError if nothing can be written there."""
    try:
        folder = Path(tempfile.gettempdir()) if named is None else named
        Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder)).rmdir()
    except OSError as error:
        where = "there is no folder for temporary files" if named is None else f"--scratch {named}"
        raise DataError(
            f"{where}: {error.strerror or error}; name a folder that you can write to by --scratch"
        ) from error
    return folder


def check_room(folder: Path, size_bytes: int) -> None:
    """Check that features have room in a folder; DataError if not."""
    try:
        ScratchSpace(folder).check_room(size_bytes, "features", "bound them by --scratch-limit")
    except ScratchError as error:
        raise DataError(str(error)) from error


def sweep(scratch: Path | None = None) -> None:
    """Remove the folders of this user's processes that ended without doing so.

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
        except (BlockingIOError, FileNotFoundError):  # someone sweeps just now
            continue
        except OSError:  # a file system without locks, where nothing is swept either
            return folder, None
        if lock is None or folder.exists():
            return folder, lock
        os.close(lock)


def _remove_if_left(place: Path) -> None:
    # Nobody but this user can put something else in the place of a folder of this user.
    with suppress(OSError):
        if place.lstat().st_uid != os.geteuid():
            return
        lock = _lock(place)
        try:
            shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder, no link; BlockingIOError if a process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
