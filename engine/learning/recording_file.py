"""The file of recorded inputs: an append-only log of samples with checksums.

``inputs.log`` begins with a header: the model, and the names and types of its inputs. Records
follow, one for each sample: the sample's slot, the number of samples seen until then, the shape and
the bytes of each input, and two CRC-32. The newest record of a slot is valid. If the file is cut
off in the middle of a record, or a record is damaged, only that record is lost.

Only the owner can read the file and its folder. This module imports only numpy, because the
compiler reads such files, too.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

LOG_NAME: Final = "inputs.log"
_MAGIC: Final = b"eeinput1"
_HEAD: Final = struct.Struct("<8sII")
"""Magic, length of the following JSON, its CRC-32."""
RECORD: Final = struct.Struct("<4sIQQI")
"""Mark, slot, number of samples seen, length of the body, CRC-32 of the body. The CRC-32 of these
fields follows."""
CRC: Final = struct.Struct("<I")
MARK: Final = b"row:"
RECORD_BYTES: Final = RECORD.size + CRC.size
_MOST_SLOTS: Final = 2**31
_MOST_AXES: Final = 64


class RecordingError(Exception):
    """A recording cannot be used; the message names the file, what was expected, and the remedy."""


class SamplePlace(NamedTuple):
    """Place of a sample in the log."""

    offset: int
    """Offset of the body of the sample's record in the file, in bytes."""
    length: int
    seen: int
    """Number of the model's samples seen until this one was recorded."""

    @property
    def record_bytes(self) -> int:
        """Size of the sample's record in the file, in bytes."""
        return RECORD_BYTES + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHeader:
    """Start of a recording's file: its model and inputs."""

    model_sha256: str
    """Hash of the model's file."""
    inputs: tuple[tuple[str, str], ...]
    """Name and dtype of every recorded input."""

    def encode(self) -> bytes:
        """Encode the beginning of the file."""
        text = json.dumps({"model": self.model_sha256, "inputs": self.inputs}).encode()
        return _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text

    @classmethod
    def decode(cls, log: memoryview, path: Path) -> tuple[Self, int]:
        """Decode the beginning of a file; return it and its length, or raise RecordingError."""
        try:
            magic, length, crc = _HEAD.unpack_from(log)
            text = bytes(log[_HEAD.size : _HEAD.size + length])
            whole = magic == _MAGIC and len(text) == length and zlib.crc32(text) == crc
            plain = json.loads(text if whole else b"")
            inputs = tuple((str(name), np.dtype(dtype).name) for name, dtype in plain["inputs"])
            return cls(model_sha256=str(plain["model"]), inputs=inputs), _HEAD.size + length
        except (struct.error, ValueError, TypeError, KeyError) as error:
            raise RecordingError(
                f"{path} is not a recording of inputs, or its beginning is damaged; remove it, and "
                "let eeserve --learn record again"
            ) from error


def record_bytes(inputs: Iterable[tuple[Sequence[int], int]]) -> int:
    """Return the size of a record in bytes, from the shape and the item size of every input."""
    return RECORD_BYTES + sum(
        CRC.size + 8 * len(shape) + math.prod(shape) * item for shape, item in inputs
    )


def sample_bytes(specs: Iterable[tuple[Sequence[int | str], str]]) -> int:
    """Return the size of a sample's record in bytes; 0 if samples differ in size.

    ``specs`` are the shape (with the batch dimension) and the dtype of every input.
    """
    shapes = []
    for shape, dtype in specs:
        sizes = [size for size in shape[1:] if isinstance(size, int)]
        if len(sizes) < len(shape) - 1:
            return 0
        shapes.append((sizes, np.dtype(dtype).itemsize))
    return record_bytes(shapes)


class FoundSamples(NamedTuple):
    """Result of a scan of a log."""

    header: RecordingHeader
    live: dict[int, SamplePlace]
    """Newest records by slot."""
    seen: int
    """Number of samples seen until the last record."""
    end: int
    """Offset of the end of the last whole record."""
    damaged: int
    """Number of records whose body does not match its CRC-32."""


def scan_log(log: memoryview, path: Path) -> FoundSamples:
    """Find the newest record of each slot."""
    header, at = RecordingHeader.decode(log, path)
    live: dict[int, SamplePlace] = {}
    seen = damaged = 0
    while at + RECORD_BYTES <= len(log):
        mark, slot, passed, length, crc = RECORD.unpack_from(log, at)
        (head_crc,) = CRC.unpack_from(log, at + RECORD.size)
        start = at + RECORD_BYTES
        whole = zlib.crc32(log[at : at + RECORD.size]) == head_crc and mark == MARK
        if not whole or slot >= _MOST_SLOTS or start + length > len(log):
            break
        if zlib.crc32(log[start : start + length]) == crc:
            live[slot] = SamplePlace(start, length, passed)
            seen = max(seen, passed)
        else:
            damaged += 1
        at = start + length
    return FoundSamples(header, live, seen, at, damaged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The samples of a recording, in order of arrival, in the mapped file."""

    path: Path
    header: RecordingHeader
    places: tuple[SamplePlace, ...]
    log: memoryview

    def __len__(self) -> int:
        return len(self.places)

    def shapes(self, row: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each input of a sample."""
        return tuple(shape for shape, _ in self._parts(row))

    def sample(self, row: int) -> dict[str, NDArray[Any]]:
        """Return the inputs of a sample, by name, as views of the file."""
        return {
            name: np.frombuffer(content, dtype).reshape(shape)
            for (name, dtype), (shape, content) in zip(
                self.header.inputs, self._parts(row), strict=True
            )
        }

    def _parts(self, row: int) -> Iterator[tuple[tuple[int, ...], memoryview]]:
        place = self.places[row]
        at = place.offset
        for _, dtype in self.header.inputs:
            (axes,) = CRC.unpack_from(self.log, at)
            if axes > _MOST_AXES:
                raise RecordingError(f"{self.path}: sample {row} has an input of {axes} axes")
            shape = struct.unpack_from(f"<{axes}Q", self.log, at + CRC.size)
            at += CRC.size + 8 * axes
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if at + size > place.offset + place.length:
                raise RecordingError(f"{self.path}: sample {row} is shorter than its shape")
            yield shape, self.log[at : at + size]
            at += size


def is_recording(folder: Path) -> bool:
    """Return whether a folder contains recorded inputs."""
    return (folder / LOG_NAME).is_file()


def read_recording(folder: Path) -> Recorded:
    """Map the recording of a folder, which may grow; RecordingError or OSError if that fails."""
    path = folder / LOG_NAME
    try:
        with open_log(path, read_only=True) as file:
            if not os.fstat(file.fileno()).st_size:
                raise RecordingError(f"{path} is empty; let eeserve --learn record more inputs")
            log = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError as error:
        raise RecordingError(
            f"{folder} has no {LOG_NAME}; name a folder that eeserve --learn records in"
        ) from error
    found = scan_log(log, path)
    order = sorted(found.live.items(), key=lambda item: (item[1].seen, item[0]))
    places = tuple(place for _, place in order)
    return Recorded(path=path, header=found.header, places=places, log=log)


def open_log(path: Path, *, create: bool = False, read_only: bool = False) -> BinaryIO:
    """Open a regular file of this user; RecordingError if it is another user's, or a link.

    Only the owner can read and write a new file.
    """
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    flags |= (os.O_EXCL if create else 0) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        _check_ours(os.fstat(descriptor), path)
        if not read_only:
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "rb" if read_only else "r+b", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _check_ours(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise RecordingError(f"{path} is not a regular file; remove it")
    if found.st_uid != os.geteuid():
        raise RecordingError(
            f"{path} belongs to user {found.st_uid}, but this process runs as user "
            f"{os.geteuid()}; name a folder of your own (--learn-folder)"
        )


def shapes_by_count(recorded: Recorded) -> Mapping[tuple[tuple[int, ...], ...], list[int]]:
    """Return the sample numbers of each combination of input shapes, the most frequent first."""
    rows: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for row in range(len(recorded)):
        rows.setdefault(recorded.shapes(row), []).append(row)
    return dict(sorted(rows.items(), key=lambda item: -len(item[1])))
