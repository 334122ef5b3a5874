"""Refill and rebatch: every decision by hand, on queues filled by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.scheduling.helpers import (
    none_exit,
    pairs,
    points_of,
    row_set,
    scheduler,
    started,
    table,
)

from offramp.engine.scheduling import Idle, SampleQueue, Submission, Wait
from offramp.engine.scheduling.buffered import BufferedQueue
from offramp.engine.scheduling.policies.merging import Rebatch, Refill
from offramp.engine.scheduling.policy_protocol import Merge, Start, Waiting

NEVER = float("inf")


class Scene:
    """Samples that wait for three stages of 0.25 s each, in batches of up to 4."""

    def __init__(self, *, fresh: int = 0, max_delay_s: float = 0.0) -> None:
        self.queue = SampleQueue(64, full=4, max_delay_s=max_delay_s)
        self.buffered = (BufferedQueue(), BufferedQueue(), BufferedQueue())
        self.policy = Refill(points_of(table(first_s=0.25, more_s=0.0)), 4)
        if fresh:
            self.queue.push(Submission(1000, fresh), 0.0)

    def buffer(
        self, stage: int, count: int, batch_key: object = None, due_s: float = NEVER
    ) -> Scene:
        samples = row_set(range(count), rows=[0] * count, deadlines_s=due_s)
        self.buffered[stage].buffer(samples, batch_key, len(self.buffered[stage].buckets), 0.0)
        return self

    def choice(self, now_s: float = 0.0) -> str:
        choice = self.policy.choose(Waiting(self.queue, self.buffered), now_s)
        if isinstance(choice, Merge):
            assert choice.limit == 4
            return f"merge {choice.stage} {choice.bucket.batch_key}"
        return "start" if isinstance(choice, Start) else str(choice)


def test_a_split_that_can_fill_a_batch_goes_first_the_deepest_first() -> None:
    assert Scene(fresh=4).buffer(1, 4).buffer(2, 4).choice() == "merge 2 None"
    assert Scene(fresh=4).buffer(1, 4).buffer(2, 3).choice() == "merge 1 None"


def test_a_full_bucket_goes_before_an_urgent_one() -> None:
    assert Scene().buffer(1, 4).buffer(2, 1, due_s=0.1).choice() == "merge 1 None"


@pytest.mark.parametrize(
    ("stage", "now_s", "choice"),
    [(2, 0.699, "start"), (2, 0.7, "merge 2 None"), (1, 0.399, "start"), (1, 0.4, "merge 1 None")],
)
def test_an_urgent_split_goes_when_there_is_just_time_for_what_it_needs_and_a_fifth(
    stage: int, now_s: float, choice: str
) -> None:
    """Due at 1.0: 0.25 s and 0.05 s before that, or twice as much where two stages are left."""
    assert Scene(fresh=1).buffer(stage, 1, due_s=1.0).choice(now_s) == choice
    assert Scene(fresh=1).buffer(stage, 1).choice(now_s) == choice  # patience is a second, too


def test_new_samples_go_before_a_batch_that_is_not_full() -> None:
    assert Scene(fresh=1).buffer(1, 3).buffer(2, 3).choice() == "start"


def test_where_nothing_is_new_the_split_that_holds_most_goes() -> None:
    assert Scene().buffer(1, 3).buffer(2, 2).choice() == "merge 1 None"
    assert Scene().buffer(1, 2, "a").buffer(1, 3, "b").choice() == "merge 1 b"


def test_a_stream_does_not_wait_for_mates_of_new_samples_while_something_is_buffered() -> None:
    assert Scene(fresh=1, max_delay_s=9.0).buffer(2, 1).choice() == "merge 2 None"
    assert Scene(fresh=1, max_delay_s=9.0).choice() == str(Wait(9.0))
    assert Scene().choice() == str(Idle())


def test_a_crowd_of_buckets_of_which_none_is_full_goes_at_four_batches_worth() -> None:
    crowd = Scene(fresh=1)
    for batch_key in range(15):
        crowd.buffer(2, 1, batch_key)
    assert crowd.choice() == "start"
    assert crowd.buffer(2, 1, "last").choice().startswith("merge 2")


def test_a_batch_that_is_still_full_runs_on() -> None:
    policy = Scene().policy
    assert policy.runs_on(0, 4, 4)
    assert not policy.runs_on(0, 4, 3)


@pytest.mark.parametrize(
    ("stage", "merging_s", "before", "leave", "runs_on"),
    [
        # Two stages are left, t_d = 0.5 s; c = 0.25 s: it pays if more than half leave.
        (0, 0.25, 4, 1, True),
        (0, 0.25, 4, 2, True),
        (0, 0.25, 4, 3, False),
        (0, 0.25, 2, 1, True),
        # One is left, t_d = 0.25 s: it would pay if more than all left.
        (1, 0.25, 4, 3, True),
        (1, 0.125, 4, 3, False),
        # Merging that costs nothing always pays, but where nobody left.
        (0, 0.0, 4, 1, False),
        (0, 0.0, 3, 0, True),
    ],
)
def test_rebatch_splits_a_batch_only_where_the_gain_is_above_the_cost(
    stage: int, merging_s: float, before: int, leave: int, runs_on: bool
) -> None:
    latencies = table(first_s=0.25, more_s=0.0)
    latencies.merging_s = merging_s
    assert Rebatch(points_of(latencies), 4).runs_on(stage, before, before - leave) is runs_on


def test_survivors_of_two_batches_become_a_full_one() -> None:
    s = scheduler("refill")
    s.submit(Submission(1, 8), 0.0)
    numbers = []
    for exited in ([True, False, True, False], [False, True, False, True]):
        started(s.next(0, 0.0))
        outcome = s.update(0, np.array(exited), 0.0)
        numbers.append(outcome.buffered)
    assert s.in_flight == 4
    merged = started(s.next(0, 0.0))
    assert (merged.stage, merged.deepest) == (1, 2)
    assert pairs(merged) == [(1, 1), (1, 3), (1, 4), (1, 6)]
    assert [(p.number, p.positions.tolist()) for p in merged.pieces] == [
        (numbers[0], [0, 1]),
        (numbers[1], [0, 1]),
    ]
    assert s.take_discarded() == numbers
    assert s.update(0, none_exit(merged), 0.0).buffered is None  # still full: it runs on
    assert (started(s.next(0, 0.0)).stage, s.in_flight) == (2, 4)


def test_what_expires_at_a_split_is_told_and_its_batch_discarded() -> None:
    s = scheduler("refill")
    s.submit(Submission(1, 2, 2.0), 0.0)
    run = started(s.next(0, 0.0))
    buffered = s.update(0, none_exit(run), 1.0).buffered
    s.submit(Submission(2), 2.0)
    assert [(d.request, d.count, d.cause.value) for d in s.take_dropped()] == [(1, 2, "expired")]
    assert s.take_discarded() == [buffered]
    assert s.in_flight == 0
