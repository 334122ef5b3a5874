"""Threads that run what the scheduler decides.

One thread a stream, each with its own slot, for all models of the device; the backend releases
the GIL while it executes. Scheduler, open requests and counts are guarded by one lock, held for
microseconds. What is finished is handed to the event loop in batches (:mod:`.outbox`).

A stage that raises fails its own batch only: the scheduler has each of its requests tried once
more, alone, on another stream where one is in service, and only those that fail again get an
error. A stream that fails twice in a row is started anew, after a pause (:mod:`.streams`).
Should all streams stay out of service, what waits is told so, until one is back. A thread that
fails outside of all this takes the models out of service, says so, and leaves nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Backend, Rows, Slot, TensorBatch
from offramp.engine.errors import (
    BackendError,
    DrainingError,
    EngineError,
    OutOfServiceError,
    QueueFullError,
)
from offramp.engine.ledger import Ledger, copy_of
from offramp.engine.outbox import Outbox
from offramp.engine.pipeline import Pipeline, Step
from offramp.engine.requests import PendingRequest
from offramp.engine.scheduling import (
    Assignment,
    DeviceScheduler,
    DropCause,
    Dropped,
    ModelScheduler,
    Run,
    SchedulerFullError,
    Submission,
    Transition,
    Wait,
)
from offramp.engine.statistics import Counters, CountersSnapshot, StageCounters
from offramp.engine.streams import StreamHealth

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
"""A stream asks again at least this often; ``Condition.wait`` has an upper bound of its own."""
_LATE = frozenset({DropCause.EXPIRED, DropCause.HOPELESS})
_JOIN_LIMIT_S = 10.0
"""How long :meth:`Executor.stop` waits for a stage that runs."""


class Runnable(Protocol):
    """What the executor needs of a model."""

    @property
    def pipeline(self) -> Pipeline:
        """What to run."""
        ...

    @property
    def scheduler(self) -> ModelScheduler:
        """Who decides."""
        ...

    def probe(self, slot: Slot) -> None:
        """Run a batch that is known to be good through all stages."""
        ...


@dataclass(frozen=True, slots=True)
class _Hosted:
    """A model as the executor knows it."""

    name: str
    pipeline: Pipeline
    scheduler: ModelScheduler
    ledger: Ledger
    probe: Callable[[Slot], None]
    parked: dict[int, Future[TensorBatch]] = field(default_factory=dict)
    """Tensors that wait at splits; each is there as soon as its stream has copied it."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What a stream shall run, with the tensors it is fused of."""

    model: _Hosted
    run: Run
    pieces: tuple[tuple[Future[TensorBatch], Rows], ...]


class _StartFailedError(Exception):
    """A stream cannot start; the cause says why."""


class _StageFailedError(Exception):
    """A stage raised; its cause says what. The batch is dealt with."""


class Executor:
    """Runs models on the streams of one device."""

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, Runnable],
        scheduler: DeviceScheduler,
        *,
        streams: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; :meth:`start` starts the threads.

        Args:
            backend: Of all pipelines.
            models: By name, as in ``scheduler``.
            scheduler: Owned by this executor from here on, with those of the models.
            streams: Threads, at least one.
            clock: Monotonic seconds.
        """
        self._backend = backend
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        """What a stream that pauses waits for: work is announced to those in service only."""
        self._outbox = Outbox(self._lock, clock)
        self._models = {name: self._host(name, model) for name, model in models.items()}
        self._health = StreamHealth(streams)
        self._refusal: EngineError | None = None
        """Why no request is taken, for now; or for ever, once ``_stopped``."""
        self._stopped = False
        names = "+".join(models)
        self._threads = [
            threading.Thread(target=self._work, args=(s,), name=f"{names}-stream-{s}", daemon=True)
            for s in range(streams)
        ]

    # The event loop's side

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; results are posted to ``loop``."""
        self._outbox.bind(loop)
        for thread in self._threads:
            thread.start()

    def submit(self, model: str, request: PendingRequest) -> None:
        """Queue a request.

        Raises:
            QueueFullError: The queue has no room for it.
            DrainingError: The executor was stopped.
            BackendError: It is out of service.
        """
        hosted = self._models[model]
        with self._lock:
            given_s = request.deadline_s - request.submitted_s
            way_s = min(self._outbox.delay_s, 0.5 * max(given_s, 0.0))
            submission = Submission(
                request.number,
                request.count,
                request.deadline_s - way_s,
                request.priority,
                request.signature,
            )
            if self._refusal is not None:
                raise copy_of(self._refusal)
            try:
                self._scheduler.submit(model, submission, request.submitted_s)
            except SchedulerFullError as error:
                hosted.ledger.counters.failed["rejected"] += request.count
                raise QueueFullError(
                    f"{model}: the queue is full: {error}; try again later, or send less"
                ) from error
            finally:
                self._settle(hosted)
            hosted.ledger.accept(request)
            self._changed.notify()

    def cancel(self, model: str, number: int) -> None:
        """Withdraw a request; nothing is posted for it any more."""
        hosted = self._models[model]
        with self._lock:
            request = hosted.ledger.get(number)
            if request is not None:
                request.withdrawn = True
                hosted.scheduler.cancel(number)
                self._settle(hosted)

    def flush(self) -> None:
        """Dispatch what waits at once, from now on."""
        with self._lock:
            self._scheduler.flush()
            self._changed.notify_all()

    @property
    def in_service(self) -> bool:
        """Whether requests are taken, and a stream is there to run them."""
        return self._refusal is None and self._health.in_service > 0

    @property
    def health(self) -> StreamHealth:
        """Of the streams; to be read only."""
        return self._health

    def pending(self) -> int:
        """Requests that are not finished."""
        with self._lock:
            return sum(len(model.ledger) for model in self._models.values())

    def snapshot(self, model: str) -> CountersSnapshot:
        """All counts of a model, of one instant."""
        hosted = self._models[model]
        with self._lock:
            return hosted.ledger.counters.snapshot(
                queued=hosted.scheduler.queued, in_flight=hosted.scheduler.in_flight
            )

    def stop(self) -> None:
        """Fail what is unfinished, then wait for the threads to end. Blocks, within limits."""
        with self._lock:
            self._stopped = True
            self._refuse(DrainingError("stopped before the answer"), "stopped")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_LIMIT_S)
            if thread.is_alive():
                _log.error("%s: a stage still runs after %g s", thread.name, _JOIN_LIMIT_S)

    # The threads' side: the life of a stream

    def _work(self, stream: int) -> None:
        suspected = False
        try:
            while not self._stopped:
                try:
                    if suspected:
                        self._rest(self._health.rest_s(stream))
                    suspected = self._live(stream, suspected=suspected)
                except _StartFailedError as failure:
                    suspected = True
                    self._pause(stream, failure.__cause__ or failure)
        except Exception as error:  # whoever waits must be told
            _log.exception("%s: out of service", threading.current_thread().name)
            with self._lock:
                self._stopped = True
                self._refuse(OutOfServiceError(f"out of service: {error!r}"), "backend_error")

    def _live(self, stream: int, *, suspected: bool) -> bool:
        """Run from one start of the stream to the next; says whether it is suspected then.

        Raises:
            _StartFailedError: It cannot start.
        """
        try:
            slot = self._backend.open_slot()
        except Exception as error:
            raise _StartFailedError from error
        try:
            if suspected:
                self._probe(slot)
            with self._lock:
                self._health.started(stream, anew=suspected)
                self._scheduler.resume(stream)
                if not self._stopped:
                    self._refusal = None
            return self._serve(stream, slot)
        finally:
            try:
                slot.close()
            except Exception:  # what it held may be lost, but a new one may still be opened
                _log.exception("stream %d: a slot could not be closed", stream)

    def _probe(self, slot: Slot) -> None:
        """Run a batch that is known to be good, of every model."""
        try:
            for model in self._models.values():
                model.probe(slot)
        except Exception as error:
            raise _StartFailedError from error

    def _pause(self, stream: int, error: BaseException) -> None:
        """Take a stream that cannot start out of service for a while."""
        with self._lock:
            pause_s = self._health.start_failed(stream)
            _log.warning("stream %d cannot start, again in %g s: %s", stream, pause_s, error)
            self._scheduler.suspend(stream)
            if self._health.hopeless and self._refusal is None:
                reason = f"out of service, no stream can start: {error}"
                self._refuse(OutOfServiceError(reason), "backend_error")
            self._changed.notify_all()  # what failed here and was to run elsewhere may go nowhere
        self._rest(pause_s)

    def _rest(self, pause_s: float) -> None:
        """Do nothing for a while, or until stopped."""
        with self._lock:
            until_s = self._clock() + pause_s
            while not self._stopped and (left_s := until_s - self._clock()) > 0.0:
                self._ended.wait(left_s)

    def _serve(self, stream: int, slot: Slot) -> bool:
        """Run stages until the stream is suspected, or is stopped; says which."""
        carry: TensorBatch | None = None
        while (task := self._next_task(stream)) is not None:
            try:
                carry = self._run_stage(stream, slot, task, carry)
            except _StageFailedError as failure:
                carry = None
                known = isinstance(failure.__cause__, EngineError)
                if self._health.failed(stream) or not known:
                    return True
        return False

    def _next_task(self, stream: int) -> _Task | None:
        """Wait for the scheduler to have something for this stream; ``None`` to end."""
        with self._lock:
            while not self._stopped:
                decision = self._scheduler.next(stream, self._clock())
                task = self._task(*decision) if isinstance(decision, Assignment) else None
                for model in self._models.values():
                    self._settle(model)
                if task is not None:
                    if self._scheduler.waiting:  # another stream may start, or keep time
                        self._changed.notify()
                    return task
                timeout_s = _LONGEST_WAIT_S
                if isinstance(decision, Wait):
                    timeout_s = min(max(decision.until_s - self._clock(), 0.0), timeout_s)
                self._changed.wait(timeout_s)
            return None

    def _task(self, name: str, run: Run) -> _Task:
        """Take what a run is fused of; the lock is held."""
        model = self._models[name]
        pieces = tuple((model.parked[p.number], p.positions) for p in run.pieces)
        self._discard(model)
        return _Task(model, run, pieces)

    # The threads' side: one stage

    def _run_stage(
        self, stream: int, slot: Slot, task: _Task, carry: TensorBatch | None
    ) -> TensorBatch | None:
        """Run one stage and release who leaves; gives the batch of those that run on.

        Raises:
            _StageFailedError: The backend raised; the batch was given back.
        """
        model, run = task.model, task.run
        try:
            batch = self._batch(slot, task, carry)
            started_s = self._clock()
            step = model.pipeline.step(slot, run.stage, batch)
            transition, kept = self._conclude(stream, task, step, started_s)
            if not len(transition.survivors):
                return None
            assert step.result.carry is not None
            if kept is None:
                return slot.select(step.result.carry, transition.survivors)
        except Exception as error:
            self._give_back(stream, task, error)
            raise _StageFailedError from error
        try:
            kept.set_result(slot.park(step.result.carry, transition.survivors))
        except Exception as error:
            kept.set_exception(error)
        return None

    def _batch(self, slot: Slot, task: _Task, carry: TensorBatch | None) -> TensorBatch:
        if task.pieces:
            return slot.join([(future.result(), rows) for future, rows in task.pieces])
        if task.run.stage == 0:
            return slot.upload(self._gather(task.model, task.run))
        assert carry is not None
        return carry

    def _gather(self, model: _Hosted, run: Run) -> dict[str, NDArray[Any]]:
        """Join the inputs of a new batch."""
        parts: list[tuple[PendingRequest, slice | NDArray[np.int64]]] = []
        with self._lock:
            now_s = self._clock()
            queue_s = model.ledger.counters.queue_s
            for start, stop in neighbours(run.requests):
                request = model.ledger.get(int(run.requests[start]))
                if request is None:
                    raise DrainingError(f"{model.name}: stopped before the answer")
                parts.append((request, _chosen(run.rows[start:stop])))
                queue_s.observe(now_s - request.submitted_s)
        if len(parts) == 1:
            request, rows = parts[0]
            return {name: array[rows] for name, array in request.inputs.items()}
        return {
            name: np.concatenate([request.inputs[name][rows] for request, rows in parts])
            for name in parts[0][0].inputs
        }

    def _conclude(
        self, stream: int, task: _Task, step: Step, started_s: float
    ) -> tuple[Transition, Future[TensorBatch] | None]:
        """Tell the scheduler, answer who leaves, count; gives where to park the survivors."""
        model, run = task.model, task.run
        kept: Future[TensorBatch] | None = None
        with self._lock:
            now_s = self._clock()
            transition = self._scheduler.done(stream, step.exited, now_s)
            if transition.parked is not None:  # another stream may be given them at once
                kept = model.parked[transition.parked] = Future()
            counters = model.ledger.counters.stages[run.stage]
            counters.batch_size.observe(len(run.requests))
            counters.run_s.observe(now_s - started_s)
            self._health.succeeded(stream)
            self._answer(model, run, transition.released, step)
            self._settle(model)
            self._changed.notify()
        return transition, kept

    def _answer(self, model: _Hosted, run: Run, released: Rows, step: Step) -> None:
        """Note the answers of the rows that leave; the lock is held."""
        exit_index = model.pipeline.plan.stages[run.stage].exit
        for start, stop in neighbours(run.requests[released]):
            answer, confidence = step.result.answer, step.result.confidence
            assert answer is not None
            rows = released[start:stop]
            number = int(run.requests[rows[0]])
            try:
                model.ledger.answer(
                    number,
                    run.stage,
                    exit_index,
                    rows=run.rows[rows],
                    answer=answer[rows],
                    confidence=confidence[rows],
                    forced=~step.exited[rows],
                )
            except Exception as error:  # an exit whose answers have another shape, say
                _log.exception("%s: stage %d: its answer cannot be kept", model.name, run.stage)
                failure = BackendError(f"{model.name}: stage {run.stage}: {error}")
                model.ledger.drop([Dropped(number, len(rows), DropCause.FAILED)], failure)

    def _give_back(self, stream: int, task: _Task, error: Exception) -> None:
        """Give a failed batch back to the scheduler; who has no second chance is told."""
        known = isinstance(error, EngineError)
        _log.error(
            "%s: stage %d: %s",
            task.model.name,
            task.run.stage,
            error,
            exc_info=None if known else error,
        )
        failure = error if isinstance(error, EngineError) else BackendError(repr(error))
        model = task.model
        with self._lock:
            self._scheduler.failed(stream, self._clock())
            dropped = model.scheduler.take_dropped()
            model.ledger.drop(dropped, failure)
            for item in dropped:
                if item.cause is DropCause.FAILED:  # the rest of its request need not run
                    model.scheduler.cancel(item.request, DropCause.FAILED)
            model.ledger.counters.retried = model.scheduler.retried
            self._settle(model)
            self._changed.notify_all()

    # Under the lock

    def _host(self, name: str, model: Runnable) -> _Hosted:
        labels = zip(model.pipeline.plan.exit_labels(), model.pipeline.plan.stages, strict=True)
        counters = Counters([StageCounters(label, s.threshold) for label, s in labels])
        ledger = Ledger(name, counters, self._outbox, self._clock)
        return _Hosted(name, model.pipeline, model.scheduler, ledger, model.probe)

    def _refuse(self, refusal: EngineError, cause: str) -> None:
        """Take no more requests, and fail the open ones."""
        self._refusal = refusal
        for model in self._models.values():
            for number in model.ledger.fail_all(refusal, cause):
                model.scheduler.cancel(number)
            self._settle(model)
        self._changed.notify_all()
        self._ended.notify_all()

    def _settle(self, model: _Hosted) -> None:
        """Account for what the scheduler dropped, and wake who waits."""
        while dropped := model.scheduler.take_dropped():
            model.ledger.drop(dropped)
            for item in dropped:  # what is left of a request that is late need not run
                if item.cause in _LATE and model.ledger.get(item.request) is not None:
                    model.scheduler.cancel(item.request, item.cause)
            self._discard(model)
        self._outbox.wake()

    def _discard(self, model: _Hosted) -> None:
        """Let go of the tensors of parked batches that nobody will ask for."""
        for number in model.scheduler.take_discarded():
            model.parked.pop(number, None)


def _chosen(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Rows of a request as an index, a view where they follow on each other.

    They do but where what survived some stages is tried again.
    """
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and (rows[1:] > rows[:-1]).all():
        return slice(first, last + 1)
    return rows


def neighbours(requests: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Give the bounds of runs of equal values."""
    if not len(requests):
        return
    start = 0
    for stop in (np.flatnonzero(requests[1:] != requests[:-1]) + 1).tolist():
        yield start, stop
        start = stop
    yield start, len(requests)
