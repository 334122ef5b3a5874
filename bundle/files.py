"""The files of a bundle: read only after a check, written completely, put in place atomically.

No file on disk is trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, TypeAlias

from offramp.bundle.npz import open_regular
from offramp.bundle.schema.errors import BundleIntegrityError, BundleSchemaError, BundleWriteError
from offramp.bundle.schema.manifest import FileEntry
from offramp.bundle.schema.serde import to_plain

MAX_JSON_BYTES: Final = 2**26
"""Limit on the size of a JSON file; parsed, it takes about ten times as much memory."""
REMEDY: Final = "copy the bundle again, or compile the model again"
_PIECE_BYTES: Final = 2**20

FileContent: TypeAlias = bytes | Iterable[bytes]
"""Content of a file: whole, or in consecutive pieces."""


class CheckedFolder:
    """A folder whose files are read only after they were checked.

    BundleIntegrityError for a file that is missing, altered, outside the folder, or not a regular
    file: reading a pipe or a device could go on forever. Messages name ``listing``, the file that
    lists sizes and hashes, and the remedy ``remedy``.
    """

    def __init__(self, root: Path, *, listing: str = "manifest", remedy: str = REMEDY) -> None:
        self.root = root
        self.remedy = remedy
        self._listing = listing

    def inside(self, name: str) -> Path:
        """Return the path of a file, which must be in the folder, also after links are followed."""
        pure = PurePosixPath(name)
        place = self.root / pure
        unsafe = (
            pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not name
        )
        try:
            unsafe = unsafe or not place.resolve().is_relative_to(self.root.resolve())
        except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, no Unicode
            unsafe = True
        if unsafe:
            raise BundleIntegrityError(
                f"{self.root}: the path {name!r} leaves the bundle; {self.remedy}"
            )
        return place

    def read_regular(self, name: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Read a regular file that no entry describes, of at most ``most_bytes``."""
        with self._opened(name, most_bytes) as file:
            return file.read()

    def read(self, entry: FileEntry) -> bytes:
        """Read a file and check that it matches its entry."""
        content = self.read_regular(entry.path, entry.size_bytes)
        self.compare(entry_of(entry.path, content), entry)
        return content

    def pieces(self, entry: FileEntry) -> Iterator[bytes]:
        """Yield a file in pieces; after the last piece, raises the errors of :meth:`read`."""
        digest, size = hashlib.sha256(), 0
        with self._opened(entry.path, entry.size_bytes) as file:
            for piece in iter(lambda: file.read(_PIECE_BYTES), b""):
                digest.update(piece)
                size += len(piece)
                yield piece
        found = FileEntry(path=entry.path, size_bytes=size, sha256=digest.hexdigest())
        self.compare(found, entry)

    def check(self, entry: FileEntry) -> None:
        """Check a file as :meth:`read` does, in pieces, without keeping it in memory."""
        for _ in self.pieces(entry):
            pass

    def compare(self, found: FileEntry, entry: FileEntry) -> None:
        """Raise BundleIntegrityError if a file does not match its entry."""
        place = self.root / entry.path
        if found.size_bytes != entry.size_bytes:
            raise BundleIntegrityError(
                f"{place} has {found.size_bytes} bytes, the {self._listing} says "
                f"{entry.size_bytes}; {self.remedy}"
            )
        if found.sha256 != entry.sha256:
            raise BundleIntegrityError(f"{place} was altered (SHA-256 differs); {self.remedy}")

    def opened(self, name: str) -> BinaryIO | FileIO:
        """Open a file for reading at offsets, without a check."""
        return (self.root / name).open("rb", buffering=0)

    @contextlib.contextmanager
    def _opened(self, name: str, most_bytes: int) -> Iterator[BinaryIO]:
        """Open a regular file of at most ``most_bytes``."""
        place = self.inside(name)
        try:
            found = place.stat()
            if not stat.S_ISREG(found.st_mode):
                raise BundleIntegrityError(f"{place} is not a regular file; {self.remedy}")
            if found.st_size > most_bytes:
                raise BundleIntegrityError(
                    f"{place} has {found.st_size} bytes, at most {most_bytes} are expected; "
                    f"{self.remedy}"
                )
            with place.open("rb") as file:
                yield file
        except OSError as error:
            raise BundleIntegrityError(f"{place}: {error.strerror}; {self.remedy}") from error


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file outside a bundle, of at most ``most_bytes``.

    OSError for a file that is missing, too large, or not a regular file: reading a pipe or a device
    could go on forever. All files next to a bundle are unchecked, so they are read with this.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def names_under(root: Path, *, without: str) -> set[str]:
    """Return the names of everything below a folder except folders; links are not followed.

    ``without`` is a folder to skip: its files belong to the bundle and are not listed.
    """
    places = (p for p in root.rglob("*") if p.is_symlink() or not p.is_dir())
    names = {place.relative_to(root).as_posix() for place in places}
    return {name for name in names if not name.startswith(f"{without}/")}


def write_whole(
    path: Path, content: FileContent, *, durable: bool = True, mode: int = 0o600
) -> None:
    """Write a temporary file next to ``path``, then rename it to ``path``.

    If ``durable``, the content is on the disk before the file is renamed, and the new name is on
    the disk when this returns.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces_of(content))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        scratch.chmod(mode)
        scratch.replace(path)
        if durable:
            with contextlib.suppress(OSError):  # the file is in place, even if this sync fails
                sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def write_described(place: Path, name: str, content: FileContent) -> FileEntry:
    """Write a file in pieces; return the entry that describes it under its ``name``."""
    with place.open("wb") as file:

        def written() -> Iterator[bytes]:
            for piece in pieces_of(content):
                file.write(piece)
                yield piece

        return _described(name, written())


def entry_of(name: str, content: FileContent) -> FileEntry:
    """Return the entry that describes a file's content."""
    return _described(name, pieces_of(content))


def _described(name: str, pieces: Iterable[bytes]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return FileEntry(path=name, size_bytes=size, sha256=digest.hexdigest())


def pieces_of(content: FileContent) -> Iterable[bytes]:
    """Return a file's content as pieces to write one after another."""
    return (content,) if isinstance(content, bytes) else content


def dump(value: object) -> bytes:
    """Return the JSON text of a dataclass of the schema, as its file contains it."""
    return (json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n").encode()


def parse_json(document: bytes, name: str) -> Any:
    """Parse JSON; ``BundleSchemaError`` if it is not valid or too large."""
    if len(document) > MAX_JSON_BYTES:
        raise BundleSchemaError(
            f"{name}: has {len(document)} bytes, at most {MAX_JSON_BYTES} are expected"
        )
    try:
        return json.loads(document)
    except (ValueError, RecursionError) as error:
        raise BundleSchemaError(f"{name}: not JSON ({error})") from error


def parse_versioned(document: bytes, name: str, version: int, remedy: str) -> Any:
    """Parse JSON whose ``schema_version`` must be ``version``; other arguments are for messages."""
    plain = parse_json(document, name)
    found = plain.get("schema_version") if isinstance(plain, dict) else None
    if type(found) is not int or found != version:
        raise BundleSchemaError(
            f"{name}: schema version {found!r}, but this Offramp reads {version}; {remedy}"
        )
    return plain


RETIRED: Final = ".old"
"""Suffix of the folder that is moved aside where two folders cannot be exchanged in one step."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NOT_OF_FOLDERS: Final = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EISDIR}
)
"""Error codes of file systems that can sync files to the disk, but not folders."""


def put_in_place(scratch: Path, target: Path) -> None:
    """Move the folder ``scratch`` to ``target``; a previous folder there goes to ``scratch``.

    The new folder's content is on the disk before it gets the name ``target``. At any moment there
    is either the old folder or the new one, complete. Where the file system cannot exchange two
    names, the old folder is moved aside first; see :func:`interrupted_backup`.
    """
    for folder, _, files in os.walk(scratch):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if not target.exists():
        scratch.rename(target)
    elif not exchange(scratch, target):
        _move(scratch, target)
    with suppress(OSError):  # the folder is in place, even if this sync fails
        sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or a folder if the file system can sync folders."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OF_FOLDERS or not path.is_dir():
            raise


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step (Linux: renameat2); return whether that was possible."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or another C library
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def interrupted_backup(target: Path) -> Path | None:
    """Return the folder moved aside by a process that was killed while it replaced ``target``."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[^.]+{re.escape(RETIRED)}")
    with suppress(OSError):
        for place in sorted(target.absolute().parent.iterdir()):
            if ours.fullmatch(place.name) and place.is_dir():
                return place
    return None


def check_writable(target: Path, *, option: str = "--output") -> None:
    """Check, by trying, that a file can be created at ``target``; BundleWriteError if not.

    The message names ``option`` as the option that chooses another target.
    """
    folder = _nearest_folder(target)
    try:
        Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder)).rmdir()
    except OSError as error:
        raise BundleWriteError(
            f"{target} cannot be written: {error}; make {folder} writable for you, or choose "
            f"another {option}"
        ) from error


def check_space(target: Path, size_bytes: int) -> None:
    """Check that a bundle of that size fits on the disk at ``target``; BundleWriteError if not."""
    folder = _nearest_folder(target)
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise BundleWriteError(
            f"{target} needs {size_bytes / 2**20:,.0f} MiB at least, but {folder} has "
            f"{free / 2**20:,.0f} MiB left; free the space or choose another --output"
        )


def _nearest_folder(target: Path) -> Path:
    """Return the folder of a target, or its nearest parent that exists."""
    return next(folder for folder in target.absolute().parents if folder.exists())


def _move(scratch: Path, target: Path) -> None:
    retired = scratch.with_name(f"{scratch.name}{RETIRED}")
    target.rename(retired)
    try:
        scratch.rename(target)
    except BaseException as error:
        try:
            retired.rename(target)
        except OSError:
            raise BundleWriteError(
                f"{target} cannot be written ({error}), and the old one cannot be put back: it is "
                f"{retired} now; rename it to {target}"
            ) from error
        raise
    with suppress(OSError):
        retired.rename(scratch)
