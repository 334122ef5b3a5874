"""The temporary folder of wrapped ONNX files, which is removed when the engine closes.

A process holds a lock next to its folder while it runs. If it is killed, its folder stays; the next
process that makes such a folder finds the lock free, and removes that folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from offramp.bundle.locks import FileLock
from offramp.engine.onnx_files.wrapping import OnnxFileError, wrap

PREFIX: Final = "offramp-onnx-"
_LOCK: Final = ".lock"


class WrappedFiles:
    """Bundles of ONNX files, wrapped one at a time; used by one thread."""

    def __init__(self) -> None:
        """Start without a folder: most engines serve no ONNX file."""
        self._folder: Path | None = None
        self._lock: FileLock | None = None
        self._count = 0
        self._files: dict[Path, Path] = {}
        """Path of the ONNX file of each bundle."""

    async def bundle(
        self, path: Path, *, answer: str | None = None, task: str | None = None
    ) -> Path:
        """Wrap a file and return the bundle's folder; raises the errors of :func:`.wrap`."""
        self._count += 1
        output = self._made() / str(self._count) / f"{path.stem}.ee"
        await wrap(path, output, answer=answer, task=task)
        self._files[output] = path
        return output

    def file_of(self, bundle: Path) -> Path | None:
        """Return the ONNX file of a bundle, or ``None`` if the bundle is not in this folder."""
        return self._files.get(bundle)

    def remove(self, bundle: Path) -> None:
        """Remove a bundle if it is in this folder."""
        if self._files.pop(bundle, None) is not None:
            shutil.rmtree(bundle.parent, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder with all bundles that were made."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _made(self) -> Path:
        """Return the folder, which only this user can read."""
        if self._folder is None:
            parent = Path(tempfile.gettempdir())
            sweep(parent)
            folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
            self._lock = FileLock(folder.with_name(folder.name + _LOCK))
            self._lock.take()  # before the folder exists: no other process may sweep it
            try:
                folder.mkdir(mode=0o700)
            except OSError as error:
                self.close()
                raise OnnxFileError(
                    f"{parent}: no folder can be made there for the bundles of ONNX files "
                    f"({error.strerror}); name another one with TMPDIR"
                ) from error
            self._folder = folder
        return self._folder


def sweep(parent: Path) -> None:
    """Remove the folders of this user's processes that were killed."""
    if not hasattr(os, "getuid"):  # Windows, where there are no such file locks
        return
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = FileLock(folder.with_name(folder.name + _LOCK))
            if lock.take() and lock.problem is None:
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
