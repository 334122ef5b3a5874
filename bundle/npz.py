"""numpy archives (``.npz``), checked completely before memory is allocated for them.

``numpy.load`` trusts an archive: a header of a hundred bytes makes it allocate exabytes, and a
megabyte of compressed zeros unpacks to a gigabyte. Here names, sizes, dtypes and shapes of all
members are checked first, and the arrays read are those that were checked. Pickles are never
loaded.

Arrays may be mapped into memory instead (:func:`map_npz`), so that data is not kept in memory after
it is read. Pages that a process has read count as its memory until it releases them; the system's
cache still holds them afterwards, as long as there is space.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

PLAIN_KINDS: Final = "biufcSUmM"
"""Kinds of dtypes that numpy writes without pickles, and reads back unchanged."""
_MOST_MEMBERS: Final = 10_000
_MOST_SIZE: Final = 2**40
"""Limit on the size of a dimension: an empty array may declare any size, and numpy would write the
array back forever."""
_MOST_EXPANSION: Final = 1032
"""Largest expansion of one byte by deflate (zlib's technical notes)."""
_ANY_SIZE: Final = 2**63
_CHUNK: Final = 2**20
_LOCAL_HEADER: Final = 30
"""Bytes before a member's name in an archive."""
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NpzError(ValueError):
    """An archive is damaged or not of the expected form; the message names member and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayForm:
    """The required form of an array in an archive."""

    dtype: str
    """numpy's name of the dtype."""
    ndim: int
    optional: bool = False
    """True if the array may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An array as its header describes it."""

    info: zipfile.ZipInfo
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int
    """Length of the header in bytes."""

    @property
    def packed(self) -> bool:
        """True if the array is compressed."""
        return self.info.compress_type != zipfile.ZIP_STORED


_Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[Any]]


def read_npz(
    file: BinaryIO | IO[bytes],
    *,
    max_bytes: int,
    expected: Mapping[str, ArrayForm] | None = None,
) -> dict[str, NDArray[Any]]:
    """Read the arrays of an archive, by name.

    They may take ``max_bytes`` together. ``expected`` names the arrays that must be there, and no
    others may be; without it all arrays of numbers, strings and times are read. ``NpzError`` for
    every defect that an archive can have.
    """
    with _converted_errors(), zipfile.ZipFile(file) as archive:
        members = _members(archive, max_bytes)
        if expected is not None:
            _check_forms(members, expected)
        return {member.name: _read(archive, member) for member in members}


class NpzBytes(NamedTuple):
    """Bytes that the arrays of an archive take."""

    arrays: int
    """Bytes of all arrays once they are in memory."""
    packed: int
    """Bytes of the compressed arrays after decompression."""


def measure_npz(file: BinaryIO | IO[bytes]) -> NpzBytes:
    """Return the bytes of an archive's arrays; raises NpzError as :func:`read_npz` does."""
    with _converted_errors(), zipfile.ZipFile(file) as archive:
        members = _members(archive, _ANY_SIZE)
    packed = sum(member.info.file_size for member in members if member.packed)
    return NpzBytes(arrays=sum(member.info.file_size for member in members), packed=packed)


def map_npz(
    file: BinaryIO | IO[bytes], unpacked: BinaryIO | IO[bytes] | None
) -> dict[str, NDArray[Any]]:
    """Map the arrays of an archive into memory, by name; their checksums are compared first.

    Uncompressed arrays are mapped from the archive itself, which must not change from then on.
    Compressed ones are written to ``unpacked``, a file with space for :attr:`NpzBytes.packed`
    bytes. Raises NpzError as :func:`read_npz` does.
    """
    with _converted_errors(), zipfile.ZipFile(file) as archive:
        return {
            member.name: _map_member(archive, member, file, unpacked)
            for member in _members(archive, _ANY_SIZE)
        }


def _map_member(
    archive: zipfile.ZipFile,
    member: _Member,
    file: BinaryIO | IO[bytes],
    unpacked: BinaryIO | IO[bytes] | None,
) -> NDArray[Any]:
    place, start = file, 0
    if member.packed:
        assert unpacked is not None, "there has to be a file to unpack to"
        place, start = unpacked, unpacked.tell()
    with archive.open(member.info) as stored:
        # Read to the last byte, as the checksum is compared there.
        for chunk in iter(partial(stored.read, _CHUNK), b""):
            if member.packed:
                place.write(chunk)
    if member.packed:
        place.flush()
    else:
        start = _content_start(file, member.info)
    return map_array(
        place, member.dtype, member.shape, offset=start + member.start, fortran=member.fortran
    )


def _content_start(file: BinaryIO | IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes in an archive, after a header that zipfile checked."""
    file.seek(info.header_offset)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(_LOCAL_HEADER)[26:])
    return info.header_offset + _LOCAL_HEADER + int(name_bytes) + int(extra_bytes)


def map_npy(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Map the array of a ``.npy`` file into memory.

    ``NpzError`` for a file without an array of numbers; OSError where it cannot be opened.
    """
    name = Path(path).name
    with open_regular(path) as file, _converted_errors():
        shape, fortran, dtype = _header(file, name)
        start = file.tell()
        _check_header(name, (shape, fortran, dtype), os.fstat(file.fileno()).st_size - start)
        return map_array(file, dtype, shape, offset=start, fortran=fortran)


@contextmanager
def _converted_errors() -> Iterator[None]:
    """Convert any exception that a damaged archive causes to an ``NpzError``."""
    try:
        yield
    except NpzError:
        raise
    except MemoryError as error:
        raise NpzError("there is not enough memory for its arrays") from error
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for damage
        reason = " ".join(str(error).split())
        raise NpzError(f"{type(error).__name__}: {reason:.200}") from error


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read; OSError for pipes and devices, which may never end."""
    # Non-blocking: opening a pipe without a writer would never return.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device, expected a regular file", str(path))


def _members(archive: zipfile.ZipFile, max_bytes: int) -> list[_Member]:
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS:
        raise NpzError(f"{len(infos)} members are more than the {_MOST_MEMBERS} that are read")
    for info in infos:
        if not info.filename.endswith(".npy"):
            raise NpzError(
                f"member {info.filename!r} of the npz file is not an array; write the file with "
                "numpy.savez"
            )
        _check_sizes(info)
    if len({info.filename for info in infos}) < len(infos):
        raise NpzError("two of its members have the same name")
    total = sum(info.file_size for info in infos)
    if total > max_bytes:
        raise NpzError(f"its arrays take {total:,} bytes, at most {max_bytes:,} are read")
    return [_described(archive, info) for info in infos]


def _check_sizes(info: zipfile.ZipInfo) -> None:
    """Raise NpzError for sizes that the stored bytes cannot have, and for unusual compression."""
    if info.compress_type not in _METHODS or info.flag_bits & 0x1:
        raise NpzError(f"{info.filename!r} is encrypted, or compressed in a way numpy does not")
    most = info.compress_size
    if info.compress_type == zipfile.ZIP_DEFLATED:
        most *= _MOST_EXPANSION
    if not 0 <= info.file_size <= most:
        raise NpzError(
            f"{info.filename!r} claims {info.file_size:,} bytes, more than its "
            f"{info.compress_size:,} stored bytes can hold"
        )


def _described(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as stored:
        header = _header(stored, name)
        start = stored.tell()
    _check_header(name, header, info.file_size - start)
    shape, fortran, dtype = header
    return _Member(info=info, name=name, dtype=dtype, shape=shape, fortran=fortran, start=start)


def _header(file: BinaryIO | IO[bytes], name: str) -> _Header:
    """Read the header of an array."""
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise NpzError(f"{name!r} has a header of version {version}, expected 1.0 or 2.0")
    header: _Header = _HEADERS[version](file)
    return header


def _check_header(name: str, header: _Header, content_bytes: int) -> None:
    """Raise NpzError for elements that are not numbers, and for a size that does not fit."""
    shape, _, dtype = header
    if dtype.hasobject:
        raise NpzError(f"{name!r} holds Python objects (allow_pickle is off); save numbers")
    if dtype.kind not in PLAIN_KINDS or not dtype.itemsize:
        raise NpzError(f"{name!r} has elements of dtype {dtype}, expected numbers")
    sizes_fit = all(0 <= size <= _MOST_SIZE for size in shape)
    if not sizes_fit or prod(shape) * dtype.itemsize != content_bytes:
        raise NpzError(
            f"{name!r} is declared as {dtype} {list(shape)!s:.100}, but it has "
            f"{content_bytes:,} bytes"
        )


def _check_forms(members: list[_Member], expected: Mapping[str, ArrayForm]) -> None:
    found = {member.name: member for member in members}
    needed = {name for name, form in expected.items() if not form.optional}
    missing, unknown = sorted(needed - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise NpzError(f"unknown arrays {unknown!s:.200}, missing arrays {missing}")
    for name, member in found.items():
        form = expected[name]
        if member.dtype != np.dtype(form.dtype) or len(member.shape) != form.ndim:
            raise NpzError(
                f"{name!r} is {member.dtype} {list(member.shape)}, expected {form.dtype} of "
                f"{form.ndim} dimensions"
            )


def _read(archive: zipfile.ZipFile, member: _Member) -> NDArray[Any]:
    """Read an array to its last byte, where its checksum is compared."""
    with archive.open(member.info) as stored:
        stored.read(member.start)
        content = bytearray(member.info.file_size - member.start)
        view = memoryview(content)
        while view and (count := stored.readinto(view)):  # type: ignore[attr-defined]
            view = view[count:]
        if view or stored.read(1):
            raise NpzError(f"{member.name!r} ends early")
    flat = np.frombuffer(content, member.dtype) if content else np.empty(0, member.dtype)
    array: NDArray[Any] = flat.reshape(member.shape, order="F" if member.fortran else "C")
    return array


def map_array(
    file: BinaryIO | IO[bytes],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    offset: int = 0,
    fortran: bool = False,
) -> NDArray[Any]:
    """Map an array that begins at byte ``offset`` of a file, read-only.

    ValueError if the file ends before the array does. The file must not be truncated while it is
    mapped: reading beyond its end kills the process.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    order = "F" if fortran else "C"
    return np.memmap(file, dtype, mode="r", offset=offset, shape=shape, order=order)  # type: ignore[call-overload,no-any-return]


def is_mapped(array: NDArray[Any]) -> bool:
    """Return whether an array is in a mapped file."""
    return _mapping(array) is not None


def release_pages(array: NDArray[Any]) -> None:
    """Release the pages read from, or written to, an array in a mapped file."""
    mapping = _mapping(array)
    if mapping is not None and hasattr(mapping, "madvise"):  # Windows has none
        mapping.madvise(mmap.MADV_DONTNEED)


def copy_rows(array: NDArray[Any], rows: slice | NDArray[np.intp]) -> NDArray[Any]:
    """Return some rows; from a mapped file, as a copy, and the pages read are released.

    An array may be at any byte of a file; the copy is aligned, as runtimes expect.
    """
    found = array[rows]
    if not is_mapped(array):
        return found
    # Indexing with an array copies already, a slice does not.
    copied = np.array(found, order="C") if is_mapped(found) else np.ascontiguousarray(found)
    release_pages(array)
    return copied


def _mapping(array: NDArray[Any]) -> mmap.mmap | None:
    found = getattr(array, "_mmap", None)  # views of a numpy.memmap have it, copies do not
    return found if isinstance(found, mmap.mmap) else None
