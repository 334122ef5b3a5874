"""The agreement of a variant with the full model, as measured while it serves.

Subnets answer outside the promise unless they are certified, so no controller follows them; how
often they agree is measured all the same. A random share of the samples that a variant answers
runs on through the full model, and the two answers are compared (:mod:`.comparison`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.certify import MODEL_END, UNKNOWN
from offramp.engine.requests.recorder import CAPACITY

AUDITED_SHARE: Final = 0.02
"""Of what a variant answers, so much runs on: the full model is what there is no time for when
variants serve."""

SampleIds = NDArray[np.int64]


class AuditCounts(NamedTuple):
    """The samples of a variant that were compared with the full model, and how that came out."""

    audited: int
    disagreed: int


class VariantAudits:
    """Compares what one variant answered with what the full model says of the same samples.

    Takes what a :class:`.Recorder` takes. Samples have a place each by their sample id, in buffers
    that are made once; one that takes so long that its place is another's is left out. ``exits`` is
    the variant's number of exits, ``capacity`` a power of two.
    """

    def __init__(self, exits: int, *, capacity: int = CAPACITY) -> None:
        self._mask = capacity - 1
        self._sample_id = np.full(capacity, -1, np.int64)
        self._prediction = np.full((exits, capacity), UNKNOWN, np.int32)
        self._answered_at = np.full(capacity, MODEL_END, np.int64)
        self._final = np.full(capacity, UNKNOWN, np.int32)
        self.counts = AuditCounts(0, 0)
        """Replaced whole; written by one thread at a time."""

    def start(self, sample_ids: SampleIds) -> None:
        """Record samples [n] that start."""
        slots = sample_ids & self._mask
        self._prediction[:, slots] = UNKNOWN
        self._answered_at[slots] = MODEL_END
        self._final[slots] = UNKNOWN
        self._sample_id[slots] = sample_ids

    def passed(
        self,
        sample_ids: SampleIds,
        exit_index: int,
        confidence: NDArray[np.float32],
        prediction: NDArray[np.int32],
    ) -> None:
        """Record what an exit said of samples."""
        del confidence
        self.compared(sample_ids, exit_index, prediction)

    def compared(
        self, sample_ids: SampleIds, exit_index: int, prediction: NDArray[np.int32]
    ) -> None:
        """Record the codes of what samples were answered with, once they are known."""
        slots, mine = self._own(sample_ids)
        self._prediction[exit_index, slots] = prediction[mine]

    def answered(self, sample_ids: SampleIds, exit_index: int) -> None:
        """Record samples that an exit answered."""
        self._answered_at[self._own(sample_ids)[0]] = exit_index

    def final(self, sample_ids: SampleIds, prediction: NDArray[np.int32]) -> None:
        """Record what the full model said of samples."""
        slots, mine = self._own(sample_ids)
        self._final[slots] = prediction[mine]

    def finish(self, sample_ids: SampleIds) -> None:
        """Compare samples of which no more will be known; the caller holds the executor's lock."""
        slots, _ = self._own(sample_ids)
        audited = slots[(self._final[slots] != UNKNOWN) & (self._answered_at[slots] != MODEL_END)]
        said = self._prediction[self._answered_at[audited], audited]
        disagreed = int(np.count_nonzero(said != self._final[audited]))
        before = self.counts
        self.counts = AuditCounts(before.audited + len(audited), before.disagreed + disagreed)

    def _own(self, sample_ids: SampleIds) -> tuple[SampleIds, NDArray[np.bool_]]:
        """The slots of samples that still have theirs, and which samples that are."""
        slots = sample_ids & self._mask
        mine: NDArray[np.bool_] = self._sample_id[slots] == sample_ids
        return slots[mine], mine
