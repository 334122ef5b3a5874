"""Threads that run what the scheduler decides.

One thread a stream, each with its own slot; the backend releases the GIL while it executes. The
scheduler and all counts are guarded by one lock, held for microseconds. What is finished is
handed to the event loop in batches: one wake-up however many requests a stage released.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Slot, TensorBatch
from offramp.engine.errors import (
    BackendError,
    DeadlineExceededError,
    DrainingError,
    EngineError,
    QueueFullError,
)
from offramp.engine.pipeline import Pipeline, Step
from offramp.engine.requests import FINAL, PendingRequest
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Run,
    Scheduler,
    SchedulerFullError,
    Submission,
    Wait,
)
from offramp.engine.statistics import Counters, StageCounters

_log = logging.getLogger(__name__)


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
            streams: Threads.
            clock: Monotonic seconds.
        """
        self._name = name
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._requests: dict[int, PendingRequest] = {}
        self._finished: list[PendingRequest] = []
        self._waking = False
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(s,), name=f"{name}-stream-{s}", daemon=True)
            for s in range(streams)
        ]
        labels = zip(pipeline.plan.exit_labels(), pipeline.plan.stages, strict=True)
        self.counters = Counters([StageCounters(label, s.threshold) for label, s in labels])

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
        """
        submission = Submission(
            request=request.number,
            count=request.count,
            signature=request.signature,
            deadline_s=request.deadline_s,
            priority=request.priority,
        )
        with self._lock:
            if self._stopping:
                raise DrainingError(f"{self._name} was stopped")
            try:
                self._scheduler.submit(submission, request.submitted_s)
            except SchedulerFullError as error:
                self.counters.failed["rejected"] += request.count
                raise QueueFullError(
                    f"{self._name}: the queue is full: {error}; try again later, or send less"
                ) from error
            self._requests[request.number] = request
            self.counters.requests += 1
            self.counters.samples += request.count
            self._drop(self._scheduler.take_dropped())
            self._changed.notify()

    def cancel(self, number: int) -> None:
        """Withdraw a request; nothing is posted for it any more."""
        with self._lock:
            if number in self._requests:
                self._scheduler.cancel(number)
                self._drop(self._scheduler.take_dropped())

    def flush(self) -> None:
        """Dispatch what waits at once, from now on."""
        with self._lock:
            self._scheduler.flush()
            self._changed.notify_all()

    @property
    def load(self) -> tuple[int, int]:
        """Samples that wait, and samples in running batches."""
        with self._lock:
            return self._scheduler.queued, self._scheduler.in_flight

    @property
    def pending(self) -> int:
        """Requests that are not finished."""
        with self._lock:
            return len(self._requests)

    def stop(self) -> None:
        """Stop the threads after their current stage; what is unfinished fails. Blocks."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        with self._lock:
            for request in list(self._requests.values()):
                self._fail(request, DrainingError(f"{self._name} was stopped before the answer"))
            self._requests.clear()

    # The threads' side

    def _work(self, stream: int) -> None:
        slot = self._pipeline.backend.open_slot()
        carry: TensorBatch | None = None
        try:
            while (run := self._next_run(stream)) is not None:
                try:
                    carry = self._execute(stream, slot, run, carry)
                except Exception as error:  # its batch fails, the stream goes on
                    _log.exception("%s: stage %d failed", self._name, run.stage)
                    self._fail_batch(stream, run, error)
                    carry = None
        finally:
            slot.close()

    def _next_run(self, stream: int) -> Run | None:
        """Wait for the scheduler to have something for this stream; ``None`` to stop."""
        with self._lock:
            while not self._stopping:
                decision = self._scheduler.next(stream, self._clock())
                self._drop(self._scheduler.take_dropped())
                if isinstance(decision, Run):
                    return decision
                timeout = None
                if isinstance(decision, Wait):
                    timeout = max(decision.until_s - self._clock(), 0.0)
                self._changed.wait(timeout)
            return None

    def _execute(
        self, stream: int, slot: Slot, run: Run, carry: TensorBatch | None
    ) -> TensorBatch | None:
        """Run one stage and release who exits; gives the batch of the survivors."""
        batch = slot.upload(self._gather(run)) if run.stage == 0 else carry
        assert batch is not None
        started_s = self._clock()
        step = self._pipeline.step(slot, run.stage, batch)
        ended_s = self._clock()
        with self._lock:
            transition = self._scheduler.done(stream, step.exited, ended_s)
            self._count(run, transition.released, ended_s - started_s)
            self._release(run, transition.released, step, ended_s)
            self._drop(self._scheduler.take_dropped())
            self._changed.notify()
        if not len(transition.survivors):
            return None
        assert step.result.carry is not None
        return slot.select(step.result.carry, transition.survivors)

    def _gather(self, run: Run) -> dict[str, NDArray[Any]]:
        """Join the inputs of a new batch."""
        with self._lock:
            now_s = self._clock()
            parts: list[tuple[PendingRequest, int, int]] = []
            for start, stop in neighbours(run.requests):
                request = self._requests[int(run.requests[start])]
                first = int(run.rows[start])
                parts.append((request, first, first + stop - start))
                self.counters.queue_s.observe(now_s - request.submitted_s)
        if len(parts) == 1:
            request, first, last = parts[0]
            return {name: array[first:last] for name, array in request.inputs.items()}
        return {
            name: np.concatenate([r.inputs[name][first:last] for r, first, last in parts])
            for name in parts[0][0].inputs
        }

    def _count(self, run: Run, released: NDArray[np.intp], seconds: float) -> None:
        counters = self.counters.stages[run.stage]
        counters.batch_size.observe(len(run.requests))
        counters.run_s.observe(seconds)
        counters.answered += len(released)

    def _release(self, run: Run, released: NDArray[np.intp], step: Step, now_s: float) -> None:
        if not len(released):
            return
        answer, confidence = step.result.answer, step.result.confidence
        assert answer is not None
        exit_index = self._pipeline.plan.stages[run.stage].exit
        for start, stop in neighbours(run.requests[released]):
            picked = released[start:stop]
            request = self._requests[int(run.requests[picked[0]])]
            request.fill(
                run.rows[picked],
                answer[picked],
                confidence[picked],
                FINAL if exit_index is None else exit_index,
            )
            if request.remaining == 0:
                del self._requests[request.number]
                if request.error is None:
                    self._finish(request, now_s)

    def _drop(self, dropped: Iterable[Dropped]) -> None:
        for item in dropped:
            self.counters.failed[item.cause.value] += item.count
            request = self._requests[item.request]
            request.remaining -= item.count
            if request.remaining == 0:
                del self._requests[item.request]
            if item.cause is DropCause.EXPIRED:
                late_ms = (request.deadline_s - request.submitted_s) * 1e3
                self._fail(
                    request,
                    DeadlineExceededError(
                        f"{self._name}: no answer within the {late_ms:.1f} ms that the request had"
                    ),
                )

    def _fail_batch(self, stream: int, run: Run, error: Exception) -> None:
        with self._lock:
            self._scheduler.failed(stream)
            self.counters.failed["backend_error"] += len(run.requests)
            for start, stop in neighbours(run.requests):
                request = self._requests[int(run.requests[start])]
                request.remaining -= stop - start
                if request.remaining == 0:
                    del self._requests[request.number]
                cause = error if isinstance(error, EngineError) else BackendError(repr(error))
                self._fail(request, cause)
            self._changed.notify()

    def _fail(self, request: PendingRequest, error: EngineError) -> None:
        if request.error is None:
            request.error = error
            self._finish(request, self._clock())

    def _finish(self, request: PendingRequest, now_s: float) -> None:
        """Post a request to the event loop; the lock is held."""
        request.finished_s = now_s
        if request.error is None:
            self.counters.latency_s.observe(now_s - request.submitted_s)
        self._finished.append(request)
        if not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: nobody waits any more
                _log.debug("%s: the event loop is closed", self._name)

    def _deliver(self) -> None:
        """Resolve futures; runs in the event loop."""
        with self._lock:
            finished, self._finished = self._finished, []
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
