"""The executor of a device: through it, the event loop's thread uses the models and streams.

Each stream has its own thread (:mod:`.stream_thread`), for all models of the device. Schedulers,
open requests and counters are guarded by one lock, held for microseconds. The completion queue
passes completed requests to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from offramp.engine.common.errors import DrainingError, QueueFullError
from offramp.engine.common.line_limit import LineLimit
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.request_table import CompletionQueue, Request, copy_of
from offramp.engine.requests.statistics import CountersSnapshot
from offramp.engine.scheduling import (
    DeviceScheduler,
    PlacedPlan,
    SchedulerFullError,
    Submission,
)
from offramp.engine.scheduling.policies import PlanPolicy
from offramp.engine.serving.availability import Availability
from offramp.engine.serving.model_runtime import ModelRuntime
from offramp.engine.serving.stream_checks import ModelChecks
from offramp.engine.serving.stream_thread import LOGGED_EVERY_S, SharedByStreams, StreamThread
from offramp.engine.stages.backend_protocol import Backend, Slot

_log = logging.getLogger(__name__)

_JOIN_LIMIT_S = 10.0
"""Longest time in seconds that :meth:`Executor.stop` waits for a running stage."""


class Executor:
    """Runs models on the streams of one device; :meth:`start` starts their threads.

    The executor owns the scheduler, and ``slots`` [streams], which are open and warm for the
    streams' first starts. Models are identified by a key; the key of the models at the start is
    their name.
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
        """``open_slot`` opens the slot of a stream, if slots differ."""
        self._backend = backend
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._completions = CompletionQueue(clock)
        self._models = {
            name: ModelRuntime(name, name, model, self._completions, clock)
            for name, model in models.items()
        }
        """Models by key; the event loop's thread changes them, under the lock."""
        self._available = Availability(streams, self._models, clock)
        self.health = self._available.health
        """Health of the streams; only this executor changes it."""
        self._checks = ModelChecks(self._changed, self._models, scheduler, self._available, clock)
        placed = any(model.scheduler.placed is not None for model in models.values())
        self._shared = SharedByStreams(
            backend=backend,
            open_slot=open_slot or (lambda _stream: backend.open_slot()),
            warm_slots=dict(enumerate(slots)),
            scheduler=scheduler,
            models=self._models,
            available=self._available,
            checks=self._checks,
            changed=self._changed,
            announce=self._changed.notify_all if placed else self._changed.notify,
            ended=threading.Condition(self._lock),
            lines=LineLimit(clock, lines=1, window_s=LOGGED_EVERY_S),
            clock=clock,
        )
        self._threads = [StreamThread(s, "+".join(models), self._shared) for s in range(streams)]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; results are posted to ``loop``."""
        self._completions.bind(loop)
        for thread in self._threads:
            thread.start()

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Serve one more model, under a new key; messages show its name.

        If slots share nothing, each stream warms up the model first: see :meth:`is_warm`.
        DrainingError if the executor was stopped.
        """
        with self._lock:
            if self._available.stopped:
                raise copy_of(self._available.refusal or DrainingError("the engine is closed"))
            self._scheduler.add(key, model.scheduler, weight=model.options.weight)
            self._models[key] = ModelRuntime(key, name, model, self._completions, self._clock)
            if not self._backend.on_cpu:
                for stream in range(self.health.streams):
                    self._checks.require_warm_up(stream, key)
            self._changed.notify_all()

    def is_warm(self, key: str) -> bool:
        """Return whether streams run an added model; raise the reason if no stream can."""
        with self._lock:
            if (refusal := self._available.refusals.get(key)) is not None:
                raise copy_of(refusal)
            return self._available.is_warm(key)

    def is_idle(self, key: str) -> bool:
        """Return whether no request and no audit of a model is in flight.

        An audit does not count if no stream can run it any more.
        """
        with self._lock:
            model = self._models[key]
            if model.table.awaited or self._scheduler.runs(key):
                return False
            return not model.scheduler.busy or key in self._available.refusals

    def remove(self, key: str) -> CountersSnapshot:
        """Remove an idle model, and return its last counts."""
        with self._lock:
            model = self._models[key]
            assert not model.table.awaited, f"{model.name} has requests in flight"
            self._scheduler.remove(key)
            del self._models[key]
            self._available.forget(key)
            return model.snapshot()

    def admit(self, model: str, samples: int, slack_s: float, priority: int) -> None:
        """Raise QueueFullError if the model is overloaded and should not queue a request."""
        runtime = self._models[model]
        if not runtime.scheduler.overloaded:  # nearly always; checked without the lock
            return
        with self._lock:
            try:
                runtime.scheduler.admit(samples, slack_s, priority, self._clock())
            except SchedulerFullError as error:
                runtime.table.counters.reject(samples)
                raise QueueFullError(
                    f"{runtime.name}: overloaded: {error}; retry later, with more time, or on "
                    "another server"
                ) from error

    def submit(self, model: str, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: The request does not fit the queue.
            DrainingError: The executor was stopped.
            BackendError: The executor is out of service.
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
                runtime.table.counters.reject(request.count)
                raise QueueFullError(
                    f"{runtime.name}: the queue is full: {error}; try again later, or send less"
                ) from error
            runtime.follow(outcome)
            runtime.table.accept(request)
            self._shared.announce()

    def cancel(self, model: str, number: int) -> None:
        """Withdraw a request; its future is not resolved any more."""
        with self._lock:
            if (runtime := self._models.get(model)) is None:  # removed: the request has ended
                return
            if runtime.table.withdraw(number):
                runtime.cancel(number)
            runtime.table.forget(number)

    def hot_swap(self, model: str, deployment: Deployment, chosen: PlanPolicy) -> None:
        """Start batches under another deployment from now on; running batches are unaffected.

        The deployment must be prepared and warmed up; ``chosen`` must be made for its operating
        points and its placement.
        """
        with self._lock:
            self._models[model].hot_swap(deployment, chosen)
            self._available.take_requests()  # failed streams may not be needed now
            self._changed.notify_all()

    def placed(self, model: str) -> PlacedPlan | None:
        """Return the active placed plan, where streams differ."""
        return self._models[model].scheduler.placed

    def open_old_plans(self, model: str) -> None:
        """Allow any stream to run samples of older plans, whose own streams may never return."""
        with self._lock:
            self._models[model].open_old_plans()
            self._changed.notify_all()

    def plans(self, model: str) -> frozenset[int]:
        """Return the numbers of the deployments with running or waiting samples."""
        with self._lock:
            return self._models[model].scheduler.plans

    def deployment(self, model: str) -> Deployment:
        """Return the active deployment, for batches that start now."""
        return self._models[model].current

    def flush(self, model: str | None = None) -> None:
        """Dispatch samples of a model (or of all) immediately from now on, in any batch size."""
        with self._lock:
            self._scheduler.flush(model)
            self._changed.notify_all()

    def serves(self, model: str) -> bool:
        """Return whether a model accepts requests, and streams can run all its stages."""
        return self._available.serves(model)

    @property
    def live(self) -> bool:
        """True if a model is served, or was served until recently (:attr:`.Availability.live`)."""
        return self._available.live

    def pending(self) -> int:
        """Return the number of requests with a waiting caller."""
        with self._lock:
            return sum(model.table.awaited for model in self._models.values())

    def snapshot(self, model: str) -> CountersSnapshot:
        """Return all counts of a model at one time."""
        with self._lock:
            return self._models[model].snapshot()

    def stop(self) -> None:
        """Fail unfinished requests, then wait for the threads to end. Blocks, within limits."""
        with self._lock:
            self._available.stopped = True
            self._shared.refuse(DrainingError("stopped before the answer"), "stopped")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_LIMIT_S)
            if thread.is_alive():
                _log.error("%s: a stage still runs after %g s", thread.name, _JOIN_LIMIT_S)
        for slot in self._shared.warm_slots.values():
            slot.close()
