"""Records a sample of a model's inputs during serving.

On the event loop only two things happen: the reservoir selects samples, and the selected samples
are copied. A thread writes the copies. If the thread cannot keep up, samples are dropped and
counted: serving neither waits nor uses more memory.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.engine.learning.recording_log import RecordingFullError, RecordingLog, Sample
from offramp.engine.learning.reservoir import Reservoir

_log = logging.getLogger(__name__)

MOST_PENDING_BYTES: Final = 2**26
"""Largest size of samples that wait to be written."""
MOST_PENDING: Final = 4096
_STOP_S: Final = 10.0
_JUDGED: Final = 1000
"""Number of drawn samples after which the recorder decides whether inputs repeat."""
_REPEATING_SHARE: Final = 0.95
"""Inputs count as repeating if at least this share of the drawn samples was recorded before."""


class _Pending(NamedTuple):
    """A sample that waits to be written."""

    slot: int
    seen: int
    sample: Sample
    size_bytes: int
    answer: NDArray[Any]
    """The model's answer, [1, …]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCounts:
    """Counts of recorded samples, and of samples that were not recorded."""

    wanted: int
    recorded: int = 0
    dropped: int = 0
    copies: int = 0
    unanswered: int = 0
    size_bytes: int = 0


class InputRecorder:
    """Keeps a uniform sample of a model's answered inputs in a log.

    ``decided`` returns which answers [n, …] are valid: samples with NaN answers cannot be used for
    compiling. All methods except the thread's are called on the event loop.

    The kept sample is smaller than requested in two cases: the disk limit is reached, or inputs
    only repeat and at least ``least`` distinct inputs are recorded.
    """

    def __init__(
        self,
        log: RecordingLog,
        *,
        samples: int,
        decided: Callable[[NDArray[Any]], NDArray[np.bool_]],
        least: int = 1,
        seed: int | None = None,
    ) -> None:
        """Continue with the samples in the log; starts the thread."""
        capacity = max(samples, 1 + max(log.live, default=0))  # the log may be larger
        self._reservoir = Reservoir(capacity, seen=log.seen, filled=log.live.keys(), seed=seed)
        self._names = [name for name, _ in log.header.inputs]
        self._log, self._decided, self._least = log, decided, least
        self._pending: deque[_Pending | None] = deque()
        self._pending_bytes = 0
        self._wake = threading.Condition()
        """Guards ``_pending`` and ``_pending_bytes``."""
        self._returned: deque[int] = deque()
        """Slots of the reservoir that the writing thread could not fill."""
        self._dropped = self._copies = self._unanswered = 0
        self._crowded = False
        """``True`` if the kept samples reach the size limit."""
        self._repeating = False
        """``True`` if nearly all new inputs repeat recorded ones."""
        self._judged = self._repeated = 0
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="recording", daemon=True)
        self._thread.start()

    def observe(self, inputs: Mapping[str, NDArray[Any]], answers: NDArray[Any]) -> None:
        """Record the wanted samples of an answered request; takes microseconds."""
        while self._returned:
            self._reservoir.give_back(self._returned.popleft())
        for row, slot in self._reservoir.offer(len(answers)):
            sample = []
            for name in self._names:
                array = inputs[name]
                sample.append((array.shape[1:], array[row].tobytes()))
            size = sum(len(content) for _, content in sample)
            answer = answers[row : row + 1]
            self._put(_Pending(slot, self._reservoir.seen, sample, size, answer))

    def counts(self) -> RecordedCounts:
        """Return the numbers of recorded, wanted, dropped and unanswered samples."""
        self._shrink_if_due()
        return RecordedCounts(
            recorded=min(len(self._log.live), self._reservoir.capacity),
            wanted=self._reservoir.capacity,
            dropped=self._dropped,
            copies=self._copies,
            unanswered=self._unanswered,
            size_bytes=self._log.size_bytes,
        )

    def _shrink_if_due(self) -> None:
        """Reduce the wanted number of samples to the kept number, if no more can be kept."""
        kept, wanted = len(self._log.live), self._reservoir.capacity
        repeats = self._repeating and kept >= self._least
        if self._pending or not 0 < kept < wanted or not (self._crowded or repeats):
            return
        why = "the size limit is reached" if self._crowded else "inputs only repeat"
        _log.warning("%s: %d samples are used instead of %d: %s", self._log.path, kept, wanted, why)
        self._reservoir.shrink(self._log.live.keys())

    def close(self, *, remove: bool = False) -> None:
        """Write waiting samples, and close the log, or remove it; blocks for milliseconds."""
        with self._wake:
            if remove:
                self._pending.clear()
            self._pending.append(None)
            self._wake.notify()
        self._thread.join(_STOP_S)
        if remove:
            self._log.remove()
        else:
            self._log.close()

    def _put(self, pending: _Pending) -> None:
        with self._wake:
            waits = len(self._pending)
            full = self._pending_bytes + pending.size_bytes > MOST_PENDING_BYTES and waits > 0
            if not full and waits < MOST_PENDING:
                self._pending.append(pending)
                self._pending_bytes += pending.size_bytes
                self._wake.notify()
                return
        self._dropped += 1
        self._return(pending.slot)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending)
                pending = self._pending[0]
            if pending is None:
                return
            try:
                self._write(pending)
            finally:
                with self._wake:
                    if self._pending and self._pending[0] is pending:
                        self._pending.popleft()
                    self._pending_bytes -= pending.size_bytes

    def _write(self, pending: _Pending) -> None:
        try:
            if not self._decided(pending.answer).all():
                self._unanswered += 1
            elif self._log.append(pending.slot, pending.seen, pending.sample):
                self._judge(is_copy=False)
                self._failing = False
                return
            else:
                self._copies += 1
                self._judge(is_copy=True)
        except RecordingFullError:
            self._dropped += 1
            self._crowded = True
        except Exception as error:  # serving and recording continue
            self._dropped += 1
            if not self._failing:
                _log.warning("%s: samples cannot be recorded: %s", self._log.path, error)
            self._failing = True
        self._return(pending.slot)

    def _judge(self, *, is_copy: bool) -> None:
        self._judged, self._repeated = self._judged + 1, self._repeated + is_copy
        if self._judged == _JUDGED:
            self._repeating = self._repeated >= _REPEATING_SHARE * _JUDGED
            self._judged = self._repeated = 0

    def _return(self, slot: int) -> None:
        if slot not in self._log.live:
            self._returned.append(slot)
