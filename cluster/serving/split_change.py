"""Change of a split model's plan while it serves; every row has a worker at every step.

E3 leaves this to its platform (4). The steps are those of :mod:`.planning.transition`, grouped by
kind: all stops, then all loads, the switch, and the unloads after it. During the change, a worker
with limited memory releases the segments that it holds only to steal work.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

from offramp.cluster.planning.cluster import ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.planning.goal import RefusedSegments
from offramp.cluster.planning.placing import StreamRole
from offramp.cluster.planning.transition import (
    Action,
    PlanTransition,
    WorkerState,
    plan_transition,
    splits_of,
)
from offramp.cluster.serving.served_splits import ServedSplits
from offramp.engine.common.errors import EngineError, StageNotLoadedError
from offramp.engine.models.deployment import DeploymentMaker
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.swapping import serve_by
from offramp.engine.stages.plan import StageSpec

_log = logging.getLogger(__name__)

DRAIN_LIMIT_S: Final = 60.0
"""Time limit, in seconds, for rows of stopping workers to drain. If it is exceeded, the active plan
stays."""
_TRIES: Final = 5
"""Largest number of times that stages are prepared in one change. The preparation is repeated if
the exits in use change during it."""

Holds: TypeAlias = Callable[[int, StageSpec], bool]
"""Function that returns whether a worker, numbered from 0, holds a stage."""
_Waits: TypeAlias = Generator[None, None, None]
"""Steps of a change; yields while rows must drain."""


class StageHolders(Protocol):
    """The workers' interface for a change of plans; each worker holds parts of a model."""

    @property
    def there(self) -> tuple[bool, ...]:
        """``True`` for each worker that can take orders, as far as is known."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """Name of the device type of each worker."""

    def hold(self, holds: Holds, /) -> None:
        """Make workers load and release stages by a rule; BackendError if a load fails."""


class SplitChangeError(EngineError):
    """A change of plans failed; the message is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitServing:
    """The parts of a served split model that a change of its plan uses."""

    name: str
    executor: Executor
    deployments: DeploymentMaker
    workers: StageHolders
    scheduling: PolicyName

    @property
    def splits(self) -> ServedSplits:
        """Splits by which new batches are served."""
        splits = self.deployments.splits
        assert isinstance(splits, ServedSplits), f"{self.name} is not split"
        return splits

    def serve_by(self, splits: ServedSplits) -> int:
        """Start all further batches by these splits; return the number of the deployment."""
        deployments, policy = self.deployments, self.scheduling
        return serve_by(self.executor, self.name, deployments, splits, policy).number

    def hold(self, holds: Holds) -> None:
        """Make workers hold the stages that ``holds`` selects, if a wanted deployment has them.

        BackendError if a stage cannot be loaded.
        """
        self.workers.hold(lambda n, spec: holds(n, spec) and self.deployments.wants(spec))

    def forget_unused(self) -> None:
        """Forget the stages that the active plan does not use."""
        self.deployments.keep_only(self.executor.deployment(self.name).plan)

    def drained(self, number: int) -> bool:
        """Return whether all work of earlier deployments is finished."""
        return min(self.executor.plans(self.name)) >= number

    def is_served(self, gone: Container[int] = ()) -> bool:
        """Return whether each split of the active plan has a worker that is not ``gone``."""
        roles = [role for number, role in enumerate(self.splits.roles) if number not in gone]
        return set(splits_of(self.splits.plan)) <= {role.segments for role in roles}

    def states(self, gone: Container[int] = (), excluded: Container[int] = ()) -> list[WorkerState]:
        """Return the state of each worker, with its split if the active plan can still be served.

        The active plan can be served if it needs none of the ``gone`` workers. Workers that are
        ``gone`` or ``excluded`` are marked as lost, and the next plan does not use them.
        """
        splits, served = self.splits, self.is_served(gone)
        memory = {kind.name: kind.memory_bytes for kind in splits.cluster.types}
        return [
            WorkerState(
                name=str(number),
                device_type=role.device_type,
                memory_bytes=memory[role.device_type],
                holds=frozenset([role.segments] if role.segments else ()),
                serves=role.segments if served else None,
                lost=number in gone or number in excluded,
            )
            for number, role in enumerate(splits.roles)
        ]


class SplitChange:
    """One change, from the active splits to others; call :meth:`advance` until it is over.

    Before the switch, a change can fail: if a stage cannot be loaded, a split has no worker, or
    rows do not drain. Then the active plan stays unchanged. If a split of the active plan has no
    worker any more, that plan cannot be kept: workers load immediately, and rows wait.
    """

    def __init__(
        self,
        served: SplitServing,
        plan: ClusterPlan,
        model: ModelFacts,
        *,
        gone: Container[int] = (),
        excluded: Container[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plan the change to ``plan``, which was made for ``model`` without some workers.

        The ``gone`` workers do not serve any more; the ``excluded`` workers serve until the switch.
        TransitionError if the workers cannot reach the plan while they serve.
        """
        self._served = served
        self._before = before = served.splits
        self._keeps = served.is_served(gone)
        """``True`` if the active plan must be served until the switch."""
        self.steps = plan_transition(
            before.plan if self._keeps else None,
            plan,
            served.states(gone, excluded),
            weight_bytes=model.weight_bytes,
        )
        self._after = replace(
            before, plan=plan, model=model, roles=_roles(before.roles, self.steps), held=()
        )
        self._late = _late(self.steps)
        self._clock = clock
        self.failure: str | None = None
        """Reason why the change failed; ``None`` unless it has failed."""
        self.refused: RefusedSegments | None = None
        """Segments that a worker could not load, if the change failed for this reason."""
        self.switched = False
        """``True`` if the next plan is active."""
        self._going = self._change()

    def advance(self) -> bool:
        """Continue as far as possible, with loads in this thread; return whether it is over."""
        return next(self._going, True) is True

    def _change(self) -> _Waits:
        served = self._served
        narrowed, joining = self._narrowed(), self._joining()
        try:
            if self._keeps:
                yield from self._release_capacity(narrowed)
            self._load(narrowed, joining)
            number = self._switch(narrowed, joining)
        except (EngineError, ValueError) as error:
            self.failure = str(error)
            if isinstance(error, StageNotLoadedError):
                self._note_refusal(error)
            self._give_up()
            return
        self.switched = True
        until_s = self._clock() + DRAIN_LIMIT_S
        while not served.drained(number) and self._clock() < until_s:
            yield
        if not served.drained(number):  # workers that are free load and run it
            served.executor.open_old_plans(served.name)
        served.forget_unused()
        try:
            served.hold(joining.holds)  # unload before loading more
            served.hold(self._after.holds)
            served.serve_by(self._after)
        except (EngineError, ValueError) as error:
            _log.error("%s: segments that workers may steal are not loaded: %s", served.name, error)
            with contextlib.suppress(EngineError):  # logged already
                served.hold(joining.holds)

    def _note_refusal(self, error: StageNotLoadedError) -> None:
        role = self._after.roles[error.device]
        if role.own.issuperset(error.segments):
            self.refused = RefusedSegments(role.device_type, *error.segments)

    def _release_capacity(self, narrowed: ServedSplits) -> _Waits:
        """Stop the workers whose memory cannot hold another split, and stop all stealing."""
        served = self._served
        served.forget_unused()
        if narrowed.held != self._before.held:
            number, until_s = served.serve_by(narrowed), self._clock() + DRAIN_LIMIT_S
            while not served.drained(number):
                if self._clock() >= until_s:
                    raise SplitChangeError(
                        f"rows of the active plan did not drain within {DRAIN_LIMIT_S:g} s"
                    )
                yield
        served.hold(narrowed.holds)

    def _load(self, narrowed: ServedSplits, joining: ServedSplits) -> None:
        """Load the next plan's splits in workers, which still run their current ones."""
        self._prepare(self._exits(), narrowed, joining)
        there = self._served.workers.there
        for first, last in splits_of(joining.plan):
            if not any(
                role.segments == (first, last) and there[number]
                for number, role in enumerate(joining.roles)
            ):
                raise SplitChangeError(f"no worker of segments {first} to {last} is left")

    def _prepare(
        self, exits: tuple[int, ...], narrowed: ServedSplits, joining: ServedSplits
    ) -> None:
        """Load the stages of the next plan, each only in workers that will run it."""
        served = self._served
        current = {spec.unit for spec in served.executor.deployment(served.name).plan.stages}
        coming = served.deployments.units(exits, joining)
        leaving, arriving = current - coming, coming - current

        def holds(worker: int, spec: StageSpec) -> bool:
            stays = self._keeps and spec.unit not in arriving and narrowed.holds(worker, spec)
            return stays or (spec.unit not in leaving and joining.holds(worker, spec))

        served.hold(holds)
        served.deployments.prepare(exits, joining)

    def _switch(self, narrowed: ServedSplits, joining: ServedSplits) -> int:
        """Activate the next plan, for the exits that are in use by now."""
        served = self._served
        for _ in range(_TRIES):
            with served.deployments.swapping:
                exits = self._exits()
                if served.deployments.prepared(exits, joining):
                    return served.serve_by(joining)
            self._prepare(exits, narrowed, joining)
        raise SplitChangeError(f"the exits in use changed {_TRIES} times during the change")

    def _give_up(self) -> None:
        """Serve by the active plan as before: workers that stopped load their splits again."""
        served = self._served
        served.forget_unused()
        try:
            served.hold(self._before.holds)
            served.serve_by(self._before)
        except (EngineError, ValueError) as error:
            _log.error(
                "%s: workers that stopped for the change of plans cannot serve again: %s",
                served.name,
                error,
            )

    def _exits(self) -> tuple[int, ...]:
        return self._served.executor.deployment(self._served.name).plan.exits

    def _narrowed(self) -> ServedSplits:
        """Return the active plan without the workers that stop, and without work stealing."""
        stopping = {int(s.worker) for s in self.steps.steps if s.action is Action.STOP}
        roles = [_out(r) if n in stopping else r for n, r in enumerate(self._before.roles)]
        return _narrow(replace(self._before, roles=tuple(roles)))

    def _joining(self) -> ServedSplits:
        """Return the next plan without the workers that join it late, and without work stealing."""
        roles = [_out(r) if n in self._late else r for n, r in enumerate(self._after.roles)]
        return _narrow(replace(self._after, roles=tuple(roles)))


def _roles(before: tuple[StreamRole, ...], steps: PlanTransition) -> tuple[StreamRole, ...]:
    """Return each stream's role in the next plan; unused streams are spare."""
    taken = dict(steps.roles)
    return tuple(
        StreamRole(role.device_type, taken.get(str(number))) for number, role in enumerate(before)
    )


def _late(steps: PlanTransition) -> frozenset[int]:
    """Return the workers that load after the switch."""
    actions = [step.action for step in steps.steps]
    behind = steps.steps[actions.index(Action.SWITCH) :]
    return frozenset(int(step.worker) for step in behind if step.action is Action.LOAD)


def _out(role: StreamRole) -> StreamRole:
    return StreamRole(role.device_type, None)


def _narrow(splits: ServedSplits) -> ServedSplits:
    """Make each device hold only its split, unless its memory can hold all weights twice."""
    memory = {kind.name: kind.memory_bytes for kind in splits.cluster.types}
    twice_bytes = 2 * sum(splits.model.weight_bytes)
    everything = frozenset(range(splits.model.segments))
    held = tuple(
        everything if splits.steals and memory[role.device_type] >= twice_bytes else role.own
        for role in splits.roles
    )
    return replace(splits, held=held)
