"""The run-through scheduler on virtual time: exact instants, no clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    Run,
    RunThroughScheduler,
    SchedulerFullError,
    Submission,
    Wait,
)


def scheduler(**settings_: object) -> RunThroughScheduler:
    return RunThroughScheduler(**{"max_batch_size": 4, **settings_})  # type: ignore[arg-type]


def started(decision: object) -> Run:
    assert isinstance(decision, Run)
    return decision


def none_exit(run: Run) -> np.ndarray:
    return np.zeros(len(run.requests), np.bool_)


def test_a_full_batch_starts_at_once_and_the_rest_waits_for_mates() -> None:
    s = scheduler(max_delay_s=1.0)
    s.submit(Submission(request=1, count=6), 10.0)
    run = started(s.next(0, 10.0))
    assert run.stage == 0
    assert run.requests.tolist() == [1, 1, 1, 1]
    assert run.rows.tolist() == [0, 1, 2, 3]
    assert s.next(1, 10.0) == Wait(11.0)
    assert started(s.next(1, 11.0)).rows.tolist() == [4, 5]
    assert isinstance(s.next(2, 11.0), Idle)


def test_flush_ends_the_wait() -> None:
    s = scheduler(max_delay_s=60.0)
    s.submit(Submission(request=1, count=1), 0.0)
    assert s.next(0, 0.0) == Wait(60.0)
    s.flush()
    assert started(s.next(0, 0.0)).requests.tolist() == [1]


def test_survivors_run_through_on_their_stream() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=3), 0.0)
    s.submit(Submission(request=2, count=1), 0.0)
    first = started(s.next(0, 0.0))
    transition = s.done(0, np.array([False, True, False, False]), 1.0)
    assert transition.released.tolist() == [1]
    assert transition.survivors.tolist() == [0, 2, 3]
    second = started(s.next(0, 1.0))
    assert (second.batch, second.stage) == (first.batch, 1)
    assert second.requests.tolist() == [1, 1, 2]
    assert second.rows.tolist() == [0, 2, 0]
    s.done(0, np.ones(3, np.bool_), 2.0)
    assert isinstance(s.next(0, 2.0), Idle)
    assert (s.queued, s.in_flight) == (0, 0)


def test_earliest_deadline_first_within_a_priority() -> None:
    s = scheduler(max_batch_size=1)
    s.submit(Submission(request=1, count=1, deadline_s=9.0), 0.0)
    s.submit(Submission(request=2, count=1, deadline_s=5.0), 0.0)
    s.submit(Submission(request=3, count=1, deadline_s=20.0, priority=1), 0.0)
    order = []
    for _ in range(3):
        order += started(s.next(0, 1.0)).requests.tolist()
        s.done(0, np.ones(1, np.bool_), 1.0)
    assert order == [3, 2, 1]


def test_samples_of_different_shapes_are_not_batched_together() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=1, signature=16), 0.0)
    s.submit(Submission(request=2, count=1, signature=32), 0.0)
    s.submit(Submission(request=3, count=1, signature=16), 0.0)
    assert started(s.next(0, 0.0)).requests.tolist() == [1, 3]
    s.done(0, np.ones(2, np.bool_), 0.0)
    assert started(s.next(0, 0.0)).requests.tolist() == [2]


def test_a_full_batch_of_one_shape_does_not_hurry_another_shape() -> None:
    s = scheduler(max_delay_s=1.0)
    s.submit(Submission(request=1, count=1, signature=16, deadline_s=9.0), 0.0)
    s.submit(Submission(request=2, count=4, signature=32), 0.0)
    assert started(s.next(0, 0.0)).requests.tolist() == [2, 2, 2, 2]
    assert s.next(1, 0.0) == Wait(1.0)
    assert started(s.next(1, 1.0)).requests.tolist() == [1]


def test_requests_without_a_deadline_are_not_overtaken_for_ever() -> None:
    s = scheduler(max_batch_size=1)
    s.submit(Submission(request=0, count=1), 0.0)
    order: list[int] = []
    for number in range(1, 9):
        now_s = number * 0.25
        s.submit(Submission(request=number, count=1, deadline_s=now_s + 0.5), now_s)
        order += started(s.next(0, now_s)).requests.tolist()
        s.done(0, np.ones(1, np.bool_), now_s)
    assert 0 in order


def test_what_is_left_of_a_failed_request_is_dropped_by_that_cause() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=6), 0.0)
    s.next(0, 0.0)
    s.failed(0)
    s.cancel(1, DropCause.FAILED)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.FAILED)]
    assert (s.queued, s.in_flight) == (0, 0)


def test_expired_in_the_queue_is_dropped_before_dispatch() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=2, deadline_s=5.0), 0.0)
    assert isinstance(s.next(0, 5.0), Idle)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.EXPIRED)]
    assert s.take_dropped() == []
    assert s.queued == 0


def test_waiting_for_mates_ends_when_a_deadline_passes() -> None:
    s = scheduler(max_delay_s=10.0)
    s.submit(Submission(request=1, count=1, deadline_s=4.0), 0.0)
    assert s.next(0, 0.0) == Wait(4.0)


def test_expired_between_stages_leaves_its_mates_alone() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=1, deadline_s=0.5), 0.0)
    s.submit(Submission(request=2, count=1), 0.0)
    run = started(s.next(0, 0.0))
    assert run.requests.tolist() == [1, 2]
    transition = s.done(0, none_exit(run), 6.0)
    assert transition.dropped.tolist() == [0]
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
    assert started(s.next(0, 6.0)).requests.tolist() == [2]


def test_an_answer_that_is_there_is_released_though_its_deadline_passed() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=1, deadline_s=5.0), 0.0)
    s.next(0, 0.0)
    transition = s.done(0, np.ones(1, np.bool_), 6.0)
    assert transition.released.tolist() == [0]
    assert s.take_dropped() == []


def test_a_cancelled_request_leaves_queue_and_batch() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=6), 0.0)
    s.submit(Submission(request=2, count=1), 0.0)
    run = started(s.next(0, 0.0))
    s.cancel(1)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.CANCELLED)]
    s.done(0, none_exit(run), 1.0)
    assert s.take_dropped() == [Dropped(1, 4, DropCause.CANCELLED)]
    assert started(s.next(0, 1.0)).requests.tolist() == [2]


def test_the_queue_is_bounded_and_takes_all_or_nothing() -> None:
    s = scheduler(max_queue=5)
    s.submit(Submission(request=1, count=4), 0.0)
    with pytest.raises(SchedulerFullError, match="2 samples do not fit: 4 of 5 wait"):
        s.submit(Submission(request=2, count=2), 0.0)
    assert s.queued == 4
    s.submit(Submission(request=3, count=1), 0.0)


def test_what_expired_makes_room() -> None:
    s = scheduler(max_queue=1)
    s.submit(Submission(request=1, count=1, deadline_s=1.0), 0.0)
    s.submit(Submission(request=2, count=1), 2.0)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]


def test_parallel_batches_start_below_tau_b() -> None:
    s = scheduler(parallel_below=2)
    s.submit(Submission(request=1, count=8), 0.0)
    run = started(s.next(0, 0.0))
    assert isinstance(s.next(1, 0.0), Idle)
    s.done(0, np.array([True, True, True, False]), 1.0)
    assert len(run.requests) == 4
    assert len(started(s.next(1, 1.0)).requests) == 4


def test_a_failed_batch_is_forgotten() -> None:
    s = scheduler()
    s.submit(Submission(request=1, count=1), 0.0)
    s.next(0, 0.0)
    s.failed(0)
    assert s.in_flight == 0
    assert isinstance(s.next(0, 0.0), Idle)


STAGES = 3
STREAMS = 3


class SchedulerMachine(RuleBasedStateMachine):
    """Random life of a scheduler against a plain model of what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.s = scheduler(max_delay_s=1.0, max_queue=32, parallel_below=3)
        self.running: dict[int, Run] = {}
        self.next_request = 0
        self.open: dict[int, int] = {}  # samples that are not resolved yet
        self.ran: set[tuple[int, int, int]] = set()  # (request, row, stage)

    def resolve(self, request: int, count: int) -> None:
        self.open[request] -= count
        assert self.open[request] >= 0, "a sample was resolved twice"

    def collect(self) -> None:
        for dropped in self.s.take_dropped():
            self.resolve(dropped.request, dropped.count)

    @rule(
        count=st.integers(1, 9),
        slack=st.one_of(st.none(), st.floats(0.1, 5)),
        priority=st.integers(0, 2),
        shape=st.integers(0, 1),
    )
    def submit(self, count: int, slack: float | None, priority: int, shape: int) -> None:
        request = self.next_request
        self.next_request += 1
        deadline_s = float("inf") if slack is None else self.now + slack
        try:
            self.s.submit(
                Submission(
                    request=request,
                    count=count,
                    signature=shape,
                    deadline_s=deadline_s,
                    priority=priority,
                ),
                self.now,
            )
        except SchedulerFullError:
            assert self.s.queued + count > 32
        else:
            self.open[request] = count
        self.collect()

    @rule(seconds=st.floats(0.01, 2))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(stream=st.integers(0, STREAMS - 1))
    def ask(self, stream: int) -> None:
        if stream in self.running:
            return
        decision = self.s.next(stream, self.now)
        self.collect()
        if isinstance(decision, Wait):
            assert decision.until_s > self.now
        if isinstance(decision, Run):
            assert 1 <= len(decision.requests) <= 4
            requests, rows = decision.requests.tolist(), decision.rows.tolist()
            for sample in zip(requests, rows, strict=True):
                assert (*sample, decision.stage) not in self.ran, "a stage ran twice"
                self.ran.add((*sample, decision.stage))
            self.running[stream] = decision

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running.pop(stream)
        n = len(run.requests)
        if data.draw(st.integers(0, 9)) == 0:
            self.s.failed(stream)
            for request in run.requests.tolist():
                self.resolve(request, 1)
            return
        exited = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        exited |= run.stage == STAGES - 1
        transition = self.s.done(stream, exited, self.now)
        parts = [transition.released, transition.dropped, transition.survivors]
        assert sorted(np.concatenate(parts).tolist()) == list(range(n))
        for request in run.requests[transition.released].tolist():
            self.resolve(request, 1)
        self.collect()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.s.cancel(data.draw(st.sampled_from(sorted(self.open))))
        self.collect()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.s.queued + self.s.in_flight == sum(self.open.values())

    def teardown(self) -> None:
        for stream, run in self.running.items():
            self.s.done(stream, np.ones(len(run.requests), np.bool_), self.now)
            for request in run.requests.tolist():
                self.resolve(request, 1)
        self.s.flush()
        for stream in range(STREAMS):
            while isinstance(run := self.s.next(stream, self.now), Run):
                self.s.done(stream, np.ones(len(run.requests), np.bool_), self.now)
                for request in run.requests.tolist():
                    self.resolve(request, 1)
            self.collect()
        assert not any(self.open.values()), "a sample was never resolved"


SchedulerMachine.TestCase.settings = settings(max_examples=150, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
