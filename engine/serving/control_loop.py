"""The loop that drives the controllers of an engine, beside the streams.

One thread reads what was observed, a few dozen times a second and for all models, and puts new
policies in force. What takes long goes elsewhere: tunings to a process of their own
(:mod:`.common.job_runner`), stages for exits that were not in use to a thread that assembles and
warms them up, engines that such stages lack to ``eecompile build`` (:mod:`.engine_upgrades`). No
stream ever waits for any of them: until a deployment is ready, batches start under the one in
force.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify.decision import NEVER
from offramp.engine.common.job_runner import JobError, JobRunner
from offramp.engine.control.controller import Controller, ControlStatus, Job
from offramp.engine.models.devices import ModelSplits
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import ModelControl, ServedModel
from offramp.engine.serving.engine_upgrades import EngineUpgrades
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.periodic import FailureLog, PeriodicLoop
from offramp.engine.serving.swapping import put_in_force

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.05
"""Between two looks: an alarm is at most this late, and a look costs little beside it."""
_SAVE_EVERY: Final = 200
"""Looks between two savings of a controller's state: ten seconds."""
_PREPARED_S: Final = 10.0
"""How long :meth:`ControlLoop.remove` waits for stages that are prepared."""


@dataclass(slots=True, kw_only=True)
class _State:
    """The state of one model in the loop."""

    key: str
    """Of the executor."""
    name: str
    """For messages."""
    options: ModelOptions
    control: ModelControl
    keeps_file: bool = True
    """Whether the state file is this model's, if it has one."""
    retired: bool = False
    """Whether another model answers the requests to its name from now on."""
    job: tuple[Job, Future[Any]] | None = None
    building: tuple[tuple[int, ...], ModelSplits | None, Future[None]] | None = None
    """Exits whose stages are prepared, for these splits."""
    refused: set[tuple[int, ...]] = field(default_factory=set)
    """Sets of exits that could not be put in use."""
    renewing: tuple[frozenset[str], Future[None]] | None = None
    """Stages that are prepared again since engines that they lacked were built: these."""
    not_renewed: set[str] = field(default_factory=set)
    """Engines that were built, and could not be loaded."""
    status: ControlStatus
    """As of the last look: asking for it need not wait for one."""
    looks: int = 0
    saved_version: int
    """Of the policy in the state kept: what an alarm took back must not come back."""
    failures: FailureLog


class ControlLoop(PeriodicLoop):
    """Shows controllers what was observed and puts their policies in force, until stopped.

    Models without control are left alone. They are known by the executor's key; that of the first
    ones is their name. ``jobs`` runs tunings, ``upgrades`` has engines built; both are closed with
    the loop.
    """

    def __init__(
        self,
        executor: Executor,
        models: Mapping[str, ServedModel],
        *,
        jobs: JobRunner | None = None,
        upgrades: EngineUpgrades | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        super().__init__("control")
        self._executor = executor
        self._jobs = jobs or JobRunner()
        self._upgrades = upgrades or EngineUpgrades()
        self._upgrade_failures = FailureLog(_log, "engines cannot be built beside serving")
        self._period_s = period_s
        self._states = {
            name: _state_of(name, name, model.options, model.control)
            for name, model in models.items()
            if model.control is not None
        }
        """By key; changed by whoever has :attr:`_turn`."""
        self._turn = threading.Lock()
        """Held while the loop looks at all models, and while one is added or removed."""
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="assembling")

    def start(self) -> None:
        """Restore what was kept of the controllers, and start the thread."""
        for state in self._states.values():
            self._restore(state)
        self.begin()

    def stop(self) -> None:
        """Stop the loop, and keep what the controllers know; blocks for seconds at most."""
        self.end()
        self._upgrades.close()
        for state in self._states.values():
            self._save(state)
            self._end(state)
        self._jobs.close()
        self._builder.shutdown(wait=True, cancel_futures=True)

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Control one more model, which the executor has; blocks for moments.

        It goes on from what was kept of it. Where the model that it replaces keeps its state in the
        same file, that state is saved now, and the file is the new model's from here on.
        """
        if model.control is None:
            return
        with self._turn:
            state = _state_of(key, name, model.options, model.control)
            for other in self._sharing(state):
                other.failures.run(partial(self._observe, other))
                self._save(other)
                other.keeps_file = False
                _release(other)
            self._restore(state)
            self._states[key] = state

    def retire(self, key: str) -> None:
        """Build no more engines for a model whose name is another's now; returns at once."""
        if (state := self._states.get(key)) is not None:
            state.retired = True

    def remove(self, key: str, *, save: bool = True) -> None:
        """Stop to control a model, and keep what was learned; blocks for seconds at most.

        It must have nothing in flight, and the executor must still have it. Without ``save``, a
        model that used the same file before has it again.
        """
        with self._turn:
            if (state := self._states.pop(key, None)) is None:
                return
            if save:
                state.failures.run(partial(self._observe, state))
                self._save(state)
            self._end(state)
            for other in () if save else self._sharing(state):
                other.keeps_file = True
        if state.building is not None:
            wait([state.building[2]], _PREPARED_S)

    def _sharing(self, state: _State) -> list[_State]:
        """Return the states of other models that are kept in the same file."""
        file = state.control.state_file
        found = ((other, other.control.state_file) for other in self._states.values())
        return [
            s for s, kept in found if s is not state and file and kept and kept.path == file.path
        ]

    def _end(self, state: _State) -> None:
        """Release the file, and end what was begun for a model."""
        _release(state)
        state.control.deployments.cancel()

    def status(self, model: str) -> ControlStatus:
        """Give what a controller knows, as of the last look."""
        return self._states[model].status

    def pause_s(self) -> float:
        """Return the period."""
        return self._period_s

    def look(self) -> None:
        """Look at every model once."""
        self._upgrade_failures.run(self._upgrades.step)
        with self._turn:
            for state in self._states.values():
                state.failures.run(partial(self._look_at, state))

    def _look_at(self, state: _State) -> None:
        controller = state.control.controller
        self._observe(state)
        self._compute(state)
        state.status = state.control.status()
        self._put_in_force(state)
        if not state.retired:
            self._upgrade(state)
        state.looks += 1
        version = controller.policy.version
        if version != state.saved_version or state.looks % _SAVE_EVERY == 0:
            state.saved_version = version
            self._save(state)

    def _observe(self, state: _State) -> None:
        control = state.control
        while (seen := control.recorder.take()) is not None:
            control.controller.observe(seen)
        control.recorder.audit_probability = control.controller.audit_probability
        for event in control.controller.take_events():
            level = logging.WARNING if event.warning else logging.INFO
            _log.log(level, "%s: %s", state.name, event.text)

    def _compute(self, state: _State) -> None:
        """Start the job that the controller wants, or give it what came of the last one."""
        controller, name = state.control.controller, state.name
        if state.job is not None and state.job[1].done():
            (job, future), state.job = state.job, None
            try:
                controller.finish(job, future.result())
            except JobError as error:
                _log.warning("%s: %s failed: %s", name, job.purpose, error)
                controller.finish(job, None)
        if state.job is None and (wanted := controller.take_job()) is not None:
            try:
                state.job = (wanted, self._jobs.submit(wanted))
            except (JobError, TypeError) as error:
                _log.error("%s: %s cannot be computed: %s", name, wanted.purpose, error)
                controller.finish(wanted, None)

    def _put_in_force(self, state: _State) -> None:
        """Have batches start under the controller's policy, as soon as its stages are there."""
        deployments = state.control.deployments
        wanted = state.control.controller.policy
        exits = tuple(active.exit for active in wanted.active)
        with deployments.swapping:  # splits change meanwhile, and with them what is prepared
            current = self._executor.deployment(state.key)
            if wanted == current.policy:
                return
            if deployments.prepared(exits):
                self._hot_swap(state, wanted)
                return
            self._build(state, exits)
            meanwhile = with_exits(wanted, current.plan.exits)
            if meanwhile is not None and meanwhile != current.policy:
                self._hot_swap(state, meanwhile)

    def _build(self, state: _State, exits: tuple[int, ...]) -> None:
        """Have the stages for some exits prepared, one set at a time."""
        splits = state.control.deployments.splits
        if state.building is not None:
            built, for_splits, future = state.building
            if not future.done():
                return
            state.building = None
            error = future.exception()
            if error is not None and for_splits is splits:  # else they are tried for the new ones
                state.refused.add(built)
                _log.error("%s: exits %s cannot be put in use: %s", state.name, built, error)
        if exits not in state.refused:
            prepare: Callable[[tuple[int, ...]], None] = state.control.deployments.prepare
            state.building = (exits, splits, self._builder.submit(prepare, exits))

    def _hot_swap(self, state: _State, policy: ExitPolicy) -> None:
        deployments, scheduling = state.control.deployments, state.options.scheduling
        try:
            put_in_force(self._executor, state.key, deployments, policy, scheduling)
        except ValueError as error:
            exits = tuple(active.exit for active in policy.active)
            if exits not in state.refused:
                state.refused.add(exits)
                _log.error("%s: exits %s do not suit scheduling: %s", state.name, exits, error)

    def _upgrade(self, state: _State) -> None:
        """Take engines into use that were built since for stages which run as chains."""
        if state.renewing is not None:
            units, future = state.renewing
            if not future.done():
                return
            state.renewing = None
            if (error := future.exception()) is not None:
                state.not_renewed |= units
                _log.error("%s: new engines cannot be put in use: %s", state.name, error)
                return
            _log.info("%s: new engines run %s", state.name, ", ".join(sorted(units)))
            self._hot_swap(state, self._executor.deployment(state.key).policy)
        current = self._executor.deployment(state.key)
        missing = [m for m in current.pipeline.missing if m.unit not in state.not_renewed]
        if self._upgrades.look(state.name, missing):
            units = frozenset(engine.unit for engine in missing if engine.is_built())
            renew: Callable[[tuple[int, ...]], None] = state.control.deployments.renew
            state.renewing = (units, self._builder.submit(renew, current.plan.exits))

    def _restore(self, state: _State) -> None:
        """Go on from what was kept, if it was kept for the same."""
        control, file = state.control, state.control.state_file
        kept = None if file is None else file.load(control.fingerprint)
        if file is None or kept is None:
            return
        try:
            rehearse(control.controller, kept)
            control.controller.restore(kept)
        except Exception as error:  # whatever a file holds, it must not stop the start
            found = f"{type(error).__name__}: {error}"
            _log.warning("%s: %s is of no use (%.200s); starting afresh", state.name, file, found)
            return
        _log.info("%s: goes on from %s", state.name, file)
        state.status = control.status()
        state.saved_version = control.controller.policy.version

    def _save(self, state: _State) -> None:
        """Keep what the controller knows, if it knows anything that is worth it."""
        control = state.control
        if control.state_file is None or not state.keeps_file:
            return
        learned = control.controller.state()
        if learned is not None:
            control.state_file.save(learned, control.fingerprint)


def _release(state: _State) -> None:
    """Leave the state file to the next server, or to the next model at the same path."""
    if state.control.state_file is not None:
        state.control.state_file.release()


def _state_of(key: str, name: str, options: ModelOptions, control: ModelControl) -> _State:
    """Return the state of a model that has not been looked at."""
    return _State(
        key=key,
        name=name,
        options=options,
        control=control,
        status=control.status(),
        saved_version=control.controller.policy.version,
        failures=FailureLog(_log, "%s: control failed; its policy stays as it is", name),
    )


def rehearse(controller: Controller, kept: Mapping[str, Any]) -> None:
    """Restore a state on a copy of the controller, and look at all that the loop reads of it.

    So a state that is refused halfway, or makes what cannot be read, leaves the controller as new.
    """
    trial = copy.deepcopy(controller)
    trial.restore(kept)
    trial.status()
    trial.state()
    if not 0 < trial.audit_probability <= 1:
        raise ValueError(f"the audit probability would be {trial.audit_probability}")
    if trial.policy.version < controller.policy.version:
        raise ValueError(f"policy {trial.policy.version} is older than {controller.policy.version}")


def with_exits(policy: ExitPolicy, exits: tuple[int, ...]) -> ExitPolicy | None:
    """The policy on other exits, if it gives the same answers there; else ``None``.

    Exits that it lacks run in shadow mode; its own that are missing must not answer anything.
    """
    thresholds = {active.exit: active.threshold for active in policy.active}
    if any(t < NEVER for index, t in thresholds.items() if index not in exits):
        return None
    active = tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits)
    return ExitPolicy(version=policy.version, active=active, promise=policy.promise)
