"""The threads that run what the scheduler decides.

One thread a stream, each with its own slot, for all models of the device; the backend releases
the GIL while it executes. Schedulers, open requests and counters are guarded by one lock, held for
microseconds. Completed requests are handed to the event loop by the completion queue.

A stage that raises fails its own batch only: the scheduler has its requests tried again, half of
them at a time, on another stream where one is in service, and only those that fail alone get an
error. A stream that fails twice in a row has to run what is known to be good, and is started anew
if it fails at that (:mod:`.streams`). One whose worker process is lost is started anew at once, and
the batch that it ran goes on at the same stage, on whichever stream is free: that is no failure of
its own.
Should all streams stay out of service, what waits is told so, until one is back. A thread that
fails outside of all this takes the models out of service, says so, and leaves nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from offramp.engine.common.errors import (
    BackendError,
    DrainingError,
    EngineError,
    OutOfServiceError,
    QueueFullError,
    WorkerLostError,
)
from offramp.engine.common.line_limit import LineLimit
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.request_table import CompletionQueue, Request, copy_of
from offramp.engine.requests.statistics import CountersSnapshot
from offramp.engine.scheduling import (
    DeviceScheduler,
    PlacedPlan,
    Run,
    SchedulerFullError,
    Submission,
    Wait,
)
from offramp.engine.scheduling.decisions import all_rows
from offramp.engine.scheduling.policies import PlanPolicy
from offramp.engine.serving.availability import Availability
from offramp.engine.serving.model_runtime import ModelRuntime, Pieces
from offramp.engine.serving.stream_checks import ModelChecks, NotWellError, StartFailedError
from offramp.engine.stages.backend_protocol import Backend, Slot, TensorBatch

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
"""A stream asks again at least this often; ``Condition.wait`` has an upper bound of its own."""
_LOGGED_EVERY_S = 10.0
"""Time between two lines about batches that fail in one way."""
_JOIN_LIMIT_S = 10.0
"""How long :meth:`Executor.stop` waits for a stage that runs."""
_Task: TypeAlias = tuple[ModelRuntime, Run, Pieces]
"""What a stream shall run, and the buffered tensors that it is merged of, if it is."""


class _InterruptedError(Exception):
    """A stream lost its worker, and its batch was given back to be resumed."""


class Executor:
    """Runs models on the streams of one device; :meth:`start` starts their threads.

    It owns the scheduler from here on, and ``slots``, open and warm ones for the streams' first
    starts. Models are known by a key; that of the first ones is their name.
    """

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, ServedModel],
        scheduler: DeviceScheduler,
        *,
        streams: int,
        slots: Sequence[Slot] = (),
        open_slot: Callable[[int], Slot] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``open_slot`` opens the slot of a stream, where these are not all alike."""
        self._backend = backend
        self._open_slot_of = open_slot or (lambda _stream: backend.open_slot())
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        placed = any(model.scheduler.placed is not None for model in models.values())
        self._announce = self._changed.notify_all if placed else self._changed.notify
        """Tells of new work: where streams differ it may not be for the first that wakes up."""
        self._ended = threading.Condition(self._lock)
        """What a stream that pauses waits for: work is announced to those in service only."""
        self._completions = CompletionQueue(clock)
        self._models = {
            name: ModelRuntime(name, name, model, self._completions, clock)
            for name, model in models.items()
        }
        """By key; changed under the lock, by the event loop's thread."""
        self._available = Availability(streams, self._models, clock)
        self.health = self._available.health
        """Of the streams; only this executor changes it."""
        self._checks = ModelChecks(self._changed, self._models, scheduler, self._available, clock)
        self._lines = LineLimit(clock, lines=1, window_s=_LOGGED_EVERY_S)
        """What is logged of batches that fail."""
        self._warm = list(slots)
        self._stopped = False
        names = "+".join(models)
        self._threads = [
            threading.Thread(target=self._work, args=(s,), name=f"{names}-stream-{s}", daemon=True)
            for s in range(streams)
        ]

    # What the event loop's thread calls

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; results are posted to ``loop``."""
        self._completions.bind(loop)
        for thread in self._threads:
            thread.start()

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Serve one more model, under a key that was not used before; messages show its name.

        Where slots share nothing, streams warm it up first: :meth:`is_warm`. DrainingError if the
        executor was stopped.
        """
        with self._lock:
            if self._stopped:
                raise copy_of(self._available.refusal or DrainingError("the engine is closed"))
            self._scheduler.add(key, model.scheduler, weight=model.options.weight)
            self._models[key] = ModelRuntime(key, name, model, self._completions, self._clock)
            if not self._backend.on_cpu:
                for stream in range(self.health.streams):
                    self._checks.keep_off(stream, key)
            self._changed.notify_all()

    def is_warm(self, key: str) -> bool:
        """Return whether streams run a model that was added; raises why none can."""
        with self._lock:
            if (refusal := self._available.refusals.get(key)) is not None:
                raise copy_of(refusal)
            return self._available.is_warm(key)

    def is_idle(self, key: str) -> bool:
        """Return whether no request and no audit of a model is in flight.

        Audits that no stream can run any more do not count.
        """
        with self._lock:
            model = self._models[key]
            if model.table.awaited or self._scheduler.runs(key):
                return False
            return not model.scheduler.busy or key in self._available.refusals

    def remove(self, key: str) -> CountersSnapshot:
        """Forget a model that is idle, and return its last counts."""
        with self._lock:
            model = self._models[key]
            assert not model.table.awaited, f"{model.name} has requests in flight"
            self._scheduler.remove(key)
            del self._models[key]
            self._available.forget(key)
            return model.snapshot()

    def admit(self, model: str, samples: int, slack_s: float, priority: int) -> None:
        """Refuse, by QueueFullError, what an overloaded model had better not be asked."""
        runtime = self._models[model]
        if not runtime.scheduler.overloaded:  # a glance without the lock: nearly always
            return
        with self._lock:
            try:
                runtime.scheduler.admit(samples, slack_s, priority, self._clock())
            except SchedulerFullError as error:
                runtime.table.counters.failed["rejected"] += samples
                raise QueueFullError(
                    f"{runtime.name}: overloaded: {error}; send it later, with more time, or to "
                    "another server"
                ) from error

    def submit(self, model: str, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: The queue has no room for it.
            DrainingError: The executor was stopped.
            BackendError: It is out of service.
        """
        runtime = self._models[model]
        with self._lock:
            given_s = request.deadline_s - request.submitted_s
            due_s = request.deadline_s - min(self._completions.delay_s, 0.5 * max(given_s, 0.0))
            submission = Submission(
                request.number, request.count, due_s, request.priority, request.batch_key
            )
            refused = self._available
            if (refusal := refused.refusal or refused.refusals.get(model)) is not None:
                raise copy_of(refusal)
            try:
                outcome = self._scheduler.submit(model, submission, request.submitted_s)
            except SchedulerFullError as error:
                runtime.follow(error.outcome)
                runtime.table.counters.failed["rejected"] += request.count
                raise QueueFullError(
                    f"{runtime.name}: the queue is full: {error}; try again later, or send less"
                ) from error
            runtime.follow(outcome)
            runtime.table.accept(request)
            self._announce()

    def cancel(self, model: str, number: int) -> None:
        """Withdraw a request; nothing is posted for it any more."""
        with self._lock:
            if (runtime := self._models.get(model)) is None:  # removed: the request has ended
                return
            request = runtime.table.get(number)
            if request is not None:
                request.withdrawn = True
                runtime.cancel(number)
            runtime.table.forget(number)

    def hot_swap(self, model: str, deployment: Deployment, chosen: PlanPolicy) -> None:
        """Start batches under another deployment from now on; what runs is not disturbed.

        The deployment is prepared and warmed up; ``chosen`` is made for its operating points and
        its placement.
        """
        with self._lock:
            self._models[model].hot_swap(deployment, chosen)
            self._available.take_requests()  # streams that were given up on may not be needed now
            self._changed.notify_all()

    def placed(self, model: str) -> PlacedPlan | None:
        """Give the placed plan in force, where streams differ."""
        return self._models[model].scheduler.placed

    def open_old_plans(self, model: str) -> None:
        """Let any stream run what still waits under older plans: theirs may never be back."""
        with self._lock:
            self._models[model].open_old_plans()
            self._changed.notify_all()

    def plans(self, model: str) -> frozenset[int]:
        """Give the numbers of the deployments that something still runs or waits under."""
        with self._lock:
            return self._models[model].scheduler.plans

    def deployment(self, model: str) -> Deployment:
        """Give the deployment in force for what starts now."""
        return self._models[model].current

    def flush(self, model: str | None = None) -> None:
        """Dispatch what waits for a model, or for any, at once, from now on."""
        with self._lock:
            self._scheduler.flush(model)
            self._changed.notify_all()

    def serves(self, model: str) -> bool:
        """Whether requests of a model are taken, and streams are there to run every stage of it."""
        return self._available.serves(model)

    @property
    def live(self) -> bool:
        """Whether a model is served, or may yet be: not once none was for too long."""
        return self._available.live

    def pending(self) -> int:
        """Count the requests that somebody waits for."""
        with self._lock:
            return sum(model.table.awaited for model in self._models.values())

    def snapshot(self, model: str) -> CountersSnapshot:
        """Give all counts of a model, of one instant."""
        with self._lock:
            return self._models[model].snapshot()

    def stop(self) -> None:
        """Fail what is unfinished, then wait for the threads to end. Blocks, within limits."""
        with self._lock:
            self._stopped = self._available.stopped = True
            self._refuse(DrainingError("stopped before the answer"), "stopped")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_LIMIT_S)
            if thread.is_alive():
                _log.error("%s: a stage still runs after %g s", thread.name, _JOIN_LIMIT_S)
        for slot in self._warm:
            slot.close()

    # The life of a stream, in its thread

    def _work(self, stream: int) -> None:
        """Start the stream, again and again where it fails, until stopped."""
        suspected = False
        try:
            while not self._stopped:
                try:
                    suspected = self._live(stream, suspected=suspected)
                except StartFailedError as failure:
                    suspected = True
                    self._pause(stream, failure.__cause__ or failure)
        except Exception as error:  # those who wait must be told
            _log.exception("%s: out of service", threading.current_thread().name)
            with self._lock:
                self._stopped = True
                self._available.end()
                self._refuse(OutOfServiceError(f"out of service: {error!r}"), "backend_error")

    def _live(self, stream: int, *, suspected: bool) -> bool:
        """Run from one start of the stream to the next; says whether it is suspected then.

        StartFailedError if it cannot start.
        """
        slot, warm = self._open_slot(stream)
        try:
            cold = not (warm or self._backend.on_cpu)
            self._checks.start(stream, slot, suspected=suspected, cold=cold)
            return self._serve(stream, slot)
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
            return self._open_slot_of(stream), False
        except Exception as error:
            raise StartFailedError from error

    def _pause(self, stream: int, error: BaseException) -> None:
        """Take a stream that cannot start out of service for a while."""
        with self._lock:
            pause_s = self.health.start_failed(stream)
            _log.warning("stream %d cannot start, again in %g s: %s", stream, pause_s, error)
            self._scheduler.suspend(stream)
            given_up = any(map(self._available.is_given_up, self._models))
            if self._available.refusal is None and given_up:
                reason = f"out of service, no stream can start: {error}"
                self._refuse(OutOfServiceError(reason), "backend_error")
            self._available.note()
            self._changed.notify_all()  # what failed here and was to run elsewhere may go nowhere
        self._rest(pause_s)

    def _rest(self, pause_s: float) -> None:
        with self._lock:
            until_s = self._clock() + pause_s
            while not self._stopped and (left_s := until_s - self._clock()) > 0.0:
                self._ended.wait(left_s)

    def _serve(self, stream: int, slot: Slot) -> bool:
        """Run stages until the stream has to start anew, or is stopped; says which."""
        carry: TensorBatch | None = None
        while not self._stopped:
            task = self._next_task(stream, amid_batch=carry is not None)
            if task is None:
                self._checks.try_again(stream, slot)
                continue
            try:
                carry = self._run_stage(stream, slot, task, carry)
            except _InterruptedError:
                return True
            except Exception as error:
                carry = None
                try:
                    if self.health.failed(stream, self._clock(), task[0].key):
                        self._checks.check(stream, slot, task[0])
                except NotWellError:
                    self._give_back(stream, task, error)
                    return True
                self._give_back(stream, task, error)
            del task  # a model that was removed is not to be kept by a stream that waits
        return False

    def _next_task(self, stream: int, *, amid_batch: bool) -> _Task | None:
        """Wait for the scheduler to have something for this stream.

        ``None`` if it is stopped, or if a model that it left out is to be tried again, which would
        overwrite the tensors of a batch.
        """
        with self._lock:
            while not self._stopped:
                due_s = math.inf if amid_batch else self.health.due_s(stream)
                if due_s <= self._clock():
                    break
                task = None
                decision = self._scheduler.next(stream, self._clock())
                if isinstance(decision, Run):
                    model = self._models[decision.model]
                    task = (model, decision, model.take_pieces(decision))
                for outcome in decision.outcomes:
                    self._models[outcome.model].follow(outcome)
                if task is not None:
                    if self._scheduler.waiting:  # another stream may start, or keep time
                        self._announce()
                    return task
                timeout_s = min(due_s - self._clock(), _LONGEST_WAIT_S)
                if isinstance(decision, Wait):
                    timeout_s = min(max(decision.until_s - self._clock(), 0.0), timeout_s)
                self._changed.wait(timeout_s)
            return None

    def _run_stage(
        self, stream: int, slot: Slot, task: _Task, carry: TensorBatch | None
    ) -> TensorBatch | None:
        """Run one stage and do what follows; gives the batch of the rows that run on here."""
        model, run, _ = task
        batch = self._batch(slot, task, carry)
        started_s = self._clock()
        try:
            step = model.pipeline_of(run).step(slot, run.stage, batch)
        except WorkerLostError as error:
            self._interrupt(stream, slot, task, batch, error)
            raise _InterruptedError from error
        step, runs_on = model.observe(run, step)
        with self._lock:
            now_s = self._clock()
            outcome = self._scheduler.update(stream, step.exited, now_s, runs_on)
            try:
                kept = model.conclude(run, step, outcome, now_s - started_s)
            except Exception as error:  # its rows have left the scheduler: tell those who wait
                model.abandon(run, BackendError(repr(error)))
                raise
            if len(outcome.released):
                self.health.succeeded(stream, model.key)
            self._announce()
        if not len(outcome.survivors):
            return None
        assert step.result.carry is not None
        if kept is None:
            return slot.select(step.result.carry, outcome.survivors)
        try:
            kept.set_result(slot.buffer(step.result.carry, outcome.survivors))
        except Exception as error:  # of those that will take the tensors, not of this stream
            kept.set_exception(error)
        return None

    def _batch(self, slot: Slot, task: _Task, carry: TensorBatch | None) -> TensorBatch:
        """Bring together what a stage takes: buffered pieces, new inputs, or what is carried on."""
        model, run, pieces = task
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
        self, stream: int, slot: Slot, task: _Task, batch: TensorBatch, error: WorkerLostError
    ) -> None:
        """Have a batch resumed whose worker was lost: what its stage was to run on is kept."""
        model, run, _ = task
        _log.warning("%s: stage %d: %s", model.name, run.stage, error)
        with self._lock:
            kept = model.interrupt(self._scheduler.interrupted(stream, self._clock()), error)
            self._scheduler.suspend(stream)
            self.health.lost(stream)
            self._available.note()
            self._changed.notify_all()
        if kept is None:
            return
        try:
            kept.set_result(slot.buffer(batch, all_rows(len(batch))))
        except Exception as failure:  # of those that will take the tensors
            kept.set_exception(failure)

    def _give_back(self, stream: int, task: _Task, error: Exception) -> None:
        """Give a failed batch back to the scheduler, and fail what has no second chance."""
        model, run, _ = task
        failure = error if isinstance(error, EngineError) else BackendError(repr(error))
        now_s = self._clock()
        suffix = self._lines.admit((model.name, run.stage, type(error)))
        if suffix is not None:
            trace = None if failure is error else error
            _log.error("%s: stage %d: %s%s", model.name, run.stage, error, suffix, exc_info=trace)
        with self._lock:
            runs = self.health.serves(stream, model.key) and self.health.vouches(
                stream, now_s, model.key
            )
            if run.samples.alone and runs:
                failure = type(failure)(
                    f"the model failed on this request's own data, which was alone in its batch: "
                    f"{failure}"
                )
            model.fail(self._scheduler.failed(stream, now_s), failure)
            self._changed.notify_all()

    def _refuse(self, refusal: EngineError, cause: str) -> None:
        """Take no more requests, and fail the open ones; the lock is held."""
        self._available.refusal = refusal
        for model in self._models.values():
            model.fail_all(refusal, cause)
        self._changed.notify_all()
        self._ended.notify_all()
