"""Operating points of several variants: what dominates what, and what policies make of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.facts import facts
from tests.unit.scheduling.helpers import Watched, none_exit, started
from tests.unit.scheduling.variants import (
    SIZE,
    TABLES,
    all_points,
    dominates,
    front_of,
    latencies_of,
    rising,
)

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Latencies,
    OperatingPoint,
    OperatingPoints,
    Run,
    StageTable,
    Submission,
    pareto_front,
)
from offramp.engine.scheduling.decisions import wait_until
from offramp.engine.scheduling.policies import PolicyName, make_policy, make_scheduler
from offramp.engine.scheduling.policies.slack import Setting, SlackPolicy
from offramp.engine.scheduling.policy_protocol import Choice, NeverBuffers, Waiting
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.scheduler import ModelScheduler

SMALL, MIDDLE, FULL = [0.0, 0.25, 0.5], [0.0, 0.5, 1.0], [0.0, 1.0, 2.0]
THREE = [[FULL], [MIDDLE], [SMALL]]
"""Three variants of one stage: 1, 0.5 and 0.25 s a row."""
AGREEMENTS = st.lists(st.integers(0, 10).map(lambda n: n / 10), min_size=1, max_size=12)
CHOOSING = ("slackfit", "slackfit-bare", "max-batch", "max-accuracy", "cheapest")
SLACKS = st.one_of(st.integers(0, 400).map(lambda n: n / 8), st.just(float("inf")))
SPEEDS = st.sampled_from([0.5, 1.0, 2.0])


def places(points: tuple[OperatingPoint, ...]) -> list[tuple[int, int]]:
    return [(point.variant, point.deepest) for point in points]


# Operating points


def test_points_are_ordered_by_time_and_the_dominated_left_out() -> None:
    latencies = latencies_of([*THREE, [SMALL], [[0.0, 1.0, 3.0]]])
    points = all_points(latencies, [0.6, 0.9, 0.8, 0.7, 0.99])
    # Variant 3 takes as long as 2 and agrees less often; 4 takes longer than the full model, whose
    # agreement counts for nothing.
    assert places(pareto_front(points, latencies)) == [(2, 0), (1, 0), (0, 0)]
    worse = all_points(latencies, [1.0, 0.8, 0.8, 0.8, 0.8])
    assert places(pareto_front(worse, latencies)) == [(2, 0), (0, 0)], "of equals the lower variant"


def test_a_variant_dominates_an_exit_of_the_full_model_but_another_exit_does_not() -> None:
    """Stages of 1 s a row; the exit at stage 1 agrees less often than the one before it."""
    stages = [FULL, FULL, FULL]
    latencies = latencies_of([stages, [[0.0, 1.5, 3.0]]])
    exits = all_points(latencies, [0.8, 0.7, 1.0, 0.75])
    assert places(pareto_front(exits, latencies)) == [(0, 0), (0, 1), (0, 2)]
    better = all_points(latencies, [0.8, 0.7, 1.0, 0.9])
    assert places(pareto_front(better, latencies)) == [(0, 0), (1, 0), (0, 2)]


def test_points_that_are_not_in_pareto_order_are_refused() -> None:
    latencies = latencies_of(THREE)
    points = tuple(all_points(latencies, [1.0, 0.9, 0.8]))
    with pytest.raises(ValueError, match=r"expected \[\(2, 0\), \(1, 0\), \(0, 0\)\]"):
        OperatingPoints(points=points, latencies=latencies)
    dominated = tuple(reversed(all_points(latencies, [1.0, 0.7, 0.8])))
    with pytest.raises(ValueError, match=r"expected \[\(2, 0\), \(0, 0\)\]"):
        OperatingPoints(points=dominated, latencies=latencies)


@given(tables=TABLES, agreements=AGREEMENTS)
def test_the_front_is_what_nothing_of_it_dominates(
    tables: list[list[list[float]]], agreements: list[float]
) -> None:
    latencies = latencies_of(tables)
    points = all_points(latencies, agreements)
    front = pareto_front(points, latencies)
    assert rising([latencies.span_s(0, p.deepest, SIZE, p.variant) for p in front])
    assert front[-1] == points[len(tables[0]) - 1], "the full model is last"
    assert not any(dominates(one, other, latencies) for one in front for other in front)
    for point in set(points) - set(front):
        seconds = latencies.span_s(0, point.deepest, SIZE, point.variant)
        assert any(
            better.worth >= point.agreement
            and latencies.span_s(0, better.deepest, SIZE, better.variant) <= seconds
            for better in front
        )


# Latencies


def test_each_variant_has_its_own_times_and_all_share_the_machines_speed() -> None:
    latencies = Latencies([FULL, FULL], smaller=[StageTable([SMALL])])
    assert (latencies.stages, latencies.last(0), latencies.last(1)) == (2, 1, 0)
    assert latencies.span_s(0, 0, 2, 1) == latencies.stage_s(0, 2, 1) == 0.5
    assert [latencies.largest_batch(0, 1.0), latencies.largest_batch(0, 1.0, 1)] == [1, 2]
    latencies.observe(0, 2, 1.5, 1)  # three times as long as predicted
    assert latencies.speed == 1.0 + 2.0 / 32
    assert latencies.span_s(0, 1, 2) == 4.0 * latencies.speed
    latencies.observe_merged(0, 2, 0.5 * latencies.speed + 0.32, 1)
    assert latencies.merging_s == pytest.approx(0.01)


def test_what_leaves_early_is_learned_of_each_variant_by_itself() -> None:
    latencies = Latencies([FULL, FULL], smaller=[StageTable([SMALL, SMALL], [0.5, 1.0])])
    latencies.observe_shrinking(0, 512, 0, 1)
    assert latencies.variants[1].going_on == [0.0, 1.0]
    assert latencies.variants[0].going_on == [1.0, 1.0]


def test_variants_are_profiled_at_the_same_batch_sizes() -> None:
    with pytest.raises(ValueError, match=facts("[2, 1]", "same batch sizes")):
        Latencies([FULL], smaller=[StageTable([[0.0, 1.0]])])


# Policies


@pytest.mark.parametrize("name", CHOOSING)
@given(
    tables=TABLES,
    agreements=AGREEMENTS,
    rows=st.integers(1, SIZE),
    slack_s=SLACKS,
    speed=SPEEDS,
    wanted_rate=st.floats(0, 50),
)
def test_no_policy_picks_a_dominated_point_or_takes_longer_than_the_slack(
    name: str,
    tables: list[list[list[float]]],
    agreements: list[float],
    rows: int,
    slack_s: float,
    speed: float,
    wanted_rate: float,
) -> None:
    latencies = latencies_of(tables)
    candidates, points = all_points(latencies, agreements), front_of(latencies, agreements)
    latencies.calibrate(speed)
    policy = make_policy(PolicyName.parse(name), points, SIZE)
    assert isinstance(policy, SlackPolicy)
    s = make_scheduler(PolicyName.parse(name), points, max_batch_size=SIZE)
    s.submit(Submission(1, rows, slack_s), 0.0)
    decision = s.next(0, 0.0)
    chosen = [policy.setting(slack_s, wanted_rate)]
    if isinstance(decision, Run):
        chosen.append(Setting(len(decision.requests), decision.deepest, decision.variant))
    for setting in filter(None, chosen):
        (point,) = [p for p in candidates if setting.runs(p)]
        assert not any(dominates(better, point, latencies) for better in points.points)
        needed_s = latencies.span_s(0, setting.deepest, setting.batch_size, setting.variant)
        assert needed_s <= slack_s * (1 + 1e-12)


@pytest.mark.parametrize("name", ["max-batch", "max-accuracy", "cheapest", "fixed:final", "slow"])
@given(tables=TABLES, agreements=AGREEMENTS, slack_s=SLACKS)
def test_every_choice_is_what_a_search_through_points_and_sizes_finds(
    name: str, tables: list[list[list[float]]], agreements: list[float], slack_s: float
) -> None:
    latencies = latencies_of(tables)
    points = front_of(latencies, agreements)
    first, last = points.points[0], points.points[-1]
    if name == "slow":  # the slowest of the variants below the full model
        assume(len(points.points) > 1 and points.points[-2].variant)
        last = points.points[-2]
        exit_ = "final" if last.exit == MODEL_END else last.exit
        name = f"fixed:{exit_}@{last.variant}"
    fits = [
        (size, rank, point)
        for rank, point in enumerate(points.points)
        for size in range(1, SIZE + 1)
        if latencies.span_s(0, point.deepest, size, point.variant) <= slack_s
    ]
    if name == "cheapest" or name.startswith("fixed"):
        fits = [item for item in fits if item[2] == (first if name == "cheapest" else last)]
    if name == "max-batch":  # as large as the fastest point allows
        size = max((size for size, _, point in fits if point == first), default=0)
        fits = [item for item in fits if item[0] == size]
    order = (lambda f: (f[1], f[0])) if name == "max-accuracy" else (lambda f: (f[0], f[1]))
    best = max(fits, key=order, default=None)
    policy = make_policy(PolicyName.parse(name), points, SIZE)
    assert isinstance(policy, SlackPolicy)
    expected = None if best is None else Setting.at(best[2], best[0])
    assert policy.setting(slack_s) == expected


@pytest.mark.parametrize(("slack_s", "variant"), [(1.0, 0), (0.75, 1), (0.3, 2)])
def test_slackfit_takes_the_best_variant_that_there_is_time_for(
    slack_s: float, variant: int
) -> None:
    points = front_of(latencies_of(THREE), [1.0, 0.9, 0.8])
    s = make_scheduler(PolicyName.parse("slackfit"), points, max_batch_size=2)
    s.submit(Submission(1, 1, slack_s), 0.0)
    run = started(s.next(0, 0.0))
    assert (run.variant, run.deepest) == (variant, 0)


@pytest.mark.parametrize("name", ["run-through", "refill", "rebatch", "delay", "clockwork"])
def test_policies_that_touch_no_answer_run_the_full_model(name: str) -> None:
    points = front_of(latencies_of(THREE), [1.0, 0.9, 0.8])
    s = make_scheduler(PolicyName.parse(name), points, max_batch_size=2)
    s.submit(Submission(1, 1, 1.5), 0.0)
    run = started(s.next(0, 0.0))
    assert run.variant == 0


def test_a_variant_that_is_not_there_cannot_be_fixed() -> None:
    points = front_of(latencies_of(THREE), [1.0, 0.9, 0.8])
    with pytest.raises(ValueError, match=facts("final@3", "final@2, final@1, final")):
        make_policy(PolicyName.parse("fixed:final@3"), points, 2)


def test_a_variant_ends_at_its_own_last_stage_and_keeps_itself_when_tried_again() -> None:
    """The full model has three stages, variant 1 two; the first try fails."""
    latencies = latencies_of([[FULL] * 3, [SMALL] * 2])
    points = front_of(latencies, [0.1, 0.2, 1.0, 0.8, 0.9])
    s = make_scheduler(PolicyName.parse("fixed:final@1"), points, max_batch_size=2)
    s.submit(Submission(1, 2), 0.0)
    first = started(s.next(0, 0.0))
    s.failed(0, 0.1)
    again = started(s.next(0, 1.0))
    assert (first.variant, first.deepest) == (again.variant, again.deepest) == (1, 1)
    assert s.update(0, np.array([True, False]), 1.5).survivors.tolist() == [1]
    last = started(s.next(0, 1.5))
    assert (last.variant, last.stage) == (1, 1)
    assert s.update(0, none_exit(last), 1.75).released.tolist() == [0]
    assert latencies.speed == 1.0, "its stages took what its own table says"
    assert latencies.variants[1].going_on == [1.0 - 2 / 512 * 0.5, 1.0]
    assert latencies.variants[0].going_on == [1.0, 1.0, 1.0]


def test_what_runs_on_after_its_answer_is_counted_for_its_variant() -> None:
    latencies = latencies_of([[FULL] * 3, [SMALL] * 2])
    points = front_of(latencies, [0.1, 0.2, 1.0, 0.8, 0.9])
    s = make_scheduler(PolicyName.parse("fixed:final@1"), points, max_batch_size=2)
    s.submit(Submission(1, 2), 0.0)
    started(s.next(0, 0.0))
    s.update(0, np.array([True, True]), 0.5, np.array([True, False]))
    assert latencies.variants[1].going_on == [1.0 - 2 / 512 * 0.5, 1.0]


@pytest.mark.parametrize(("wanted_rate", "variant"), [(0.5, 0), (1.5, 1), (3.0, 2), (99.0, 2)])
def test_slackfit_keeps_up_by_the_rate_of_each_variant(wanted_rate: float, variant: int) -> None:
    """The variants serve 1, 2 and 4 rows per second."""
    points = front_of(latencies_of(THREE), [1.0, 0.9, 0.8])
    policy = make_policy(PolicyName.parse("slackfit"), points, 2)
    assert isinstance(policy, SlackPolicy)
    assert policy.setting(float("inf"), wanted_rate) == Setting(2, 0, variant)


def test_a_second_try_needs_the_time_of_its_own_variant() -> None:
    """1 s is enough for two rows of variant 2, and not for the full model's."""
    late = Dropped(1, 2, DropCause.FAILED)
    for policy, dropped in (("fixed:final@2", []), ("fixed:final", [late])):
        points = front_of(latencies_of(THREE), [1.0, 0.9, 0.8])
        s = Watched(make_scheduler(PolicyName.parse(policy), points, max_batch_size=2))
        s.submit(Submission(1, 2, 2.0), 0.0)
        started(s.next(0, 0.0))
        s.failed(0, 1.0)
        assert s.take_dropped() == dropped


def test_slackfit_keeps_up_with_the_streams_that_are_in_service() -> None:
    """1.5 rows a second are 0.75 for each of two streams, and variant 1's for one alone."""
    points = front_of(latencies_of(THREE), [1.0, 0.9, 0.8])
    policy = make_policy(PolicyName.parse("slackfit"), points, 2, 2)
    assert isinstance(policy, SlackPolicy)
    queue = SampleQueue(8, full=2)
    queue.push(Submission(1, 1, 9.0), 0.0)
    suspended: set[int] = set()
    waiting = Waiting(queue, (), suspended)
    for out, variant in (((), 0), ((1,), 1), ((0, 1), 1), ((), 0)):
        suspended.clear()
        suspended.update(out)
        policy.choose(waiting, 0.0)
        assert policy.setting(float("inf"), 1.5) == Setting(2, 0, variant)


def test_a_scheduler_tells_its_policy_which_streams_are_out_of_service() -> None:
    seen = []

    class Looking(NeverBuffers):
        name = "looking"

        def choose(self, waiting: Waiting, now_s: float) -> Choice:
            seen.append(set(waiting.suspended))
            return wait_until(now_s + 1.0)

    latencies = latencies_of(THREE)
    queue = SampleQueue(8, full=2)
    s = ModelScheduler(Looking(), latencies, queue, streams=3)
    s.suspend(2)
    s.next(0, 0.0)
    s.hot_swap(1, Looking(), latencies)
    s.suspend(1)
    s.next(0, 0.0)
    s.resume(2)
    s.next(0, 0.0)
    assert seen == [{2}, {1, 2}, {1}]
