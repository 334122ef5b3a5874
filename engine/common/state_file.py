"""The file with a controller's state: one for each served name and host, next to the bundle.

Other files that a server keeps there are also :class:`OwnedFile` objects.

The bundle itself never changes, because its hashes are checked. Next to ``resnet.ee``, served as
``resnet`` on the host ``one``, there is ``resnet.ee.resnet@one.state.npz``. So two servers, or two
names, of one bundle each continue from their own observations.

If a second server of the same name runs on the same host, the first owns the file, and the second
writes nothing until the first has ended. This happens in a rolling restart: the new server reads
the file, and writes it after the old one has ended. (A serving process holds a lock on a separate
file next to the state. Without such locks the last server to save wins, with a whole state.)
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self
from urllib.parse import quote

from offramp.bundle.locks import FileLock
from offramp.engine.common.control_state import load_state, save_state

_log = logging.getLogger(__name__)

SUFFIX: Final = ".state.npz"
LOCK_SUFFIX: Final = ".state.lock"
_LONGEST: Final = 60
"""Largest number of characters of a name or host in the file name; file systems allow 255 in
total."""


class OwnedFile:
    """A file next to a bundle, of one served name on one host; one server at a time writes it."""

    suffix: ClassVar[str]
    lock_suffix: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(
            path.with_name(path.name.removesuffix(self.suffix) + self.lock_suffix)
        )
        self._waits = False
        """``True`` if the log has reported that another server owns the file."""
        self._told = False
        """``True`` if the log has reported that there is no lock."""

    def __str__(self) -> str:
        return self.path.name

    @classmethod
    def of(cls, bundle: str | os.PathLike[str], name: str) -> Self:
        """Return the file of a bundle served under a name: next to it, or to a link's target."""
        place = Path(bundle).resolve()
        file = f"{place.name}.{_flat(name)}@{_flat(platform.node())}{cls.suffix}"
        return cls(place.with_name(file))

    def release(self) -> None:
        """Release the file for the next server."""
        self._lock.release()

    def take(self) -> bool:
        """Lock the file, unless another server owns it; return whether this server owns it."""
        is_ours = self._lock.take()
        if self._lock.problem is not None and not self._told:
            self._told = True
            _log.info(
                "%s cannot be locked (%s): of two servers of this name on this host, the last to "
                "save wins",
                self.path,
                self._lock.problem,
            )
        if not is_ours and not self._waits:
            _log.warning(
                "%s belongs to another server of this name on this host: what this one learns is "
                "not saved until that server has ended; serve it under another name "
                "(--model NAME=PATH), or with --no-state",
                self.path,
            )
        elif is_ours and self._waits:
            _log.info("%s belongs to this server now", self.path)
        self._waits = not is_ours
        return is_ours


class StateFile(OwnedFile):
    """The file of one controller's state: saves and loads it."""

    suffix = SUFFIX
    lock_suffix = LOCK_SUFFIX

    def load(self, fingerprint: Mapping[str, str]) -> Mapping[str, Any] | None:
        """Lock the file for this server, and read it; ``None`` if there is no usable state.

        See :func:`.control_state.load_state`.
        """
        self.take()
        return load_state(self.path, fingerprint=fingerprint)

    def save(self, state: Mapping[str, Any], fingerprint: Mapping[str, str]) -> bool:
        """Save a state, unless another server owns the file; return whether it was saved.

        See :func:`.control_state.save_state`.
        """
        return self.take() and save_state(self.path, state, fingerprint=fingerprint)


def _flat(word: str) -> str:
    """Encode a word as a part of a file name; different words give different parts.

    All characters but letters, digits and ``_.-~`` are percent-encoded; the end of a long word is
    replaced by a hash.
    """
    flat = quote(word, safe="", errors="surrogatepass")
    if len(flat) <= _LONGEST:
        return flat
    digest = hashlib.sha256(word.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{flat[: _LONGEST - 17]}~{digest[:16]}"
