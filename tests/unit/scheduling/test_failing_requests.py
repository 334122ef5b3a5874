"""Requests that fail alone: found by halving, after all others, at little cost to them."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from tests.unit.scheduling.helpers import Watched, all_exit, pairs, scheduler, started, table

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    ParallelLimit,
    Run,
    Submission,
    Wait,
)
from offramp.engine.scheduling.failure_history import FailureHistory
from offramp.engine.scheduling.queue import PATIENCE_S

SIZE = 16


def runs_until_done(s: Watched, bad: set[int]) -> list[list[int]]:
    """Serve what waits; the requests of each run, of which those with a bad one fail."""
    seen: list[list[int]] = []
    while isinstance(run := s.next(0, 0.0), Run):
        requests = run.requests.tolist()
        seen.append(requests)
        if bad.isdisjoint(requests):
            s.update(0, all_exit(run), 0.0)
        else:
            s.failed(0, 0.0)
    return seen


@pytest.mark.parametrize("bad", range(SIZE))
def test_one_of_sixteen_is_found_by_halving(bad: int) -> None:
    s = scheduler(latencies=table(size=SIZE, first_s=0.25, more_s=0.0))
    for request in range(SIZE):
        s.submit(Submission(request), 0.0)
    runs = runs_until_done(s, {bad})
    assert [len(run) for run in runs if bad in run] == [16, 8, 4, 2, 1]
    assert sorted(len(run) for run in runs if bad not in run) == [1, 2, 4, 8]
    assert s.take_dropped() == [Dropped(bad, 1, DropCause.FAILED)]
    assert not s.busy


def test_rows_of_a_request_stay_together_and_the_others_in_order() -> None:
    s = scheduler(latencies=table(size=SIZE, first_s=0.25, more_s=0.0))
    for request, rows in enumerate((3, 1, 2)):
        s.submit(Submission(request, rows), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 0.0)
    halves = [[(0, 0), (0, 1), (0, 2), (1, 0)], [(2, 0), (2, 1)]]
    for half in halves:
        run = started(s.next(0, 0.0))
        assert pairs(run) == half
        s.update(0, all_exit(run), 0.0)


@pytest.mark.parametrize(("devices", "refused"), [(1, [0]), (2, [0, 2])])
def test_what_failed_is_tried_again_on_another_device(devices: int, refused: list[int]) -> None:
    limit = ParallelLimit(SIZE, devices=devices)
    s = scheduler(streams=4, latencies=table(size=SIZE, first_s=0.25, more_s=0.0), parallel=limit)
    for request in range(2):
        s.submit(Submission(request), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 0.0)
    assert [n for n in range(4) if not isinstance(s.next(n, 0.0), Run)][: len(refused)] == refused


def test_a_batch_whose_tensors_were_lost_is_tried_again_as_if_it_had_not_run() -> None:
    s = scheduler(streams=2, latencies=table(size=SIZE, first_s=0.25, more_s=0.0))
    s.submit(Submission(0), 0.0)
    for _ in range(3):
        assert started(s.next(0, 0.0)).requests.tolist() == [0]
        s.failed(0, 0.0, blamed=False)
    for stream in (0, 1):  # then it may fail as often as any request, on another stream
        assert started(s.next(stream, 0.0)).requests.tolist() == [0]
        s.failed(stream, 0.0)
    assert s.take_dropped() == [Dropped(0, 1, DropCause.FAILED)]
    assert not s.busy


def test_tensors_that_are_lost_again_and_again_are_a_failure() -> None:
    s = scheduler(latencies=table(size=SIZE, first_s=0.25, more_s=0.0))
    s.submit(Submission(0), 0.0)
    tries = 0
    while isinstance(s.next(0, 0.0), Run):
        tries += 1
        s.failed(0, 0.0, blamed=False)
    assert tries == 6
    assert s.take_dropped() == [Dropped(0, 1, DropCause.FAILED)]


def test_a_request_that_failed_alone_waits_for_all_others_but_not_for_ever() -> None:
    s = scheduler(latencies=table(size=1, first_s=0.25, more_s=0.0))
    s.submit(Submission(1), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 0.0)
    for request in (2, 3):
        s.submit(Submission(request), 0.0)
    run = started(s.next(0, 0.0))
    assert pairs(run) == [(2, 0)]
    s.update(0, all_exit(run), 0.5 * PATIENCE_S)
    run = started(s.next(0, PATIENCE_S))
    assert pairs(run) == [(1, 0)]
    s.failed(0, PATIENCE_S)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.FAILED)]
    assert pairs(started(s.next(0, PATIENCE_S))) == [(3, 0)]


def test_a_stream_that_waits_for_mates_wakes_up_for_a_suspect() -> None:
    s = scheduler("delay", max_delay_s=10.0)
    s.submit(Submission(1), 0.0)
    started(s.next(0, 10.0))
    s.failed(0, 10.0)
    s.submit(Submission(2), 10.0)
    assert s.next(0, 10.0) == Wait(10.0 + PATIENCE_S)
    assert pairs(started(s.next(0, 10.0 + PATIENCE_S))) == [(1, 0)]


def test_second_tries_that_are_in_vain_become_rare() -> None:
    """The first three fail, and from then on one waits at a time."""
    s = scheduler(latencies=table(size=1, first_s=0.25, more_s=0.0))
    for request in range(3):
        s.submit(Submission(request), 0.0)
        assert runs_until_done(s, {request}) == [[request], [request]]
    s.take_dropped()
    for request in range(3, 6):
        s.submit(Submission(request), 0.0)
    for _ in range(3):
        started(s.next(0, 0.0))
        s.failed(0, 0.0)
    assert [item.request for item in s.take_dropped()] == [4, 5]
    assert pairs(started(s.next(0, 0.0))) == [(3, 0)]
    s.update(0, np.ones(1, np.bool_), 0.0)  # it succeeds: the next ones are worth it again
    for request in (6, 7):
        s.submit(Submission(request), 0.0)
    assert runs_until_done(s, {6, 7}) == [[6], [7], [6], [7]]


def test_batches_are_of_fewer_requests_while_many_fail_and_of_all_again_afterwards() -> None:
    history = FailureHistory()
    assert history.together > 1000
    history.succeeded(100)
    history.failed()
    assert history.together == 8, "an eighth of a failing one is expected in each batch"
    for _ in range(60):
        history.failed()
    assert history.together == 1
    history.succeeded(1000)
    assert history.together > 1000


def test_a_request_of_many_rows_is_not_torn_for_the_failures_of_others() -> None:
    s = scheduler(latencies=table(size=SIZE, first_s=0.25, more_s=0.0))
    for request in range(100):
        s.submit(Submission(request), 0.0)
        runs_until_done(s, {request})
    s.take_dropped()
    s.submit(Submission(100, SIZE), 0.0)
    s.submit(Submission(101), 0.0)
    assert runs_until_done(s, set()) == [[100] * SIZE, [101]]


class _Load:
    """Eight clients that ask again once answered, and others at a rate, on virtual time."""

    def __init__(self, *, streams: int, failing: bool, fails_after: float) -> None:
        self.s = scheduler(
            latencies=table(1, 8, first_s=0.006, more_s=0.004), streams=streams, capacity=512
        )
        self.streams, self.failing, self.fails_after = streams, failing, fails_after
        self.events: list[tuple[float, int, str, int]] = []
        self.running: dict[int, Run] = {}
        self.number = self.answered = 0
        self.others: set[int] = set()

    def submit(self, now_s: float, *, other: bool) -> None:
        self.number += 1
        if other:
            self.others.add(self.number)
        self.s.submit(Submission(self.number), now_s)

    def serve(self, seconds: float, rate: float) -> float:
        """Requests of the clients that are answered a second."""
        for _ in range(8):
            self.submit(0.0, other=False)
        heapq.heappush(self.events, (0.0, 0, "arrives", 0))
        while self.events:
            now_s, order, what, stream = heapq.heappop(self.events)
            if now_s > seconds:
                break
            if what == "arrives":
                self.submit(now_s, other=True)
                heapq.heappush(self.events, (now_s + 1 / rate, order + 1, "arrives", 0))
            elif what == "ends":
                self.end(stream, now_s)
            self.ask(now_s)
        return self.answered / seconds

    def end(self, stream: int, now_s: float) -> None:
        run = self.running.pop(stream)
        if self.failing and not self.others.isdisjoint(run.requests.tolist()):
            self.s.failed(stream, now_s)
            self.s.take_dropped()
            return
        self.s.update(stream, all_exit(run), now_s)
        for request in run.requests.tolist():
            if request not in self.others:
                self.answered += 1
                self.submit(now_s, other=False)

    def ask(self, now_s: float) -> None:
        for stream in set(range(self.streams)) - set(self.running):
            decision = self.s.next(stream, now_s)
            if isinstance(decision, Run):
                self.running[stream] = decision
                bad = self.failing and not self.others.isdisjoint(decision.requests.tolist())
                took_s = 0.006 + 0.004 * (len(decision.requests) - 1)
                took_s *= self.fails_after if bad else 1.0
                heapq.heappush(self.events, (now_s + took_s, self.number, "ends", stream))
            elif not isinstance(decision, Idle):
                heapq.heappush(self.events, (decision.until_s, self.number, "wakes", stream))


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("rate", [10, 100])
@pytest.mark.parametrize(("fails_after", "least"), [(0.1, 0.8), (1.0, 0.35)])
def test_failing_requests_leave_others_a_good_part_of_what_right_ones_do(
    streams: int, rate: float, fails_after: float, least: float
) -> None:
    """Four fifths if batches fail early; less if each takes all of its time before it fails.

    One stream answers some 230 requests a second in full batches, and some 170 one by one.
    """
    right = _Load(streams=streams, failing=False, fails_after=1.0).serve(8.0, rate)
    failing = _Load(streams=streams, failing=True, fails_after=fails_after).serve(8.0, rate)
    assert failing >= least * right, (failing, right)
