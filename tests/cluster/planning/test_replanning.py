"""When to plan again, and that plans do not flap."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit, Replicas
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.replanning import ReplanGuard, ReplanRules, fits_cluster, gain_of
from offramp.cluster.planning.transition import splits_of

LAYERS = 12
GOAL = PlanningGoal(slo_s=0.1, batch_sizes=(1, 2, 4, 8))


def cluster_of(count: int, price: float = 1.0) -> Cluster:
    """A batch of n rows takes (8 + n) / 16 of 10 ms; an exit a fiftieth of a layer."""
    sizes = np.arange(65)
    layer = np.where(sizes > 0, 10e-3 / LAYERS * (8 + sizes) / 16, 0.0)
    segments = np.tile(layer, (LAYERS, 1))
    times = DeviceTimes(segments_s=segments, exits_s=0.02 * segments[:3])
    return Cluster(types=(DeviceType(name="a", count=count, cost_per_hour=price, times=times),))


CLUSTER = cluster_of(16)


def model_of(*going_on: float) -> ModelFacts:
    return ModelFacts(segments=LAYERS, exit_after=(2, 4, 5), going_on=going_on)


def rated(rate_rps: float, *, cost: float = 1.0, longest_s: float = 0.0) -> ClusterPlan:
    replicas = Replicas(device_type="a", count=1, exits=(), stage_s=1.0, longest_s=longest_s)
    split = PlannedSplit(
        first_segment=0, last_segment=0, replicas=(replicas,), share=1.0, period_s=1 / rate_rps,
        fill_s=0.0, link_period_s=0.0, link_s=0.0,
    )  # fmt: skip
    return ClusterPlan(batch_size=1, splits=(split,), cost_per_hour=cost)


def begun(rules: ReplanRules | None = None) -> tuple[ReplanGuard, ClusterPlan]:
    """A guard that planned at 0, and its plan."""
    guard = ReplanGuard(rules)
    assert guard.due(0.0) == "first"
    decision = guard.decide(0.0, None, model_of(0.8, 0.6, 0.5), CLUSTER, GOAL, due="first")
    assert decision.plan is not None
    assert (decision.changed, decision.reason) == (True, "the first plan")
    return guard, decision.plan


def test_planning_is_due_every_window() -> None:
    guard, plan = begun()
    assert guard.due(119.0) is None
    assert guard.due(120.0) == "window"
    guard.decide(120.0, plan, model_of(0.8, 0.6, 0.5), CLUSTER, GOAL)
    assert guard.due(239.0) is None
    assert guard.due(240.0) == "window"


@pytest.mark.parametrize(
    ("observed", "rows", "due"),
    [
        ((0.8, 0.6, 0.5), 10_000, None),
        ((0.8, 0.6, 0.64), 10_000, None),
        ((0.8, 0.6, 0.66), 10_000, "parted"),
        ((0.8, 0.6, 0.34), 10_000, "parted"),
        ((0.8, 0.6, 0.1), 499, None),
        ((None, None, 0.1), 500, "parted"),
        ((0.8, None, None), 10_000, None),
    ],
)
def test_planning_is_due_at_once_where_shares_part(
    observed: tuple[float | None, ...], rows: int, due: str | None
) -> None:
    guard, plan = begun()
    forecast = (0.8, 0.6, 0.5)
    assert guard.due(60.0, observed=observed, forecast=forecast, rows=rows) == due
    if due == "parted":
        guard.decide(60.0, plan, model_of(0.8, 0.6, 0.5), CLUSTER, GOAL, due="parted")
        # Once in a window is enough; the next window comes when it would have come.
        assert guard.due(61.0, observed=observed, forecast=forecast, rows=rows) is None
        assert guard.due(120.0) == "window"
        guard.decide(120.0, plan, model_of(0.8, 0.6, 0.5), CLUSTER, GOAL)
        assert guard.due(121.0, observed=observed, forecast=forecast, rows=rows) == "parted"


def test_a_plan_is_changed_for_a_gain_above_the_margin_once_the_pause_is_over() -> None:
    guard = ReplanGuard(ReplanRules(margin=0.1, pause_s=600.0))
    here, better = rated(100.0), rated(112.0)
    kept = guard.compare(0.0, here, rated(109.0), GOAL)
    assert (kept.plan, kept.changed) == (here, False)
    assert kept.reason == "a change would gain 9.0%, less than 10%"
    assert guard.compare(0.0, here, rated(90.0), GOAL).plan == here
    changed = guard.compare(0.0, here, better, GOAL)
    assert (changed.plan, changed.changed, changed.reason) == (better, True, "better by 12.0%")
    waits = guard.compare(599.0, better, rated(200.0), GOAL)
    assert (waits.plan, waits.changed) == (better, False)
    assert waits.reason == "a change would gain 78.6%, but the pause lasts 1 s more"
    assert guard.compare(600.0, better, rated(200.0), GOAL).changed


def test_gains_are_in_what_was_asked_for() -> None:
    assert gain_of(rated(100.0), rated(125.0), PlanningGoal()) == pytest.approx(0.25)
    rate = PlanningGoal(rate_rps=100.0)
    cheap, dear = rated(100.0, cost=2.0), rated(500.0, cost=3.0)
    assert gain_of(dear, cheap, rate) == pytest.approx(0.5)
    assert gain_of(cheap, dear, rate) == pytest.approx(-1 / 3)
    assert gain_of(rated(99.0), dear, rate) == math.inf
    free = rated(100.0, cost=0.0)
    assert (gain_of(free, free, rate), gain_of(cheap, free, rate)) == (0.0, math.inf)
    # Of an objective of 100 ms a fifth is slack, of which a plan in force may use a tenth.
    late = PlanningGoal(slo_s=0.1)
    for longest_s, gain in ((0.079, 0.0), (0.087, 0.0), (0.089, math.inf)):
        slow = rated(100.0, longest_s=longest_s)
        assert gain_of(slow, rated(100.0), late, tolerance=0.1) == pytest.approx(gain)
    assert gain_of(rated(100.0, longest_s=0.087), rated(100.0), late) == math.inf


def test_a_plan_whose_devices_are_gone_is_replaced_at_once() -> None:
    guard, plan = begun()
    assert fits_cluster(plan, CLUSTER)
    fewer = cluster_of(max(plan.devices()["a"] - 1, 1))
    assert not fits_cluster(plan, fewer)
    decision = guard.decide(1.0, plan, model_of(0.8, 0.6, 0.5), fewer, GOAL)
    assert decision.plan is not None
    assert decision.changed
    assert fits_cluster(decision.plan, fewer)
    assert decision.reason == "devices of the active plan are gone"


def test_without_a_feasible_plan_the_active_plan_stays() -> None:
    guard, plan = begun()
    tight = PlanningGoal(slo_s=1e-4, batch_sizes=(1,))
    decision = guard.decide(1e4, plan, model_of(0.8, 0.6, 0.5), CLUSTER, tight)
    assert (decision.plan, decision.changed) == (plan, False)
    assert decision.reason.startswith("no plan is possible: latency")
    gone = guard.decide(1e4, plan, model_of(0.8, 0.6, 0.5), cluster_of(1), tight)
    assert (gone.plan, gone.changed) == (None, True)


def test_a_plan_follows_a_shift_of_the_mix() -> None:
    guard, plan = begun()
    hard = model_of(0.97, 0.95, 0.93)
    decision = guard.decide(1e4, plan, hard, CLUSTER, GOAL)
    assert decision.changed
    assert decision.plan is not None
    assert splits_of(decision.plan) != splits_of(plan)


def changes(rules: ReplanRules, seed: int, noise: float) -> int:
    """Changes in 40 windows of one mix, with forecasts that are wrong at random."""
    rng, guard, plan, found = np.random.default_rng(seed), ReplanGuard(rules), None, -1
    for window in range(40):
        odds = np.log(np.array([0.8, 0.6, 0.5]) / np.array([0.2, 0.4, 0.5]))
        shares = 1 / (1 + np.exp(-(odds + rng.normal(0, noise))))
        decision = guard.decide(120.0 * window, plan, model_of(*shares), CLUSTER, GOAL)
        plan = decision.plan
        found += decision.changed
    return found


@pytest.mark.parametrize("seed", range(2))
def test_with_noisy_forecasts_plans_do_not_flap(seed: int) -> None:
    eager = changes(ReplanRules(margin=0.0, pause_s=0.0), seed, noise=0.1)
    assert eager > 12
    assert changes(ReplanRules(pause_s=0.0), seed, noise=0.1) <= 2
    assert changes(ReplanRules(), seed, noise=0.1) <= 2
    # Noise that no margin helps against: the pause of five windows does.
    assert changes(ReplanRules(), seed, noise=2.0) <= 8


@given(
    st.lists(st.floats(1.0, 10.0), min_size=2, max_size=6),
    st.lists(st.lists(st.floats(-1.0, 1.0), min_size=6, max_size=6), min_size=1, max_size=40),
    st.floats(0.01, 0.5),
)
def test_no_plan_comes_back_while_noise_is_within_the_margin(
    rates: list[float], noise: list[list[float]], margin: float
) -> None:
    """The statement at the top of the module: true rates rise with each change."""
    guard, here = ReplanGuard(ReplanRules(margin=margin, pause_s=0.0)), 0
    most = 0.5 * math.log(1 + margin)
    for errors in noise:
        seen = [rate * math.exp(0.999 * most * error) for rate, error in zip(rates, errors)]  # noqa: B905
        best = int(np.argmax(seen))
        decision = guard.compare(0.0, rated(seen[here]), rated(seen[best]), PlanningGoal())
        if decision.changed:
            assert rates[best] > rates[here]
            here = best


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=50), st.floats(1.0, 1e4))
def test_whatever_is_forecast_a_change_has_its_pause(rates: list[float], pause_s: float) -> None:
    guard = ReplanGuard(ReplanRules(margin=0.0, pause_s=pause_s))
    times = [120.0 * k for k in range(len(rates))]
    here, changed = rated(1.0), []
    for now_s, rate in zip(times, rates, strict=True):
        if guard.compare(now_s, here, rated(rate), PlanningGoal()).changed:
            changed.append(now_s)
    assert all(b - a >= pause_s for a, b in itertools.pairwise(changed))


def test_rules_are_checked() -> None:
    with pytest.raises(ValueError, match="parted has 0, expected more than 0"):
        ReplanRules(parted=0)
    with pytest.raises(ValueError, match="margin has -1, expected at least 0"):
        ReplanRules(margin=-1)
