"""Scratch: room on the disk for what does not stay, and an account of what was taken there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_GIB = 2**30


class ScratchError(Exception):
    """There is no room for temporary files; the message names bytes, folder and remedy."""


@dataclass(slots=True)
class ScratchSpace:
    """A folder for temporary files, and the bytes that are taken there."""

    folder: Path | None = None
    """``None``: the system's folder for temporary files."""
    taken_bytes: int = 0
    """Now."""
    peak_bytes: int = 0
    """The most at once."""

    @property
    def place(self) -> Path:
        """The folder itself."""
        return self.folder or Path(tempfile.gettempdir())

    def check_room(self, size_bytes: int, what: str, remedy: str) -> None:
        """Check that something has room; ScratchError if not."""
        free = shutil.disk_usage(self.place).free
        if size_bytes > free:
            raise ScratchError(
                f"{what} take {describe_bytes(size_bytes)} ({size_bytes:,} bytes), but "
                f"{self.place} has {describe_bytes(free)} ({free:,} bytes) free; free the space, "
                f"name another folder by --scratch, or {remedy}"
            )

    def take(self, size_bytes: int) -> None:
        """Count bytes that stay taken until all is done; those given back are negative."""
        self.taken_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """Count bytes that are taken meanwhile."""
        self.take(size_bytes)
        try:
            yield
        finally:
            self.take(-size_bytes)

    def unnamed_file(self, size_bytes: int, what: str, remedy: str) -> IO[bytes]:
        """Make a file of some size that has no name, so that it is gone with this process.

        ScratchError if there is no room for it.
        """
        self.check_room(size_bytes, what, remedy)
        with self._reporting(size_bytes, what, remedy):
            file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - the caller closes it
        try:
            self.extend(file, 0, size_bytes, what, remedy)
        except ScratchError:
            file.close()
            raise
        return file

    def extend(self, file: IO[bytes], start: int, size_bytes: int, what: str, remedy: str) -> None:
        """Make room for more bytes in a file, from byte ``start`` on.

        ScratchError if there is no room for them.
        """
        self.check_room(size_bytes, what, remedy)
        with self._reporting(start + size_bytes, what, remedy):
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), start, size_bytes)
        self.take(size_bytes)

    @contextmanager
    def _reporting(self, size_bytes: int, what: str, remedy: str) -> Iterator[None]:
        """Turn an OSError about a temporary file into a ScratchError."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise ScratchError(
                f"{what} take {describe_bytes(size_bytes)} in {self.place}: {reason}; free the "
                f"space, name another folder by --scratch, or {remedy}"
            ) from error


def describe_bytes(size: int) -> str:
    """Name a size in the unit that fits."""
    if size < _GIB / 10:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / _GIB:,.2f} GiB"
