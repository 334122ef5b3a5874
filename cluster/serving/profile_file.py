"""The file that keeps a model's batch profile across restarts, readable by ``eecompile plan``.

The file is next to the controller's state and has the same rules: one file for each served name and
host, which one server at a time writes. If it cannot be used, serving starts with a new series of
windows.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from offramp.bundle.files import read_limited, write_whole
from offramp.cluster.planning.batch_profile import (
    MOST_PROFILE_BYTES,
    BatchProfile,
    dump_batch_profile,
    parse_recorded,
)
from offramp.engine.common.state_file import OwnedFile

_log = logging.getLogger(__name__)

PROFILE_SUFFIX: Final = ".batch-profile.json"


class ProfileFile(OwnedFile):
    """The file of one model's batch profile: saves and loads it."""

    suffix = PROFILE_SUFFIX
    lock_suffix = ".batch-profile.lock"

    def __init__(self, path: Path) -> None:
        """Keep the path of the batch profile's file; nothing is read yet."""
        super().__init__(path)
        self._unwritable = False
        """``True`` if the last save failed: one warning is enough until a save succeeds."""

    def load(self, *, bundle: str, exits: int, window_s: float) -> BatchProfile | None:
        """Lock the file for this server, and read it; ``None`` if there is no usable profile.

        ``bundle`` is the hash of the served bundle. A log line states why a profile is not used.
        """
        self.take()
        try:
            content = read_limited(self.path, MOST_PROFILE_BYTES)
            kept = parse_recorded(content.decode(), self.path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s cannot be read (%s); a new batch profile begins", self.path, error)
            return None
        except ValueError as error:  # BatchProfileError, or bytes that are not UTF-8
            _log.warning("%s is damaged or not a profile (%.200s); a new batch profile begins",
                         self.path, error)  # fmt: skip
            return None
        found = (kept.bundle, kept.profile.exits, kept.profile.window_s)
        if found == (bundle, exits, window_s):
            return kept.profile
        _log.info(
            "%s belongs to bundle %.18r with %d exits, in windows of %g s; now served: bundle "
            "%.18r with %d exits, in windows of %g s: a new batch profile begins",
            self.path,
            *found,
            bundle,
            exits,
            window_s,
        )
        return None

    def save(self, profile: BatchProfile, bundle: str) -> bool:
        """Save a profile, unless another server owns the file; return whether it was saved."""
        if not self.take():
            return False
        try:
            write_whole(self.path, dump_batch_profile(profile, bundle).encode())
        except OSError as error:
            if not self._unwritable:
                remedy = "the batch profile is lost with the server; make its folder writable"
                _log.warning("%s cannot be written (%s): %s", self.path, error, remedy)
            self._unwritable = True
            return False
        self._unwritable = False
        return True
