"""Changing the plan of a split model while it serves: no row is without a worker at any step.

E3 leaves that to its platform (4). The steps are those of :mod:`.planning.transition`, taken
together by kind: all that stop, then all that load, the switch, and what is unloaded behind it. A
worker of bounded memory gives up what it may only steal for as long as that takes.
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
"""How long the rows of workers that shall stop may take; then the plan in force stays."""
_TRIES: Final = 5
"""Times that stages are prepared for the exits in use, should these change meanwhile."""

Holds: TypeAlias = Callable[[int, StageSpec], bool]
"""Whether a worker, numbered from 0, holds a stage."""
_Waits: TypeAlias = Generator[None, None, None]
"""Steps of a change; yields where rows have to drain first."""


class StageHolders(Protocol):
    """Workers that hold parts of a model, one of each stream, as a change of plans needs them."""

    @property
    def there(self) -> tuple[bool, ...]:
        """Whether each can be asked, as far as is known."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """The type of device of each."""

    def hold(self, holds: Holds, /) -> None:
        """Have workers load and forget stages by a rule; BackendError if one cannot be loaded."""


class SplitChangeError(EngineError):
    """A change of plans that was given up; one line says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitServing:
    """A split model as it is served: what a change of its plan works on."""

    name: str
    executor: Executor
    deployments: DeploymentMaker
    workers: StageHolders
    scheduling: PolicyName

    @property
    def splits(self) -> ServedSplits:
        """The splits in force."""
        splits = self.deployments.splits
        assert isinstance(splits, ServedSplits), f"{self.name} is not split"
        return splits

    def serve_by(self, splits: ServedSplits) -> int:
        """Start batches by these splits from now on; gives the number of the deployment."""
        deployments, policy = self.deployments, self.scheduling
        return serve_by(self.executor, self.name, deployments, splits, policy).number

    def hold(self, holds: Holds) -> None:
        """Have workers hold stages by a rule, and nothing that came before; BackendError."""
        self.workers.hold(lambda n, spec: holds(n, spec) and self.deployments.wants(spec))

    def forget_unused(self) -> None:
        """Forget the stages that are not of the plan in force."""
        self.deployments.keep_only(self.executor.deployment(self.name).plan)

    def drained(self, number: int) -> bool:
        """Whether all that was started under deployments before this one is over."""
        return min(self.executor.plans(self.name)) >= number

    def is_served(self, gone: Container[int] = ()) -> bool:
        """Whether each split of the plan in force has a worker that is not ``gone``."""
        roles = [role for number, role in enumerate(self.splits.roles) if number not in gone]
        return set(splits_of(self.splits.plan)) <= {role.segments for role in roles}

    def states(self, gone: Container[int] = (), excluded: Container[int] = ()) -> list[WorkerState]:
        """Say what each worker is in the plan in force, if that is served without the ``gone``.

        The next plan does without these and the ``excluded``.
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
    """One change, from the splits in force to others; :meth:`advance` until it is over.

    Until the switch it can be given up: a stage that cannot be loaded, a split that no worker is
    there for, rows that do not drain. Then the plan in force stays, as it was. Where a split of it
    has no worker any more, there is nothing to keep served: workers load at once, and rows wait.
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
        """Plan the change to ``plan``, made for ``model``, which does without some workers.

        Those that are ``gone`` do not serve any more, the ``excluded`` serve to the switch.
        TransitionError if the workers cannot come there while they serve.
        """
        self._served = served
        self._before = before = served.splits
        self._keeps = served.is_served(gone)
        """Whether the plan in force is to be served to the switch."""
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
        """Why it was given up, once it is over."""
        self.refused: RefusedSegments | None = None
        """What a worker could not load of its split in the next plan, if that is why."""
        self.switched = False
        """Whether the next plan is in force."""
        self._going = self._change()

    def advance(self) -> bool:
        """Go on as far as can be now; says whether it is over. Loads in the calling thread."""
        return next(self._going, True) is True

    def _change(self) -> _Waits:
        served = self._served
        narrowed, joining = self._narrowed(), self._joining()
        try:
            if self._keeps:
                yield from self._make_room(narrowed)
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
        if not served.drained(number):  # it is run by whoever is free, and loads it for that
            served.executor.open_old_plans(served.name)
        served.forget_unused()
        try:
            served.hold(joining.holds)  # what is left is unloaded before more is loaded
            served.hold(self._after.holds)
            served.serve_by(self._after)
        except (EngineError, ValueError) as error:
            _log.error("%s: what workers may steal is not loaded: %s", served.name, error)
            with contextlib.suppress(EngineError):  # told already
                served.hold(joining.holds)

    def _note_refusal(self, error: StageNotLoadedError) -> None:
        role = self._after.roles[error.device]
        if role.own.issuperset(error.segments):
            self.refused = RefusedSegments(role.device_type, *error.segments)

    def _make_room(self, narrowed: ServedSplits) -> _Waits:
        """Have workers stop that have no room for another split, and all stop stealing."""
        served = self._served
        served.forget_unused()
        if narrowed.held != self._before.held:
            number, until_s = served.serve_by(narrowed), self._clock() + DRAIN_LIMIT_S
            while not served.drained(number):
                if self._clock() >= until_s:
                    raise SplitChangeError(
                        f"rows of the plan in force did not drain within {DRAIN_LIMIT_S:g} s"
                    )
                yield
        served.hold(narrowed.holds)

    def _load(self, narrowed: ServedSplits, joining: ServedSplits) -> None:
        """Have workers load their splits of the next plan, beside those that they run."""
        self._prepare(self._exits(), narrowed, joining)
        there = self._served.workers.there
        for first, last in splits_of(joining.plan):
            if not any(
                role.segments == (first, last) and there[number]
                for number, role in enumerate(joining.roles)
            ):
                raise SplitChangeError(f"no worker of segments {first} to {last} is there any more")

    def _prepare(
        self, exits: tuple[int, ...], narrowed: ServedSplits, joining: ServedSplits
    ) -> None:
        """Have the stages of the next plan loaded, each where it will run, and nowhere else."""
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
        """Put the next plan in force, for whichever exits are in use by now."""
        served = self._served
        for _ in range(_TRIES):
            with served.deployments.swapping:
                exits = self._exits()
                if served.deployments.prepared(exits, joining):
                    return served.serve_by(joining)
            self._prepare(exits, narrowed, joining)
        raise SplitChangeError(f"the exits in use changed {_TRIES} times meanwhile")

    def _give_up(self) -> None:
        """Serve by the plan in force as before: what stopped for the next one loads again."""
        served = self._served
        served.forget_unused()
        try:
            served.hold(self._before.holds)
            served.serve_by(self._before)
        except (EngineError, ValueError) as error:
            _log.error("%s: workers that stopped to change plans stay out: %s", served.name, error)

    def _exits(self) -> tuple[int, ...]:
        return self._served.executor.deployment(self._served.name).plan.exits

    def _narrowed(self) -> ServedSplits:
        """Give the plan in force without the workers that stop, and without what is only stolen."""
        stopping = {int(s.worker) for s in self.steps.steps if s.action is Action.STOP}
        roles = [_out(r) if n in stopping else r for n, r in enumerate(self._before.roles)]
        return _narrow(replace(self._before, roles=tuple(roles)))

    def _joining(self) -> ServedSplits:
        """Give the next plan without the workers that join it late, and without stealing."""
        roles = [_out(r) if n in self._late else r for n, r in enumerate(self._after.roles)]
        return _narrow(replace(self._after, roles=tuple(roles)))


def _roles(before: tuple[StreamRole, ...], steps: PlanTransition) -> tuple[StreamRole, ...]:
    """Give each stream its role in the next plan; those that it does without are spare."""
    taken = dict(steps.roles)
    return tuple(
        StreamRole(role.device_type, taken.get(str(number))) for number, role in enumerate(before)
    )


def _late(steps: PlanTransition) -> frozenset[int]:
    """Give the workers that load behind the switch."""
    actions = [step.action for step in steps.steps]
    behind = steps.steps[actions.index(Action.SWITCH) :]
    return frozenset(int(step.worker) for step in behind if step.action is Action.LOAD)


def _out(role: StreamRole) -> StreamRole:
    return StreamRole(role.device_type, None)


def _narrow(splits: ServedSplits) -> ServedSplits:
    """Let each device hold its split alone, unless it has room for everything twice."""
    memory = {kind.name: kind.memory_bytes for kind in splits.cluster.types}
    twice_bytes = 2 * sum(splits.model.weight_bytes)
    everything = frozenset(range(splits.model.segments))
    held = tuple(
        everything if splits.steals and memory[role.device_type] >= twice_bytes else role.own
        for role in splits.roles
    )
    return replace(splits, held=held)
