"""Plans that are swapped while samples wait, run and are buffered."""

from __future__ import annotations

import numpy as np
import pytest
from tests.facts import facts
from tests.unit.scheduling.helpers import (
    SIZE,
    Watched,
    all_exit,
    none_exit,
    pairs,
    points_of,
    scheduler,
    sizes,
    started,
    table,
)

from offramp.engine.scheduling import (
    DeviceScheduler,
    DropCause,
    Dropped,
    Idle,
    ModelScheduler,
    ParallelLimit,
    Run,
    SchedulerFullError,
    StepOutcome,
    Submission,
    Wait,
)
from offramp.engine.scheduling.policies import PolicyName, make_policy

STARTED = ("batches", "retries", "cancelled", "dropped", "lost", "buffered", "discarded")


def first(policy: str = "run-through", **options: object) -> ModelScheduler:
    """Plan 0, of three stages of 0.25 s."""
    return scheduler(policy, **options)  # type: ignore[arg-type]


def hot_swap(
    s: Watched, plan: int, stages: int, policy: str = "run-through", streams: int = 1
) -> None:
    latencies = table(stages, first_s=0.25, more_s=0.0)
    chosen = make_policy(PolicyName.parse(policy), points_of(latencies), SIZE, streams)
    s.hot_swap(plan, chosen, latencies)


def nobody_exits(s: Watched, stream: int, run: Run, now_s: float = 0.0) -> StepOutcome:
    return s.update(stream, none_exit(run), now_s)


def stages_of_a_batch(s: Watched, stream: int = 0) -> list[tuple[int, int]]:
    """(plan, stage) of all that a stream runs for the batch that it has or is given."""
    seen = []
    while True:
        run = started(s.next(stream, 0.0))
        seen.append((run.plan, run.stage))
        if not len(nobody_exits(s, stream, run).survivors):
            return seen


# Who runs under which plan


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_running_batch_finishes_as_it_was_started(stages: int) -> None:
    s = first()
    s.submit(Submission(1, 2), 0.0)
    run = started(s.next(0, 0.0))
    assert (run.plan, run.deepest) == (0, 2)
    s.submit(Submission(2, 2), 0.0)
    hot_swap(s, 7, stages)
    assert s.plan == 7
    nobody_exits(s, 0, run)
    assert stages_of_a_batch(s) == [(0, 1), (0, 2)]
    assert stages_of_a_batch(s) == [(7, stage) for stage in range(stages)]
    assert not s.busy


def test_a_change_between_two_stages_does_not_tear_the_batch() -> None:
    s = first()
    s.submit(Submission(1, 1), 0.0)
    nobody_exits(s, 0, started(s.next(0, 0.0)))
    hot_swap(s, 1, 2)
    hot_swap(s, 2, 1)
    assert stages_of_a_batch(s) == [(0, 1), (0, 2)]


def test_nothing_waits_for_a_change() -> None:
    s = first(streams=2)
    s.submit(Submission(1, 1), 0.0)
    old = started(s.next(0, 0.0))
    hot_swap(s, 1, 2, streams=2)
    s.submit(Submission(2, 1), 0.0)
    new = started(s.next(1, 0.0))
    assert (old.plan, new.plan, new.stage) == (0, 1, 0)
    assert s.plans == {0, 1}


def test_plans_are_forgotten_once_they_are_through() -> None:
    s = first(streams=2)
    s.submit(Submission(1, 1), 0.0)
    old = started(s.next(0, 0.0))
    hot_swap(s, 1, 2)  # nothing ever starts under it
    hot_swap(s, 2, 2)
    assert s.plans == {0, 2}
    s.update(0, all_exit(old), 0.0)
    assert (s.take_dropped(), s.take_lost(), s.take_discarded()) == ([], [], [])
    assert s.plans == {2}


def test_a_plan_is_dropped_once_its_losses_are_reported() -> None:
    s = first("refill")
    s.submit(Submission(1, 3), 0.0)
    run = started(s.next(0, 0.0))
    number = s.update(0, np.array([True, False, False]), 0.0).buffered
    assert number == run.batch
    s.cancel(1)
    hot_swap(s, 1, 3, "refill")
    assert not s.busy
    assert s.plans == {1}
    assert s.take_discarded() == [number]
    assert s.plans == {1}
    assert s.take_dropped() == [Dropped(1, 2, DropCause.CANCELLED)]
    assert [samples.sample_ids.tolist() for samples in s.take_lost()] == [[1, 2]]
    assert s.take_discarded() == []
    assert s.plans == {1}


def test_who_waits_at_a_split_goes_on_under_the_old_plan() -> None:
    s = first("refill")
    s.submit(Submission(1, 2), 0.0)
    buffered = nobody_exits(s, 0, started(s.next(0, 0.0))).buffered
    hot_swap(s, 1, 2, "refill")
    s.submit(Submission(2, 1), 0.0)
    # The new samples would make a batch of three with them, but under another plan.
    run = started(s.next(0, 0.0))
    assert (run.plan, run.stage, pairs(run)) == (0, 1, [(1, 0), (1, 1)])
    assert [piece.number for piece in run.pieces] == [buffered]
    assert s.take_discarded() == [buffered]
    assert nobody_exits(s, 0, run).buffered == run.batch
    assert stages_of_a_batch(s) == [(0, 2)]
    run = started(s.next(0, 0.0))
    assert (run.plan, run.stage, pairs(run)) == (1, 0, [(2, 0)])


def test_what_is_left_of_the_oldest_plan_goes_first() -> None:
    """Even before a full batch of new samples: an old plan is not kept for long."""
    s = first("refill", streams=3)
    runs = []
    for plan in range(3):
        s.submit(Submission(plan, 1), 0.0)
        runs.append(started(s.next(plan, 0.0)))
        hot_swap(s, plan + 1, 3, "refill", streams=3)
    for stream in (2, 0, 1):
        nobody_exits(s, stream, runs[stream])
    s.submit(Submission(9, SIZE), 0.0)
    order = [started(s.next(stream, 0.0)) for stream in range(3)]
    assert [(run.plan, run.stage) for run in order] == [(0, 1), (1, 1), (2, 1)]
    for stream in range(3):
        s.update(stream, all_exit(order[stream]), 0.0)
    run = started(s.next(0, 0.0))
    assert (run.plan, run.stage, len(run.requests)) == (3, 0, SIZE)


def test_survivors_of_different_plans_are_never_merged() -> None:
    s = first("refill", streams=2)
    s.submit(Submission(1, 2), 0.0)
    old = started(s.next(0, 0.0))
    hot_swap(s, 1, 3, "refill", streams=2)
    s.submit(Submission(2, 2), 0.0)
    new = started(s.next(1, 0.0))
    numbers = [nobody_exits(s, 1, new).buffered, nobody_exits(s, 0, old).buffered]
    assert len(set(numbers)) == 2
    assert s.in_flight == 4
    # Four wait before stage 1 with equal batch keys; the oldest plan goes first.
    for stream, plan, request in ((0, 0, 1), (1, 1, 2)):
        run = started(s.next(stream, 0.0))
        assert (run.plan, run.stage, pairs(run)) == (plan, 1, [(request, 0), (request, 1)])
    assert s.take_discarded() == [numbers[1], numbers[0]]


def test_buffered_numbers_are_unique_over_plans() -> None:
    s = first("refill", streams=5)
    runs = []
    for plan in range(5):
        s.submit(Submission(plan, 1), 0.0)
        runs.append(started(s.next(plan, 0.0)))
        hot_swap(s, plan + 1, 3, "refill", streams=5)
    assert [run.plan for run in runs] == [0, 1, 2, 3, 4]
    buffered = {nobody_exits(s, stream, run).buffered for stream, run in enumerate(runs)}
    assert len(buffered) == 5
    assert s.plans == {0, 1, 2, 3, 4, 5}


def test_a_retry_runs_under_the_plan_that_it_was_started_under() -> None:
    s = first("fixed:1")
    s.submit(Submission(1, 2), 0.0)
    started(s.next(0, 0.0))
    hot_swap(s, 1, 5, "fixed:0")
    s.failed(0, 0.0)
    again = started(s.next(0, 0.0))
    assert (again.plan, again.stage, again.deepest) == (0, 0, 1)
    assert (again.sample_ids.tolist(), s.retried) == ([0, 1], 2)
    nobody_exits(s, 0, again)
    assert stages_of_a_batch(s) == [(0, 1)]
    s.take_discarded()
    assert s.plans == {1}
    assert s.retried == 2  # what a plan counted outlives it


def test_a_retry_that_another_stream_has_to_take_does_not_hold_up_the_new_plan() -> None:
    s = first(streams=2)
    s.submit(Submission(1, 1, deadline_s=8.0), 0.0)
    started(s.next(0, 0.0))
    hot_swap(s, 1, 2, streams=2)
    s.failed(0, 0.0)
    assert s.next(0, 0.0) == Wait(8.0)
    s.submit(Submission(2, 1), 0.0)
    assert started(s.next(0, 0.0)).plan == 1
    assert started(s.next(1, 0.0)).plan == 0


# What waits goes over


def test_waiting_samples_keep_their_order_and_the_numbering_goes_on() -> None:
    s = first()
    s.submit(Submission(1, 3), 0.0)
    run = started(s.next(0, 0.0))
    assert run.sample_ids.tolist() == [0, 1, 2]
    s.submit(Submission(2, 3, deadline_s=9.0), 0.0)
    s.submit(Submission(3, 1, deadline_s=8.0), 0.0)
    s.submit(Submission(4, 1, priority=1), 0.0)
    s.submit(Submission(5, 2, deadline_s=7.0, batch_key="other"), 0.0)
    hot_swap(s, 1, 2)
    assert (s.queued, s.in_flight) == (7, 3)
    s.update(0, all_exit(run), 0.0)
    order, sample_ids = [], []
    while s.queued:
        run = started(s.next(0, 0.0))
        assert run.plan == 1
        order.append(pairs(run))
        sample_ids += run.sample_ids.tolist()
        s.update(0, all_exit(run), 0.0)
    assert order == [[(4, 0), (3, 0), (2, 0), (2, 1)], [(5, 0), (5, 1)], [(2, 2)]]
    assert sample_ids == [3, 4, 5, 6, 7, 8, 9]


def test_a_stream_waits_for_what_comes_first_under_any_plan() -> None:
    """A retry that is meant for the other stream expires at 3; the new sample's mates have 1 s."""
    for now_s, submitted_s, until_s in ((0.0, 0.0, 1.0), (2.5, 2.5, 3.0)):
        s = first(streams=2, max_delay_s=1.0)
        s.submit(Submission(1, SIZE, deadline_s=3.0), 0.0)
        started(s.next(0, 0.0))
        hot_swap(s, 1, 2, streams=2)
        s.failed(0, 0.0)
        s.submit(Submission(2, 1), submitted_s)
        assert s.next(0, now_s) == Wait(until_s)


def test_a_request_may_be_answered_under_two_plans_row_by_row() -> None:
    s = first(streams=2)
    s.submit(Submission(1, 5), 0.0)
    old = started(s.next(0, 0.0))
    hot_swap(s, 1, 2, streams=2)
    new = started(s.next(1, 0.0))
    assert (pairs(old)[-1], pairs(new)) == ((1, 3), [(1, 4)])
    assert (old.plan, new.plan) == (0, 1)
    s.cancel(1)
    assert s.take_dropped() == []  # both run
    assert nobody_exits(s, 1, new).given_up.tolist() == [0]
    assert nobody_exits(s, 0, old).given_up.tolist() == [0, 1, 2, 3]
    assert sorted(d.count for d in s.take_dropped()) == [1, 4]


def test_waiting_samples_keep_deadline_patience_and_room() -> None:
    s = first(max_delay_s=1.0, capacity=4)
    s.submit(Submission(1, 1), 0.0)
    s.submit(Submission(2, 1, deadline_s=0.75), 0.0)
    hot_swap(s, 1, 2)
    with pytest.raises(SchedulerFullError, match=facts("3 samples", "2 of 4")):
        s.submit(Submission(3, 3), 0.5)
    assert s.next(0, 0.5) == Wait(0.75)
    assert s.next(0, 0.75) == Wait(1.0)
    assert s.take_dropped() == [Dropped(2, 1, DropCause.EXPIRED)]
    assert pairs(started(s.next(0, 1.0))) == [(1, 0)]


def test_who_drains_goes_on_draining() -> None:
    s = first(max_delay_s=60.0)
    s.flush()
    hot_swap(s, 1, 2)
    s.submit(Submission(1, 1), 0.0)
    assert started(s.next(0, 0.0)).plan == 1


# What holds for all plans together


def test_counts_are_those_of_all_plans() -> None:
    s = first(streams=2)
    s.submit(Submission(1, 4), 0.0)
    old = started(s.next(0, 0.0))
    hot_swap(s, 1, 2, streams=2)
    s.submit(Submission(2, 3), 0.0)
    new = started(s.next(1, 0.0))
    yes = np.array([True, True, False, False])
    s.update(0, yes, 0.0, np.array([True, False, False, False]))
    s.update(1, yes[1:], 0.0, yes[1:])
    assert (s.in_flight, s.auditing, s.queued) == (2 + 2, 1 + 1, 0)
    old, new = started(s.next(0, 0.0)), started(s.next(1, 0.0))
    assert [(run.plan, len(run.requests)) for run in (old, new)] == [(0, 3), (1, 3)]
    assert s.update(1, none_exit(new), 0.0, none_exit(new)).ended.tolist() == [0]
    s.failed(0, 0.0)  # an answered row is lost, two are tried again
    assert [samples.sample_ids.tolist() for samples in s.take_lost()] == [[0]]
    assert (s.in_flight, s.auditing, s.retried, s.busy, s.waiting) == (2, 0, 2, True, True)


def test_feedback_of_an_old_plan_ends_at_its_own_last_stage() -> None:
    s = first()
    s.submit(Submission(1, 2), 0.0)
    run = started(s.next(0, 0.0))
    s.update(0, all_exit(run), 0.0, all_exit(run))
    hot_swap(s, 1, 2)
    run = started(s.next(0, 0.0))
    assert s.update(0, none_exit(run), 0.0, none_exit(run)).survivors.tolist() == [0, 1]
    run = started(s.next(0, 0.0))
    assert (run.plan, run.stage) == (0, 2)
    assert s.update(0, none_exit(run), 0.0, none_exit(run)).ended.tolist() == [0, 1]


def test_suspended_streams_stay_suspended() -> None:
    """With stream 1 out of service, stream 0 has to take its own retry."""
    s = first(streams=2)
    s.suspend(1)
    hot_swap(s, 1, 2, streams=2)
    s.submit(Submission(1, 1), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 0.0)
    assert pairs(started(s.next(0, 0.0))) == [(1, 0)]


def test_streams_are_suspended_and_resumed_under_every_plan() -> None:
    s = first(streams=2)
    s.submit(Submission(1, 1), 0.0)
    started(s.next(0, 0.0))
    hot_swap(s, 1, 2, streams=2)
    s.failed(0, 0.0)
    assert isinstance(s.next(0, 0.0), Idle)  # for stream 1
    s.suspend(1)
    again = started(s.next(0, 0.0))
    assert again.plan == 0
    s.update(0, all_exit(again), 0.0)
    s.submit(Submission(2, 1), 0.0)
    started(s.next(0, 0.0))
    hot_swap(s, 2, 2, streams=2)
    s.failed(0, 0.0)
    s.resume(1)
    assert isinstance(s.next(0, 0.0), Idle)
    again = started(s.next(1, 0.0))
    assert (again.plan, pairs(again)) == (1, [(2, 0)])


def test_a_resumed_stream_is_in_service_under_the_new_plan_too() -> None:
    s = first(streams=2)
    s.suspend(1)
    hot_swap(s, 1, 2, streams=2)
    s.resume(1)
    s.submit(Submission(2, 1), 0.0)
    assert started(s.next(0, 0.0)).plan == 1
    s.failed(0, 0.0)
    assert isinstance(s.next(0, 0.0), Idle)
    assert started(s.next(1, 0.0)).plan == 1


def test_batches_of_all_plans_are_side_by_side_under_one_limit() -> None:
    s = first(streams=2, parallel=ParallelLimit(SIZE, fixed=2))
    s.submit(Submission(1, 2), 0.0)
    old = started(s.next(0, 0.0))
    hot_swap(s, 1, 2, streams=2)
    s.submit(Submission(2, 1), 0.0)
    assert isinstance(s.next(1, 0.0), Idle)
    s.update(0, np.array([True, False]), 0.0)
    assert started(s.next(1, 0.0)).plan == 1
    assert isinstance(started(s.next(0, 0.0)), Run)
    assert old.plan == 0


def test_every_plan_learns_from_its_own_batches() -> None:
    s = first()
    old = s.latencies
    s.submit(Submission(1, 1), 0.0)
    run = started(s.next(0, 0.0))
    hot_swap(s, 1, 3)
    s.update(0, all_exit(run), 1.0)  # 0.25 s were predicted: speed moves 1/32 of the way to 4
    assert (old.speed, s.latencies.speed) == (1.0 + 3.0 / 32, 1.0)
    s.submit(Submission(2, 1), 1.0)
    run = started(s.next(0, 1.0))
    s.update(0, all_exit(run), 1.5)
    assert (old.speed, s.latencies.speed) == (1.0 + 3.0 / 32, 1.0 + 1.0 / 32)


def test_what_expires_under_an_old_plan_is_told() -> None:
    s = first("refill")
    s.submit(Submission(1, 2, deadline_s=2.0), 0.0)
    number = nobody_exits(s, 0, started(s.next(0, 0.0))).buffered
    hot_swap(s, 1, 2, "refill")
    assert isinstance(s.next(0, 2.0), Idle)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.EXPIRED)]
    assert [samples.sample_ids.tolist() for samples in s.take_lost()] == [[0, 1]]
    assert s.take_discarded() == [number]
    assert s.plans == {1}


def test_failing_without_a_batch_does_nothing() -> None:
    s = first()
    hot_swap(s, 1, 2)
    s.failed(0, 0.0)
    assert isinstance(s.next(0, 0.0), Idle)
    assert (s.retried, s.in_flight, s.take_dropped()) == (0, 0, [])


@pytest.mark.parametrize("policy", ["run-through", "refill", "slackfit"])
def test_however_many_plans_there_were_few_are_remembered(policy: str) -> None:
    """Two thousand, one a round of two streams."""
    rng = np.random.default_rng(0)
    s = first(policy, streams=2, capacity=16)
    plans, largest = [], 0
    for plan in range(1, 2001):
        now_s = plan / 8
        if s.queued < 8:
            s.submit(Submission(plan, int(rng.integers(1, 5)), now_s + 4.0), now_s)
        for stream in (0, 1):
            serve(s, stream, now_s, rng)
        hot_swap(s, plan, 1 + plan % 4, policy, streams=2)
        assert len(s.take_dropped()) + len(s.take_lost()) + len(s.take_discarded()) <= 16
        plans.append(len(s.plans))
        largest = max(largest, *(sizes(s)[name] for name in STARTED))
    # What runs, is buffered or tried again goes before anything new, on both streams.
    assert 3 <= max(plans) <= 8
    assert 1 <= largest <= 8


def serve(s: Watched, stream: int, now_s: float, rng: np.random.Generator) -> None:
    """Run a stage, if there is one to run."""
    run = s.next(stream, now_s)
    if isinstance(run, Run):
        exited, runs_on = rng.random((2, len(run.requests))) < 0.5
        if rng.random() < 0.1:
            s.failed(stream, now_s)
        else:
            s.update(stream, exited, now_s, runs_on)


# On a device


def test_a_device_serves_the_plans_of_its_models() -> None:
    made = {name: scheduler(latencies=table(first_s=1.0, more_s=0.0)) for name in ("a", "b")}
    device = DeviceScheduler(made)
    device.submit("a", Submission(1, 2), 0.0)
    task = device.next(0, 0.0)
    assert isinstance(task, Run)
    device.submit("a", Submission(2, 1), 0.0)
    hot_swap(made["a"], 1, 1)
    outcome = device.update(0, all_exit(task), 1.0, np.array([True, False]))
    assert (outcome.released.tolist(), outcome.survivors.tolist()) == ([0, 1], [0])
    seen = []
    for now_s in (1.0, 2.0, 3.0):
        task = device.next(0, now_s)
        assert isinstance(task, Run)
        seen.append((task.plan, task.stage, pairs(task)))
        outcome = device.update(0, none_exit(task), now_s + 1.0, none_exit(task))
    assert seen == [(0, 1, [(1, 0)]), (0, 2, [(1, 0)]), (1, 0, [(2, 0)])]
    assert outcome.released.tolist() == [0]
    assert not device.waiting
    assert isinstance(device.next(0, 4.0), Idle)
