"""The file that keeps a model's batch profile over restarts, as ``eecompile plan`` reads it.

It lies beside the controller's state and by the same rules: one for each served name and host,
which one server at a time writes. Whatever is wrong with it, serving starts, and the windows begin
anew.
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
    """Where a server keeps the batch profile of one model, and finds it again."""

    suffix = PROFILE_SUFFIX
    lock_suffix = ".batch-profile.lock"

    def __init__(self, path: Path) -> None:
        """Keep the profile at ``path``."""
        super().__init__(path)
        self._unwritable = False
        """Whether the last attempt to save failed: one warning is enough until one succeeds."""

    def load(self, *, bundle: str, exits: int, window_s: float) -> BatchProfile | None:
        """Take the file for this server, and read it; ``None`` if there is nothing to go on from.

        ``bundle`` is the hash that it must be of. A line in the log says why it is of no use.
        """
        self.take()
        try:
            content = read_limited(self.path, MOST_PROFILE_BYTES)
            kept = parse_recorded(content.decode(), self.path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s cannot be read (%s); the batch profile begins anew", self.path, error)
            return None
        except ValueError as error:  # BatchProfileError, or bytes that are no text
            _log.warning("%s is damaged or something else (%.200s); the batch profile begins anew",
                         self.path, error)  # fmt: skip
            return None
        found = (kept.bundle, kept.profile.exits, kept.profile.window_s)
        if found == (bundle, exits, window_s):
            return kept.profile
        _log.info(
            "%s is of bundle %.18r with %d exits, in windows of %g s; now %.18r with %d, %g s: "
            "the batch profile begins anew",
            self.path,
            *found,
            bundle,
            exits,
            window_s,
        )
        return None

    def save(self, profile: BatchProfile, bundle: str) -> bool:
        """Keep a profile, unless another server keeps the file; says whether it is kept."""
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
