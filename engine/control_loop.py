"""The loop that drives the controllers of an engine, beside the streams.

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
from typing import Any, Final

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify.decision import NEVER
from offramp.engine.control.controller import ControlStatus, Job
from offramp.engine.control_state import load_state, save_state
from offramp.engine.executor import Executor
from offramp.engine.job_runner import JobError, JobRunner
from offramp.engine.options import ModelOptions
from offramp.engine.scheduling import make_policy
from offramp.engine.served_model import ModelControl, ServedModel

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.05
"""Between two looks: an alarm is at most this late, and a look costs little beside it."""
_SAVE_EVERY: Final = 200
"""Looks between two savings of a controller's state: ten seconds."""
_STOP_S: Final = 10.0


@dataclass(slots=True, kw_only=True)
class _Loop:
    """The state of one model in the loop."""

    name: str
    options: ModelOptions
    control: ModelControl
    job: tuple[Job, Future[Any]] | None = None
    building: tuple[tuple[int, ...], Future[None]] | None = None
    refused: set[tuple[int, ...]] = field(default_factory=set)
    """Sets of exits that could not be put in use."""
    status: ControlStatus
    """As of the last look: asking for it need not wait for one."""
    looks: int = 0
    saved_version: int
    """Of the policy in the state kept: what an alarm took back must not come back."""
    failing: bool = False


class ControlLoop:
    """Shows controllers what was observed and puts their policies in force, until stopped."""

    def __init__(
        self,
        executor: Executor,
        models: Mapping[str, ServedModel],
        *,
        jobs: JobRunner | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        """Prepare; :meth:`start` starts the thread.

        Args:
            executor: Runs the models.
            models: By name; those without control are left alone.
            jobs: Runs tunings; closed with the loop.
            period_s: Between two looks.
        """
        self._executor = executor
        self._jobs = jobs or JobRunner()
        self._period_s = period_s
        self._loops = {
            name: _Loop(
                name=name,
                options=model.options,
                control=model.control,
                status=model.control.controller.status(),
                saved_version=model.control.controller.policy.version,
            )
            for name, model in models.items()
            if model.control is not None
        }
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="assembling")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="control", daemon=True)

    def start(self) -> None:
        """Restore what was kept of the controllers, and start the thread."""
        for loop in self._loops.values():
            self._restore(loop)
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop, and keep what the controllers know; blocks for seconds at most."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)
        for loop in self._loops.values():
            self._save(loop)
            loop.control.deployments.cancel()
        self._jobs.close()
        self._builder.shutdown(wait=True, cancel_futures=True)

    def status(self, model: str) -> ControlStatus:
        """Give what a controller knows, as of the last look."""
        return self._loops[model].status

    def look(self) -> None:
        """Look at every model once; what the thread does all the time."""
        for name, loop in self._loops.items():
            try:
                self._look_at(loop)
            except Exception:  # serving goes on as it is, and whoever operates it must know
                if not loop.failing:
                    _log.exception("%s: control failed; its policy stays as it is", name)
                loop.failing = True
            else:
                loop.failing = False

    def _look_at(self, loop: _Loop) -> None:
        controller = loop.control.controller
        self._observe(loop)
        self._compute(loop)
        loop.status = controller.status()
        self._put_in_force(loop)
        loop.looks += 1
        version = controller.policy.version
        if version != loop.saved_version or loop.looks % _SAVE_EVERY == 0:
            loop.saved_version = version
            self._save(loop)

    def _work(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.look()

    def _observe(self, loop: _Loop) -> None:
        """Hand the controller what was seen since the last look."""
        control = loop.control
        while (seen := control.recorder.take()) is not None:
            control.controller.observe(seen)
        control.recorder.audit_probability = control.controller.audit_probability
        for event in control.controller.take_events():
            level = logging.WARNING if event.warning else logging.INFO
            _log.log(level, "%s: %s", loop.name, event.text)

    def _compute(self, loop: _Loop) -> None:
        """Start the job that the controller wants, or give it what came of the last one."""
        controller, name = loop.control.controller, loop.name
        if loop.job is not None and loop.job[1].done():
            (job, future), loop.job = loop.job, None
            try:
                controller.finish(job, future.result())
            except JobError as error:
                _log.warning("%s: %s failed: %s", name, job.purpose, error)
                controller.finish(job, None)
        if loop.job is None and (wanted := controller.take_job()) is not None:
            try:
                loop.job = (wanted, self._jobs.submit(wanted))
            except (JobError, TypeError) as error:
                _log.error("%s: %s cannot be computed: %s", name, wanted.purpose, error)
                controller.finish(wanted, None)

    def _put_in_force(self, loop: _Loop) -> None:
        """Have batches start under the controller's policy, as soon as its stages are there."""
        deployments, current = loop.control.deployments, self._executor.deployment(loop.name)
        wanted = loop.control.controller.policy
        if wanted == current.policy:
            return
        exits = tuple(active.exit for active in wanted.active)
        if deployments.prepared(exits):
            self._hot_swap(loop, wanted)
            return
        self._build(loop, exits)
        meanwhile = with_exits(wanted, current.plan.exits)
        if meanwhile is not None and meanwhile != current.policy:
            self._hot_swap(loop, meanwhile)

    def _build(self, loop: _Loop, exits: tuple[int, ...]) -> None:
        """Have the stages for some exits prepared, one set at a time."""
        if loop.building is not None:
            built, future = loop.building
            if not future.done():
                return
            loop.building = None
            error = future.exception()
            if error is not None:
                loop.refused.add(built)
                _log.error("%s: exits %s cannot be put in use: %s", loop.name, built, error)
        if exits not in loop.refused:
            prepare: Callable[[tuple[int, ...]], None] = loop.control.deployments.prepare
            loop.building = (exits, self._builder.submit(prepare, exits))

    def _hot_swap(self, loop: _Loop, policy: ExitPolicy) -> None:
        before = self._executor.deployment(loop.name)
        deployment = loop.control.deployments.make(policy, before)
        options, streams = loop.options, self._executor.health.streams
        try:
            scheduling = make_policy(
                options.scheduling, deployment.points, options.max_batch_size, streams
            )
        except ValueError as error:
            exits = tuple(active.exit for active in policy.active)
            if exits not in loop.refused:
                loop.refused.add(exits)
                _log.error("%s: exits %s do not suit scheduling: %s", loop.name, exits, error)
            return
        self._executor.hot_swap(loop.name, deployment, scheduling)

    def _restore(self, loop: _Loop) -> None:
        """Go on from what was kept, if it was kept for the same."""
        if loop.control.state_path is None:
            return
        state = load_state(loop.control.state_path, fingerprint=loop.control.fingerprint)
        if state is None:
            return
        try:
            loop.control.controller.restore(state)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s: %s is of no use: %s", loop.name, loop.control.state_path.name, error)
            return
        _log.info("%s: goes on from %s", loop.name, loop.control.state_path.name)
        loop.status = loop.control.controller.status()
        loop.saved_version = loop.control.controller.policy.version

    def _save(self, loop: _Loop) -> None:
        if loop.control.state_path is None:
            return
        state = loop.control.controller.state()
        if state is not None:
            save_state(loop.control.state_path, state, fingerprint=loop.control.fingerprint)


def with_exits(policy: ExitPolicy, exits: tuple[int, ...]) -> ExitPolicy | None:
    """The policy on other exits, if it gives the same answers there; else ``None``.

    Exits that it lacks run in shadow mode; its own that are missing must not answer anything.
    """
    thresholds = {active.exit: active.threshold for active in policy.active}
    if any(t < NEVER for index, t in thresholds.items() if index not in exits):
        return None
    active = tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits)
    return ExitPolicy(version=policy.version, active=active, promise=policy.promise)
