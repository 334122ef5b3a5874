"""Writes recorded inputs: appends them to a log, and rewrites the log when it is too large."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from offramp.engine.learning.recording_file import (
    CRC,
    LOG_NAME,
    MARK,
    RECORD,
    RECORD_BYTES,
    RecordingError,
    RecordingHeader,
    SamplePlace,
    open_log,
    scan_log,
)

_NEW: Final = f"{LOG_NAME}.new"
"""Name of the new log during a rewrite, before it replaces the old log."""
_SLACK_BYTES: Final = 2**26
"""A log is rewritten when it exceeds twice the size of the kept records by this number of bytes."""
LIVE_SHARE: Final = 0.45
"""Largest share of the size limit for kept samples; the rest is needed for a second log during a
rewrite."""
_LOG_SHARE: Final = 1 - LIVE_SHARE

Sample: TypeAlias = Sequence[tuple[tuple[int, ...], bytes]]
"""Shape and bytes of every input of a sample, in the order of the header."""


def encode_sample(sample: Sample) -> bytes:
    """Encode a sample as the body of a record."""
    pieces = []
    for shape, content in sample:
        pieces += [struct.pack(f"<I{len(shape)}Q", len(shape), *shape), content]
    return b"".join(pieces)


class RecordingLog:
    """The log of a folder, open for appending; used by one thread.

    ``limit_bytes`` is the size limit of the folder's recording, including a rewrite.
    """

    def __init__(self, folder: Path, header: RecordingHeader, *, limit_bytes: int) -> None:
        """Continue the log of the folder, or begin one; RecordingError or OSError if that fails.

        A log of another model, or of other inputs, is replaced.
        """
        self._folder, self.header, self._limit = folder, header, limit_bytes
        self.path = folder / LOG_NAME
        self._digests: dict[int, bytes] = {}
        self._known: set[bytes] = set()
        self.live: dict[int, SamplePlace] = {}
        """Place in the file of the sample of each slot."""
        self.live_bytes = 0
        self.seen = 0
        """Number of samples seen until the last one that was kept."""
        self.lost = 0
        """Number of records that were damaged or cut off when the log was opened."""
        (folder / _NEW).unlink(missing_ok=True)
        self._file = open_log(self.path)
        try:
            self._go_on()
        except BaseException:
            self._file.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Size of the recording's file, in bytes."""
        return self._end

    def append(self, slot: int, seen: int, sample: Sample) -> bool:
        """Write a sample to a slot, in place of the slot's old sample.

        Returns ``False`` if an equal sample is kept already. After an OSError the slot keeps its
        old sample. Raises RecordingFullError if the size limit would be exceeded.
        """
        body = encode_sample(sample)
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if digest in self._known:
            return False
        size, former = RECORD_BYTES + len(body), self.live.get(slot)
        live = self.live_bytes + size - (former.record_bytes if former else 0)
        if live + len(self.header.encode()) > LIVE_SHARE * self._limit:
            raise RecordingFullError(live)
        most = min(_LOG_SHARE * self._limit, 2 * self.live_bytes + _SLACK_BYTES)
        if self._end + size > most and self._end > self.live_bytes + len(self.header.encode()):
            self._rewrite()
        self._write(slot, seen, body)
        self._note(slot, SamplePlace(self._end - len(body), len(body), seen), digest)
        self.seen = max(self.seen, seen)
        return True

    def close(self) -> None:
        """Close the recording's file, which stays on the disk."""
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
                found = scan_log(log, self.path)
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

    def _note(self, slot: int, place: SamplePlace, digest: bytes) -> None:
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
            with contextlib.suppress(OSError):  # the next start removes a torn record, too
                os.truncate(self._file.fileno(), self._end)
            raise
        self._end += len(record)

    def _rewrite(self) -> None:
        """Write the kept samples to a new log, and replace the old log."""
        new = self._folder / _NEW
        with open_log(new, create=True) as file, _mapped(self._file) as log:
            places, at = {}, 0
            for piece in (self.header.encode(), *(self._records(log))):
                _write_all(file.fileno(), piece, at)
                at += len(piece)
            start = len(self.header.encode())
            for slot, place in sorted(self.live.items()):
                places[slot] = SamplePlace(start + RECORD_BYTES, place.length, place.seen)
                start += place.record_bytes
            os.fsync(file.fileno())
        new.replace(self.path)
        self._file.close()
        self._file = open_log(self.path)
        self.live, self._end = places, at

    def _records(self, log: memoryview) -> Iterator[bytes]:
        for slot, place in sorted(self.live.items()):
            body = bytes(log[place.offset : place.offset + place.length])
            yield _record(slot, place.seen, body)


class RecordingFullError(Exception):
    """A sample would exceed the size limit of its recording."""

    def __init__(self, needed_bytes: int) -> None:
        """Keep the size of all samples together, in bytes."""
        super().__init__(f"the samples would take {needed_bytes:,} bytes")


def _record(slot: int, seen: int, body: bytes) -> bytes:
    head = RECORD.pack(MARK, slot, seen, len(body), zlib.crc32(body))
    return b"".join((head, CRC.pack(zlib.crc32(head)), body))


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
