"""The loop that drives the controllers of an engine, in parallel with the streams.

One thread reads observations, a few dozen times per second and for all models, and activates new
policies. Slow work runs elsewhere. Tuning runs in its own process (:mod:`.common.job_runner`).
Stages for newly used exits are assembled and warmed up in a thread. Missing engines of such stages
are built by ``eecompile build`` (:mod:`.engine_upgrades`). No stream ever waits for this work:
until a deployment is ready, batches start under the active deployment.
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
from offramp.engine.serving.swapping import activate

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.05
"""Seconds between two polls of the controllers: the longest delay of an alarm. A poll takes much
less time."""
_SAVE_EVERY: Final = 200
"""Number of polls between two saves of a controller's state: ten seconds."""
_PREPARED_S: Final = 10.0
"""Longest time in seconds that :meth:`ControlLoop.remove` waits for stages in preparation."""


@dataclass(slots=True, kw_only=True)
class _State:
    """The state of one model in the loop."""

    key: str
    """Key of the model in the executor."""
    name: str
    """Name of the model in messages."""
    options: ModelOptions
    control: ModelControl
    keeps_file: bool = True
    """True if the state file, if any, belongs to this model."""
    retired: bool = False
    """True if another model answers requests to its name from now on."""
    job: tuple[Job, Future[Any]] | None = None
    building: tuple[tuple[int, ...], ModelSplits | None, Future[None]] | None = None
    """Exits whose stages are being prepared, and the splits for which they are prepared."""
    refused: set[tuple[int, ...]] = field(default_factory=set)
    """Sets of exits that could not be activated."""
    renewing: tuple[frozenset[str], Future[None]] | None = None
    """Newly built engines, for which stages are being prepared again."""
    not_renewed: set[str] = field(default_factory=set)
    """Engines that were built, and could not be loaded."""
    status: ControlStatus
    """Status at the last poll, available without waiting."""
    looks: int = 0
    saved_version: int
    """Version of the policy in the saved state: a policy that an alarm revoked must not return."""
    failures: FailureLog


class ControlLoop(PeriodicLoop):
    """Passes observations to controllers and activates their policies, until stopped.

    Models without control are ignored. Models are identified by the executor's key; the key of the
    models at the start is their name. ``jobs`` runs tunings, ``upgrades`` builds engines; both are
    closed with the loop.
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
        """States by key; only the holder of :attr:`_turn` may change them."""
        self._turn = threading.Lock()
        """Held while the loop polls all models, and while a model is added or removed."""
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="assembling")

    def start(self) -> None:
        """Restore the saved states of the controllers, and start the thread."""
        for state in self._states.values():
            self._restore(state)
        self.begin()

    def stop(self) -> None:
        """Stop the loop, and save the controllers' states; blocks for seconds at most."""
        self.end()
        self._upgrades.close()
        for state in self._states.values():
            self._save(state)
            self._end(state)
        self._jobs.close()
        self._builder.shutdown(wait=True, cancel_futures=True)

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Control one more model, which the executor already has; blocks briefly.

        The model's controller continues from its saved state. If the replaced model uses the same
        state file, its state is saved first, and from then on the file belongs to the new model.
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
        """Build no more engines for a model that lost its name to another; returns immediately."""
        if (state := self._states.get(key)) is not None:
            state.retired = True

    def remove(self, key: str, *, save: bool = True) -> None:
        """Stop controlling a model, and save what was learned; blocks for seconds at most.

        The model must have nothing in flight, and the executor must still have it. If not ``save``,
        the state file goes back to the model that used it before.
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
        """Return the states of other models that use the same file."""
        file = state.control.state_file
        found = ((other, other.control.state_file) for other in self._states.values())
        return [
            s for s, kept in found if s is not state and file and kept and kept.path == file.path
        ]

    def _end(self, state: _State) -> None:
        """Release the file, and end the work in progress for a model."""
        _release(state)
        state.control.deployments.cancel()

    def status(self, model: str) -> ControlStatus:
        """Return a controller's status at the last poll."""
        return self._states[model].status

    def pause_s(self) -> float:
        """Return the pause between two polls, in seconds."""
        return self._period_s

    def poll(self) -> None:
        """Poll every model once."""
        self._upgrade_failures.run(self._upgrades.step)
        with self._turn:
            for state in self._states.values():
                state.failures.run(partial(self._look_at, state))

    def _look_at(self, state: _State) -> None:
        controller = state.control.controller
        self._observe(state)
        self._compute(state)
        state.status = state.control.status()
        self._activate(state)
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
        """Start the job that the controller requests, or pass it the result of the last one."""
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

    def _activate(self, state: _State) -> None:
        """Start batches under the controller's policy, once the policy's stages are prepared."""
        deployments = state.control.deployments
        wanted = state.control.controller.policy
        exits = tuple(active.exit for active in wanted.active)
        with deployments.swapping:  # splits, and so prepared stages, may change otherwise
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
        """Prepare the stages for some exits, one set at a time."""
        splits = state.control.deployments.splits
        if state.building is not None:
            built, for_splits, future = state.building
            if not future.done():
                return
            state.building = None
            error = future.exception()
            if error is not None and for_splits is splits:  # new splits are tried again
                state.refused.add(built)
                _log.error("%s: exits %s cannot be activated: %s", state.name, built, error)
        if exits not in state.refused:
            prepare: Callable[[tuple[int, ...]], None] = state.control.deployments.prepare
            state.building = (exits, splits, self._builder.submit(prepare, exits))

    def _hot_swap(self, state: _State, policy: ExitPolicy) -> None:
        deployments, scheduling = state.control.deployments, state.options.scheduling
        try:
            activate(self._executor, state.key, deployments, policy, scheduling)
        except ValueError as error:
            exits = tuple(active.exit for active in policy.active)
            if exits not in state.refused:
                state.refused.add(exits)
                _log.error("%s: exits %s do not fit scheduling: %s", state.name, exits, error)

    def _upgrade(self, state: _State) -> None:
        """Start using newly built engines, for stages that run as chains."""
        if state.renewing is not None:
            units, future = state.renewing
            if not future.done():
                return
            state.renewing = None
            if (error := future.exception()) is not None:
                state.not_renewed |= units
                _log.error("%s: new engines cannot be loaded: %s", state.name, error)
                return
            _log.info("%s: new engines run %s", state.name, ", ".join(sorted(units)))
            self._hot_swap(state, self._executor.deployment(state.key).policy)
        current = self._executor.deployment(state.key)
        missing = [m for m in current.pipeline.missing if m.unit not in state.not_renewed]
        if self._upgrades.check_missing(state.name, missing):
            units = frozenset(engine.unit for engine in missing if engine.is_built())
            renew: Callable[[tuple[int, ...]], None] = state.control.deployments.renew
            state.renewing = (units, self._builder.submit(renew, current.plan.exits))

    def _restore(self, state: _State) -> None:
        """Continue from the saved state, if it was saved for the same model."""
        control, file = state.control, state.control.state_file
        kept = None if file is None else file.load(control.fingerprint)
        if file is None or kept is None:
            return
        try:
            rehearse(control.controller, kept)
            control.controller.restore(kept)
        except Exception as error:  # no content of the file may prevent the start
            found = f"{type(error).__name__}: {error}"
            _log.warning("%s: %s is unusable (%.200s); starting afresh", state.name, file, found)
            return
        _log.info("%s: continues from %s", state.name, file)
        state.status = control.status()
        state.saved_version = control.controller.policy.version

    def _save(self, state: _State) -> None:
        """Save the controller's state, if it has learned anything."""
        control = state.control
        if control.state_file is None or not state.keeps_file:
            return
        learned = control.controller.state()
        if learned is not None:
            control.state_file.save(learned, control.fingerprint)


def _release(state: _State) -> None:
    """Release the state file to the next server, or to the next model at the same path."""
    if state.control.state_file is not None:
        state.control.state_file.release()


def _state_of(key: str, name: str, options: ModelOptions, control: ModelControl) -> _State:
    """Return the initial state of a model."""
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
    """Restore a state in a copy of the controller, and read everything that the loop reads.

    If the restoration fails halfway, or restores values that cannot be read, the controller itself
    stays unchanged.
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
    """Return the policy with other exits if its answers stay the same; otherwise ``None``.

    Added exits run in shadow mode; removed exits must not answer anything.
    """
    thresholds = {active.exit: active.threshold for active in policy.active}
    if any(t < NEVER for index, t in thresholds.items() if index not in exits):
        return None
    active = tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits)
    return ExitPolicy(version=policy.version, active=active, promise=policy.promise)
