"""The loop that runs the scheduler's decisions on a backend, one step at a time.

Other threads submit and cancel sequences under the lock; one thread calls the backend, without the
lock. If a call of the backend raises, its rows fail: the scheduler retries or ends them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError, EngineError
from offramp.engine.common.line_limit import LineLimit
from offramp.engine.requests.statistics import (
    BATCH_BOUNDS,
    HISTOGRAM_BOUNDS_S,
    Histogram,
    HistogramCounter,
)
from offramp.generation.scheduling import (
    NewSequence,
    PrefillStep,
    TextCounter,
    TextLimits,
    TextOutcome,
    TextScheduler,
    TokenStep,
)
from offramp.generation.stages.text_backend import TextBackend

_log = logging.getLogger(__name__)

_COUNTED_EVERY_S = 1.0
_NEVER_S = float("inf")

Publish: TypeAlias = Callable[[TextOutcome, EngineError | None], None]
"""Callback that receives outcomes in order, with the error of failed sequences; it is called while
the lock is held."""


def limits_of(backend: TextBackend, *, batch: int) -> TextLimits:
    """Return the limits of a backend for its scheduler, for steps of at most ``batch`` rows."""
    return TextLimits(
        stages=backend.stages,
        slots=backend.slots,
        length=backend.length,
        batch=batch,
        ragged=backend.ragged,
        longest_prompt=backend.longest_prompt,
        prompt_in_slot=backend.prompt_in_slot,
    )


class TextStageRuns(NamedTuple):
    """Statistics of a stage's runs."""

    batch_size: Histogram
    """Number of rows of each run."""
    run_s: Histogram
    """Time of each run, in seconds."""


class StepLoop:
    """A scheduler of tokens, and the backend that runs its steps."""

    def __init__(
        self,
        backend: TextBackend,
        scheduler: TextScheduler,
        publish: Publish,
        clock: Callable[[], float],
    ) -> None:
        self.changed = threading.Condition()
        """Lock of the scheduler, notified of new sequences."""
        self.scheduler = scheduler
        self.counter = TextCounter(scheduler.limits)
        self._backend, self._publish, self._clock = backend, publish, clock
        self._runs = [
            (HistogramCounter(BATCH_BOUNDS), HistogramCounter(HISTOGRAM_BOUNDS_S))
            for _ in range(scheduler.limits.stages)
        ]
        """Rows and seconds of the runs of each stage."""
        self._queue_s = HistogramCounter(HISTOGRAM_BOUNDS_S)
        self._submitted_s: dict[int, float] = {}
        """Submission times of sequences that wait for their first prefill, without background
        ones.
        """
        self._lines = LineLimit(clock)
        self._prompts: dict[int, NDArray[np.int64]] = {}
        """Prompts of all sequences that have not ended; a restart needs the prompt."""
        self._closes: list[int] = []
        """Slots to close before the next step."""
        self._opened: set[int] = set()
        """Slots opened in the backend."""
        self.backend_statistics: dict[str, Any] = {}
        """The backend's counts, at most one second old while it runs; replaced as a whole."""
        self._counted_s = -_NEVER_S

    def submit(self, new: NewSequence, prompt: NDArray[np.int64]) -> None:
        """Queue a sequence; raise the errors of the scheduler."""
        with self.changed:
            self._prompts[new.number] = prompt
            now_s = self._clock()
            try:
                outcome = self.scheduler.submit(new, now_s)
            except Exception:
                del self._prompts[new.number]
                raise
            if not new.background:
                self._submitted_s[new.number] = now_s
            self._note(outcome)
            self.changed.notify_all()

    def cancel(self, number: int) -> None:
        """End a sequence, if it has not ended."""
        with self.changed:
            self._note(self.scheduler.cancel(number))
            self.changed.notify_all()

    def turn(self) -> bool:
        """Run a step and its follow-up calls; return False if there was no step."""
        with self.changed:
            began_s = self._clock()
            decision = self.scheduler.next(began_s)
            self._note(decision.outcome)
            closes, self._closes = self._closes, []
            step = decision.step
            if step is not None:
                self.counter.decided(step)
                prompts = [self._prompts[number] for number in step.sequences]
            if isinstance(step, PrefillStep):
                self._note_begun(step.sequences, began_s)
        for slot in closes:
            self._close_slot(slot)
        self._count(idle=step is None)
        if step is None:
            return False
        try:
            tokens, confidences = self._run(step, prompts)
        except Exception as error:
            self._fail(step.sequences, error)
            return True
        with self.changed:
            now_s = self._clock()
            if isinstance(step, PrefillStep):
                self._note(self.scheduler.prefilled(now_s))
                return True
            batch_size, run_s = self._runs[step.stage]
            batch_size.observe(len(step.slots))
            run_s.observe(now_s - began_s)
            outcome = self._note(self.scheduler.update(tokens, confidences, now_s))
        self._go_on(outcome)
        return True

    def runs(self) -> tuple[TextStageRuns, ...]:
        """Return the statistics of each stage's runs; needs the lock."""
        return tuple(TextStageRuns(rows.snapshot(), run_s.snapshot()) for rows, run_s in self._runs)

    def queue_s(self) -> Histogram:
        """Return the seconds that sequences waited for their first prefill; needs the lock."""
        return self._queue_s.snapshot()

    def close(self) -> None:
        """Release the backend; no step may follow."""
        self._backend.close()

    def _run(
        self, step: PrefillStep | TokenStep, prompts: Sequence[NDArray[np.int64]]
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Run a step; return the tokens and confidences of a stage's rows."""
        if isinstance(step, PrefillStep):
            for slot, prompt in zip(step.slots, prompts, strict=True):
                self._opened.add(slot)
                self._backend.open(slot, prompt)
            self._backend.prefill(step.slots)
            return (), ()
        answers = self._backend.run(step.stage, step.slots, step.limits)
        tokens, confidences = answers.tokens.tolist(), answers.confidences.tolist()
        if not len(tokens) == len(confidences) == len(step.slots):
            raise BackendError(
                f"{len(tokens)} tokens and {len(confidences)} confidences of {len(step.slots)} rows"
            )
        return tokens, confidences

    def _go_on(self, outcome: TextOutcome) -> None:
        """Pass early exits and next tokens to the backend, and note which slots to close later."""
        if not outcome.accepted:
            return
        slots = [row.slot for row in outcome.accepted]
        try:
            if outcome.left_at is not None:
                self._backend.leave(outcome.left_at, slots)
            self._backend.accept(slots, [row.token for row in outcome.accepted])
        except Exception as error:
            self._fail([row.sequence for row in outcome.accepted], error)

    def _fail(self, sequences: Sequence[int], error: Exception) -> None:
        failure = error if isinstance(error, EngineError) else BackendError(repr(error))
        suffix = self._lines.admit(type(error))
        if suffix is not None:
            trace = None if failure is error else error
            rows = len(sequences)
            _log.error("a step of %d sequences failed: %s%s", rows, error, suffix, exc_info=trace)
        with self.changed:
            self._note(self.scheduler.failed(sequences, self._clock()), failure)

    def _note(self, outcome: TextOutcome, error: EngineError | None = None) -> TextOutcome:
        """Publish an outcome; needs the lock."""
        self.counter.followed(outcome)
        self._closes += outcome.closed
        for ended in outcome.ended:
            del self._prompts[ended.sequence]
            self._submitted_s.pop(ended.sequence, None)
        if outcome.given or outcome.ended:
            self._publish(outcome, error)
        return outcome

    def _note_begun(self, sequences: Sequence[int], now_s: float) -> None:
        """Record the waiting times of sequences whose first prefill starts; needs the lock."""
        for number in sequences:
            submitted_s = self._submitted_s.pop(number, None)
            if submitted_s is not None:
                self._queue_s.observe(now_s - submitted_s)

    def _count(self, *, idle: bool) -> None:
        """Read the backend's counts if the last counts are old, or if the loop becomes idle."""
        now_s = self._clock()
        if idle or now_s >= self._counted_s + _COUNTED_EVERY_S:
            self._counted_s = now_s
            self.backend_statistics = self._backend.statistics()

    def _close_slot(self, slot: int) -> None:
        """Close a slot that the scheduler has freed, if it was opened."""
        if slot not in self._opened:  # the prefill failed before it
            return
        self._opened.remove(slot)
        try:
            self._backend.close_slot(slot)
        except Exception:  # no caller is affected; the next prompt overwrites it
            _log.exception("slot %d could not be closed", slot)
