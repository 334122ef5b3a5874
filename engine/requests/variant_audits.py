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
from offramp.engine.requests.recorder import CAPACITY, AnswerRing, SampleIds

AUDITED_SHARE: Final = 0.02
"""Of what a variant answers, so much runs on: the full model is what there is no time for when
variants serve."""


class AuditCounts(NamedTuple):
    """The samples of a variant that were compared with the full model, and how that came out."""

    audited: int
    disagreed: int


class VariantAudits(AnswerRing):
    """Compares what one variant answered with what the full model says of the same samples.

    Takes what a :class:`.Recorder` takes. A sample that takes so long that its place is another's
    is left out. ``exits`` is the variant's number of exits.
    """

    def __init__(self, exits: int) -> None:
        super().__init__(exits, CAPACITY)
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

    def answered(self, sample_ids: SampleIds, exit_index: int) -> None:
        """Record samples that an exit answered."""
        self._answered_at[self._own(sample_ids)[0]] = exit_index

    def finish(self, sample_ids: SampleIds) -> None:
        """Compare samples of which no more will be known; the caller holds the executor's lock."""
        slots, _ = self._own(sample_ids)
        audited = slots[(self._final[slots] != UNKNOWN) & (self._answered_at[slots] != MODEL_END)]
        said = self._prediction[self._answered_at[audited], audited]
        disagreed = int(np.count_nonzero(said != self._final[audited]))
        before = self.counts
        self.counts = AuditCounts(before.audited + len(audited), before.disagreed + disagreed)
