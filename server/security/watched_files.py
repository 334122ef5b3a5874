"""Files that are read again when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from offramp.engine.common.errors import EngineError
from offramp.server.common.errors import StartError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Stamp: TypeAlias = tuple[tuple[int, ...] | None, ...]


class WatchedFiles(Generic[_T]):
    """The value read from some files; may be used from any thread.

    If files cannot be read any more, this is logged once, and the old value stays.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        """Read the files; ``read`` raises OSError, ValueError or EngineError if they are invalid.

        Raises:
            StartError: The files are invalid.
        """
        self._what: Final = what
        self._paths: Final = tuple(paths)
        self._read: Final = read
        self._lock: Final = threading.Lock()
        self._stamp = self._look()
        try:
            self._value = read()
        except (OSError, ValueError, EngineError) as error:
            raise StartError(str(error)) from error

    def current(self) -> _T:
        """Return the present content, read again if the files have changed."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()
            return self._value

    def _read_again(self) -> None:
        try:
            self._value = self._read()
        except (OSError, ValueError, EngineError) as error:
            logger.warning(
                "%s: the files changed and the old content is kept: %s", self._what, error
            )
        else:
            logger.info("%s: the files changed and were read again", self._what)

    def _look(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode
