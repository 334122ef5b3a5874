"""Records the answers of exits and of the model to served samples, until a controller reads them.

The streams' threads write the record without a lock: every sample has its own place in preallocated
buffers, by its sample id. One other thread reads the record, in the order in which samples were
started, up to the first sample that is still in progress. If samples were read in the order in
which they finish, samples that leave early would be counted before audited samples.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.certify import MODEL_END, UNKNOWN, Observations
from offramp.engine.control.evidence_window import EvidenceWindow, Origin

CAPACITY: Final = 1 << 14
"""Number of samples in the ring buffer; a power of two."""
_MOST_AT_ONCE: Final = 1 << 12
"""Largest number of samples in one read."""
_NOBODY: Final = -1
_RUNNING, _FINISHED, _LOST, _LEFT_OUT, _SET_ASIDE, _DISCOUNTED = map(np.uint8, range(6))

SampleIds = NDArray[np.int64]


class AnswerRing:
    """Codes of answers by sample id, in preallocated buffers for ``capacity`` samples.

    ``exits`` is the number of exits, ``capacity`` a power of two.
    """

    def __init__(self, exits: int, capacity: int) -> None:
        self._mask = capacity - 1
        self._sample_id = np.full(capacity, _NOBODY, np.int64)
        self._prediction = np.full((exits, capacity), UNKNOWN, np.int32)
        self._answered_at = np.full(capacity, MODEL_END, np.int64)
        self._final = np.full(capacity, UNKNOWN, np.int32)

    def compared(
        self, sample_ids: SampleIds, exit_index: int, prediction: NDArray[np.int32]
    ) -> None:
        """Record the codes of an exit's earlier answers, which are known only now."""
        slots, mine = self._own(sample_ids)
        self._prediction[exit_index, slots] = prediction[mine]

    def final(self, sample_ids: SampleIds, prediction: NDArray[np.int32]) -> None:
        """Record the answers of the model's end."""
        slots, mine = self._own(sample_ids)
        self._final[slots] = prediction[mine]

    def _own(self, sample_ids: SampleIds) -> tuple[SampleIds, NDArray[np.bool_]]:
        """Return the slots of the samples that still own a slot, and a mask of these samples.

        A very slow sample, whose slot was reused, must not write into another sample's slot.
        """
        slots = sample_ids & self._mask
        mine: NDArray[np.bool_] = self._sample_id[slots] == sample_ids
        return slots[mine], mine


class Recorder(AnswerRing):
    """A ring of samples by sample id; it decides at random which are audited (at first all).

    ``exits`` is K, the number of exits of the bundle, in use or not. ``seed`` is for the random
    decisions; ``None`` uses a random seed. ``capacity`` is a power of two. ``window`` decides which
    samples are evidence. Other samples are not audited, except with ``release``: then all samples
    run to the model's end.
    """

    def __init__(
        self,
        exits: int,
        *,
        seed: int | None = None,
        capacity: int = CAPACITY,
        window: EvidenceWindow | None = None,
        release: bool = False,
    ) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"capacity is {capacity}, expected a power of two")
        super().__init__(exits, capacity)
        self.audit_probability = 1.0
        """Audit probability of samples that are started from now on."""
        self.lost = 0
        """Samples without a result: their batch failed, they were late, withdrawn, or not read in
        time."""
        self.left_out = 0
        """Samples that are no evidence because their inputs are out of range."""
        self.discounted = 0
        """Samples that are no evidence: equal samples came before, or one source sent too many."""
        self._window = window or EvidenceWindow()
        self._admitting = threading.Lock()
        """Held while the window decides, as several streams use it."""
        self._release = release
        self._random = np.random.default_rng(seed)
        self._read = 0
        """First sample id that was not read."""
        self._state = np.full(capacity, _RUNNING, np.uint8)
        self._confidence = np.full((exits, capacity), np.nan, np.float32)
        self._audit_probability = np.ones(capacity)
        self._runs_on = np.ones(capacity, np.bool_)
        self._version = np.zeros(capacity, np.int64)
        self._forced = np.zeros(capacity, np.bool_)
        self._in_range = np.ones(capacity, np.bool_)
        self._aside = np.zeros(capacity, np.bool_)
        self._is_admitted = np.ones(capacity, np.bool_)

    def start(self, sample_ids: SampleIds, version: int, *, forced: bool = False) -> None:
        """Record samples [n] that start under a policy version, and decide which are audited.

        ``forced`` is whether the samples will have to leave before the model's end.
        """
        # A sample that is retried so late that its slot was reused is left out.
        sample_ids = sample_ids[self._sample_id[sample_ids & self._mask] <= sample_ids]
        slots = sample_ids & self._mask
        # Reset before the sample id is set: a reader must not see the previous sample's state.
        self._state[slots] = _RUNNING
        self._confidence[:, slots] = np.nan
        self._prediction[:, slots] = UNKNOWN
        self._answered_at[slots] = MODEL_END
        self._final[slots] = UNKNOWN
        probability = self.audit_probability
        self._audit_probability[slots] = probability
        self._runs_on[slots] = self._random.random(len(slots)) < probability
        self._version[slots] = version
        self._forced[slots] = forced
        self._in_range[slots] = True
        self._aside[slots] = False
        self._is_admitted[slots] = True
        self._sample_id[slots] = sample_ids

    def runs_on(self, sample_ids: SampleIds) -> NDArray[np.bool_]:
        """Return which samples were chosen to run on after an early answer, [n]."""
        chosen: NDArray[np.bool_] = self._runs_on[sample_ids & self._mask]
        return chosen

    def record_variant_samples(self, sample_ids: SampleIds, audit_probability: float) -> None:
        """Record samples that a variant answers: they are no evidence about the policy's exits.

        Whether they are audited is decided again, with ``audit_probability``.
        """
        slots, _ = self._own(sample_ids)
        self._aside[slots] = True
        self._runs_on[slots] = self._random.random(len(slots)) < audit_probability

    def leave_out(self, sample_ids: SampleIds) -> None:
        """Record samples whose inputs are out of range: they will be no evidence."""
        self._in_range[self._own(sample_ids)[0]] = False

    def admit(self, sample_ids: SampleIds, origins: Sequence[Origin]) -> None:
        """Decide, with the window, which started samples [n] are evidence."""
        with self._admitting:
            admitted = self._window.admit(sample_ids, origins)
        slots, mine = self._own(sample_ids)
        self._is_admitted[slots] = admitted[mine]
        if not self._release:
            self._runs_on[slots] &= admitted[mine]

    def in_range(self, sample_ids: SampleIds) -> NDArray[np.bool_]:
        """Return which samples' inputs are in range, [n]."""
        found: NDArray[np.bool_] = self._in_range[sample_ids & self._mask]
        return found

    def passed(
        self,
        sample_ids: SampleIds,
        exit_index: int,
        confidence: NDArray[np.float32],
        prediction: NDArray[np.int32],
    ) -> None:
        """Record an exit's answers, whether they were used or not."""
        slots, mine = self._own(sample_ids)
        self._confidence[exit_index, slots] = confidence[mine]
        self._prediction[exit_index, slots] = prediction[mine]

    def answered(self, sample_ids: SampleIds, exit_index: int, forced: NDArray[np.bool_]) -> None:
        """Record samples that an exit answered; ``forced`` [n] marks those below its threshold."""
        slots, mine = self._own(sample_ids)
        self._answered_at[slots] = exit_index
        self._forced[slots] |= forced[mine]

    def finish(self, sample_ids: SampleIds) -> None:
        """Record that all answers to these samples are known."""
        slots, _ = self._own(sample_ids)
        state = np.where(self._is_admitted[slots], _FINISHED, _DISCOUNTED)
        state = np.where(self._in_range[slots], state, _LEFT_OUT)
        self._state[slots] = np.where(self._aside[slots], _SET_ASIDE, state)

    def lose(self, sample_ids: SampleIds) -> None:
        """Record that samples left unexpectedly: they are no evidence."""
        self._state[self._own(sample_ids)[0]] = _LOST

    def take(self) -> Observations | None:
        """Return the results of the next samples, in the order in which they were started.

        ``None`` if the next sample is still in progress. Only one thread may read.
        """
        self._skip_overwritten()
        expected = np.arange(self._read, self._read + min(_MOST_AT_ONCE, self._mask + 1))
        slots = expected & self._mask
        ready = (self._sample_id[slots] == expected) & (self._state[slots] != _RUNNING)
        count = len(ready) if ready.all() else int(ready.argmin())
        if not count:
            return None
        slots = slots[:count]
        known = slots[self._state[slots] == _FINISHED]
        seen = Observations(
            confidence=self._confidence[:, known],
            prediction=self._prediction[:, known],
            answered_at=self._answered_at[known],
            final=self._final[known],
            audit_probability=self._audit_probability[known],
            policy_version=self._version[known],
            forced=self._forced[known],
        )
        torn = (self._state[slots] == _RUNNING) | (self._sample_id[slots] != expected[:count])
        if torn.any():  # overwritten during the read; the next call skips it
            return None
        self._read += count
        self.left_out += int(np.count_nonzero(self._state[slots] == _LEFT_OUT))
        self.discounted += int(np.count_nonzero(self._state[slots] == _DISCOUNTED))
        self.lost += int(np.count_nonzero(self._state[slots] == _LOST))
        return seen if len(known) else None

    def _skip_overwritten(self) -> None:
        """Skip samples that were overwritten before they were read."""
        newest = int(self._sample_id.max())
        oldest = newest - self._mask
        if self._read < oldest:
            # Skip half of the ring, so that the reader is not overrun again immediately.
            skipped = oldest + (self._mask + 1) // 2 - self._read
            self.lost += skipped
            self._read += skipped
