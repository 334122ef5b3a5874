"""Threads that run what the scheduler decides.

One thread a stream, each with its own slot; the backend releases the GIL while it executes. The
scheduler, the open requests and all counts are guarded by one lock, held for microseconds. What
is finished is handed to the event loop in batches: one wake-up however many requests a stage
released.

A stage that raises fails as little as can be: the requests of its batch are run again, each
alone, and only those that fail alone get an error. A thread that fails outside of a stage takes
the model out of service, says so, and leaves nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Slot, TensorBatch
from offramp.engine.errors import (
    BackendError,
    DrainingError,
    EngineError,
    QueueFullError,
)
from offramp.engine.ledger import Ledger, copy_of
from offramp.engine.pipeline import Pipeline, Step
from offramp.engine.requests import PendingRequest
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Run,
    Scheduler,
    SchedulerFullError,
    Submission,
    Transition,
    Wait,
)
from offramp.engine.statistics import Counters, CountersSnapshot, StageCounters

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
"""A stream asks again at least this often; ``Condition.wait`` has an upper bound of its own."""
_JOIN_LIMIT_S = 10.0
"""How long :meth:`Executor.stop` waits for a stage that runs."""


class Executor:
    """Runs one model's pipeline on a number of streams."""

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        scheduler: Scheduler,
        *,
        streams: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; :meth:`start` starts the threads.

        Args:
            name: The model's, for threads and messages.
            pipeline: What to run.
            scheduler: Decides; owned by this executor from here on.
            streams: Threads, at least one.
            clock: Monotonic seconds.
        """
        self._name = name
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        labels = zip(pipeline.plan.exit_labels(), pipeline.plan.stages, strict=True)
        counters = Counters([StageCounters(label, s.threshold) for label, s in labels])
        self._ledger = Ledger(name, counters, clock)
        self._waking = False
        self._refusal: EngineError | None = None
        """Why no request is taken any more; the threads end then."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(s,), name=f"{name}-stream-{s}", daemon=True)
            for s in range(streams)
        ]

    # The event loop's side

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; results are posted to ``loop``."""
        self._loop = loop
        for thread in self._threads:
            thread.start()

    def submit(self, request: PendingRequest) -> None:
        """Queue a request.

        Raises:
            QueueFullError: The queue has no room for it.
            DrainingError: The executor was stopped.
            BackendError: It is out of service.
        """
        submission = Submission(
            request=request.number,
            count=request.count,
            signature=request.signature,
            deadline_s=request.deadline_s,
            priority=request.priority,
        )
        with self._lock:
            if self._refusal is not None:
                raise copy_of(self._refusal)
            try:
                self._scheduler.submit(submission, request.submitted_s)
            except SchedulerFullError as error:
                self._ledger.counters.failed["rejected"] += request.count
                raise QueueFullError(
                    f"{self._name}: the queue is full: {error}; try again later, or send less"
                ) from error
            finally:
                self._settle()
            self._ledger.accept(request)
            self._changed.notify()

    def cancel(self, number: int) -> None:
        """Withdraw a request; nothing is posted for it any more."""
        with self._lock:
            request = self._ledger.get(number)
            if request is not None:
                request.withdrawn = True
                self._scheduler.cancel(number)
                self._settle()

    def flush(self) -> None:
        """Dispatch what waits at once, from now on."""
        with self._lock:
            self._scheduler.flush()
            self._changed.notify_all()

    @property
    def in_service(self) -> bool:
        """Whether requests are taken."""
        return self._refusal is None

    @property
    def pending(self) -> int:
        """Requests that are not finished."""
        with self._lock:
            return len(self._ledger)

    def snapshot(self) -> CountersSnapshot:
        """All counts, of one instant."""
        with self._lock:
            return self._ledger.counters.snapshot(
                queued=self._scheduler.queued, in_flight=self._scheduler.in_flight
            )

    def stop(self) -> None:
        """Fail what is unfinished, then wait for the threads to end. Blocks, within limits."""
        self._leave_service(DrainingError(f"{self._name} was stopped before the answer"), "stopped")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_LIMIT_S)
            if thread.is_alive():
                _log.error("%s: a stage still runs after %g s", thread.name, _JOIN_LIMIT_S)

    # The threads' side

    def _work(self, stream: int) -> None:
        try:
            slot = self._pipeline.backend.open_slot()
            try:
                carry: TensorBatch | None = None
                while (run := self._next_run(stream)) is not None:
                    carry = self._run_stage(stream, slot, run, carry)
            finally:
                slot.close()
        except Exception as error:  # whoever waits must be told
            _log.exception("%s: out of service", threading.current_thread().name)
            self._leave_service(
                BackendError(f"{self._name} is out of service: {error!r}"), "backend_error"
            )

    def _next_run(self, stream: int) -> Run | None:
        """Wait for the scheduler to have something for this stream; ``None`` to end."""
        with self._lock:
            while self._refusal is None:
                decision = self._scheduler.next(stream, self._clock())
                self._settle()
                if isinstance(decision, Run):
                    if self._scheduler.queued:  # another stream may start, or has to keep time
                        self._changed.notify()
                    return decision
                timeout = None
                if isinstance(decision, Wait):
                    timeout = min(max(decision.until_s - self._clock(), 0.0), _LONGEST_WAIT_S)
                self._changed.wait(timeout)
            return None

    def _run_stage(
        self, stream: int, slot: Slot, run: Run, carry: TensorBatch | None
    ) -> TensorBatch | None:
        """Run one stage and release who exits; gives the batch of the survivors."""
        try:
            batch = slot.upload(self._gather(run)) if run.stage == 0 else carry
            assert batch is not None
            started_s = self._clock()
            step = self._pipeline.step(slot, run.stage, batch)
        except Exception as error:  # its batch is dealt with, the stream goes on
            self._recover(stream, slot, run, error)
            return None
        survivors = self._conclude(stream, run, step, self._clock() - started_s).survivors
        if not len(survivors):
            return None
        try:
            assert step.result.carry is not None
            return slot.select(step.result.carry, survivors)
        except Exception as error:  # what left has its answers, the rest is dealt with
            rest = Run(run.batch, run.stage, run.requests[survivors], run.rows[survivors])
            self._recover(stream, slot, rest, error)
            return None

    def _gather(self, run: Run) -> dict[str, NDArray[Any]]:
        """Join the inputs of a new batch."""
        with self._lock:
            now_s = self._clock()
            parts: list[tuple[PendingRequest, int, int]] = []
            for start, stop in neighbours(run.requests):
                request = self._ledger.get(int(run.requests[start]))
                if request is None:
                    raise DrainingError(f"{self._name} was stopped before the answer")
                first = int(run.rows[start])
                parts.append((request, first, first + stop - start))
                self._ledger.counters.queue_s.observe(now_s - request.submitted_s)
        if len(parts) == 1:
            request, first, last = parts[0]
            return {name: array[first:last] for name, array in request.inputs.items()}
        return {
            name: np.concatenate([r.inputs[name][first:last] for r, first, last in parts])
            for name in parts[0][0].inputs
        }

    def _conclude(self, stream: int, run: Run, step: Step, seconds: float) -> Transition:
        """Tell the scheduler, answer who leaves, count."""
        with self._lock:
            transition = self._scheduler.done(stream, step.exited, self._clock())
            counters = self._ledger.counters.stages[run.stage]
            counters.batch_size.observe(len(run.requests))
            counters.run_s.observe(seconds)
            self._answer(run, transition.released, step)
            self._settle()
            self._changed.notify()
        return transition

    def _answer(self, run: Run, released: NDArray[np.intp], step: Step) -> None:
        """Note the answers of the rows that leave; the lock is held."""
        exit_index = self._pipeline.plan.stages[run.stage].exit
        for start, stop in neighbours(run.requests[released]):
            answer, confidence = step.result.answer, step.result.confidence
            assert answer is not None
            rows = released[start:stop]
            self._ledger.answer(
                int(run.requests[rows[0]]),
                run.stage,
                exit_index,
                rows=run.rows[rows],
                answer=answer[rows],
                confidence=confidence[rows],
            )

    def _recover(self, stream: int, slot: Slot, run: Run, error: Exception) -> None:
        """Run each request of a failed batch alone, so that one bad request fails alone."""
        known = isinstance(error, EngineError)
        _log.error(
            "%s: stage %d: %s", self._name, run.stage, error, exc_info=None if known else error
        )
        with self._lock:
            self._scheduler.failed(stream)
        parts = list(neighbours(run.requests))
        for start, stop in parts:
            number, rows = int(run.requests[start]), run.rows[start:stop]
            if len(parts) == 1 or isinstance(error, DrainingError):
                self._fail_rows(number, len(rows), error)
                continue
            try:
                self._run_alone(slot, number, rows)
            except Exception as own:  # this one is the culprit, or everything fails
                self._fail_rows(number, len(rows), own)
        with self._lock:
            self._changed.notify()

    def _run_alone(self, slot: Slot, number: int, rows: NDArray[np.int64]) -> None:
        """Run some rows of one request from the start; all are answered, or it raises."""
        with self._lock:
            request = self._ledger.get(number)
        if request is None:
            return
        inputs = {name: array[rows] for name, array in request.inputs.items()}
        departures = list(self._pipeline.run(slot, inputs))
        stages = self._pipeline.plan.stages
        with self._lock:
            for stage, left, answer, confidence in departures:
                self._ledger.answer(
                    number,
                    stage,
                    stages[stage].exit,
                    rows=rows[left],
                    answer=answer,
                    confidence=confidence,
                )
            self._wake()

    def _fail_rows(self, number: int, count: int, error: Exception) -> None:
        """Fail a request some rows of which cannot be answered."""
        known = error if isinstance(error, EngineError) else BackendError(repr(error))
        with self._lock:
            request = self._ledger.get(number)
            if request is not None:
                self._ledger.fail(request, known)
                self._ledger.drop([Dropped(number, count, DropCause.FAILED)])
                self._scheduler.cancel(number, DropCause.FAILED)
            self._settle()

    def _leave_service(self, refusal: EngineError, cause: str) -> None:
        """Take no more requests, fail the open ones, let the threads end."""
        with self._lock:
            if self._refusal is None:
                self._refusal = refusal
            for number in self._ledger.fail_all(refusal, cause):
                self._scheduler.cancel(number)
            self._settle()
            self._changed.notify_all()

    def _settle(self) -> None:
        """Account for what the scheduler dropped, and wake who waits; the lock is held."""
        self._ledger.drop(self._scheduler.take_dropped())
        self._wake()

    def _wake(self) -> None:
        """Have the event loop deliver what is finished; the lock is held."""
        if self._ledger.finished and not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: nobody waits any more
                _log.debug("%s: the event loop is closed", self._name)

    def _deliver(self) -> None:
        """Resolve futures; runs in the event loop."""
        with self._lock:
            finished, self._ledger.finished = self._ledger.finished, []
            self._waking = False
        for request in finished:
            if not request.future.done():  # its caller may have left
                request.future.set_result(request)


def neighbours(requests: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Give the bounds of runs of equal values."""
    if not len(requests):
        return
    start = 0
    for stop in (np.flatnonzero(requests[1:] != requests[:-1]) + 1).tolist():
        yield start, stop
        start = stop
    yield start, len(requests)
