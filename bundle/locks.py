"""Locks between processes: a file beside what it protects, locked for as long as a process lives.

The system lets go of a lock when its process ends, however that happens. Such a lock binds only
those who ask for it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]


class FileLock:
    """An exclusive lock, by a file that is there while the lock is held.

    Where the file system knows no locks, or the file cannot be made, nobody can be kept out:
    :meth:`take` succeeds, and :attr:`problem` says what is missing.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is made yet."""
        self.path = path
        self.problem: str | None = None
        """Why there is no lock although it was taken; ``None`` if there is one."""
        self._descriptor: int | None = None
        self._taken = False

    def take(self) -> bool:
        """Take the lock, unless another process holds it; says whether it is ours now."""
        if not self._taken:
            self._taken = self._lock() if fcntl is not None else True
        return self._taken

    def release(self) -> None:
        """Remove the file, and let go; without the lock, do nothing."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._descriptor)
        self._descriptor, self._taken = None, False

    def _lock(self) -> bool:
        # A folder from elsewhere may have a link there: it is not followed.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            self.problem = str(error)
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the file just now: then this locks nothing.
            is_ours = os.path.samestat(os.fstat(descriptor), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError as error:  # as network file systems may give
            os.close(descriptor)
            self.problem = str(error)
            return True
        if not is_ours:
            os.close(descriptor)
            return False
        self._descriptor, self.problem = descriptor, None
        return True
