"""Checks of models on streams, with known-good batches.

A model that fails on a stream while others run there is excluded from that stream until it passes.
If slots share nothing, an added model is kept off each stream until it is warmed up there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from offramp.engine.common.errors import OutOfServiceError
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.served_model import ServedModel
from offramp.engine.scheduling import DeviceScheduler
from offramp.engine.serving.availability import Availability
from offramp.engine.serving.model_runtime import ModelRuntime
from offramp.engine.stages.backend_protocol import Slot

_log = logging.getLogger(__name__)

KnownGoodRun: TypeAlias = Callable[[ServedModel, Slot, Deployment], None]
""":meth:`.ServedModel.probe` or :meth:`.ServedModel.warm_up`."""


class StartFailedError(Exception):
    """A stream cannot start; the cause is the reason."""


class UnhealthyStreamError(Exception):
    """A stream failed at a known-good batch, and must restart."""


class ModelChecks:
    """Decides which models each stream runs; called by the streams' threads.

    ``changed`` is the executor's condition; the executor owns the other arguments, too.
    """

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, ModelRuntime],
        scheduler: DeviceScheduler,
        available: Availability,
        clock: Callable[[], float],
    ) -> None:
        self._lock = self._changed = changed
        self._models = models
        self._scheduler = scheduler
        self._available = available
        self._health = available.health
        self._clock = clock

    def start(self, stream: int, slot: Slot, *, suspected: bool, cold: bool) -> None:
        """Put a stream into service for all models that pass; StartFailedError if none passes.

        A ``suspected`` slot runs known-good batches first; a ``cold`` slot is warmed up.
        """
        with self._lock:
            models = dict(self._models)  # others may be added later
        broken: dict[str, Exception] = {}
        if suspected:
            broken = run_each(ServedModel.probe, models, slot)
        if cold:
            broken |= run_each(ServedModel.warm_up, models, slot)
        with self._lock:
            self._health.started(stream, restarted=suspected)
            self._scheduler.resume(stream)
            for key in models.keys() & self._models.keys() - broken.keys():
                self._health.model_recovered(stream, key)
                if suspected:
                    self._health.passed(stream, self._clock(), key)
            self.leave_out(stream, broken)
            if cold:
                for key in self._models.keys() - models.keys():
                    self.require_warm_up(stream, key)
            self._available.take_requests()

    def check(self, stream: int, slot: Slot, model: ModelRuntime) -> None:
        """Run known-good batches of the model that failed on a suspected slot.

        If the model fails and another model passes, the slot excludes the failing model. If no
        model passes, UnhealthyStreamError is raised. So bad requests do not restart a slot, which
        would have to warm up again.
        """
        failure = failure_of(ServedModel.probe, model, slot)
        with self._lock:
            others = [
                other
                for key, other in self._models.items()
                if other is not model and self._health.serves(stream, key)
            ]
        if failure and all(failure_of(ServedModel.probe, other, slot) for other in others):
            raise UnhealthyStreamError from failure
        with self._lock:
            if failure:
                self.leave_out(stream, {model.key: failure})
            else:
                self._health.passed(stream, self._clock(), model.key)

    def require_warm_up(self, stream: int, key: str) -> None:
        """Require a stream to warm up a model before running it; the lock is held."""
        self._health.model_added(stream, key, self._clock())
        self._scheduler.suspend(stream, key)

    def leave_out(self, stream: int, failures: Mapping[str, Exception]) -> None:
        """Exclude models from a stream until they pass there; the lock is held."""
        refusals = self._available.refusals
        for key, error in failures.items():
            if (model := self._models.get(key)) is None:
                continue  # removed in the meantime
            pause_s = self._health.model_failed(stream, key, self._clock())
            told = "stream %d: %s fails at a known-good batch, again in %g s: %s"
            _log.warning(told, stream, model.name, pause_s, error)
            self._scheduler.suspend(stream, key)
            if key not in refusals and self._available.is_given_up(key, key):
                reason = f"{model.name}: out of service, no stream can run it: {error}"
                refusals[key] = OutOfServiceError(reason)
                model.fail_all(refusals[key], "backend_error")
        if failures:
            self._available.note()
            self._changed.notify_all()

    def try_again(self, stream: int, slot: Slot) -> None:
        """Run known-good batches of the models that a stream excluded, if they are due.

        Models that were added since the stream started are warmed up.
        """
        with self._lock:
            due = [
                (self._models[key], self._health.is_cold(stream, key, tried=True))
                for key in self._health.due(stream, self._clock())
            ]
        for model, cold in due:
            run = ServedModel.warm_up if cold else ServedModel.probe
            failure = failure_of(run, model, slot)
            with self._lock:
                if failure:
                    self.leave_out(stream, {model.key: failure})
                elif model.key in self._models:
                    self._health.model_recovered(stream, model.key)
                    self._scheduler.resume(stream, model.key)
                    self._available.take_requests()
                    self._changed.notify_all()


def run_each(
    run: KnownGoodRun, models: Mapping[str, ModelRuntime], slot: Slot
) -> dict[str, Exception]:
    """Run known-good batches of every model, and return the errors of those that fail.

    StartFailedError if all fail.
    """
    failures = {key: failure_of(run, model, slot) for key, model in models.items()}
    found = {key: failure for key, failure in failures.items() if failure is not None}
    if models and len(found) == len(models):
        raise StartFailedError from next(iter(found.values()))
    return found


def failure_of(run: KnownGoodRun, runtime: ModelRuntime, slot: Slot) -> Exception | None:
    """Run a model's known-good batch on a slot, and return the error that it raises."""
    try:
        run(runtime.model, slot, runtime.current)
    except Exception as error:
        return error
    return None
