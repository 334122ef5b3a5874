"""The plan that serving begins with: made or given, the exits that it has off, what cannot load."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cluster.held import ROWS, HeldBackend, cluster_for, plan_of
from tests.cluster.loops import plans_of
from tests.cluster.split_serving import FRONT, KINDS, Serving, Small, serve
from tests.facts import Told, facts
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType
from offramp.cluster.planning.cluster_plan import ClusterPlan, Replicas, dump_plan
from offramp.cluster.planning.cluster_times import times_of
from offramp.cluster.planning.goal import PlanningGoal, RefusedSegments
from offramp.cluster.serving.cluster_serving import ServedCluster, plan_splits
from offramp.cluster.serving.cluster_statistics import plan_of as plan_status_of
from offramp.cluster.serving.planning_files import read_plan
from offramp.engine.common.errors import OptionsError
from offramp.engine.models.controllers import policy_of_exits
from offramp.engine.models.options import ModelOptions
from offramp.engine.stages.plan import StageSpec, make_plan

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    bundle, inputs = compile_small(tmp_path_factory.mktemp("small"))
    with np.load(inputs) as archive:
        return bundle, np.array_split(archive["x"][:200], 200)


@pytest.fixture(scope="module")
def golden() -> Bundle:
    return Bundle.open(GOLDEN)


def with_exits(plan: ClusterPlan, *exits: int) -> ClusterPlan:
    """A plan whose first split has these exits on."""
    first, *others = plan.splits
    replicas = tuple(replace(r, exits=exits) for r in first.replicas)
    return replace(plan, splits=(replace(first, replicas=replicas), *others))


def where_an_exit_costs(bundle: Bundle, dear: int, *, factor: float) -> ServedCluster:
    """Devices on which one exit takes longer than it saves."""
    times = times_of(bundle.profile(), ROWS)
    exits_s = times.exits_s.copy()
    exits_s[dear] = factor * times.segments_s.sum(axis=0)
    dear_times = DeviceTimes(segments_s=times.segments_s, exits_s=exits_s)
    kind = DeviceType(name="cpu", count=2, cost_per_hour=1.0, times=dear_times)
    return ServedCluster(
        cluster=Cluster(types=(kind,)), goal=PlanningGoal(batch_sizes=(1, 2, 4, ROWS))
    )


def test_an_exit_that_costs_more_than_it_saves_is_off_and_the_others_are_certified_again(
    golden: Bundle,
) -> None:
    active = [a.exit for a in golden.policy.active]
    dear = active[1]
    splits = plan_splits("m", golden, where_an_exit_costs(golden, dear, factor=2.0), ["cpu"] * 2)
    assert dear not in splits.exits
    assert splits.exits
    assert set(splits.model.exit_names) == splits.exits < {*active}
    policy = policy_of_exits(golden, splits.exits, golden.profile(), ModelOptions())
    assert {a.exit for a in policy.active} == splits.exits
    assert policy.promise is not None
    records = golden.records()
    chosen = records["split"] == 2
    left = np.zeros(int(chosen.sum()), np.bool_)
    wrong = 0
    final = records["final_prediction"][chosen]
    for exit_ in policy.active:
        sure = records["confidence"][exit_.exit][chosen] >= np.float32(exit_.threshold)
        leaves = sure & ~left
        wrong += int((records["prediction"][exit_.exit][chosen][leaves] != final[leaves]).sum())
        left |= leaves
    assert policy.promise.certify_errors == wrong
    assert policy.promise.certify_samples == chosen.sum()
    assert policy.promise.p_value <= 1 - policy.promise.confidence_level
    asked = golden.policy.promise
    assert asked is not None
    assert policy.promise.max_disagreement <= asked.max_disagreement


def test_a_policy_without_the_exits_that_are_off_is_the_same(golden: Bundle) -> None:
    every = [a.exit for a in golden.policy.active]
    found = policy_of_exits(golden, [*every, 99], golden.profile(), ModelOptions())
    assert found is golden.policy


def test_where_no_exit_earns_anything_all_stay_on(golden: Bundle) -> None:
    times = times_of(golden.profile(), ROWS)
    slow = DeviceTimes(segments_s=times.segments_s, exits_s=1e3 + times.exits_s)
    kind = DeviceType(name="cpu", count=1, cost_per_hour=1.0, times=slow)
    served = ServedCluster(cluster=Cluster(types=(kind,)), goal=PlanningGoal(batch_sizes=(1,)))
    splits = plan_splits("m", golden, served, ["cpu"])
    assert splits.plan.exits() == frozenset()
    assert splits.exits == {a.exit for a in golden.policy.active}


def test_a_given_plan_is_served_as_it_stands(small: Small, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(dump_plan(FRONT))
    given = read_plan(tmp_path / "plan.json")
    assert given == FRONT

    async def body(serving: Serving) -> None:
        assert serving.segments() == [(2, 4), (0, 1), (2, 4), (0, 1)]
        loop = plans_of(serving.engine)
        assert loop is not None
        before = serving.plan
        for _ in range(3):
            loop._clock = lambda: 1e9
            await asyncio.to_thread(loop.poll)
        assert serving.plan == before
        status = plan_status_of(serving.engine.statistics()["small"])
        assert status is not None
        assert (status.changes, status.given_up, status.batch_size) == (0, 0, FRONT.batch_size)
        assert status.reason == "the configured plan"

    cluster = replace(cluster_for(small[0], share=0.8), plan=given)
    assert serve(small, body, plan=None, cluster=cluster).trespasses == []


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (plan_of((0, 3, {"slow": 1})), ("segments 0 to 3", "expected 0 to 4")),
        (plan_of((1, 4, {"slow": 1})), ("segments 1 to 4", "expected 0 to 4")),
        (with_exits(FRONT, 7), ("exits [7]", "in use, [0")),
        (plan_of((0, 4, {"slow": 3})), ("1 more devices of type 'slow'",)),
        (plan_of((0, 4, {"odd": 1})), ("'odd'",)),
    ],
)
def test_a_given_plan_that_does_not_fit_is_refused(
    small: Small, plan: ClusterPlan, told: Told
) -> None:
    cluster = replace(cluster_for(small[0], share=0.8), plan=plan)
    with pytest.raises(OptionsError, match=facts(*told)):
        plan_splits("small", small[0], cluster, KINDS)


def test_a_given_plan_that_cannot_be_loaded_is_refused(small: Small) -> None:
    cluster = replace(cluster_for(small[0], share=0.8), plan=FRONT)
    other = cluster.without(RefusedSegments("slow", 0, 1))
    assert plan_splits("small", small[0], other, KINDS).plan == FRONT
    with pytest.raises(OptionsError, match=facts("'slow'", "segments 3 to 4")):
        plan_splits("small", small[0], cluster.without(RefusedSegments("slow", 3, 4)), KINDS)


def test_where_a_split_cannot_be_loaded_the_next_best_plan_is_tried(small: Small) -> None:
    whole = cluster_for(small[0], share=2.0, speeds={"slow": 1.0, "fast": 1.0})
    best = plan_splits("small", small[0], whole, KINDS).plan
    assert best.splits[-1].last_segment - best.splits[-1].first_segment == 3
    refused = []

    def refuses(backend: HeldBackend, spec: StageSpec) -> bool:
        """Return True for stages that would give a worker both the second segment and the last."""
        holders = [n for n in range(backend.workers) if backend.rule(n, spec)]
        loaded = {
            segment
            for n in holders
            for first, last, _ in (*backend.stages(n), spec.unit)
            for segment in range(first, last + 1)
        }
        if {1, 4} <= loaded:
            refused.append(spec.unit)
            return True
        return False

    async def body(serving: Serving) -> None:
        splits = serving.served.splits
        assert not splits.steals
        assert all(not {1, 4} <= held for held in splits.held)

    assert serve(small, body, plan=None, cluster=whole, refuses=refuses).trespasses == []
    assert refused


def test_plans_have_nothing_that_was_refused(small: Small) -> None:
    cluster = cluster_for(small[0], share=2.0)
    for last in (4, 3, 2):
        refused = [RefusedSegments(kind, 0, last) for kind in ("fast", "slow")]
        plan = plan_splits("small", small[0], cluster.without(*refused), KINDS).plan
        assert plan.splits[0].last_segment < last
    one = plan_splits("small", small[0], cluster.without(RefusedSegments("fast", 0, 0)), KINDS).plan
    assert "fast" not in one.splits[0].device_types


def replicas(**changes: Any) -> Replicas:
    return replace(FRONT.splits[0].replicas[0], **changes)


def test_the_exits_of_a_plan_are_those_of_its_splits() -> None:
    first, second = FRONT.splits
    first = replace(first, replicas=(replicas(exits=(0,)), replicas(exits=(0, 1))))
    assert replace(FRONT, splits=(first, second)).exits() == {0, 1}
    assert FRONT.exits() == frozenset()


def test_each_batch_of_a_worker_is_a_stream_of_its_split(small: Small) -> None:
    cluster = replace(cluster_for(small[0], share=0.8), plan=FRONT, batches_per_worker=2)
    splits = plan_splits("small", small[0], cluster, KINDS)
    assert len(splits.roles) == len(KINDS)
    placement = splits.placement(make_plan(small[0], borders=splits.borders), ROWS, 0.0)
    assert len(placement.streams) == 2 * len(KINDS)
    assert placement.streams[: len(KINDS)] == placement.streams[len(KINDS) :]
