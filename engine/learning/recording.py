"""The file of recorded inputs: an append-only log of samples with checksums.

``inputs.log`` begins with a header: which model the inputs were for, and their names and types.
Records follow, one a sample: its slot, how many samples had passed until then, the shape and the
bytes of each input, and two CRC-32. The newest record of a slot counts. A file that was cut off in
the middle of a record, or has a damaged one, loses that record and nothing before it.

The file and its folder can be read by their owner alone. This module imports numpy alone, as the
compiler reads such files too.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from typing import Any, BinaryIO, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

LOG_NAME: Final = "inputs.log"
_NEW: Final = f"{LOG_NAME}.new"
"""A log that is being rewritten, until it takes the place of the other."""
_MAGIC: Final = b"eeinput1"
_HEAD: Final = struct.Struct("<8sII")
"""Magic, length of the JSON that follows, its CRC-32."""
_RECORD: Final = struct.Struct("<4sIQQI")
"""Mark, slot, samples until then, length of the body, its CRC-32; the CRC-32 of these follows."""
_CRC: Final = struct.Struct("<I")
_MARK: Final = b"row:"
_RECORD_BYTES: Final = _RECORD.size + _CRC.size
_MOST_HEADER: Final = 2**20
_MOST_SLOTS: Final = 2**31
_MOST_AXES: Final = 64
_SLACK_BYTES: Final = 2**26
"""Replaced records that a log may hold beside as many bytes as it needs."""
LIVE_SHARE: Final = 0.45
"""Share of the limit that the samples kept may take: while a log is rewritten there are two."""
_LOG_SHARE: Final = 1 - LIVE_SHARE

Sample: TypeAlias = Sequence[tuple[tuple[int, ...], bytes]]
"""Shape and bytes of every input of a sample, in the order of the header."""


class RecordingError(Exception):
    """A recording cannot be used; the message names the file, what was expected, and the remedy."""


class Place(NamedTuple):
    """Where in the log a sample is."""

    offset: int
    """Of its body."""
    length: int
    seen: int
    """Samples that had passed then."""

    @property
    def record_bytes(self) -> int:
        """What its record takes in the file."""
        return _RECORD_BYTES + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHeader:
    """What a recording is of."""

    model_sha256: str
    """Hash of the model's file."""
    inputs: tuple[tuple[str, str], ...]
    """Name and dtype of every input that is recorded."""

    def encode(self) -> bytes:
        """Return the beginning of the file."""
        text = json.dumps({"model": self.model_sha256, "inputs": self.inputs}).encode()
        return _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text

    @classmethod
    def decode(cls, log: memoryview, path: Path) -> tuple[Self, int]:
        """Read the beginning of a file; returns it and where it ends, or raises RecordingError."""
        try:
            magic, length, crc = _HEAD.unpack_from(log)
            text = bytes(log[_HEAD.size : _HEAD.size + length])
            if magic != _MAGIC or len(text) != length or zlib.crc32(text) != crc:
                raise ValueError("no header")
            plain = json.loads(text)
            inputs = tuple((str(name), np.dtype(dtype).name) for name, dtype in plain["inputs"])
            return cls(model_sha256=str(plain["model"]), inputs=inputs), _HEAD.size + length
        except (struct.error, ValueError, TypeError, KeyError) as error:
            raise RecordingError(
                f"{path} is no recording of inputs, or its beginning is damaged; remove it, and "
                "let eeserve --learn record again"
            ) from error


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as the body of a record."""
    pieces = []
    for shape, content in sample:
        pieces += [struct.pack(f"<I{len(shape)}Q", len(shape), *shape), content]
    return b"".join(pieces)


def record_bytes(inputs: Iterable[tuple[Sequence[int], int]]) -> int:
    """Return the bytes of a record, of the shape and the item size of every input."""
    return _RECORD_BYTES + sum(
        _CRC.size + 8 * len(shape) + math.prod(shape) * item for shape, item in inputs
    )


class _Found(NamedTuple):
    """What a scan of a log found."""

    header: RecordingHeader
    live: dict[int, Place]
    """By slot."""
    seen: int
    """Samples that had passed at the last record."""
    end: int
    """Where the last whole record ends."""
    damaged: int
    """Records whose body is not what its CRC-32 says."""


def _scan(log: memoryview, path: Path) -> _Found:
    """Find the newest record of each slot."""
    header, at = RecordingHeader.decode(log, path)
    live: dict[int, Place] = {}
    seen = damaged = 0
    while at + _RECORD_BYTES <= len(log):
        mark, slot, passed, length, crc = _RECORD.unpack_from(log, at)
        (head_crc,) = _CRC.unpack_from(log, at + _RECORD.size)
        start = at + _RECORD_BYTES
        whole = zlib.crc32(log[at : at + _RECORD.size]) == head_crc and mark == _MARK
        if not whole or slot >= _MOST_SLOTS or start + length > len(log):
            break
        if zlib.crc32(log[start : start + length]) == crc:
            live[slot] = Place(start, length, passed)
            seen = max(seen, passed)
        else:
            damaged += 1
        at = start + length
    return _Found(header, live, seen, at, damaged)


class RecordingLog:
    """The log of a folder, open for appending; used by one thread.

    ``limit_bytes`` is the most that the folder's recording takes, while it is rewritten too.
    """

    def __init__(self, folder: Path, header: RecordingHeader, *, limit_bytes: int) -> None:
        """Go on with the log of the folder, or begin one; RecordingError, OSError.

        A log of another model, or of other inputs, is begun again.
        """
        self._folder, self.header, self._limit = folder, header, limit_bytes
        self.path = folder / LOG_NAME
        self._digests: dict[int, bytes] = {}
        self._known: set[bytes] = set()
        self.live: dict[int, Place] = {}
        """Where the sample of each slot is."""
        self.live_bytes = 0
        self.seen = 0
        """Samples that had passed when the last one was kept."""
        self.lost = 0
        """Records that were damaged or cut off when the log was opened."""
        (folder / _NEW).unlink(missing_ok=True)
        self._file = _open(self.path)
        try:
            self._go_on()
        except BaseException:
            self._file.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._end

    def append(self, slot: int, seen: int, sample: Sample) -> bool:
        """Keep a sample in a slot, in place of the one that it has; OSError, nothing lost.

        Returns ``False`` where the same sample is kept already. Raises NoRoomError where the limit
        leaves no room for it.
        """
        body = encode_sample(sample)
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if digest in self._known:
            return False
        size, former = _RECORD_BYTES + len(body), self.live.get(slot)
        live = self.live_bytes + size - (former.record_bytes if former else 0)
        if live + len(self.header.encode()) > LIVE_SHARE * self._limit:
            raise NoRoomError(live)
        most = min(_LOG_SHARE * self._limit, 2 * self.live_bytes + _SLACK_BYTES)
        if self._end + size > most and self._end > self.live_bytes + len(self.header.encode()):
            self._rewrite()
        self._write(slot, seen, body)
        self._note(slot, Place(self._end - len(body), len(body), seen), digest)
        self.seen = max(self.seen, seen)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def remove(self) -> None:
        """Close the file, and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _go_on(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        self._end = 0
        if size:
            with contextlib.suppress(RecordingError), _mapped(self._file) as log:
                found = _scan(log, self.path)
                if found.header == self.header:
                    self._end, self.seen = found.end, found.seen
                    self.lost = found.damaged + (found.end < size)
                    for slot, place in found.live.items():
                        body = log[place.offset : place.offset + place.length]
                        self._note(slot, place, hashlib.blake2b(body, digest_size=16).digest())
                        body.release()
        if not self._end:
            begin = self.header.encode()
            os.truncate(self._file.fileno(), 0)
            _write_all(self._file.fileno(), begin, 0)
            self._end = len(begin)
        os.truncate(self._file.fileno(), self._end)

    def _note(self, slot: int, place: Place, digest: bytes) -> None:
        if (former := self.live.get(slot)) is not None:
            self.live_bytes -= former.record_bytes
            self._known.discard(self._digests[slot])
        self.live[slot], self._digests[slot] = place, digest
        self.live_bytes += place.record_bytes
        self._known.add(digest)

    def _write(self, slot: int, seen: int, body: bytes) -> None:
        record = _record(slot, seen, body)
        try:
            _write_all(self._file.fileno(), record, self._end)
        except OSError:
            with contextlib.suppress(OSError):  # a torn record is cut off at the next start, too
                os.truncate(self._file.fileno(), self._end)
            raise
        self._end += len(record)

    def _rewrite(self) -> None:
        """Write the samples kept into a new log, and put it in the place of this one."""
        new = self._folder / _NEW
        with _open(new, anew=True) as file, _mapped(self._file) as log:
            places, at = {}, 0
            for piece in (self.header.encode(), *(self._records(log))):
                _write_all(file.fileno(), piece, at)
                at += len(piece)
            start = len(self.header.encode())
            for slot, place in sorted(self.live.items()):
                places[slot] = Place(start + _RECORD_BYTES, place.length, place.seen)
                start += place.record_bytes
            os.fsync(file.fileno())
        new.replace(self.path)
        self._file.close()
        self._file = _open(self.path)
        self.live, self._end = places, at

    def _records(self, log: memoryview) -> Iterator[bytes]:
        for slot, place in sorted(self.live.items()):
            body = bytes(log[place.offset : place.offset + place.length])
            yield _record(slot, place.seen, body)


class NoRoomError(Exception):
    """A sample does not fit within the limit of its recording."""

    def __init__(self, needed_bytes: int) -> None:
        """Say how many bytes the samples would take together."""
        self.needed_bytes = needed_bytes
        super().__init__(f"the samples would take {needed_bytes:,} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The samples of a recording, in the order in which they came, as the mapped file has them."""

    path: Path
    header: RecordingHeader
    places: tuple[Place, ...]
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

    def sha256(self) -> str:
        """Return a hash of all samples."""
        digest = hashlib.sha256(self.header.encode())
        for place in self.places:
            digest.update(self.log[place.offset : place.offset + place.length])
        return digest.hexdigest()

    def _parts(self, row: int) -> Iterator[tuple[tuple[int, ...], memoryview]]:
        place = self.places[row]
        at = place.offset
        for _, dtype in self.header.inputs:
            (axes,) = _CRC.unpack_from(self.log, at)
            if axes > _MOST_AXES:
                raise RecordingError(f"{self.path}: sample {row} has an input of {axes} axes")
            shape = struct.unpack_from(f"<{axes}Q", self.log, at + _CRC.size)
            at += _CRC.size + 8 * axes
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if at + size > place.offset + place.length:
                raise RecordingError(f"{self.path}: sample {row} is shorter than its shape says")
            yield shape, self.log[at : at + size]
            at += size


def is_recording(folder: Path) -> bool:
    """Whether a folder holds recorded inputs."""
    return (folder / LOG_NAME).is_file()


def read_recording(folder: Path) -> Recorded:
    """Map the recording of a folder, which may be written meanwhile; RecordingError, OSError."""
    path = folder / LOG_NAME
    try:
        with _open(path, read_only=True) as file:
            if not os.fstat(file.fileno()).st_size:
                raise RecordingError(f"{path} is empty; let eeserve --learn record more inputs")
            log = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError as error:
        raise RecordingError(
            f"{folder} has no {LOG_NAME}; name a folder that eeserve --learn records in"
        ) from error
    found = _scan(log, path)
    order = sorted(found.live.items(), key=lambda item: (item[1].seen, item[0]))
    places = tuple(place for _, place in order)
    return Recorded(path=path, header=found.header, places=places, log=log)


def _record(slot: int, seen: int, body: bytes) -> bytes:
    head = _RECORD.pack(_MARK, slot, seen, len(body), zlib.crc32(body))
    return b"".join((head, _CRC.pack(zlib.crc32(head)), body))


def _open(path: Path, *, anew: bool = False, read_only: bool = False) -> BinaryIO:
    """Open a regular file of ours; RecordingError if it is somebody else's, or a link.

    A new file can be read and written by its owner alone.
    """
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    flags |= (os.O_EXCL if anew else 0) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RecordingError(f"{path} is no regular file; remove it")
        if found.st_uid != os.geteuid():
            raise RecordingError(
                f"{path} belongs to user {found.st_uid}, and this process runs as user "
                f"{os.geteuid()}; name a folder of your own (--learn-folder)"
            )
        if not read_only:
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "rb" if read_only else "r+b", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def _mapped(file: BinaryIO) -> Iterator[memoryview]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def shapes_by_count(recorded: Recorded) -> Mapping[tuple[tuple[int, ...], ...], list[int]]:
    """Return the rows of each combination of shapes, the most frequent one first."""
    rows: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for row in range(len(recorded)):
        rows.setdefault(recorded.shapes(row), []).append(row)
    return dict(sorted(rows.items(), key=lambda item: -len(item[1])))
