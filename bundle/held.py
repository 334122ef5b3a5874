"""Files of a bundle as they were when it was opened, whatever its path names now.

A server reads graphs again while it serves: for exits that it tries, and for workers that start in
place of lost ones. By then another bundle may be at the path, or none. Small files are kept in
memory, large ones open: what is open can be read though its name is gone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from offramp.bundle.files import inside, read_checked
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.schema.errors import BundleIntegrityError
from offramp.bundle.schema.file_entry import FileEntry

_SMALL_BYTES: Final = 2**20
"""Files up to it are kept in memory, but for weights: a server has only so many descriptors."""

_PIECE_BYTES: Final = 2**24


class HeldFiles:
    """The files of a bundle at ``root``, which are checked as they are read.

    BundleIntegrityError if one is not what its entry says by now.
    """

    def __init__(self, root: Path, entries: Sequence[FileEntry], *, mend: str) -> None:
        self.root = root
        """Folder that the path led to, without links."""
        self._mend = mend
        self._small: dict[str, bytes] = {}
        self._open: dict[str, int] = {}
        weakref.finalize(self, _close, self._open)
        for entry in entries:
            if entry.size_bytes <= _SMALL_BYTES and entry.path != WEIGHTS:
                self._small[entry.path] = read_checked(root, entry, listing="manifest", mend=mend)
            else:
                place = inside(root, entry.path, mend=mend)
                try:
                    self._open[entry.path] = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise BundleIntegrityError(f"{place}: {error.strerror}; {mend}") from error

    def read(self, entry: FileEntry) -> bytes:
        """Read a file whole; the caller checks what it holds."""
        if entry.path in self._small:
            return self._small[entry.path]
        pieces, at = list[bytes](), 0  # by place: others read the same open file meanwhile
        while piece := os.pread(self._open[entry.path], _PIECE_BYTES, at):
            at += len(piece)
            pieces.append(piece)
            if at > entry.size_bytes:
                break
        return b"".join(pieces)

    def opened(self, name: str) -> BinaryIO:
        """Open a file again, to be read by place: a large one, or that of weights."""
        return os.fdopen(os.dup(self._open[name]), "rb", buffering=0)


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
