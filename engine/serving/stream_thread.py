"""The thread of a stream, which runs the scheduler's decisions, and its restarts.

Each stream has one thread and one slot, for all models of the device. The backend releases the GIL
while it executes.

A stage that raises fails its own batch only: the scheduler retries the batch's requests, half of
them at a time, on another stream if one is in service. Only requests that fail alone get an error.
A stream that fails twice in a row has to run known-good batches, and restarts if it fails at these
(:mod:`.stream_health`). A stream whose worker process is lost restarts immediately, and its batch
continues at the same stage on any free stream: this is not a failure of the batch. If all streams
stay out of service, waiting requests fail until a stream is in service again. A thread that fails
for any other reason takes the models out of service and fails all waiting requests.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from offramp.engine.common.errors import (
    BackendError,
    EngineError,
    OutOfServiceError,
    TensorsLostError,
    WorkerLostError,
)
from offramp.engine.common.line_limit import LineLimit
from offramp.engine.scheduling import DeviceScheduler, Run, Wait
from offramp.engine.scheduling.decisions import all_rows
from offramp.engine.serving.availability import Availability
from offramp.engine.serving.model_runtime import ModelRuntime, Pieces
from offramp.engine.serving.stream_checks import ModelChecks, StartFailedError, UnhealthyStreamError
from offramp.engine.stages.backend_protocol import Backend, Slot, TensorBatch

_log = logging.getLogger(__name__)

LOGGED_EVERY_S = 10.0
"""Time between two log lines about batches that fail in the same way."""
_LONGEST_WAIT_S = 60.0
"""Longest time in seconds until a stream asks for work again: ``Condition.wait`` does not accept
infinity."""


class _InterruptedError(Exception):
    """A stream lost its worker, and its batch was returned to the scheduler, to be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedByStreams:
    """State that the streams of a device share with each other and the event loop's thread.

    Everything except the backend and ``open_slot`` is guarded by the common lock of ``changed``
    and ``ended``.
    """

    backend: Backend
    open_slot: Callable[[int], Slot]
    """Function that opens the slot of a stream, given the stream's number."""
    warm_slots: dict[int, Slot]
    """Slots for the first start of each stream, by stream; opened and warmed up in advance."""
    scheduler: DeviceScheduler
    models: Mapping[str, ModelRuntime]
    """Models by key; the executor adds and removes them."""
    available: Availability
    checks: ModelChecks
    changed: threading.Condition
    """Condition for which a stream without work waits."""
    announce: Callable[[], None]
    """Function that wakes a waiting stream for new work, or all streams if they do not run the same
    stages."""
    ended: threading.Condition
    """Condition for which a stream waits while it pauses after a failed start; new work does not
    end the pause."""
    lines: LineLimit
    """Limit on log lines about batches that fail."""
    clock: Callable[[], float]

    def refuse(self, refusal: EngineError, cause: str) -> None:
        """Accept no more requests, and fail the open ones; the caller holds the lock."""
        self.available.refusal = refusal
        for model in self.models.values():
            model.fail_all(refusal, cause)
        self.changed.notify_all()
        self.ended.notify_all()


class StreamThread(threading.Thread):
    """Runs one stream, numbered from 0, until ``shared.available.stopped``."""

    def __init__(self, stream: int, models: str, shared: SharedByStreams) -> None:
        """Make the thread; ``models`` are the models' names, for the name of the thread."""
        super().__init__(name=f"{models}-stream-{stream}", daemon=True)
        self._stream, self._shared = stream, shared
        self._lock, self._changed, self._clock = shared.changed, shared.changed, shared.clock
        self._scheduler, self._models = shared.scheduler, shared.models
        self._available, self._health = shared.available, shared.available.health
        self._checks = shared.checks
        self._pieces: Pieces = ()
        """Buffered tensors from which the run that was just decided is merged."""

    def run(self) -> None:
        """Start the stream, and start it again after failures, until it is stopped."""
        suspected = False
        try:
            while not self._available.stopped:
                try:
                    suspected = self._live(suspected=suspected)
                except StartFailedError as failure:
                    suspected = True
                    self._pause(failure.__cause__ or failure)
        except Exception as error:  # waiting callers must get an error
            _log.exception("%s: out of service", self.name)
            with self._lock:
                self._available.end()
                self._shared.refuse(
                    OutOfServiceError(f"out of service: {error!r}"), "backend_error"
                )

    def _live(self, *, suspected: bool) -> bool:
        """Run from one start of the stream to the next; return whether the stream is suspected.

        StartFailedError if the stream cannot start.
        """
        slot, warm = self._open_slot()
        try:
            cold = not (warm or self._shared.backend.on_cpu)
            self._checks.start(self._stream, slot, suspected=suspected, cold=cold)
            return self._serve(slot)
        finally:
            try:
                slot.close()
            except Exception:  # its resources may leak, but a new slot may still be opened
                _log.exception("stream %d: a slot could not be closed", self._stream)

    def _open_slot(self) -> tuple[Slot, bool]:
        """Take an open slot, or open one; return the slot, and whether it is warm."""
        with self._lock:
            if (warm := self._shared.warm_slots.pop(self._stream, None)) is not None:
                return warm, True
            if not self._shared.backend.on_cpu:  # opening is slow: let others run
                self._scheduler.suspend(self._stream)
        try:
            return self._shared.open_slot(self._stream), False
        except Exception as error:
            raise StartFailedError from error

    def _pause(self, error: BaseException) -> None:
        """Take a stream that cannot start out of service for a while."""
        with self._lock:
            pause_s = self._health.start_failed(self._stream)
            _log.warning(
                "stream %d cannot start; next try in %g s: %s", self._stream, pause_s, error
            )
            self._scheduler.suspend(self._stream)
            given_up = any(map(self._available.is_given_up, self._models))
            if self._available.refusal is None and given_up:
                reason = f"out of service, no stream can start: {error}"
                self._shared.refuse(OutOfServiceError(reason), "backend_error")
            self._available.note()
            self._changed.notify_all()  # retries meant for other streams may have none left
        self._rest(pause_s)

    def _rest(self, pause_s: float) -> None:
        with self._lock:
            until_s = self._clock() + pause_s
            while not self._available.stopped and (left_s := until_s - self._clock()) > 0.0:
                self._shared.ended.wait(left_s)

    def _serve(self, slot: Slot) -> bool:
        """Run stages; return True if the stream must restart, False if it is stopped."""
        carry: TensorBatch | None = None
        while not self._available.stopped:
            task = self._next(within_batch=carry is not None)
            if task is None:
                self._checks.try_again(self._stream, slot)
                continue
            model, run = task
            try:
                carry = self._run_stage(slot, model, run, carry)
            except _InterruptedError:
                return True
            except TensorsLostError as error:
                carry = None
                self._give_back(model, run, error, blamed=False)
            except Exception as error:
                carry = None
                try:
                    if self._health.failed(self._stream, self._clock(), model.key):
                        self._checks.check(self._stream, slot, model)
                except UnhealthyStreamError:
                    self._give_back(model, run, error)
                    return True
                self._give_back(model, run, error)
            del task, model  # a waiting stream must not keep a removed model alive
        return False

    def _next(self, *, within_batch: bool) -> tuple[ModelRuntime, Run] | None:
        """Wait until the scheduler has a run for this stream.

        ``None`` if the stream is stopped, or if it must retry a model that it excluded (not
        ``within_batch``: a retry would overwrite the tensors of the batch).
        """
        with self._lock:
            while not self._available.stopped:
                due_s = math.inf if within_batch else self._health.due_s(self._stream)
                if due_s <= self._clock():
                    break
                task = None
                decision = self._scheduler.next(self._stream, self._clock())
                if isinstance(decision, Run):
                    model = self._models[decision.model]
                    self._pieces = model.take_pieces(decision)  # before they are discarded
                    task = (model, decision)
                for outcome in decision.outcomes:
                    self._models[outcome.model].follow(outcome)
                if task is not None:
                    if self._scheduler.waiting:  # another stream may start, or wait for a time
                        self._shared.announce()
                    return task
                timeout_s = min(due_s - self._clock(), _LONGEST_WAIT_S)
                if isinstance(decision, Wait):
                    timeout_s = min(max(decision.until_s - self._clock(), 0.0), timeout_s)
                self._changed.wait(timeout_s)
            return None

    def _run_stage(
        self, slot: Slot, model: ModelRuntime, run: Run, carry: TensorBatch | None
    ) -> TensorBatch | None:
        """Run one stage and process its outcome; return the rows that continue here."""
        batch = self._batch(slot, model, run, carry)
        started_s = self._clock()
        try:
            step = model.pipeline_of(run).step(slot, run.stage, batch)
        except WorkerLostError as error:
            self._interrupt(slot, model, run, batch, error)
            raise _InterruptedError from error
        step, runs_on = model.observe(run, step)
        with self._lock:
            now_s = self._clock()
            outcome = self._scheduler.update(self._stream, step.exited, now_s, runs_on)
            try:
                kept = model.conclude(run, step, outcome, now_s - started_s)
            except Exception as error:  # its rows have left the scheduler: fail their requests
                model.abandon(run, BackendError(repr(error)))
                raise
            if len(outcome.released):
                self._health.succeeded(self._stream, model.key)
            self._shared.announce()
        if not len(outcome.survivors):
            return None
        assert step.result.carry is not None
        if kept is None:
            return slot.select(step.result.carry, outcome.survivors)
        try:
            kept.set_result(slot.buffer(step.result.carry, outcome.survivors))
        except Exception as error:  # runs that need these tensors start from the beginning
            kept.set_exception(TensorsLostError(str(error) or repr(error)))
        return None

    def _batch(
        self, slot: Slot, model: ModelRuntime, run: Run, carry: TensorBatch | None
    ) -> TensorBatch:
        """Return a stage's inputs: merged buffers, new inputs, or the carried tensors."""
        pieces, self._pieces = self._pieces, ()
        if pieces:
            return slot.merge([(future.result(), rows) for future, rows in pieces])
        if run.stage == 0:
            model.start(run)
            with self._lock:
                parts = model.requests_of(run, self._clock())
            inputs = model.gather(parts)
            model.check_inputs(run, parts, inputs)
            return slot.upload(inputs)
        assert carry is not None
        return carry

    def _interrupt(
        self,
        slot: Slot,
        model: ModelRuntime,
        run: Run,
        batch: TensorBatch,
        error: WorkerLostError,
    ) -> None:
        """Interrupt a batch whose worker was lost: the inputs of its stage are kept."""
        _log.warning("%s: stage %d: %s", model.name, run.stage, error)
        with self._lock:
            kept = model.interrupt(self._scheduler.interrupted(self._stream, self._clock()), error)
            self._scheduler.suspend(self._stream)
            self._health.lost(self._stream)
            self._available.note()
            self._changed.notify_all()
        if kept is None:
            return
        try:
            kept.set_result(slot.buffer(batch, all_rows(len(batch))))
        except Exception as failure:  # as above
            kept.set_exception(TensorsLostError(str(failure) or repr(failure)))

    def _give_back(
        self, model: ModelRuntime, run: Run, error: Exception, *, blamed: bool = True
    ) -> None:
        """Return a failed batch to the scheduler, and fail requests that are not retried."""
        failure = error if isinstance(error, EngineError) else BackendError(repr(error))
        now_s = self._clock()
        suffix = self._shared.lines.admit((model.name, run.stage, type(error)))
        if suffix is not None:
            trace = None if failure is error else error
            _log.error("%s: stage %d: %s%s", model.name, run.stage, error, suffix, exc_info=trace)
        with self._lock:
            runs = self._health.serves(self._stream, model.key) and self._health.is_batch_fault(
                self._stream, now_s, model.key
            )
            if run.samples.alone and runs:
                failure = type(failure)(
                    f"the model failed on this request's own data, which was alone in its batch: "
                    f"{failure}"
                )
            outcome = self._scheduler.failed(self._stream, now_s, blamed=blamed)
            model.fail(outcome, failure)
            self._changed.notify_all()
