"""Threads that run what the scheduler decides.

One thread a stream, each with its own slot, for all models of the device; the backend releases
the GIL while it executes. Scheduler, open requests and counts are guarded by one lock, held for
microseconds. What is finished is handed to the event loop in batches (:mod:`.completions`).

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Backend, Rows, Slot, TensorBatch
from offramp.engine.completion_queue import CompletionQueue
from offramp.engine.deployment import Deployment
from offramp.engine.errors import (
    BackendError,
    DrainingError,
    EngineError,
    OutOfServiceError,
    QueueFullError,
)
from offramp.engine.hosting import HostedModel, neighbours
from offramp.engine.pipeline import Step
from offramp.engine.recorder import Recorder
from offramp.engine.request_table import RequestTable, copy_of
from offramp.engine.requests import PendingRequest
from offramp.engine.scheduling import (
    Assignment,
    DeviceScheduler,
    Policy,
    Run,
    SchedulerFullError,
    Submission,
    Transition,
    Wait,
)
from offramp.engine.statistics import Counters, CountersSnapshot
from offramp.engine.streams import StreamHealth

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
"""A stream asks again at least this often; ``Condition.wait`` has an upper bound of its own."""
_JOIN_LIMIT_S = 10.0
"""How long :meth:`Executor.stop` waits for a stage that runs."""


class Runnable(Protocol):
    """What the executor needs of a model."""

    @property
    def deployment(self) -> Deployment:
        """What to start with."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Where to keep what is observed; ``None`` in modes that observe nothing."""
        ...

    def probe(self, slot: Slot, deployment: Deployment) -> None:
        """Run a batch that is known to be good through all stages."""
        ...

    def warm_up(self, slot: Slot, deployment: Deployment) -> None:
        """Run batches of every size, so that the slot has all that it will need."""
        ...


@dataclass(frozen=True, slots=True)
class _Task:
    """What a stream shall run, with the tensors it is fused of."""

    model: HostedModel
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
        slots: Sequence[Slot] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; :meth:`start` starts the threads.

        Args:
            backend: Of all pipelines.
            models: By name, as in ``scheduler``.
            scheduler: Owned by this executor from here on, with those of the models.
            streams: Threads, at least one.
            slots: Open and warm, for the streams' first starts; closed by this executor.
            clock: Monotonic seconds.
        """
        self._backend = backend
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        """What a stream that pauses waits for: work is announced to those in service only."""
        self._completions = CompletionQueue(self._lock, clock)
        self._models = {name: self._host(name, model) for name, model in models.items()}
        self._probes = {name: model.probe for name, model in models.items()}
        self._warm_ups = {name: model.warm_up for name, model in models.items()}
        self._health = StreamHealth(streams)
        self._warm = list(slots)
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
        self._completions.bind(loop)
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
            way_s = min(self._completions.delay_s, 0.5 * max(given_s, 0.0))
            submission = Submission(
                request.number,
                request.count,
                request.deadline_s - way_s,
                request.priority,
                request.batch_key,
            )
            if self._refusal is not None:
                raise copy_of(self._refusal)
            try:
                self._scheduler.submit(model, submission, request.submitted_s)
            except SchedulerFullError as error:
                hosted.table.counters.failed["rejected"] += request.count
                raise QueueFullError(
                    f"{model}: the queue is full: {error}; try again later, or send less"
                ) from error
            finally:
                self._settle(hosted)
            hosted.table.accept(request)
            self._changed.notify()

    def cancel(self, model: str, number: int) -> None:
        """Withdraw a request; nothing is posted for it any more."""
        hosted = self._models[model]
        with self._lock:
            request = hosted.table.get(number)
            if request is not None:
                request.withdrawn = True
                hosted.scheduler.cancel(number)
                self._settle(hosted)
            hosted.table.forget(number)

    def succeed(self, model: str, deployment: Deployment, policy: Policy) -> None:
        """Run what starts from now on under another plan; what runs is not disturbed.

        Args:
            model: Name.
            deployment: Prepared and warmed up.
            policy: Of scheduling, made for the deployment's operating points.
        """
        with self._lock:
            self._models[model].succeed(deployment, policy)
            self._changed.notify_all()

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
            return sum(model.table.awaited for model in self._models.values())

    def snapshot(self, model: str) -> CountersSnapshot:
        """All counts of a model, of one instant."""
        with self._lock:
            return self._models[model].snapshot()

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
        for slot in self._warm:
            slot.close()

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
        slot, warm = self._open_slot(stream)
        try:
            if suspected:
                self._run_each(self._probes, slot)
            if not (warm or self._backend.on_cpu):
                self._run_each(self._warm_ups, slot)
            with self._lock:
                self._health.started(stream, anew=suspected)
                self._scheduler.resume(stream)
                if not self._stopped:
                    self._refusal = None
            while self._serve(stream, slot):
                if self._backend.on_cpu or not self._is_well(stream, slot):
                    return True
            return False
        finally:
            try:
                slot.close()
            except Exception:  # what it held may be lost, but a new one may still be opened
                _log.exception("stream %d: a slot could not be closed", stream)

    def _open_slot(self, stream: int) -> tuple[Slot, bool]:
        """Take a slot that is open, or open one; says whether it is warm."""
        with self._lock:
            if self._warm:
                return self._warm.pop(), True
            if not self._backend.on_cpu:  # that takes a while: others run what waits
                self._scheduler.suspend(stream)
        try:
            return self._backend.open_slot(), False
        except Exception as error:
            raise _StartFailedError from error

    def _is_well(self, stream: int, slot: Slot) -> bool:
        """Whether a suspected slot runs what is known to be good: then it is not given up.

        Where slots have to be warmed up, one is not started anew for the sake of bad requests.
        """
        self._rest(self._health.rest_s(stream))
        try:
            self._run_each(self._probes, slot)
        except _StartFailedError:
            return False
        with self._lock:
            self._health.passed(stream)
        return True

    def _run_each(self, runs: Mapping[str, Callable[[Slot, Deployment], None]], slot: Slot) -> None:
        """Run batches that are known to be good, of every model."""
        try:
            for name, run in runs.items():
                run(slot, self._models[name].current.deployment)
        except Exception as error:
            raise _StartFailedError from error

    def _pause(self, stream: int, error: BaseException) -> None:
        """Take a stream that cannot start out of service for a while."""
        with self._lock:
            pause_s = self._health.start_failed(stream)
            _log.warning("stream %d cannot start, again in %g s: %s", stream, pause_s, error)
            self._scheduler.suspend(stream)
            if self._health.infeasible and self._refusal is None:
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
        pieces = tuple((model.buffered[p.number], p.positions) for p in run.pieces)
        model.discard()
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
            step = model.under(run).deployment.pipeline.step(slot, run.stage, batch)
            runs_on = model.seen(run, step)
            transition, kept = self._conclude(stream, task, step, started_s, runs_on)
            if not len(transition.survivors):
                return None
            assert step.result.carry is not None
            if kept is None:
                return slot.select(step.result.carry, transition.survivors)
        except Exception as error:
            self._give_back(stream, task, error)
            raise _StageFailedError from error
        try:
            kept.set_result(slot.buffer(step.result.carry, transition.survivors))
        except Exception as error:
            kept.set_exception(error)
        return None

    def _batch(self, slot: Slot, task: _Task, carry: TensorBatch | None) -> TensorBatch:
        if task.pieces:
            return slot.merge([(future.result(), rows) for future, rows in task.pieces])
        if task.run.stage == 0:
            task.model.started(task.run)
            return slot.upload(self._gather(task.model, task.run))
        assert carry is not None
        return carry

    def _gather(self, model: HostedModel, run: Run) -> dict[str, NDArray[Any]]:
        """Join the inputs of a new batch."""
        parts: list[tuple[PendingRequest, slice | NDArray[np.int64]]] = []
        with self._lock:
            now_s = self._clock()
            queue_s = model.table.counters.queue_s
            for start, stop in neighbours(run.requests):
                request = model.table.get(int(run.requests[start]))
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
        self,
        stream: int,
        task: _Task,
        step: Step,
        started_s: float,
        runs_on: NDArray[np.bool_] | None,
    ) -> tuple[Transition, Future[TensorBatch] | None]:
        """Tell the scheduler, answer who leaves, count; gives where to buffer the survivors."""
        model, run = task.model, task.run
        kept: Future[TensorBatch] | None = None
        with self._lock:
            now_s = self._clock()
            transition = self._scheduler.done(stream, step.exited, now_s, runs_on)
            if transition.buffered is not None:  # another stream may be given them at once
                kept = model.buffered[transition.buffered] = Future()
            counters = model.under(run).stages[run.stage]
            counters.batch_size.observe(len(run.requests))
            counters.run_s.observe(now_s - started_s)
            self._health.succeeded(stream)
            model.release(run, transition, step)
            self._settle(model)
            self._changed.notify()
        return transition, kept

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
        with self._lock:
            self._scheduler.failed(stream, self._clock())
            task.model.give_up(failure)
            self._settle(task.model)
            self._changed.notify_all()

    # Under the lock

    def _host(self, name: str, model: Runnable) -> HostedModel:
        table = RequestTable(name, Counters(), self._completions, self._clock)
        scheduler = self._scheduler.model(name)
        return HostedModel(name, model.deployment, scheduler, table, model.recorder)

    def _refuse(self, refusal: EngineError, cause: str) -> None:
        """Take no more requests, and fail the open ones."""
        self._refusal = refusal
        for model in self._models.values():
            for number in model.table.fail_all(refusal, cause):
                model.scheduler.cancel(number)
            self._settle(model)
        self._changed.notify_all()
        self._ended.notify_all()

    def _settle(self, model: HostedModel) -> None:
        """Account for what the scheduler dropped, and wake who waits."""
        model.settle()
        self._completions.wake()


def _chosen(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Rows of a request as an index, a view where they follow on each other.

    They do but where what survived some stages is tried again.
    """
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and (rows[1:] > rows[:-1]).all():
        return slice(first, last + 1)
    return rows
