"""Puts a finished folder in its place in one step, and on the disk for good."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from offramp.bundle.schema.errors import BundleWriteError

RETIRED: Final = ".old"
"""End of the name of what is moved aside, where two folders cannot be exchanged in one step."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NOT_OF_FOLDERS: Final = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EISDIR}
)
"""What file systems say that bring files to the disk, and know no such thing of folders."""


def put_in_place(scratch: Path, target: Path) -> None:
    """Put the folder ``scratch`` at ``target``, beside it; what was there goes to ``scratch``.

    All of it is on the disk before its name is. Whoever looks, at whatever moment, finds the old
    folder or the new one, whole. Where the file system cannot exchange two names, the old one is
    moved aside first; see :func:`moved_aside`.
    """
    for folder, _, files in os.walk(scratch):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if not target.exists():
        scratch.rename(target)
    elif not exchange(scratch, target):
        _move(scratch, target)
    with suppress(OSError):  # it is in its place by now, whatever the disk says
        sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; a folder, where the file system can do that."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OF_FOLDERS or not path.is_dir():
            raise


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; whether that was possible (Linux: renameat2)."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or another C library
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def moved_aside(target: Path) -> Path | None:
    """Find what stood at ``target`` before an overwriting that was killed between two steps."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[^.]+{re.escape(RETIRED)}")
    with suppress(OSError):
        for place in sorted(target.absolute().parent.iterdir()):
            if ours.fullmatch(place.name) and place.is_dir():
                return place
    return None


def check_writable(target: Path, *, option: str = "--output") -> None:
    """Check, by trying, that something can be put at ``target``; BundleWriteError if not.

    The message names ``option`` as what chooses another target.
    """
    folder = _nearest_folder(target)
    try:
        Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder)).rmdir()
    except OSError as error:
        raise BundleWriteError(
            f"{target} cannot be written: {error}; make {folder} writable for you, or choose "
            f"another {option}"
        ) from error


def check_space(target: Path, size_bytes: int) -> None:
    """Check that a bundle of that size has room at ``target``; BundleWriteError if not."""
    folder = _nearest_folder(target)
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise BundleWriteError(
            f"{target} needs {size_bytes / 2**20:,.0f} MiB at least, but {folder} has "
            f"{free / 2**20:,.0f} MiB left; free the space or choose another --output"
        )


def _nearest_folder(target: Path) -> Path:
    """Find the folder that a target is in, or the first one above it that is there already."""
    return next(folder for folder in target.absolute().parents if folder.exists())


def _move(scratch: Path, target: Path) -> None:
    retired = scratch.with_name(f"{scratch.name}{RETIRED}")
    target.rename(retired)
    try:
        scratch.rename(target)
    except BaseException as error:
        try:
            retired.rename(target)
        except OSError:
            raise BundleWriteError(
                f"{target} cannot be written ({error}), nor put back: it is in {retired} now; "
                "rename that"
            ) from error
        raise
    with suppress(OSError):
        retired.rename(scratch)
