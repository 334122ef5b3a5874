"""Admission of samples as evidence: equal samples count once, and one source has a bounded share.

A statement about agreement takes samples for independent draws of one load. Copies of a sample are
none: an easy image, sent again and again, would stand for the whole load, and thresholds would be
certified by it for all others. So a sample equal to a recent one is no evidence: it counts for and
against nothing that a controller learns, and is not audited.

Samples are told by a fingerprint of their inputs (:func:`fingerprints`). What exits say of a sample
would be there for nothing, but is no fingerprint: confidences of different easy samples are often
equal (1 after rounding), and those of equal samples differ in the last bits with the batch.

The rule is *predictable*: it looks at the sample's inputs, its source and the samples before it,
before anything is computed. So it says nothing of the outcome, and the theorems of
:mod:`offramp.certify.betting` hold for the samples that are admitted, as a load of their own.

Nearly equal samples are different ones here. How much of the evidence one source can make of them
is bounded by ``max_source_share``.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.certify import BoolArray, IntArray

REMEMBERED: Final = 1 << 16
"""Samples of the evidence that later ones are compared with."""
Origin: TypeAlias = tuple[int, str]
"""The fingerprint of a sample, and its source: whoever sent it."""
SHARED: Final = 4096
"""Samples of the evidence of which one source has a bounded share."""
_BLOCKS: Final = 256
_BLOCK_BYTES: Final = 256
"""What is read of long inputs."""


class EvidenceWindow:
    """Decides which samples are admitted as evidence, by the last ones that were."""

    def __init__(
        self, *, remembered: int = REMEMBERED, max_source_share: float = 1.0, shared: int = SHARED
    ) -> None:
        """Start with nothing admitted.

        A sample is admitted once while ``remembered`` others are. Of the last ``shared`` samples
        that were admitted, one source has at most ``max_source_share``, in (0, 1], but always one.
        """
        if remembered < 1 or shared < 1:
            raise ValueError(f"remembered is {remembered}, shared {shared}, expected at least 1")
        if not 0 < max_source_share <= 1:
            raise ValueError(
                f"max_source_share is {max_source_share}, expected above 0 and at most 1"
            )
        self._remembered = remembered
        self._admitted: dict[int, int] = {}
        """Sample ids, by fingerprint."""
        self._order: deque[int] = deque()
        """Their fingerprints, the oldest first."""
        self._limit = max(1, math.floor(max_source_share * shared)) if max_source_share < 1 else 0
        """Samples that one source may have of those in ``_sources``; 0 bounds nothing."""
        self._sources: deque[str] = deque()
        self._counts: Counter[str] = Counter()
        self._shared = shared

    def admit(self, sample_ids: IntArray, origins: Sequence[Origin]) -> BoolArray:
        """Decide on n samples in order; bool[n]: whether each is evidence.

        ``sample_ids`` are int64[n]: a sample that is tried again is the same one, and stays what it
        was.
        """
        samples = zip(sample_ids.tolist(), origins, strict=True)
        return np.array([self._admits(*sample) for sample in samples], np.bool_)

    def _admits(self, sample_id: int, origin: Origin) -> bool:
        fingerprint, source = origin
        before = self._admitted.get(fingerprint)
        if before is not None:
            return before == sample_id
        if self._limit and not self._count_source(source):
            return False
        if len(self._order) == self._remembered:
            del self._admitted[self._order.popleft()]
        self._admitted[fingerprint] = sample_id
        self._order.append(fingerprint)
        return True

    def _count_source(self, source: str) -> bool:
        """Count one more sample of a source, unless it has its share: returns whether it did."""
        if self._counts[source] >= self._limit:
            return False
        if len(self._sources) == self._shared:
            oldest = self._sources.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._sources.append(source)
        self._counts[source] += 1
        return True


def fingerprints(arrays: Iterable[NDArray[np.generic]], count: int) -> list[int]:
    """Return a fingerprint of each of ``count`` samples, by the bytes of its inputs, [count, …].

    CRC-32: of the checksums that Python has, the fastest on rows from 784 bytes (0.3 µs) to 600 KB
    (90 µs; BLAKE2 takes 440), and it lets other threads run. Of a full window, one in 65,000
    different samples is taken for a copy by chance. Who makes such samples on purpose only keeps
    their own out of the evidence. Of an input above 64 KiB as much is read, evenly spread: samples
    that are equal there hardly differ.
    """
    prints = [0] * count
    for array in arrays:
        rows = np.ascontiguousarray(array).reshape(count, math.prod(array.shape[1:]))
        each = zip(_excerpt(rows.view(np.uint8)), prints, strict=True)
        prints = [zlib.crc32(row.data, before) for row, before in each]
    return prints


def _excerpt(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks that lie evenly spread in long rows; short ones as they are."""
    count, size = rows.shape
    if size <= _BLOCKS * _BLOCK_BYTES:
        return rows
    step = size // _BLOCKS
    blocks = rows[:, : _BLOCKS * step].reshape(count, _BLOCKS, step)[:, :, :_BLOCK_BYTES]
    return blocks.reshape(count, -1)
