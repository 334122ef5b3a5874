"""Archives of numpy (``.npz``), whose every claim is checked before memory is taken for it.

``numpy.load`` believes what an archive says: a header of a hundred bytes makes it allocate
exabytes, and a megabyte of zeros, compressed, unpacks to a gigabyte. Here names, sizes, dtypes and
shapes of all members are looked at first, and what is read is what was looked at. Pickles are
never loaded.
"""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any, BinaryIO, Final, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

PLAIN_KINDS: Final = "biufcSUmM"
"""The kinds of dtypes that numpy writes without pickles, and reads as they were."""
_MOST_MEMBERS: Final = 10_000
_MOST_SIZE: Final = 2**40
"""Of a dimension: an empty array may claim any, and numpy would write it again for ever."""
_MOST_EXPANSION: Final = 1032
"""No byte of deflate stands for more (zlib's own technical notes)."""
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NpzError(ValueError):
    """An archive is damaged, or not of the form expected; the message names member and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayForm:
    """The form that an array of an archive must have."""

    dtype: str
    """numpy's name of it."""
    ndim: int
    optional: bool = False
    """Whether the array may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An array as its header describes it."""

    info: zipfile.ZipInfo
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int
    """Bytes of the header."""


_Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[Any]]


def read_npz(
    file: BinaryIO | IO[bytes],
    *,
    max_bytes: int,
    expected: Mapping[str, ArrayForm] | None = None,
) -> dict[str, NDArray[Any]]:
    """Read the arrays of an archive, by name.

    They may take ``max_bytes`` together. ``expected`` names the arrays that there have to be, and
    no others; without it any of numbers, strings and times are read. ``NpzError`` for everything
    that can be wrong with an archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = _members(archive, max_bytes)
            if expected is not None:
                _check_forms(members, expected)
            return {member.name: _read(archive, member) for member in members}
    except NpzError:
        raise
    except MemoryError as error:
        raise NpzError("there is not enough memory for its arrays") from error
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for damage
        reason = " ".join(str(error).split())
        raise NpzError(f"{type(error).__name__}: {reason:.200}") from error


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read; OSError for anything else, as a pipe or a device never ends."""
    # Without waiting: the opening of a pipe that nobody writes to would not return.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device, expected a regular file", str(path))


def physical_memory_bytes() -> int:
    """The memory of this machine; without an answer of the system, an amount none has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**50


def _members(archive: zipfile.ZipFile, max_bytes: int) -> list[_Member]:
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS:
        raise NpzError(f"{len(infos)} members are more than the {_MOST_MEMBERS} that are read")
    for info in infos:
        if not info.filename.endswith(".npy"):
            raise NpzError(f"{info.filename!r} in it is no array; write it with numpy.savez")
        _check_sizes(info)
    if len({info.filename for info in infos}) < len(infos):
        raise NpzError("two of its members have one name")
    total = sum(info.file_size for info in infos)
    if total > max_bytes:
        raise NpzError(f"its arrays take {total:,} bytes, at most {max_bytes:,} are read")
    return [_described(archive, info) for info in infos]


def _check_sizes(info: zipfile.ZipInfo) -> None:
    """Refuse sizes that the stored bytes cannot have, and what is not plain deflate."""
    if info.compress_type not in _METHODS or info.flag_bits & 0x1:
        raise NpzError(f"{info.filename!r} is encrypted, or compressed in a way numpy does not")
    most = info.compress_size
    if info.compress_type == zipfile.ZIP_DEFLATED:
        most *= _MOST_EXPANSION
    if not 0 <= info.file_size <= most:
        raise NpzError(
            f"{info.filename!r} claims {info.file_size:,} bytes, its {info.compress_size:,} "
            "stored ones cannot hold them"
        )


def _described(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as stored:
        version = npy.read_magic(stored)
        if version not in _HEADERS:
            raise NpzError(f"{name!r} has a header of version {version}, expected 1.0 or 2.0")
        header: _Header = _HEADERS[version](stored)
        start = stored.tell()
    shape, fortran, dtype = header
    if dtype.hasobject:
        raise NpzError(f"{name!r} holds Python objects (allow_pickle is off); save numbers")
    if dtype.kind not in PLAIN_KINDS or not dtype.itemsize:
        raise NpzError(f"{name!r} has elements of dtype {dtype}, expected numbers")
    needed = prod(shape) * dtype.itemsize
    sizes_fit = all(0 <= size <= _MOST_SIZE for size in shape)
    if not sizes_fit or start + needed != info.file_size:
        raise NpzError(
            f"{name!r} says that it is {dtype} {list(shape)!s:.100}, but it has "
            f"{info.file_size - start:,} bytes"
        )
    return _Member(info=info, name=name, dtype=dtype, shape=shape, fortran=fortran, start=start)


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
    """Read an array to its last byte, with which its checksum is compared."""
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
