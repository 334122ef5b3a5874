"""Admission of samples as evidence: equal samples count once, and one source has a bounded share.

A statement about agreement assumes that samples are independent draws of one load. Copies of a
sample are not: an easy image that is sent again and again would represent the whole load, and
thresholds would be certified by it for all others. So a sample equal to a recent one is no
evidence: no controller learns from it, and it is not audited.

Samples are identified by a fingerprint of their inputs (:func:`fingerprints`). The confidences of
the exits would be available at no cost, but they are no fingerprint: different easy samples often
have equal confidences (1 after rounding), and the confidences of equal samples differ in the last
bits with the batch.

The rule is *predictable*: it depends on the sample's inputs, its source and earlier samples, before
anything is computed. So it is independent of the outcome, and the theorems of
:mod:`offramp.certify.betting` hold for the admitted samples, as a load of their own.

Nearly equal samples count as different here. ``max_source_share`` bounds the share of the evidence
that one source can produce with them.
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
"""Admitted samples that later ones are compared with."""
Origin: TypeAlias = tuple[int, str]
"""The fingerprint of a sample, and its source: the client that sent it."""
SHARED: Final = 4096
"""Number of the last admitted samples in which the share of one source is bounded."""
_BLOCKS: Final = 256
_BLOCK_BYTES: Final = 256
"""Number of blocks that are read of a long input, and number of bytes in a block."""


class EvidenceWindow:
    """Decides which samples are admitted as evidence, by comparison with those admitted before."""

    def __init__(
        self, *, remembered: int = REMEMBERED, max_source_share: float = 1.0, shared: int = SHARED
    ) -> None:
        """Start with nothing admitted.

        An equal sample is admitted again after ``remembered`` others. Of the last ``shared``
        admitted samples, at most the share ``max_source_share``, in (0, 1], is from one source; one
        sample is always allowed.
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
        """Fingerprints of the admitted samples, the oldest first."""
        self._limit = max(1, math.floor(max_source_share * shared)) if max_source_share < 1 else 0
        """Largest number of samples of one source in ``_sources``; 0 means no limit."""
        self._sources: deque[str] = deque()
        self._counts: Counter[str] = Counter()
        self._shared = shared

    def admit(self, sample_ids: IntArray, origins: Sequence[Origin]) -> BoolArray:
        """Decide on n samples in order; bool[n]: whether each is evidence.

        ``sample_ids`` are int64[n]: a retried sample keeps its id, and its decision.
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
        """Count one more sample of a source; return False if the source has used its share."""
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

    CRC-32 is the fastest of Python's checksums on rows from 784 bytes (0.3 µs) to 600 KB (90 µs;
    BLAKE2 takes 440 µs), and it releases the GIL. With a full window, one in 65,000 different
    samples is taken for a copy by chance. A client that makes collisions on purpose only excludes
    its own samples from the evidence. Of an input above 64 KiB, 64 KiB are read, evenly spread:
    samples that are equal there hardly differ.
    """
    prints = [0] * count
    for array in arrays:
        rows = np.ascontiguousarray(array).reshape(count, math.prod(array.shape[1:]))
        each = zip(_excerpt(rows.view(np.uint8)), prints, strict=True)
        prints = [zlib.crc32(row.data, before) for row, before in each]
    return prints


def _excerpt(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return blocks that are evenly spread in long rows; short rows as they are."""
    count, size = rows.shape
    if size <= _BLOCKS * _BLOCK_BYTES:
        return rows
    step = size // _BLOCKS
    blocks = rows[:, : _BLOCKS * step].reshape(count, _BLOCKS, step)[:, :, :_BLOCK_BYTES]
    return blocks.reshape(count, -1)
