"""Plans are those of brute force, on many small instances; and what is never given up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.cluster.planning.instances import (
    Candidate,
    baseline_rate,
    candidates,
    random_instance,
)
from tests.facts import Told, facts, tells

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType, ModelFacts
from offramp.cluster.planning.cluster_plan import InfeasiblePlanError, PlanError
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.prediction import predict
from offramp.engine.scheduling import DeviceLink

CLOSE = 1e-6
"""Relative: sums of the same figures in another order."""


def best_of(found: list[Candidate], goal: PlanningGoal, most_cost: float) -> Candidate | str:
    """Return the best candidate for the goal, or the first constraint that none meets."""
    if not found:
        return "memory"
    found = [c for c in found if c.latency_s <= goal.latency_s * (1 + 1e-9)]
    if not found:
        return "latency"
    found = [c for c in found if c.cost <= most_cost * (1 + 1e-9)]
    if not found:
        return "cost"
    if goal.rate_rps is None:
        least_s = min(c.period_s for c in found)
        found = [c for c in found if c.period_s <= least_s * 1.01 * (1 + 1e-9)]
    else:
        found = [c for c in found if c.period_s <= 1 / goal.rate_rps * (1 + 1e-9)]
        if not found:
            return "rate"
        least = min(c.cost for c in found)
        found = [c for c in found if c.cost <= least * (1 + 1e-9)]
    return min(found, key=lambda c: (c.splits, round(c.cost, 6), c.latency_s))


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_plans_are_those_of_brute_force(first: int) -> None:
    for seed in range(first, first + 20):
        model, cluster, goal = random_instance(seed)
        arrival_rps = goal.rate_rps or baseline_rate(model, cluster, goal)
        every = list(candidates(model, cluster, goal, arrival_rps))
        expected = best_of(every, goal, goal.cost_factor * cluster.cost_per_hour)
        if isinstance(expected, str):
            with pytest.raises(InfeasiblePlanError, match=f"^{expected}: ") as caught:
                make_cluster_plan(model, cluster, goal)
            assert caught.value.binds == expected, seed
            continue
        result = make_cluster_plan(model, cluster, goal)
        plan = result.plan
        assert result.arrival_rps == pytest.approx(arrival_rps, rel=CLOSE)
        assert len(plan.splits) == expected.splits, seed
        assert plan.cost_per_hour == pytest.approx(expected.cost, rel=CLOSE)
        assert plan.latency_s == pytest.approx(expected.latency_s, rel=CLOSE), seed
        # What is predicted of the plan is what one of the candidates is.
        assert any(
            c.splits == len(plan.splits)
            and c.batch_size == plan.batch_size
            and c.period_s == pytest.approx(plan.period_s, rel=CLOSE)
            and c.latency_s == pytest.approx(plan.latency_s, rel=CLOSE)
            for c in every
        ), seed
        assert predict(plan, model, cluster, arrival_rps=result.arrival_rps) == plan


def flat(count: int, segments: int, size: int = 4, exit_s: float = 0.0) -> DeviceTimes:
    """Return times of 1 ms for every segment at any batch size: larger batches are always
    better.
    """
    batch = (np.arange(size + 1) > 0).astype(float)
    return DeviceTimes(
        segments_s=np.tile(1e-3 * batch, (segments, 1)),
        exits_s=np.tile(exit_s * batch, (count, 1)),
    )


def two_halves(devices: int, exit_s: float = 0.0, **cluster: object) -> Cluster:
    times = flat(1, 2, exit_s=exit_s)
    kind = DeviceType(name="gpu", count=devices, cost_per_hour=1.0, times=times)
    return Cluster(types=(kind,), **cluster)  # type: ignore[arg-type]


HALF_LEAVE = ModelFacts(segments=2, exit_after=(0,), going_on=(0.5,), row_bytes=(1e3,))
FOUR = PlanningGoal(batch_sizes=(4,))


def test_a_halved_batch_is_refilled_after_the_exit() -> None:
    """Figure 5: two devices for the first split, one for the second, all batches full."""
    plan = make_cluster_plan(HALF_LEAVE, two_halves(3), FOUR).plan
    assert [(s.first_segment, s.last_segment, s.replicas[0].count) for s in plan.splits] == [
        (0, 0, 2),
        (1, 1, 1),
    ]
    assert plan.splits[0].replicas[0].exits == (0,)
    assert plan.splits[1].share == 0.5
    # 4 rows in 1 ms on each of two devices; the second split sees half of them on one device.
    assert plan.period_s == pytest.approx(1e-3 / 8)
    assert plan.rate_rps == pytest.approx(8e3)
    # The whole model takes 2 ms for 4 rows on each of three devices.
    baseline = make_cluster_plan(HALF_LEAVE, two_halves(3), FOUR).baseline
    assert baseline is not None
    assert baseline.rate_rps == pytest.approx(6e3)
    # Waits are for 1.5 more rows on average, at the rate of the baseline, and at half of it.
    assert plan.latency_s == pytest.approx(2e-3 + 1.5 / 6e3 + 1.5 / 3e3)


def test_the_model_as_it_is_has_no_copy_before_it() -> None:
    """The last segment of a cascade is the model: here as fast as its copy, which is no gain."""
    model = ModelFacts(segments=2, exit_after=(0,), going_on=(0.9,), begins=1)
    result = make_cluster_plan(model, two_halves(3), FOUR)
    assert result.baseline == result.plan
    (split,) = result.plan.splits
    assert (split.first_segment, split.last_segment, split.share) == (1, 1, 1.0)
    assert result.plan.rate_rps == pytest.approx(12e3)  # 4 rows in 1 ms on each of three
    assert predict(result.plan, model, two_halves(3), arrival_rps=12e3) == result.plan


def costs_by_exit(*exits_s: float) -> Cluster:
    """Three devices; every segment takes 1 ms, each exit of the bundle what is given."""
    sizes = np.arange(5) > 0
    times = DeviceTimes(
        segments_s=np.tile(1e-3 * sizes, (2, 1)), exits_s=np.array(exits_s)[:, None] * sizes
    )
    return Cluster(types=(DeviceType(name="gpu", count=3, cost_per_hour=1.0, times=times),))


def test_an_exit_in_use_is_timed_and_called_as_in_the_bundle() -> None:
    """The second of three exits is in use: the times of the others do not matter."""
    model = ModelFacts(segments=2, exit_after=(0,), going_on=(0.5,), exits=(1,))
    cluster = costs_by_exit(5e-3, 0.1e-3, 5e-3)
    plan = make_cluster_plan(model, cluster, FOUR).plan
    first, second = plan.splits
    assert first.replicas[0].exits == (1,)
    assert first.replicas[0].stage_s == pytest.approx(1.1e-3)
    assert second.replicas[0].stage_s == pytest.approx(1e-3)
    assert predict(plan, model, cluster, arrival_rps=6e3) == plan
    free = make_cluster_plan(model, costs_by_exit(0.0, 5e-3, 0.0), FOUR).plan
    assert free.splits[0].replicas[0].exits == ()


def test_an_exit_that_no_device_has_a_time_of_is_refused() -> None:
    model = ModelFacts(segments=2, exit_after=(0,), going_on=(0.5,), exits=(3,))
    message = r"times of 2 segments and 3 exits, expected 2 and more than 3 for this model"
    with pytest.raises(PlanError, match=message):
        make_cluster_plan(model, costs_by_exit(0.0, 0.0, 0.0), FOUR)


def test_an_exit_that_costs_more_than_it_saves_is_off_and_the_model_stays_whole() -> None:
    result = make_cluster_plan(HALF_LEAVE, two_halves(3, exit_s=2e-3), FOUR)
    assert result.plan == result.baseline
    assert result.plan.splits[0].replicas[0].exits == ()


def test_a_slow_link_keeps_the_model_whole() -> None:
    link = DeviceLink(bytes_per_s=1e6)  # 1 kB of half of the rows: 2,000 rows/s at most
    plan = make_cluster_plan(HALF_LEAVE, two_halves(3, link=link), FOUR).plan
    assert len(plan.splits) == 1
    assert plan.rate_rps == pytest.approx(6e3)


def test_the_least_cost_for_a_rate_uses_fewer_devices() -> None:
    goal = PlanningGoal(batch_sizes=(4,), rate_rps=4e3)
    result = make_cluster_plan(HALF_LEAVE, two_halves(9), goal)
    assert result.plan.devices() == {"gpu": 2}
    assert result.plan.cost_per_hour == 2.0
    assert result.arrival_rps == 4e3
    needed = PlanningGoal(batch_sizes=(4,), rate_rps=7e3)
    found = make_cluster_plan(HALF_LEAVE, two_halves(9), needed)
    assert found.plan.devices() == {"gpu": 3}
    assert found.baseline is not None
    assert found.baseline.devices() == {"gpu": 4}


def test_without_the_wrapper_all_exits_are_on() -> None:
    model = ModelFacts(segments=3, exit_after=(0, 1), going_on=(1.0, 0.9))
    kind = DeviceType(name="gpu", count=1, cost_per_hour=1.0, times=flat(2, 3, exit_s=1e-4))
    cluster = Cluster(types=(kind,))
    off = PlanningGoal(batch_sizes=(4,), wrapper=False)
    plans = [make_cluster_plan(model, cluster, goal).plan for goal in (FOUR, off)]
    assert [plan.splits[0].replicas[0].exits for plan in plans] == [(), ()]  # the model as it is
    steep = ModelFacts(segments=3, exit_after=(0, 1), going_on=(1.0, 0.1))
    plans = [make_cluster_plan(steep, cluster, goal).plan for goal in (FOUR, off)]
    assert [plan.splits[0].replicas[0].exits for plan in plans] == [(1,), (0, 1)]
    # 2 ms, a check, and 0.4 rows for a third: 0.4 ms; the second check costs 0.1 ms more.
    assert [plan.splits[0].replicas[0].stage_s for plan in plans] == pytest.approx([2.5e-3, 2.6e-3])
    # Of a row that goes on, at worst, a third segment in full.
    assert [plan.splits[0].longest_s for plan in plans] == pytest.approx([3.1e-3, 3.2e-3])


@pytest.mark.parametrize(
    ("goal", "binds", "message"),
    [
        (
            PlanningGoal(slo_s=1e-3),
            "latency",
            ("faster than 2.00 ms", "at most 0.80 ms", "SLO of 1.00 ms"),
        ),
        (PlanningGoal(cost_factor=0.3), "cost", ("at most 0.6 an hour", "0.3 of all")),
        (PlanningGoal(rate_rps=1e5), "rate", ("4,000.0 rows/s", "expected 100,000.0")),
    ],
)
def test_the_constraint_that_binds_is_named(goal: PlanningGoal, binds: str, message: Told) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_cluster_plan(HALF_LEAVE, two_halves(2), goal)
    assert caught.value.binds == binds
    tells(str(caught.value), *message)
    assert "\n" not in str(caught.value)


def test_too_little_memory_is_named() -> None:
    model = ModelFacts(
        segments=2, exit_after=(0,), going_on=(0.5,), row_bytes=(0,), weight_bytes=(2e6, 1e6)
    )
    kind = DeviceType(name="gpu", count=1, cost_per_hour=1.0, times=flat(1, 2), memory_bytes=2.5e6)
    with pytest.raises(InfeasiblePlanError, match=facts("memory", "3.0 MB", "1 dev")):
        make_cluster_plan(model, Cluster(types=(kind,)), PlanningGoal())


def test_what_is_too_much_to_search_is_refused() -> None:
    kinds = tuple(
        DeviceType(name=f"t{k}", count=99, cost_per_hour=1.0, times=flat(1, 2)) for k in range(3)
    )
    with pytest.raises(PlanError, match=facts("300,000,000 combinations", "at most")):
        make_cluster_plan(HALF_LEAVE, Cluster(types=kinds), PlanningGoal())
    with pytest.raises(PlanError, match=facts("batch sizes [8]", "at most 4")):
        make_cluster_plan(HALF_LEAVE, two_halves(1), PlanningGoal(batch_sizes=(8,)))


def test_no_plan_is_worse_than_the_model_as_it_is() -> None:
    """If few leave, the paper's plans lose up to 23 % (5.9)."""
    model = ModelFacts(segments=2, exit_after=(0,), going_on=(0.8,))
    result = make_cluster_plan(model, two_halves(3, exit_s=3e-4), FOUR)
    assert result.baseline is not None
    assert result.plan.rate_rps == result.baseline.rate_rps == pytest.approx(6e3)


def test_a_plan_under_another_forecast_is_limited_by_the_split_that_gets_more() -> None:
    cluster = two_halves(3)
    plan = make_cluster_plan(HALF_LEAVE, cluster, FOUR).plan
    harder = ModelFacts(segments=2, exit_after=(0,), going_on=(0.75,), row_bytes=(1e3,))
    found = predict(plan, harder, cluster, arrival_rps=6e3)
    assert found.rate_rps == pytest.approx(4e3 / 0.75)
    assert math.isclose(found.splits[1].share, 0.75)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exit_after": (1,)}, ("increase from 0", "below 1")),
        ({"going_on": ()}, ("going_on has 0 values", "expected 1")),
        ({"going_on": (1.5,)}, ("going_on has 1.5",)),
        ({"row_bytes": (1.0, 2.0)}, ("row_bytes has 2 values", "expected 1")),
        ({"exits": (-1,)}, ("exits (-1,)", "increase from 0")),
    ],
)
def test_facts_that_contradict_each_other_are_refused(
    fields: dict[str, object], message: Told
) -> None:
    given = {"segments": 2, "exit_after": (0,), "going_on": (0.5,), **fields}
    with pytest.raises(ValueError, match=facts(*message)):
        ModelFacts(**given)  # type: ignore[arg-type]


def test_clusters_that_contradict_themselves_are_refused() -> None:
    (kind,) = two_halves(1).types
    with pytest.raises(ValueError, match="a different name for each"):
        Cluster(types=(kind, kind))
    with pytest.raises(ValueError, match=r"links name \['cpu'\], expected types among \['gpu'\]"):
        Cluster(types=(kind,), links=(("gpu", "cpu", DeviceLink()),))
