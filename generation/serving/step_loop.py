"""Runs what the scheduler decides on a backend: one step, and all that follows from it, at a time.

Sequences are submitted and cancelled by other threads, under the lock; the backend runs without it,
and is called by one thread only. A call of the backend that raises fails its own rows: the
scheduler has them try again, or ends them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError, EngineError
from offramp.engine.common.line_limit import LineLimit
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
"""Takes outcomes in order, and the error that made sequences fail; the lock is held."""


def limits_of(backend: TextBackend, *, batch: int) -> TextLimits:
    """Return what a scheduler has to know of a backend, for steps of at most ``batch`` rows."""
    return TextLimits(
        stages=backend.stages,
        slots=backend.slots,
        length=backend.length,
        batch=batch,
        ragged=backend.ragged,
        longest_prompt=backend.longest_prompt,
        prompt_in_slot=backend.prompt_in_slot,
    )


class StepLoop:
    """A scheduler and its backend."""

    def __init__(
        self,
        backend: TextBackend,
        scheduler: TextScheduler,
        publish: Publish,
        clock: Callable[[], float],
    ) -> None:
        self.changed = threading.Condition()
        """Guards the scheduler, and tells of new sequences."""
        self.scheduler = scheduler
        self.counter = TextCounter(scheduler.limits)
        self._backend, self._publish, self._clock = backend, publish, clock
        self._lines = LineLimit(clock)
        self._prompts: dict[int, NDArray[np.int64]] = {}
        """Prompts of all sequences that have not ended: any may have to start again."""
        self._closes: list[int] = []
        """Slots to close before the next step."""
        self._opened: set[int] = set()
        """Slots that the backend was told to open."""
        self.backend_statistics: dict[str, Any] = {}
        """The backend's counts, of at most a second ago while it runs; replaced whole."""
        self._counted_s = -_NEVER_S

    def submit(self, new: NewSequence, prompt: NDArray[np.int64]) -> None:
        """Queue a sequence; raises what the scheduler raises."""
        with self.changed:
            self._prompts[new.number] = prompt
            try:
                outcome = self.scheduler.submit(new, self._clock())
            except Exception:
                del self._prompts[new.number]
                raise
            self._note(outcome)
            self.changed.notify_all()

    def cancel(self, number: int) -> None:
        """End a sequence, if it has not ended."""
        with self.changed:
            self._note(self.scheduler.cancel(number))
            self.changed.notify_all()

    def turn(self) -> bool:
        """Run a step and what follows from it; return whether there was one."""
        with self.changed:
            decision = self.scheduler.next(self._clock())
            self._note(decision.outcome)
            closes, self._closes = self._closes, []
            step = decision.step
            if step is not None:
                self.counter.decided(step)
                prompts = [self._prompts[number] for number in step.sequences]
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
            outcome = self._note(self.scheduler.update(tokens, confidences, now_s))
        self._go_on(outcome)
        return True

    def close(self) -> None:
        """Free the backend; there are no more turns."""
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
        """Pass early exits and next tokens on to the backend; slots may be closed later."""
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
        """Publish an outcome; the lock is held."""
        self.counter.followed(outcome)
        self._closes += outcome.closed
        for ended in outcome.ended:
            del self._prompts[ended.sequence]
        if outcome.given or outcome.ended:
            self._publish(outcome, error)
        return outcome

    def _count(self, *, idle: bool) -> None:
        """Ask the backend for its counts, now and then."""
        now_s = self._clock()
        if idle or now_s >= self._counted_s + _COUNTED_EVERY_S:
            self._counted_s = now_s
            self.backend_statistics = self._backend.statistics()

    def _close_slot(self, slot: int) -> None:
        """Close a slot that the scheduler has freed, if it was opened."""
        if slot not in self._opened:  # the prefill failed before its turn came
            return
        self._opened.remove(slot)
        try:
            self._backend.close_slot(slot)
        except Exception:  # nobody waits for it, and the next prompt overwrites it
            _log.exception("slot %d could not be closed", slot)
