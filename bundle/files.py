"""The files of a bundle, read only after they were checked, as nothing on disk is trusted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, Final

from offramp.bundle.errors import BundleIntegrityError, BundleSchemaError
from offramp.bundle.manifest import FileEntry
from offramp.bundle.placing import sync
from offramp.bundle.serde import to_plain

MAX_JSON_BYTES: Final = 2**26
"""Of a JSON file: read, it takes some ten times as much memory."""


def read_checked(root: Path, entry: FileEntry, *, listing: str, mend: str) -> bytes:
    """Read a file and check that it is what its entry says.

    Messages name ``listing``, the file that has the entry, and the remedy ``mend``.
    """
    place = root / entry.path
    content = read_regular(root, entry.path, mend=mend, most_bytes=entry.size_bytes)
    if len(content) != entry.size_bytes:
        raise BundleIntegrityError(
            f"{place} has {len(content)} bytes, the {listing} says {entry.size_bytes}; {mend}"
        )
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise BundleIntegrityError(f"{place} was altered (SHA-256 differs); {mend}")
    return content


def read_regular(root: Path, name: str, *, mend: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a regular file of the bundle; a pipe or a device would never end, nor a file of zeros.

    ``most_bytes`` are read; without it, as many as a JSON file may have.
    """
    place = inside(root, name, mend=mend)
    try:
        found = place.stat()
        if not stat.S_ISREG(found.st_mode):
            raise BundleIntegrityError(f"{place} is not a regular file; {mend}")
        if found.st_size > most_bytes:
            raise BundleIntegrityError(
                f"{place} has {found.st_size} bytes, at most {most_bytes} are expected; {mend}"
            )
        return place.read_bytes()
    except OSError as error:
        raise BundleIntegrityError(f"{place}: {error.strerror}; {mend}") from error


def inside(root: Path, name: str, *, mend: str) -> Path:
    """Give the place of a file, which must not be outside the bundle, through links neither."""
    pure = PurePosixPath(name)
    place = root / pure
    unsafe = pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not name
    try:
        unsafe = unsafe or not place.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, no Unicode
        unsafe = True
    if unsafe:
        raise BundleIntegrityError(f"{root}: the path {name!r} leaves the bundle; {mend}")
    return place


def write_whole(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Write a file beside its place, and put it there in one step.

    If ``durable``, it is on the disk when this returns, and before it takes its place.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        scratch.chmod(mode)
        scratch.replace(path)
        if durable:
            with contextlib.suppress(OSError):  # it is in its place by now, whatever the disk says
                sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def entry_of(name: str, content: bytes) -> FileEntry:
    """Describe a file by its content."""
    digest = hashlib.sha256(content).hexdigest()
    return FileEntry(path=name, size_bytes=len(content), sha256=digest)


def dump(value: object) -> bytes:
    """Give a dataclass of the schema as the content of its file."""
    return (json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n").encode()


def parse_json(document: bytes, name: str) -> Any:
    """Read JSON; ``BundleSchemaError`` if it is none."""
    if len(document) > MAX_JSON_BYTES:
        raise BundleSchemaError(
            f"{name}: has {len(document)} bytes, at most {MAX_JSON_BYTES} are expected"
        )
    try:
        return json.loads(document)
    except (ValueError, RecursionError) as error:
        raise BundleSchemaError(f"{name}: not JSON ({error})") from error


def parse_versioned(document: bytes, name: str, version: int, remedy: str) -> Any:
    """Read JSON whose ``schema_version`` has to be ``version``; the rest is for messages."""
    plain = parse_json(document, name)
    found = plain.get("schema_version") if isinstance(plain, dict) else None
    if found != version:
        raise BundleSchemaError(
            f"{name}: schema version {found!r}, but this Offramp reads {version}; {remedy}"
        )
    return plain
