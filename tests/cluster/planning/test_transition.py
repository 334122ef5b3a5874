"""From plan to plan: as few loads as there can be, and no split without a worker at any step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.facts import facts

from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit, Replicas
from offramp.cluster.planning.transition import (
    Action,
    PlanTransition,
    Segments,
    TransitionError,
    WorkerState,
    assign,
    plan_transition,
    splits_of,
)


def plan_of(*splits: tuple[int, dict[str, int]]) -> ClusterPlan:
    """Splits by the segment that each ends with, and its devices by type."""
    ends = [-1, *(end for end, _ in splits)]
    return ClusterPlan(
        batch_size=1,
        splits=tuple(
            PlannedSplit(
                first_segment=before + 1, last_segment=end, share=1.0, period_s=1.0, fill_s=0.0,
                link_period_s=0.0, link_s=0.0,
                replicas=tuple(
                    Replicas(device_type=kind, count=count, exits=(), stage_s=1.0, longest_s=1.0)
                    for kind, count in devices.items()
                ),
            )
            for before, (end, devices) in zip(ends, splits, strict=False)
        ),
        cost_per_hour=1.0,
    )  # fmt: skip


def workers_of(count: int, kind: str = "a", memory: float = math.inf) -> list[WorkerState]:
    return [
        WorkerState(name=f"{kind}{k}", device_type=kind, memory_bytes=memory) for k in range(count)
    ]


class World:
    """Workers that take steps, and what may never be at any of them."""

    def __init__(
        self,
        old: ClusterPlan | None,
        new: ClusterPlan,
        workers: Sequence[WorkerState],
        weight_bytes: Sequence[float],
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.kinds = {worker.name: worker.device_type for worker in workers}
        self.old, self.new, self.weight_bytes = old, new, weight_bytes
        self.draining: dict[str, Segments] = {}
        self.switched = False
        self.loads = 0

    def run(self, transition: PlanTransition) -> None:
        roles = dict(transition.roles)
        self.check()
        for step in transition.steps:
            if step.action is Action.SWITCH:
                assert not self.switched
                self.switched = True
                for name, worker in self.workers.items():
                    role = roles.get(name)
                    ready = role if role in worker.holds else None
                    self.workers[name] = replace(worker, serves=ready)
            else:
                self.take(step.action, step.worker, step.segments)
                worker = self.workers[step.worker]
                role = roles.get(step.worker)
                if self.switched and step.action is Action.LOAD:
                    assert role == step.segments
                    self.workers[step.worker] = replace(worker, serves=role)
            self.check()
        assert self.switched
        # In the end the next plan is served as planned, and nothing else is held.
        wanted = Counter(
            ((split.first_segment, split.last_segment), replicas.device_type)
            for split in self.new.splits
            for replicas in split.replicas
            for _ in range(replicas.count)
        )
        serves = Counter(
            (worker.serves, self.kinds[name])
            for name, worker in self.workers.items()
            if worker.serves is not None
        )
        assert serves == wanted
        for worker in self.workers.values():
            assert worker.holds == ({worker.serves} if worker.serves else frozenset())

    def take(self, action: Action, name: str, segments: Segments) -> None:
        worker = self.workers[name]
        if action is Action.STOP:
            assert not self.switched
            assert worker.serves == segments
            self.workers[name] = replace(worker, serves=None)
        elif action is Action.UNLOAD:
            assert segments in worker.holds
            assert worker.serves != segments
            self.workers[name] = replace(worker, holds=worker.holds - {segments})
        else:
            assert segments not in worker.holds, "loaded twice"
            self.workers[name] = replace(worker, holds=worker.holds | {segments})
            self.loads += 1

    def size(self, segments: Segments) -> float:
        return sum(self.weight_bytes[segments[0] : segments[1] + 1])

    def check(self) -> None:
        for worker in self.workers.values():
            assert sum(map(self.size, worker.holds)) <= worker.memory_bytes
        active_policy = self.new if self.switched else self.old
        serving = {worker.serves for worker in self.workers.values()}
        assert active_policy is None or set(splits_of(active_policy)) <= serving


def fewest_loads(
    new: ClusterPlan, workers: Sequence[WorkerState], weight_bytes: Sequence[float]
) -> float:
    """Return the fewest loads over all assignments."""
    slots = [
        ((split.first_segment, split.last_segment), replicas.device_type)
        for split in new.splits
        for replicas in split.replicas
        for _ in range(replicas.count)
    ]
    found = math.inf
    for chosen in itertools.permutations(workers, len(slots)):
        loads = 0.0
        for (segments, kind), worker in zip(slots, chosen, strict=True):
            size = sum(weight_bytes[segments[0] : segments[1] + 1])
            if worker.device_type != kind or size > worker.memory_bytes:
                loads = math.inf
                break
            loads += segments not in worker.holds
        found = min(found, loads)
    return found


SEGMENTS = 4


@st.composite
def plans(draw: st.DrawFn, there: dict[str, int]) -> ClusterPlan:
    """A plan for some of the devices; one split at least."""
    left = dict(there)
    cuts = draw(st.sets(st.integers(0, SEGMENTS - 2), max_size=max(sum(left.values()) - 1, 0)))
    ends = [*sorted(cuts), SEGMENTS - 1]
    splits = []
    for number, end in enumerate(ends):
        kinds = [kind for kind, count in left.items() if count]
        kind = draw(st.sampled_from(kinds))
        spare = sum(left.values()) - (len(ends) - number)
        count = draw(st.integers(1, min(left[kind], spare + 1)))
        left[kind] -= count
        splits.append((end, {kind: count}))
    return plan_of(*splits)


@st.composite
def moves(
    draw: st.DrawFn,
) -> tuple[ClusterPlan | None, ClusterPlan, list[WorkerState], list[float]]:
    """Draw workers that serve a plan, or none, and hold more stages, and another plan for them."""
    there = {"a": draw(st.integers(2, 5)), "b": draw(st.integers(0, 2))}
    weight_bytes = draw(st.lists(st.integers(1, 4), min_size=SEGMENTS, max_size=SEGMENTS))
    old = draw(plans(there)) if draw(st.integers(0, 4)) else None
    new = draw(plans(there))
    every = sorted({*splits_of(new), *(splits_of(old) if old else ())})
    largest = max(sum(weight_bytes[a : b + 1]) for a, b in every)
    memory = largest * draw(st.sampled_from([1.0, 1.5, 2.0, math.inf]))
    workers = [w for kind, count in there.items() for w in workers_of(count, kind, memory)]
    if old is not None:
        first = plan_transition(None, old, workers, weight_bytes=weight_bytes)
        roles = dict(first.roles)
        workers = [
            replace(w, holds=frozenset({roles[w.name]}), serves=roles[w.name])
            if w.name in roles
            else w
            for w in workers
        ]
    for place, worker in enumerate(workers):  # left from plans before
        kept = draw(st.sets(st.sampled_from(every), max_size=2))
        for segments in sorted(kept - worker.holds):
            size = sum(sum(weight_bytes[a : b + 1]) for a, b in {*worker.holds, segments})
            if size <= worker.memory_bytes:
                worker = replace(worker, holds=worker.holds | {segments})  # noqa: PLW2901
        workers[place] = worker
    return old, new, workers, [float(b) for b in weight_bytes]


@settings(max_examples=400, deadline=None)
@given(moves())
def test_no_step_leaves_a_split_without_a_worker_or_a_worker_without_memory(
    move: tuple[ClusterPlan | None, ClusterPlan, list[WorkerState], list[float]],
) -> None:
    old, new, workers, weight_bytes = move
    try:
        found = plan_transition(old, new, workers, weight_bytes=weight_bytes)
    except TransitionError as error:
        event("impossible")
        assert "\n" not in str(error)
        assert any(w.memory_bytes < 2 * sum(weight_bytes) for w in workers), "room for any two"
        return
    world = World(old, new, workers, weight_bytes)
    world.run(found)
    assert world.loads == fewest_loads(new, workers, weight_bytes)
    if all(w.memory_bytes >= 2 * sum(weight_bytes) for w in workers):
        assert Action.STOP not in {step.action for step in found.steps}
        switch = [step.action for step in found.steps].index(Action.SWITCH)
        assert Action.LOAD not in {step.action for step in found.steps[switch:]}
    # Where nothing is to change, nothing is done.
    again = plan_transition(new, new, list(world.workers.values()), weight_bytes=weight_bytes)
    assert [step.action for step in again.steps] == [Action.SWITCH]
    assert again.roles == found.roles


@given(st.integers(0, 10_000))
def test_an_assignment_costs_the_least(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(0, 5)), int(rng.integers(1, 6))
    costs = rng.integers(0, 4, (rows, columns)) + rng.choice([0.0, 0.5], (rows, columns))
    costs[rng.random((rows, columns)) < 0.3] = math.inf
    sums = [
        sum(costs[row, column] for row, column in enumerate(chosen))
        for chosen in itertools.permutations(range(columns), rows)
    ]
    found, least = assign(costs), min(sums, default=math.inf)
    if found is None:
        assert math.isinf(least)
    else:
        assert len(set(found)) == rows
        assert sum(costs[row, column] for row, column in enumerate(found)) == least


def served(plan: ClusterPlan, workers: list[WorkerState]) -> list[WorkerState]:
    """Workers that serve a plan, in turn."""
    roles = dict(plan_transition(None, plan, workers).roles)
    return [replace(w, holds=frozenset({roles[w.name]}), serves=roles[w.name]) for w in workers]


def test_a_split_moves_to_those_who_have_room_beside_what_they_run() -> None:
    old, new = plan_of((1, {"a": 2}), (3, {"a": 1})), plan_of((1, {"a": 1}), (3, {"a": 2}))
    workers = served(old, workers_of(3))
    found = plan_transition(old, new, workers)
    (mover,) = {step.worker for step in found.steps if step.worker}
    assert [(s.action, s.segments) for s in found.steps if s.worker == mover] == [
        (Action.LOAD, (2, 3)), (Action.UNLOAD, (0, 1)),
    ]  # fmt: skip
    assert [s.action for s in found.steps] == [Action.LOAD, Action.SWITCH, Action.UNLOAD]


def test_where_there_is_no_room_for_two_one_worker_serves_to_the_switch() -> None:
    """Whole model on four devices that hold it and nothing else: one goes on until the switch."""
    old, new = plan_of((3, {"a": 4})), plan_of((1, {"a": 2}), (3, {"a": 2}))
    found = plan_transition(old, new, served(old, workers_of(4, memory=4.0)), weight_bytes=[1] * 4)
    switch = [s.action for s in found.steps].index(Action.SWITCH)
    before = Counter(s.action for s in found.steps[:switch])
    assert before == {Action.STOP: 3, Action.UNLOAD: 3, Action.LOAD: 3}
    assert [s.action for s in found.steps[switch + 1 :]] == [Action.UNLOAD, Action.LOAD]


def test_what_cannot_be_done_while_serving_is_said_in_a_line() -> None:
    old, new = plan_of((3, {"a": 1})), plan_of((3, {"a": 2}))
    with pytest.raises(
        TransitionError, match=facts("2 workers of type 'a'", "there are 1", "plan")
    ):
        plan_transition(old, new, served(old, workers_of(1)))
    with pytest.raises(TransitionError, match="too few workers have the memory for"):
        plan_transition(None, new, workers_of(2, memory=3.0), weight_bytes=[1] * 4)
    # One of two has no room beside what it runs, and nobody stands in for it.
    old, new = plan_of((1, {"a": 1}), (3, {"a": 1})), plan_of((0, {"a": 1}), (3, {"a": 1}))
    full = served(old, workers_of(2, memory=3.0))
    with pytest.raises(TransitionError, match=facts("1 splits", "memory")):
        plan_transition(old, new, full, weight_bytes=[1] * 4)
    spare = [*full, *workers_of(2, "b", 3.0)]
    with_spare = [replace(worker, device_type="a") for worker in spare]
    steps = plan_transition(old, new, with_spare, weight_bytes=[1] * 4).steps
    assert Counter(step.action for step in steps)[Action.LOAD] == 2


def test_workers_that_serve_something_else_are_a_mistake() -> None:
    old, new = plan_of((3, {"a": 1})), plan_of((3, {"a": 2}))
    with pytest.raises(ValueError, match=r"no worker serves the plan's splits \[\(0, 3\)\]"):
        plan_transition(old, new, workers_of(2))
    with pytest.raises(ValueError, match=facts("[(0, 3)]", "active plan")):
        plan_transition(None, new, served(new, workers_of(2)))
    with pytest.raises(ValueError, match="expected unique names"):
        plan_transition(None, new, workers_of(1) * 2)
    with pytest.raises(ValueError, match=facts("(0, 1)", "not hold")):
        WorkerState(name="x", device_type="a", serves=(0, 1))
