"""The file that keeps a controller's state: one for each served name and host, beside the bundle.

What else a server keeps there is an :class:`OwnedFile` too.

The bundle itself never changes, its hashes are checked; next to ``resnet.ee``, served as ``resnet``
on the host ``one``, there is ``resnet.ee.resnet@one.state.npz``. So two servers, or two names, of
one bundle each go on from what they saw themselves.

Where a second server of the same name runs on the same host, the first keeps the file, and the
second writes nothing until the first has gone. That is what a rolling restart does: the new server
reads the file, and writes it from when the old one has ended. (As long as it serves, a server has
a lock on a file of its own beside the state. Without such locks the last one to save wins, with a
whole state.)
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
"""Characters of a name or host that are kept as they are; file systems allow 255 of all."""


class OwnedFile:
    """A file beside a bundle that one server at a time writes: of one served name on one host."""

    suffix: ClassVar[str]
    lock_suffix: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(
            path.with_name(path.name.removesuffix(self.suffix) + self.lock_suffix)
        )
        self._waits = False
        """Whether it was said that another server keeps the file."""
        self._told = False
        """Whether it was said that there is no lock."""

    def __str__(self) -> str:
        return self.path.name

    @classmethod
    def of(cls, bundle: str | os.PathLike[str], name: str) -> Self:
        """Return the file of a bundle served under a name: next to it, or to a link's target."""
        place = Path(bundle).resolve()
        file = f"{place.name}.{_flat(name)}@{_flat(platform.node())}{cls.suffix}"
        return cls(place.with_name(file))

    def release(self) -> None:
        """Leave the file to the next server."""
        self._lock.release()

    def take(self) -> bool:
        """Take the file for this server, unless another one keeps it; says whether it is ours."""
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
                "%s is kept by another server of this name on this host: what this one learns is "
                "not kept until that has ended; serve it under another name (--model NAME=PATH), "
                "or with --no-state",
                self.path,
            )
        elif is_ours and self._waits:
            _log.info("%s is kept by this server now", self.path)
        self._waits = not is_ours
        return is_ours


class StateFile(OwnedFile):
    """Where a server keeps the state of one controller, and finds it again."""

    suffix = SUFFIX
    lock_suffix = LOCK_SUFFIX

    def load(self, fingerprint: Mapping[str, str]) -> Mapping[str, Any] | None:
        """Take the file for this server, and read it; ``None`` if there is nothing to go on from.

        See :func:`.control_state.load_state`.
        """
        self.take()
        return load_state(self.path, fingerprint=fingerprint)

    def save(self, state: Mapping[str, Any], fingerprint: Mapping[str, str]) -> bool:
        """Keep a state, unless another server keeps the file; says whether it is kept.

        See :func:`.control_state.save_state`.
        """
        return self.take() and save_state(self.path, state, fingerprint=fingerprint)


def _flat(word: str) -> str:
    """Give a word as a part of a file name, different for different words.

    All but letters, digits and ``_.-~`` is percent-encoded; of a long word a hash stands for the
    rest.
    """
    flat = quote(word, safe="", errors="surrogatepass")
    if len(flat) <= _LONGEST:
        return flat
    digest = hashlib.sha256(word.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{flat[: _LONGEST - 17]}~{digest[:16]}"
