"""Disk space for temporary files, with a count of the bytes in use."""

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
    """The disk has no space for temporary files; the message names bytes, folder and remedy."""


@dataclass(slots=True)
class ScratchSpace:
    """A folder for temporary files, and the bytes that are in use there."""

    folder: Path | None = None
    """Folder for temporary files; ``None`` is the system's."""
    taken_bytes: int = 0
    """Bytes of temporary files that are in use now."""
    peak_bytes: int = 0
    """Largest number of bytes in use so far."""

    @property
    def place(self) -> Path:
        """The folder in use: :attr:`folder`, or the system's."""
        return self.folder or Path(tempfile.gettempdir())

    def check_space(self, size_bytes: int, what: str, remedy: str) -> None:
        """Check that the disk has space for ``size_bytes``; ScratchError if not."""
        free = shutil.disk_usage(self.place).free
        if size_bytes > free:
            raise ScratchError(
                f"{what} take {describe_bytes(size_bytes)} ({size_bytes:,} bytes), but "
                f"{self.place} has {describe_bytes(free)} ({free:,} bytes) free; free the space, "
                f"name another folder by --scratch, or {remedy}"
            )

    def take(self, size_bytes: int) -> None:
        """Count bytes as in use from now on; negative bytes are released."""
        self.taken_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """Count bytes as in use within the context."""
        self.take(size_bytes)
        try:
            yield
        finally:
            self.take(-size_bytes)

    def unnamed_file(self, size_bytes: int, what: str, remedy: str) -> IO[bytes]:
        """Create a file of some size without a name, so that it is removed with this process.

        ScratchError if there is no space for it.
        """
        self.check_space(size_bytes, what, remedy)
        with self._reporting(size_bytes, what, remedy):
            file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - the caller closes it
        try:
            self.extend(file, 0, size_bytes, what, remedy)
        except ScratchError:
            file.close()
            raise
        return file

    def extend(self, file: IO[bytes], start: int, size_bytes: int, what: str, remedy: str) -> None:
        """Reserve space for more bytes of a file, from byte ``start`` on.

        ScratchError if there is no space for them.
        """
        self.check_space(size_bytes, what, remedy)
        with self._reporting(start + size_bytes, what, remedy):
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), start, size_bytes)
        self.take(size_bytes)

    @contextmanager
    def _reporting(self, size_bytes: int, what: str, remedy: str) -> Iterator[None]:
        """Convert an OSError about a temporary file to a ScratchError."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise ScratchError(
                f"{what} take {describe_bytes(size_bytes)} in {self.place}: {reason}; free the "
                f"space, name another folder by --scratch, or {remedy}"
            ) from error


def describe_bytes(size: int) -> str:
    """Return a size as text, in a unit that fits."""
    if size < _GIB / 10:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / _GIB:,.2f} GiB"
