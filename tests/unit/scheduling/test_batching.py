"""Run-through and delay, and what the mechanism does under them, at exact instants."""

from __future__ import annotations

import numpy as np
import pytest
from tests.facts import facts
from tests.unit.scheduling.helpers import all_exit, none_exit, pairs, scheduler, started, table

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    ModelScheduler,
    SchedulerFullError,
    Submission,
    Wait,
)

BOTH = pytest.mark.parametrize("policy", ["run-through", "delay"])


@BOTH
def test_a_full_batch_starts_at_once_and_the_rest_waits_for_mates(policy: str) -> None:
    s = scheduler(policy, max_delay_s=1.0, streams=3)
    s.submit(Submission(1, 6), 10.0)
    run = started(s.next(0, 10.0))
    assert (run.stage, run.deepest, run.pieces) == (0, 2, ())
    assert pairs(run) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert s.next(1, 10.0) == Wait(11.0)
    assert pairs(started(s.next(1, 11.0))) == [(1, 4), (1, 5)]
    assert isinstance(s.next(2, 11.0), Idle)


@BOTH
def test_survivors_run_through_on_their_stream(policy: str) -> None:
    s = scheduler(policy)
    s.submit(Submission(1, 3), 0.0)
    s.submit(Submission(2, 1), 0.0)
    first = started(s.next(0, 0.0))
    outcome = s.update(0, np.array([False, True, False, False]), 1.0)
    assert outcome.released.tolist() == [1]
    assert outcome.survivors.tolist() == [0, 2, 3]
    assert outcome.buffered is None
    second = started(s.next(0, 1.0))
    assert (second.batch, second.stage) == (first.batch, 1)
    assert pairs(second) == [(1, 0), (1, 2), (2, 0)]
    s.update(0, all_exit(second), 2.0)
    assert isinstance(s.next(0, 2.0), Idle)
    assert (s.queued, s.in_flight) == (0, 0)


def test_waiting_for_mates_ends_when_a_deadline_passes() -> None:
    s = scheduler(max_delay_s=10.0)
    s.submit(Submission(1, 1, deadline_s=4.0), 0.0)
    assert s.next(0, 0.0) == Wait(4.0)
    assert isinstance(s.next(0, 4.0), Idle)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
    assert s.take_dropped() == []


def test_flush_ends_the_wait() -> None:
    s = scheduler(max_delay_s=60.0)
    s.submit(Submission(1, 1), 0.0)
    assert s.next(0, 0.0) == Wait(60.0)
    s.flush()
    assert pairs(started(s.next(0, 0.0))) == [(1, 0)]


def test_run_through_takes_as_many_as_the_first_can_wait_for() -> None:
    """n rows take 3n seconds."""
    s = scheduler(latencies=table(first_s=1.0, more_s=1.0))
    s.submit(Submission(1, 4, deadline_s=8.5), 0.0)
    assert pairs(started(s.next(0, 0.0))) == [(1, 0), (1, 1)]


def test_run_through_gives_up_what_would_be_late_and_delay_does_not() -> None:
    def at_once(policy: str, deadline_s: float) -> ModelScheduler:
        s = scheduler(policy, latencies=table(first_s=1.0, more_s=0.0))
        s.submit(Submission(1, 1, deadline_s), 0.0)
        return s

    assert isinstance((infeasible := at_once("run-through", 2.99)).next(0, 0.0), Idle)
    assert infeasible.take_dropped() == [Dropped(1, 1, DropCause.INFEASIBLE)]
    started(at_once("run-through", 3.0).next(0, 0.0))
    started(at_once("delay", 2.99).next(0, 0.0))


def test_requests_without_a_deadline_are_not_overtaken_for_ever() -> None:
    s = scheduler("delay", latencies=table(size=1, first_s=0.1, more_s=0.0))
    s.submit(Submission(0), 0.0)
    order: list[int] = []
    for number in range(1, 9):
        now_s = number * 0.25
        s.submit(Submission(number, 1, now_s + 0.375), now_s)
        order += started(s.next(0, now_s)).requests.tolist()
        s.update(0, np.ones(1, np.bool_), now_s)
    assert order == [1, 2, 0, 3, 4, 5, 6, 7]


def test_expired_between_stages_leaves_its_mates_alone() -> None:
    s = scheduler("delay")
    s.submit(Submission(1, 1, 0.5), 0.0)
    s.submit(Submission(2, 1), 0.0)
    run = started(s.next(0, 0.0))
    outcome = s.update(0, none_exit(run), 0.5)
    assert (outcome.given_up.tolist(), outcome.survivors.tolist()) == ([0], [1])
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
    assert pairs(started(s.next(0, 0.5))) == [(2, 0)]


def test_an_answer_that_is_there_is_released_though_its_deadline_passed() -> None:
    s = scheduler()
    s.submit(Submission(1, 1, 5.0), 0.0)
    run = started(s.next(0, 0.0))
    assert s.update(0, all_exit(run), 6.0).released.tolist() == [0]
    assert s.take_dropped() == []


def test_a_cancelled_request_leaves_queue_and_batch() -> None:
    s = scheduler()
    s.submit(Submission(1, 6), 0.0)
    s.submit(Submission(2, 1), 0.0)
    run = started(s.next(0, 0.0))
    s.cancel(1)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.CANCELLED)]
    s.update(0, none_exit(run), 1.0)
    assert s.take_dropped() == [Dropped(1, 4, DropCause.CANCELLED)]
    assert pairs(started(s.next(0, 1.0))) == [(2, 0)]


def test_a_cancelled_request_leaves_a_batch_that_it_shares() -> None:
    s = scheduler()
    s.submit(Submission(1, 1), 0.0)
    s.submit(Submission(2, 1), 0.0)
    run = started(s.next(0, 0.0))
    s.cancel(1)
    s.update(0, none_exit(run), 1.0)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.CANCELLED)]
    assert pairs(started(s.next(0, 1.0))) == [(2, 0)]


def test_what_expired_makes_room() -> None:
    s = scheduler(capacity=1)
    s.submit(Submission(1, 1, 1.0), 0.0)
    with pytest.raises(SchedulerFullError, match=facts("1 samples", "1 of 1")):
        s.submit(Submission(2), 0.5)
    s.submit(Submission(3), 2.0)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
    assert s.queued == 1


def test_retries_go_first_alone_and_elsewhere() -> None:
    s = scheduler(streams=2)
    s.submit(Submission(1, 2), 0.0)
    s.submit(Submission(2, 2), 0.0)
    started(s.next(0, 0.0))
    s.submit(Submission(3, 1), 0.0)
    s.failed(0, 1.0)
    assert (s.retried, s.in_flight, s.waiting) == (4, 4, True)
    assert pairs(started(s.next(0, 1.0))) == [(3, 0)]  # not what failed here
    assert pairs(started(s.next(1, 1.0))) == [(1, 0), (1, 1)]
    s.failed(1, 2.0)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.FAILED)]
    assert pairs(started(s.next(1, 2.0))) == [(2, 0), (2, 1)]


def test_a_retry_runs_where_it_failed_if_there_is_no_elsewhere() -> None:
    s = scheduler(streams=2)
    s.submit(Submission(1), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 1.0)
    assert isinstance(s.next(0, 1.0), Idle)
    s.suspend(1)
    started(s.next(0, 1.0))
    s.failed(0, 2.0)
    s.resume(1)
    assert isinstance(s.next(1, 2.0), Idle)


def test_any_of_several_retries_can_be_withdrawn() -> None:
    s = scheduler()
    s.submit(Submission(1, 2), 0.0)
    s.submit(Submission(2, 2), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 1.0)
    s.cancel(2)
    assert s.take_dropped() == [Dropped(2, 2, DropCause.CANCELLED)]
    assert pairs(started(s.next(0, 1.0))) == [(1, 0), (1, 1)]


def test_a_retry_that_expires_is_told() -> None:
    s = scheduler()
    s.submit(Submission(1, 2, 9.0), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 1.0)
    assert isinstance(s.next(0, 9.0), Idle)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.EXPIRED)]


def test_there_is_time_for_a_retry_as_deep_as_the_batch_would_have_gone() -> None:
    """A stage takes 1 s; the batch may use the first only, and has 1.5 s left."""
    s = scheduler("cheapest", latencies=table(first_s=1.0, more_s=0.0))
    s.submit(Submission(1, 1, 2.5), 0.0)
    assert started(s.next(0, 0.0)).deepest == 0
    s.failed(0, 1.0)
    assert started(s.next(0, 1.0)).deepest == 0


def test_the_deadline_of_a_retry_is_kept_though_it_is_for_another_stream() -> None:
    s = scheduler(latencies=table(first_s=0.25, more_s=0.0), streams=2)
    s.submit(Submission(1, 1, deadline_s=5.0), 0.0)
    started(s.next(0, 0.0))
    s.submit(Submission(2, 1), 0.0)
    started(s.next(1, 0.0))
    s.failed(0, 1.0)
    assert s.next(0, 1.0) == Wait(5.0)
    s.next(0, 5.0)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
