"""Drives the controllers of an engine, beside the streams.

One thread reads what was observed, a few dozen times a second and for all models, and puts new
policies in force. What takes long goes elsewhere: tunings to a process of their own
(:mod:`.job_runner`), stages for exits that were not in use to a thread that assembles and warms
them up. No stream ever waits for either: until a deployment is ready, batches start under the one
in force.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from offramp.bundle import NEVER, ActiveExit, ExitPolicy
from offramp.engine.control.controller import ControlStatus, Job
from offramp.engine.control_state import load_state, save_state
from offramp.engine.deployment import Deployment
from offramp.engine.executor import Executor
from offramp.engine.job_runner import JobError, JobRunner
from offramp.engine.options import ModelOptions
from offramp.engine.scheduling import make_policy
from offramp.engine.served_model import Observed

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.05
"""Between two looks: an alarm is at most this late, and a look costs little beside it."""
_SAVE_EVERY: Final = 200
"""Looks between two savings of a controller's state: ten seconds."""
_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A model to control."""

    name: str
    observed: Observed
    deployment: Deployment
    """In force."""
    options: ModelOptions
    streams: int
    state_path: Path | None = None
    """Where its controller's state is kept; ``None`` keeps none."""


@dataclass(slots=True, kw_only=True)
class _Control:
    """Where the control of a model stands."""

    model: Watched
    deployment: Deployment
    """In force."""
    job: tuple[Job, Future[Any]] | None = None
    building: tuple[tuple[int, ...], Future[None]] | None = None
    refused: set[tuple[int, ...]] = field(default_factory=set)
    """Sets of exits that could not be put in use."""
    status: ControlStatus
    """As of the last look: whoever asks need not wait for one."""
    looks: int = 0
    saved_version: int
    """Of the policy in the state kept: what an alarm took back must not come back."""
    failing: bool = False


class ControlLoop:
    """Watches models until it is stopped."""

    def __init__(
        self,
        executor: Executor,
        models: Mapping[str, Watched],
        *,
        jobs: JobRunner | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        """Prepare; :meth:`start` starts the thread.

        Args:
            executor: Runs the models.
            models: By name.
            jobs: Runs tunings; closed with the loop.
            period_s: Between two looks.
        """
        self._executor = executor
        self._jobs = jobs or JobRunner()
        self._period_s = period_s
        self._controls = {
            name: _Control(
                model=model,
                deployment=model.deployment,
                status=model.observed.controller.status(),
                saved_version=model.observed.controller.policy.version,
            )
            for name, model in models.items()
        }
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="assembling")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="control", daemon=True)

    def start(self) -> None:
        """Start watching."""
        for control in self._controls.values():
            self._restore(control)
        self._thread.start()

    def stop(self) -> None:
        """End, and keep what the controllers know; blocks for seconds at most."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)
        for control in self._controls.values():
            self._save(control)
            control.model.observed.deployments.cancel()
        self._jobs.close()
        self._builder.shutdown(wait=True, cancel_futures=True)

    def status(self, model: str) -> ControlStatus:
        """What a controller knows, as of the last look."""
        return self._controls[model].status

    def policy(self, model: str) -> ExitPolicy:
        """In force for what starts now."""
        return self._controls[model].deployment.policy

    def look(self) -> None:
        """Look at every model once; what the thread does all the time."""
        for name, control in self._controls.items():
            try:
                self._look_at(control)
            except Exception:  # serving goes on as it is, and whoever operates it must know
                if not control.failing:
                    _log.exception("%s: control failed; its policy stays as it is", name)
                control.failing = True
            else:
                control.failing = False

    def _look_at(self, control: _Control) -> None:
        controller = control.model.observed.controller
        self._observe(control)
        self._compute(control)
        control.status = controller.status()
        self._put_in_force(control)
        control.looks += 1
        version = controller.policy.version
        if version != control.saved_version or control.looks % _SAVE_EVERY == 0:
            control.saved_version = version
            self._save(control)

    def _work(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.look()

    def _observe(self, control: _Control) -> None:
        """Hand the controller what was seen since the last look."""
        observed = control.model.observed
        while (seen := observed.recorder.take()) is not None:
            observed.controller.observe(seen)
        observed.recorder.audit_probability = observed.controller.audit_probability
        for event in observed.controller.take_events():
            level = logging.WARNING if event.warning else logging.INFO
            _log.log(level, "%s: %s", control.model.name, event.text)

    def _compute(self, control: _Control) -> None:
        """Start the job that the controller wants, or give it what came of the last one."""
        controller, name = control.model.observed.controller, control.model.name
        if control.job is not None and control.job[1].done():
            (job, future), control.job = control.job, None
            try:
                controller.finish(job, future.result())
            except JobError as error:
                _log.warning("%s: %s failed: %s", name, job.purpose, error)
                controller.finish(job, None)
        if control.job is None and (wanted := controller.take_job()) is not None:
            try:
                control.job = (wanted, self._jobs.submit(wanted))
            except (JobError, TypeError) as error:
                _log.error("%s: %s cannot be computed: %s", name, wanted.purpose, error)
                controller.finish(wanted, None)

    def _put_in_force(self, control: _Control) -> None:
        """Have batches start under the controller's policy, as soon as its stages are there."""
        deployments = control.model.observed.deployments
        wanted = control.model.observed.controller.policy
        if wanted == control.deployment.policy:
            return
        exits = tuple(active.exit for active in wanted.active)
        if deployments.prepared(exits):
            self._succeed(control, wanted)
            return
        self._build(control, exits)
        meanwhile = with_exits(wanted, control.deployment.exits)
        if meanwhile is not None and meanwhile != control.deployment.policy:
            self._succeed(control, meanwhile)

    def _build(self, control: _Control, exits: tuple[int, ...]) -> None:
        """Have the stages for some exits prepared, one set at a time."""
        if control.building is not None:
            built, future = control.building
            if not future.done():
                return
            control.building = None
            error = future.exception()
            if error is not None:
                control.refused.add(built)
                _log.error(
                    "%s: exits %s cannot be put in use: %s", control.model.name, built, error
                )
        if exits not in control.refused:
            prepare: Callable[[tuple[int, ...]], None] = control.model.observed.deployments.prepare
            control.building = (exits, self._builder.submit(prepare, exits))

    def _succeed(self, control: _Control, policy: ExitPolicy) -> None:
        model = control.model
        deployment = model.observed.deployments.make(policy, control.deployment)
        options = model.options
        try:
            scheduling = make_policy(
                options.scheduling, deployment.points, options.max_batch_size, model.streams
            )
        except ValueError as error:
            exits = tuple(active.exit for active in policy.active)
            if exits not in control.refused:
                control.refused.add(exits)
                _log.error("%s: exits %s do not suit scheduling: %s", model.name, exits, error)
            return
        self._executor.succeed(model.name, deployment, scheduling)
        control.deployment = deployment

    def _restore(self, control: _Control) -> None:
        """Go on from what was kept, if it was kept for the same."""
        model = control.model
        if model.state_path is None:
            return
        state = load_state(model.state_path, fingerprint=model.observed.fingerprint)
        if state is None:
            return
        try:
            model.observed.controller.restore(state)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s: %s is of no use: %s", model.name, model.state_path.name, error)
            return
        _log.info("%s: goes on from %s", model.name, model.state_path.name)
        control.status = model.observed.controller.status()
        control.saved_version = model.observed.controller.policy.version

    def _save(self, control: _Control) -> None:
        model = control.model
        if model.state_path is None:
            return
        state = model.observed.controller.state()
        if state is not None:
            save_state(model.state_path, state, fingerprint=model.observed.fingerprint)


def with_exits(policy: ExitPolicy, exits: tuple[int, ...]) -> ExitPolicy | None:
    """The policy on other exits, if it gives the same answers there; else ``None``.

    Exits that it lacks look on; those of its own that are missing must not answer anything.
    """
    thresholds = {active.exit: active.threshold for active in policy.active}
    if any(t < NEVER for index, t in thresholds.items() if index not in exits):
        return None
    active = tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits)
    return ExitPolicy(version=policy.version, active=active, promise=policy.promise)
