"""The files of a bundle: read only after they were checked, written whole, put in place at once.

Nothing on disk is trusted.
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
"""Of a JSON file: read, it takes some ten times as much memory."""
MEND: Final = "copy the bundle again, or compile the model again"
_PIECE_BYTES: Final = 2**20

FileContent: TypeAlias = bytes | Iterable[bytes]
"""What a file has, or will have: whole, or in pieces one after another."""


class CheckedFolder:
    """The files of a folder, which are read only after they were checked.

    BundleIntegrityError for a file that is missing, altered, outside the folder, or no regular
    file: a pipe or a device would never end, nor a file of zeros. Messages name ``listing``, the
    file that has the entries, and the remedy ``mend``.
    """

    def __init__(self, root: Path, *, listing: str = "manifest", mend: str = MEND) -> None:
        self.root = root
        self.mend = mend
        self._listing = listing

    def inside(self, name: str) -> Path:
        """Return the place of a file, which must not be outside, through links neither."""
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
                f"{self.root}: the path {name!r} leaves the bundle; {self.mend}"
            )
        return place

    def read_regular(self, name: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Read a regular file that no entry describes, of at most ``most_bytes``."""
        with self._opened(name, most_bytes) as file:
            return file.read()

    def read(self, entry: FileEntry) -> bytes:
        """Read a file and check that it is what its entry says."""
        content = self.read_regular(entry.path, entry.size_bytes)
        self.compare(entry_of(entry.path, content), entry)
        return content

    def pieces(self, entry: FileEntry) -> Iterator[bytes]:
        """Read a file piece by piece; once all was given, raises as :meth:`read` does."""
        digest, size = hashlib.sha256(), 0
        with self._opened(entry.path, entry.size_bytes) as file:
            for piece in iter(lambda: file.read(_PIECE_BYTES), b""):
                digest.update(piece)
                size += len(piece)
                yield piece
        found = FileEntry(path=entry.path, size_bytes=size, sha256=digest.hexdigest())
        self.compare(found, entry)

    def check(self, entry: FileEntry) -> None:
        """Check a file as :meth:`read` does, piece by piece, and keep none of it."""
        for _ in self.pieces(entry):
            pass

    def compare(self, found: FileEntry, entry: FileEntry) -> None:
        """Refuse a file that is not what its entry says."""
        place = self.root / entry.path
        if found.size_bytes != entry.size_bytes:
            raise BundleIntegrityError(
                f"{place} has {found.size_bytes} bytes, the {self._listing} says "
                f"{entry.size_bytes}; {self.mend}"
            )
        if found.sha256 != entry.sha256:
            raise BundleIntegrityError(f"{place} was altered (SHA-256 differs); {self.mend}")

    def opened(self, name: str) -> BinaryIO | FileIO:
        """Open a file, to be read by place, and unchecked."""
        return (self.root / name).open("rb", buffering=0)

    @contextlib.contextmanager
    def _opened(self, name: str, most_bytes: int) -> Iterator[BinaryIO]:
        """Open a regular file that is not too large."""
        place = self.inside(name)
        try:
            found = place.stat()
            if not stat.S_ISREG(found.st_mode):
                raise BundleIntegrityError(f"{place} is not a regular file; {self.mend}")
            if found.st_size > most_bytes:
                raise BundleIntegrityError(
                    f"{place} has {found.st_size} bytes, at most {most_bytes} are expected; "
                    f"{self.mend}"
                )
            with place.open("rb") as file:
                yield file
        except OSError as error:
            raise BundleIntegrityError(f"{place}: {error.strerror}; {self.mend}") from error


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file outside a bundle, of at most ``most_bytes``.

    OSError for a file that is missing, too large, or no regular file: a pipe or a device may never
    end. Nobody checked such a file before, so everything beside a bundle is read through this.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def names_under(root: Path, *, without: str) -> set[str]:
    """Everything below a folder but plain folders; links are not followed.

    ``without`` is a folder whose files belong to the bundle without being listed.
    """
    places = (p for p in root.rglob("*") if p.is_symlink() or not p.is_dir())
    names = {place.relative_to(root).as_posix() for place in places}
    return {name for name in names if not name.startswith(f"{without}/")}


def write_whole(
    path: Path, content: FileContent, *, durable: bool = True, mode: int = 0o600
) -> None:
    """Write a file beside its place, and put it there in one step.

    If ``durable``, it is on the disk when this returns, and before it takes its place.
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
            with contextlib.suppress(OSError):  # it is in its place by now, whatever the disk says
                sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def write_described(place: Path, name: str, content: FileContent) -> FileEntry:
    """Write a file, piece by piece; describes what was written under its ``name``."""
    with place.open("wb") as file:

        def written() -> Iterator[bytes]:
            for piece in pieces_of(content):
                file.write(piece)
                yield piece

        return _described(name, written())


def entry_of(name: str, content: FileContent) -> FileEntry:
    """Describe a file by its content."""
    return _described(name, pieces_of(content))


def _described(name: str, pieces: Iterable[bytes]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return FileEntry(path=name, size_bytes=size, sha256=digest.hexdigest())


def pieces_of(content: FileContent) -> Iterable[bytes]:
    """Give a file's content piece by piece."""
    return (content,) if isinstance(content, bytes) else content


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
    if type(found) is not int or found != version:
        raise BundleSchemaError(
            f"{name}: schema version {found!r}, but this Offramp reads {version}; {remedy}"
        )
    return plain


RETIRED: Final = ".old"
"""End of the name of what is moved aside, where two folders cannot be exchanged in one step."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NOT_OF_FOLDERS: Final = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EISDIR}
)
"""What file systems say that bring files to the disk, and know no such thing of folders."""


def put_in_place(scratch: Path, target: Path) -> None:
    """Put the folder ``scratch`` at ``target``, beside it; what was there goes to ``scratch``.

    All of it is on the disk before its name is. Whoever looks, at whatever moment, finds the old
    folder or the new one, whole. Where the file system cannot exchange two names, the old one is
    moved aside first; see :func:`moved_aside`.
    """
    for folder, _, files in os.walk(scratch):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if not target.exists():
        scratch.rename(target)
    elif not exchange(scratch, target):
        _move(scratch, target)
    with suppress(OSError):  # it is in its place by now, whatever the disk says
        sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; a folder, where the file system can do that."""
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
    """Exchange two names in one step; whether that was possible (Linux: renameat2)."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or another C library
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def moved_aside(target: Path) -> Path | None:
    """Find what stood at ``target`` before an overwriting that was killed between two steps."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[^.]+{re.escape(RETIRED)}")
    with suppress(OSError):
        for place in sorted(target.absolute().parent.iterdir()):
            if ours.fullmatch(place.name) and place.is_dir():
                return place
    return None


def check_writable(target: Path, *, option: str = "--output") -> None:
    """Check, by trying, that something can be put at ``target``; BundleWriteError if not.

    The message names ``option`` as what chooses another target.
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
    """Check that a bundle of that size has room at ``target``; BundleWriteError if not."""
    folder = _nearest_folder(target)
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise BundleWriteError(
            f"{target} needs {size_bytes / 2**20:,.0f} MiB at least, but {folder} has "
            f"{free / 2**20:,.0f} MiB left; free the space or choose another --output"
        )


def _nearest_folder(target: Path) -> Path:
    """Find the folder that a target is in, or the first one above it that is there already."""
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
                f"{target} cannot be written ({error}), nor put back: it is in {retired} now; "
                "rename that"
            ) from error
        raise
    with suppress(OSError):
        retired.rename(scratch)
