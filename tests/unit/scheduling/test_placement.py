"""Placements: who is asked for what, whose times count, and what is refused; every case by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.scheduling.helpers import (
    Watched,
    none_exit,
    pairs,
    points_of,
    scheduler,
    started,
    table,
)

from offramp.engine.scheduling import (
    DeviceKind,
    DeviceLink,
    Idle,
    Latencies,
    ModelScheduler,
    Placement,
    Run,
    StreamPlacement,
    Submission,
    Wait,
)
from offramp.engine.scheduling.policies import PolicyName, make_policy, place, policy_for
from offramp.engine.scheduling.stragglers import ReplicaStatus, StragglerMonitor

FAST, SLOW = DeviceKind(name="fast"), DeviceKind(name="slow", speed=2.0)


def on(prefers: Sequence[int], holds: Sequence[int] = (), kind: str = "fast") -> StreamPlacement:
    mine = frozenset(prefers)
    return StreamPlacement(kind=kind, prefers=mine, holds=mine | frozenset(holds))


def placement(*streams: StreamPlacement, **others: Any) -> Placement:
    return Placement(stages=3, streams=streams, kinds=(FAST, SLOW), **others)


def placed(*streams: StreamPlacement, policy: str = "refill") -> ModelScheduler:
    """Three stages that take 0.25 s, batches of up to 4."""
    return scheduler(policy, streams=len(streams), placement=placement(*streams))


def submit(s: Watched, *requests: int, now_s: float = 0.0, **how: Any) -> None:
    for request in requests:
        s.submit(Submission(request, **how), now_s)


def finish(s: Watched, stream: int, run: Run, now_s: float) -> int | None:
    """End a run in which no sample left; return the number of the buffered batch."""
    return s.update(stream, none_exit(run), now_s).buffered


@pytest.mark.parametrize("kinds", [("fast", "slow"), ("slow", "fast")])
@pytest.mark.parametrize(("slack_s", "counts"), [(0.6, False), (0.9, True)])
def test_a_request_is_feasible_if_the_fastest_stream_can_answer_it(
    kinds: Sequence[str], slack_s: float, *, counts: bool
) -> None:
    s = placed(*(on(range(3), kind=kind) for kind in kinds), policy="run-through")
    submit(s, 1, deadline_s=slack_s)
    s.next(0, 2.0)
    assert s.overloaded == counts


OWN = on([0, 1]), on([2])
STEALING = on([0, 1], [2]), on([2], [0])


def test_a_batch_changes_streams_where_a_split_ends_full_or_not() -> None:
    s = placed(*OWN)
    submit(s, 0, 1, 2, 3)
    assert s.next(1, 0.0) == Idle(), "it holds stage 2 alone"
    run = started(s.next(0, 0.0))
    assert finish(s, 0, run, 0.25) is None, "a full batch goes on inside its split"
    run = started(s.next(0, 0.25))
    assert run.stage == 1
    number = finish(s, 0, run, 0.5)
    assert number is not None
    assert s.next(0, 0.5) == Idle()
    run = started(s.next(1, 0.5))
    assert (run.stage, [piece.number for piece in run.pieces]) == (2, [number])
    assert pairs(run) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_an_idle_stream_steals_what_no_idle_stream_prefers() -> None:
    s = placed(*STEALING)
    submit(s, 0)
    assert s.next(1, 0.0) == Idle(), "stream 0 is idle, and prefers it"
    run = started(s.next(0, 0.0))
    submit(s, 1)
    stolen = started(s.next(1, 0.0))
    assert (stolen.stage, pairs(stolen)) == (0, [(1, 0)])
    assert finish(s, 1, stolen, 0.25) is not None, "stage 1 is of another split"
    finish(s, 0, run, 0.25)
    run = started(s.next(0, 0.25))
    assert (run.stage, sorted(pairs(run))) == (1, [(0, 0), (1, 0)])


def test_a_stream_serves_its_own_split_first_where_its_batch_is_full() -> None:
    s = placed(on([0]), on([1, 2], [0]))
    submit(s, 0, 1, 2, 3)
    finish(s, 0, started(s.next(0, 0.0)), 0.25)
    submit(s, 4, 5, 6, 7)
    started(s.next(0, 0.25))
    submit(s, 8, 9, 10, 11)
    assert started(s.next(1, 0.25)).stage == 1, "though a full batch waits for stage 0"


def test_an_own_batch_that_may_grow_lets_a_full_one_of_another_split_go_first() -> None:
    s = placed(on([0]), on([1, 2], [0]))
    submit(s, 0, 1, deadline_s=9.0)
    finish(s, 0, started(s.next(0, 0.0)), 0.25)
    submit(s, 2, 3, 4, 5)
    started(s.next(0, 0.25))
    submit(s, 6, 7, 8)
    own = started(s.next(1, 0.25))
    assert (own.stage, pairs(own)) == (1, [(0, 0), (1, 0)]), "three do not fill a batch either"
    assert finish(s, 1, own, 0.5) is not None, "two are not full"
    submit(s, 9, now_s=0.5)
    stolen = started(s.next(1, 0.5))
    assert (stolen.stage, len(stolen.requests)) == (0, 4)


def test_an_own_batch_without_time_to_grow_goes_first() -> None:
    """The two need 0.5 s, and a fifth more; 0.55 s are left."""
    s = placed(on([0]), on([1, 2], [0]))
    submit(s, 0, 1, deadline_s=0.8)
    finish(s, 0, started(s.next(0, 0.0)), 0.25)
    submit(s, 2, 3, 4, 5)
    started(s.next(0, 0.25))
    submit(s, 6, 7, 8, 9)
    assert started(s.next(1, 0.25)).stage == 1


def test_inside_its_split_a_batch_goes_on_until_empty_places_have_cost_what_merging_would() -> None:
    """An empty place costs 1/16 s a stage; to merge takes 3/8 s more than a stage, so 9/32 s for
    three rows. What three have wasted is 1/16 s, 1/8 s, 3/16 s, 1/4 s, then too much."""
    latencies = table(7, first_s=0.25, more_s=0.0)
    every = frozenset(range(7))
    streams = [StreamPlacement(kind="fast", prefers=every, holds=every) for _ in range(2)]
    where = Placement(stages=7, streams=tuple(streams), kinds=(FAST, SLOW))
    s = scheduler("refill", latencies=latencies, streams=2, placement=where)
    plan = s._current.placed
    assert plan is not None
    plan.latencies["fast"].merging_s = 0.375
    submit(s, 0, 1, 2, 3)
    run = started(s.next(0, 0.0))
    one_leaves = np.array([True, False, False, False])
    assert s.update(0, one_leaves, 0.25).buffered is None
    for stage in (1, 2, 3, 4):
        run = started(s.next(0, 0.25 * stage))
        assert (run.stage, len(run.requests), run.pieces) == (stage, 3, ())
        buffered = finish(s, 0, run, 0.25 * (stage + 1))
        assert (buffered is None) == (stage < 4)
    merged = started(s.next(1, 1.25))
    assert (merged.stage, len(merged.pieces)) == (5, 1)


def test_what_waits_for_a_stream_out_of_service_is_taken_by_who_holds_it() -> None:
    s = placed(on([0, 1]), on([2]), on([0, 1], [2]))
    submit(s, 0, 1, 2, 3)
    finish(s, 0, started(s.next(0, 0.0)), 0.25)
    finish(s, 0, started(s.next(0, 0.25)), 0.5)
    assert s.next(2, 0.5) == Idle(), "stream 1 is idle"
    s.suspend(1)
    assert started(s.next(2, 0.5)).stage == 2


def test_rows_of_an_old_plan_are_run_by_whoever_is_free_once_it_is_open_to_all() -> None:
    s = placed(on([0]), on([1, 2]))
    submit(s, 0)
    assert finish(s, 0, started(s.next(0, 0.0)), 0.25) is not None
    old = s.placed
    assert old is not None
    s.suspend(1)
    points = points_of(table(first_s=0.25, more_s=0.0))
    s.hot_swap(2, *policy_for(
        PolicyName("refill"), points, max_batch_size=4, streams=2,
        placement=placement(on([0, 1, 2]), on([])), before=old,
    ))  # fmt: skip
    assert s.next(0, 1.0) == Idle()
    old.open_to_all()
    run = started(s.next(0, 2.0))
    assert (run.plan, run.stage, pairs(run)) == (0, 1, [(0, 0)])


def test_a_second_try_stays_alone_across_splits() -> None:
    s = placed(on([0]), on([1, 2]), on([0]), on([1, 2]))
    submit(s, 7, samples=2)
    submit(s, 8)
    finish(s, 0, started(s.next(0, 0.0)), 0.25)
    run = started(s.next(1, 0.25))
    assert run.stage == 1
    s.failed(1, 0.5)
    again = [started(s.next(stream, 0.5)) for stream in (0, 2)]
    assert [(r.stage, pairs(r)) for r in again] == [(0, [(7, 0), (7, 1)]), (0, [(8, 0)])]
    numbers = [finish(s, stream, r, 0.75) for stream, r in zip((0, 2), again, strict=True)]
    assert isinstance(s.next(1, 0.75), Idle), "they failed there, and stream 3 is in service"
    alone = started(s.next(3, 0.75))
    assert (alone.stage, pairs(alone)) == (1, [(7, 0), (7, 1)])
    assert [piece.number for piece in alone.pieces] == numbers[:1]
    assert s.take_discarded()[-1:] == numbers[:1]
    s.failed(3, 1.0)
    (dropped,) = s.take_dropped()
    assert (dropped.request, dropped.count) == (7, 2), "it failed twice; the other did not"


def test_a_kind_predicts_by_its_own_times_and_learns_nothing_from_another() -> None:
    base = table(first_s=0.25, more_s=0.0)
    streams = on([0, 1]), on([2], kind="slow")
    s = place(PolicyName.parse("refill"), points_of(base), placement(*streams), 4)
    fast, slow = s.latencies["fast"], s.latencies["slow"]
    assert [fast.stage_s(stage, 1) for stage in range(3)] == [0.25, 0.25, 0.5]
    assert [slow.stage_s(stage, 1) for stage in range(3)] == [0.25, 0.25, 0.5]
    whole = placed(on([0, 1]), on([2], kind="slow"))
    submit(whole, 0, 1, 2, 3)
    finish(whole, 0, started(whole.next(0, 0.0)), 0.25)
    finish(whole, 0, started(whole.next(0, 0.25)), 0.5)
    started(whole.next(1, 0.5))
    plan = whole._current.placed
    assert plan is not None
    whole.update(1, np.ones(4, np.bool_), 2.5)  # four times as long as predicted
    assert plan.latencies["fast"].speed == 1.0
    assert plan.latencies["slow"].speed == pytest.approx(1 + 3 / 32)
    assert whole.latencies is plan.latencies["fast"], "of who starts what is new"


def test_times_are_those_of_who_prefers_a_stage_and_of_moving_rows_there() -> None:
    """A row of stage 2 has 100 B; 400 B/s and 0.5 s from fast to slow, no time otherwise."""
    links = (("fast", "slow", DeviceLink(bytes_per_s=400.0, latency_s=0.5)),)
    where = placement(on([0, 1]), on([2], kind="slow"), row_bytes=(0.0, 0.0, 100.0), links=links)
    seconds = table(first_s=1.0, more_s=0.0).profiled_s
    assert where.expected_s("fast", seconds) == [[0.0, *[1.0] * 4]] * 2 + [
        [0.0, 2.75, 3.0, 3.25, 3.5]
    ]
    assert where.expected_s("slow", seconds)[2] == [0.0, *[2.0] * 4], "it does not wait there"
    assert where.moving_s("fast", "slow", 2, 4) == 1.5
    assert where.moving_s("slow", "fast", 2, 4) == 0.0


def test_a_table_of_its_own_replaces_the_models() -> None:
    own = ((0.0, 1.0, 2.0),) * 2
    kind = DeviceKind(name="gpu", speed=3.0, seconds=own)
    assert kind.own_s([[0.0, 9.0, 9.0]] * 2) == [[0.0, 3.0, 6.0]] * 2
    with pytest.raises(ValueError, match=facts("'gpu'", "2 stages", "up to 2", "expected 1")):
        kind.own_s([[0.0, 9.0]])


def test_a_slow_stream_leaves_to_a_faster_one_what_it_cannot_do_in_time() -> None:
    """The whole model takes 0.75 s or 1.5 s; 1.0 s is left."""
    streams = on([0, 1, 2]), on([0, 1, 2], kind="slow")
    s = placed(*streams, policy="clockwork")
    submit(s, 0, deadline_s=1.0)
    assert not isinstance(s.next(1, 0.0), Run)
    assert not s.take_dropped()
    assert started(s.next(0, 0.0)).stage == 0
    alone = placed(*streams, policy="clockwork")
    alone.suspend(0)
    submit(alone, 0, deadline_s=1.0)
    assert not isinstance(alone.next(1, 0.0), Run)
    assert [item.request for item in alone.take_dropped()] == [0], "nobody else is there"


def test_a_straggler_gets_what_is_left_then_a_probe_now_and_then() -> None:
    s = placed(on([0, 1, 2]), on([0, 1, 2]), on([0, 1, 2], kind="slow"))
    plan = s._current.placed
    assert plan is not None
    monitor = plan.stragglers = StragglerMonitor(["fast", "fast", "slow"], window=1)
    for ratio in (1.0, 9.0):
        monitor.observe(int(ratio > 1), ratio, 0.0)
    assert monitor.status(1) is ReplicaStatus.REDUCED
    submit(s, 0)
    assert s.next(1, 0.0) == Idle(), "others are idle"
    started(s.next(0, 0.0))
    submit(s, 1)
    started(s.next(2, 0.0))
    submit(s, 2)
    assert started(s.next(1, 0.0)).stage == 0, "all others are busy"
    s.update(1, np.ones(1, np.bool_), 9.0)
    assert monitor.status(1) is ReplicaStatus.EXCLUDED
    submit(s, 3, now_s=9.0)
    wait = s.next(1, 9.0)
    assert getattr(wait, "until_s", None) == monitor.probe_s(1) == 10.0
    assert started(s.next(1, 10.0)).stage == 0
    s.update(1, np.ones(1, np.bool_), 10.75)
    assert monitor.status(1) is ReplicaStatus.EXCLUDED, "three times as long as the other"


def test_an_excluded_straggler_runs_stages_that_no_other_replica_can() -> None:
    s = placed(on([0, 1]), on([2]), on([0, 1]))
    plan = s._current.placed
    assert plan is not None
    monitor = plan.stragglers = StragglerMonitor(["fast"] * 3, window=1)
    for stream, ratio in ((0, 1.0), (2, 1.0), (1, 9.0), (1, 9.0)):
        monitor.observe(stream, ratio, 0.0)
    assert monitor.status(1) is ReplicaStatus.EXCLUDED
    submit(s, 0, 1, 2, 3)
    finish(s, 0, started(s.next(0, 0.0)), 0.25)
    finish(s, 0, started(s.next(0, 0.25)), 0.5)
    assert started(s.next(1, 0.5)).stage == 2


def test_streams_that_are_alike_are_served_as_ever() -> None:
    where = Placement.shared(2, 3)
    assert where.is_shared
    assert not where.is_split
    s = scheduler("run-through", streams=2, placement=where)
    assert s._current.placed is None
    assert not placement(on([0, 1, 2]), on([0, 1, 2], kind="slow")).is_shared


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([on([0, 1])], ("stages [2]",)),
        ([on([0, 1, 2], kind="gpu")], ("stream 0", "'gpu'", "expected")),
        ([on([0, 1, 2, 3])], ("stream 0", "[0, 1, 2, 3]", "3 stages")),
        (
            [StreamPlacement(kind="fast", prefers=frozenset([1]), holds=frozenset([0]))],
            ("prefers [1]", "holds [0]", "must hold"),
        ),
    ],
)
def test_what_is_no_placement_is_refused(streams: list[StreamPlacement], message: Told) -> None:
    with pytest.raises(ValueError, match=facts(*message)):
        placement(*streams)


@pytest.mark.parametrize("policy", ["run-through", "slackfit", "fixed:final", "clockwork"])
def test_policies_that_never_merge_cannot_serve_splits(policy: str) -> None:
    with pytest.raises(ValueError, match=facts(policy, "refill or rebatch")):
        placed(*OWN, policy=policy)


def test_plans_are_placed_on_the_same_streams_or_not_at_all() -> None:
    s = placed(*OWN)
    latencies = table(first_s=0.25, more_s=0.0)
    points, refill = points_of(latencies), PolicyName.parse("refill")
    with pytest.raises(ValueError, match="plan 1: place its stages"):
        s.hot_swap(1, make_policy(refill, points, 4, 2), latencies)
    others = place(refill, points, placement(on([0, 1, 2], kind="slow"), on([2])), 4)
    with pytest.raises(ValueError, match=r"of kinds \['slow', 'fast'\], expected \['fast', 'fast'"):
        s.hot_swap(1, *others.first(), others)
    with pytest.raises(ValueError, match=facts("2 streams", "expected 3", "place each")):
        scheduler("refill", streams=3, placement=placement(*OWN))
    again = place(refill, points, placement(*STEALING), 4)
    s.hot_swap(1, *again.first(), again)
    assert again.stragglers is not None
    assert s.plan == 1


def test_a_placement_is_of_as_many_stages_as_the_plan() -> None:
    latencies = Latencies([[0.0, 1.0]] * 2)
    with pytest.raises(ValueError, match=facts("3 stages", "expected 2")):
        place(PolicyName.parse("refill"), points_of(latencies), placement(*OWN), 1)


def test_an_excluded_straggler_whose_probe_is_due_waits_for_work_not_for_a_time() -> None:
    """Stream 1 may probe from 1.0 on, but nothing waits for its stages; 2 holds what does."""
    s = placed(on([0]), on([1, 2]), on([0], [1]))
    plan = s._current.placed
    assert plan is not None
    monitor = plan.stragglers = StragglerMonitor(["fast"] * 3, window=1)
    for stream, ratio in ((0, 1.0), (2, 1.0), (1, 9.0), (1, 9.0)):
        monitor.observe(stream, ratio, 0.0)
    submit(s, 0, 1)
    assert s.next(1, 0.5) == Wait(1.0)
    assert s.next(1, 1.5) == Idle()


def test_a_batch_goes_on_to_what_its_stream_holds_and_is_no_slower_at() -> None:
    """Splits of stages 0 and 1, and of 2, which a slow stream prefers."""
    seconds = table(first_s=1.0, more_s=0.0).profiled_s
    streams = on([0, 1], [2]), on([0, 1]), on([2], [0, 1], kind="slow")
    assert placement(*streams).continued_stages(seconds) == [{0, 1, 2}, {0, 1}, {1, 2}]
    turned = on([0, 1], [2], kind="slow"), on([2])
    assert placement(*turned).continued_stages(seconds) == [{0, 1}, {2}], (
        "fast streams prefer stage 2"
    )
    s = placed(*streams)
    submit(s, 0, 1, 2, 3)
    for stage in range(2):
        run = started(s.next(0, 0.25 * stage))
        assert finish(s, 0, run, 0.25 * (stage + 1)) is None
    assert started(s.next(0, 0.5)).stage == 2, "in another split, but where it is"
