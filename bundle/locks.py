"""Locks between processes: a lock file next to the file or folder that it protects.

The system releases a lock when the process that holds it ends for any reason. Only processes that
ask for the lock respect it.
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
    """An exclusive lock, by a file that exists while the lock is held.

    Where the file system has no locks, or the file cannot be created, no other process is kept out:
    :meth:`take` succeeds, and :attr:`problem` is the reason.
    """

    def __init__(self, path: Path) -> None:
        """Set the path of the lock file, which is not created yet."""
        self.path = path
        self.problem: str | None = None
        """Reason why ``take`` succeeded without a lock; ``None`` if there is one."""
        self._descriptor: int | None = None
        self._taken = False

    def take(self) -> bool:
        """Take the lock, unless another process holds it; return whether this object has it now."""
        if not self._taken:
            self._taken = self._lock() if fcntl is not None else True
        return self._taken

    def release(self) -> None:
        """Remove the file and release the lock; without the lock, do nothing."""
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
            # The previous holder may have removed the file just now: then this locks nothing.
            is_ours = os.path.samestat(os.fstat(descriptor), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError as error:  # network file systems may raise it
            os.close(descriptor)
            self.problem = str(error)
            return True
        if not is_ours:
            os.close(descriptor)
            return False
        self._descriptor, self.problem = descriptor, None
        return True
