"""Graph files of a bundle, as stored and with the weights that they name.

Files may be held (:class:`HeldFolder`): then they stay readable if the bundle is replaced.
"""

from __future__ import annotations

import hashlib
import io
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from offramp.bundle.files import CheckedFolder, entry_of
from offramp.bundle.graph_weights import MOST_BYTES, WEIGHTS, filled_parts, named_weights
from offramp.bundle.onnx_wire import Part, Place, length_of
from offramp.bundle.schema.errors import BundleIntegrityError, BundleSchemaError
from offramp.bundle.schema.manifest import FileEntry
from offramp.proto.wire_format import WireError

_PIECE_BYTES: Final = 2**20

FileIdentity: TypeAlias = tuple[int, ...]
"""Device, inode, size, and times of the last changes of a file. If none of them has changed, the
file was not written."""


def identity_of_file(place: Path) -> FileIdentity | None:
    """Return values that change when a file is written or replaced; ``None`` if it is missing."""
    try:
        found = place.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_graph(files: CheckedFolder, name: str, graph: bytes, size_bytes: int) -> None:
    """Raise BundleSchemaError if a graph names weights where there are none.

    ``size_bytes`` is the size of the file of weights.
    """
    try:
        named_weights(graph, size_bytes)
    except WireError as error:
        raise BundleSchemaError(f"{files.root / name}: {error}; {files.remedy}") from error


def fill(files: CheckedFolder, entry: FileEntry, graph: bytes, size_bytes: int) -> bytes:
    """Return a graph of a bundle with the weights that it names.

    BundleSchemaError if it names weights where there are none, or would exceed protobuf's limit
    with them; BundleIntegrityError if graph and weights together do not match ``entry``.
    """
    parts = _filled(files, entry.path, graph, size_bytes)
    if parts is None:
        return graph
    if (size := sum(map(length_of, parts))) > MOST_BYTES:
        raise BundleSchemaError(
            f"{files.root / entry.path} has {size:,} bytes with its weights, above protobuf's "
            f"limit of {MOST_BYTES:,}: only runtimes that map the weights file can run this graph"
        )
    whole, digest = io.BytesIO(), hashlib.sha256()
    for piece in _read(files, parts):
        whole.write(piece)
        digest.update(piece)
    if digest.hexdigest() != entry.filled_sha256:
        raise BundleIntegrityError(
            f"{files.root / entry.path} has other weights in {WEIGHTS} than the manifest says "
            f"(SHA-256 of both differs); {files.remedy}"
        )
    return whole.getvalue()


def describe_filled(
    files: CheckedFolder, entries: Sequence[FileEntry], graphs: Sequence[str]
) -> Iterator[FileEntry]:
    """Yield the entries; a graph's entry also gets the hash of the graph with its named weights."""
    sizes = {entry.path: entry.size_bytes for entry in entries}
    size_bytes = sizes.get(WEIGHTS, 0)
    for entry in entries:
        parts = None
        if size_bytes and entry.path in graphs:
            graph = (files.root / entry.path).read_bytes()
            parts = _filled(files, entry.path, graph, size_bytes)
        if parts is None:
            yield entry
            continue
        digest = hashlib.sha256()
        for piece in _read(files, parts):
            digest.update(piece)
        yield replace(entry, filled_sha256=digest.hexdigest())


def _filled(files: CheckedFolder, name: str, graph: bytes, size_bytes: int) -> list[Part] | None:
    """Split a graph as :func:`.filled_parts` does, with errors that name the file."""
    try:
        return filled_parts(graph, size_bytes)
    except WireError as error:
        raise BundleSchemaError(f"{files.root / name}: {error}; {files.remedy}") from error


def _read(files: CheckedFolder, parts: Sequence[Part]) -> Iterator[bytes | memoryview]:
    # Not mapped: if the file is truncated at the same time, this is an error, not a signal.
    weights = files.root / WEIGHTS
    try:
        with files.opened(WEIGHTS) as file:
            for part in parts:
                if not isinstance(part, Place):
                    yield part
                    continue
                at, end = part.offset, part.offset + part.length
                while at < end:
                    piece = os.pread(file.fileno(), min(_PIECE_BYTES, end - at), at)
                    if not piece:
                        raise BundleIntegrityError(
                            f"{weights} ends at byte {at}, expected {end}; {files.remedy}"
                        )
                    at += len(piece)
                    yield piece
    except OSError as error:
        raise BundleIntegrityError(f"{weights}: {error.strerror}; {files.remedy}") from error


_SMALL_BYTES: Final = 2**20
"""Size in bytes up to which files are kept in memory, except weights: a process may open only a
limited number of files."""

_MOST_PIECE: Final = 2**24


class HeldFolder(CheckedFolder):
    """The files of a bundle as they are now, even if another bundle replaces it.

    A server reads graphs again while it serves: for exits that it tries, and for workers that
    replace lost ones. By then another bundle, or none, may be at the path. Small files are kept in
    memory, large ones stay open: an open file can be read after its name is removed.
    """

    def __init__(self, root: Path, entries: Sequence[FileEntry]) -> None:
        super().__init__(root)
        self.resolved = root.resolve()
        """Folder that the path leads to, with links resolved."""
        self._small: dict[str, bytes] = {}
        self._open: dict[str, int] = {}
        weakref.finalize(self, _close, self._open)
        files = CheckedFolder(self.resolved)
        for entry in entries:
            if entry.size_bytes <= _SMALL_BYTES and entry.path != WEIGHTS:
                self._small[entry.path] = files.read(entry)
                continue
            place = files.inside(entry.path)
            try:
                self._open[entry.path] = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise BundleIntegrityError(f"{place}: {error.strerror}; {self.remedy}") from error

    def read(self, entry: FileEntry) -> bytes:
        """Read a whole file and check it."""
        content = self._small.get(entry.path)
        if content is None:
            pieces, at = list[bytes](), 0  # by offset: others read the same open file
            while piece := os.pread(self._open[entry.path], _MOST_PIECE, at):
                at += len(piece)
                pieces.append(piece)
                if at > entry.size_bytes:
                    break
            content = b"".join(pieces)
        self.compare(entry_of(entry.path, content), entry)
        return content

    def opened(self, name: str) -> BinaryIO:
        """Return a new handle of a held file, for reading at offsets."""
        return os.fdopen(os.dup(self._open[name]), "rb", buffering=0)


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
