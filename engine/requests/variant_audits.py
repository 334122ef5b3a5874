"""The agreement of a variant with the full model, measured while it serves.

The promise does not cover a subnet's answers unless the subnet is certified, so no controller uses
its answers as evidence. Their agreement is measured nevertheless. A random share of the samples
that a variant answers runs on through the full model, and the two answers are compared
(:mod:`.comparison`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.certify import MODEL_END, UNKNOWN
from offramp.engine.requests.recorder import CAPACITY, AnswerRing, SampleIds

AUDITED_SHARE: Final = 0.02
"""Share of a variant's samples that run on through the full model. It is small, because variants
serve when there is no time for the full model."""


class AuditCounts(NamedTuple):
    """Counts of a variant's samples that were compared with the full model."""

    audited: int
    disagreed: int


class VariantAudits(AnswerRing):
    """Compares the answers of one variant with the full model's answers to the same samples.

    Takes the same calls as a :class:`.Recorder`. A sample that takes so long that its slot was
    reused is left out. ``exits`` is the variant's number of exits.
    """

    def __init__(self, exits: int) -> None:
        super().__init__(exits, CAPACITY)
        self.counts = AuditCounts(0, 0)
        """Counts, replaced as a whole tuple; written by one thread at a time."""

    def start(self, sample_ids: SampleIds) -> None:
        """Forget what was recorded for the slots of samples [n], which start."""
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
        """Record an exit's answers."""
        del confidence
        self.compared(sample_ids, exit_index, prediction)

    def answered(self, sample_ids: SampleIds, exit_index: int) -> None:
        """Record samples that an exit answered."""
        self._answered_at[self._own(sample_ids)[0]] = exit_index

    def finish(self, sample_ids: SampleIds) -> None:
        """Compare samples that are complete; the caller holds the executor's lock."""
        slots, _ = self._own(sample_ids)
        audited = slots[(self._final[slots] != UNKNOWN) & (self._answered_at[slots] != MODEL_END)]
        said = self._prediction[self._answered_at[audited], audited]
        disagreed = int(np.count_nonzero(said != self._final[audited]))
        before = self.counts
        self.counts = AuditCounts(before.audited + len(audited), before.disagreed + disagreed)
