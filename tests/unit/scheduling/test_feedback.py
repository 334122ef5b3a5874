"""Samples that run on after their answer, so that the model's own is known too."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.scheduling.helpers import (
    Watched,
    all_exit,
    none_exit,
    pairs,
    row_set,
    scheduler,
    started,
    table,
)

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    Latencies,
    ModelScheduler,
    ParallelLimit,
    StepOutcome,
    Submission,
)

NEVER = float("inf")


def flags(text: str) -> NDArray[np.bool_]:
    """``x.x`` is true, false, true."""
    return np.array([letter == "x" for letter in text])


def fates(outcome: StepOutcome) -> tuple[list[int], list[int], list[int], list[int]]:
    """Released, dropped, survivors, ended."""
    return (
        outcome.released.tolist(),
        outcome.given_up.tolist(),
        outcome.survivors.tolist(),
        outcome.ended.tolist(),
    )


def lost(s: Watched) -> list[tuple[int, int, int, bool]]:
    """Request, row, sample id and whether it was answered, of all that were lost."""
    told: list[tuple[int, int, int, bool]] = []
    for samples in s.take_lost():
        columns = (samples.requests, samples.rows, samples.sample_ids, samples.answered)
        told += zip(*(column.tolist() for column in columns), strict=True)
    return told


def after_the_first_stage(
    exited: str, runs_on: str, *, policy: str = "run-through", deadline_s: float = NEVER
) -> ModelScheduler:
    """Request 1, of as many samples, through stage 0 at 0.25 s and not at stage 1 yet."""
    s = scheduler(policy)
    s.submit(Submission(1, len(exited), deadline_s), 0.0)
    started(s.next(0, 0.0))
    s.update(0, flags(exited), 0.25, flags(runs_on))
    return s


# One batch on its way


@pytest.mark.parametrize(
    ("survivors", "ended", "expected"),
    [([3], [], False), ([1, 3], [], True), ([], [3], False), ([0], [3], True)],
)
def test_released_survive_if_one_runs_on(
    survivors: list[int], ended: list[int], expected: bool
) -> None:
    """Rows 0 and 1 of four are released, and 2 is given up."""
    rows = [np.array(found, np.intp) for found in ([0, 1], [2], survivors)]
    outcome = StepOutcome(*rows, ended=np.array(ended, np.intp))
    assert outcome.released_survive(4) is expected


def test_a_row_that_runs_on_is_released_once_and_ends_at_the_last_stage() -> None:
    s = scheduler()
    s.submit(Submission(1, 4), 0.0)
    started(s.next(0, 0.0))
    outcome = s.update(0, flags("xx.."), 0.25, flags("x..x"))
    assert fates(outcome) == ([0, 1], [], [0, 2, 3], [])
    assert (s.in_flight, s.auditing) == (2, 1)
    run = started(s.next(0, 0.25))
    assert (run.stage, pairs(run)) == (1, [(1, 0), (1, 2), (1, 3)])
    # Row 0 has its answer: whether it is sure here too, or would run on, changes nothing.
    assert fates(s.update(0, flags("x.x"), 0.5, flags("..."))) == ([2], [], [0, 1], [])
    assert (s.in_flight, s.auditing) == (1, 1)
    run = started(s.next(0, 0.5))
    assert (run.stage, pairs(run)) == (2, [(1, 0), (1, 2)])
    assert fates(s.update(0, flags("xx"), 0.75, flags("xx"))) == ([1], [], [], [0])
    assert (s.in_flight, s.auditing, s.busy) == (0, 0, False)
    assert (lost(s), s.take_dropped()) == ([], [])


def test_a_batch_continues_after_its_clients_disconnect() -> None:
    s = after_the_first_stage("xx", "xx")
    assert (s.in_flight, s.auditing, s.busy) == (0, 2, True)
    assert started(s.next(0, 0.25)).stage == 1
    assert fates(s.update(0, flags(".."), 0.5, flags(".."))) == ([], [], [0, 1], [])
    assert started(s.next(0, 0.5)).stage == 2
    assert fates(s.update(0, flags(".."), 0.75, flags(".."))) == ([], [], [], [0, 1])
    assert not s.busy


@pytest.mark.parametrize("runs_on", [None, flags("....")])
def test_where_nobody_is_to_run_on_whoever_is_released_leaves(
    runs_on: NDArray[np.bool_] | None,
) -> None:
    s = scheduler()
    s.submit(Submission(1, 4), 0.0)
    started(s.next(0, 0.0))
    assert fates(s.update(0, flags("x.x."), 0.25, runs_on)) == ([0, 2], [], [1, 3], [])
    assert (s.in_flight, s.auditing) == (2, 0)


def test_only_released_samples_can_run_on() -> None:
    """A coin for a row that is not sure yet says nothing: it goes on anyway, unanswered."""
    s = after_the_first_stage("..", "xx")
    assert (s.in_flight, s.auditing) == (2, 0)


def test_an_answered_row_has_no_deadline_any_more() -> None:
    s = after_the_first_stage("x..", "x..", deadline_s=1.0)
    run = started(s.next(0, 0.25))
    # At 1.0 all three are late: the one that is sure enough is answered all the same.
    assert fates(s.update(0, flags("..x"), 1.0, flags("..x"))) == ([2], [1], [0, 2], [])
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
    assert lost(s) == [(1, 1, 1, False)]
    run = started(s.next(0, 1.0))
    assert pairs(run) == [(1, 0), (1, 2)]
    assert fates(s.update(0, none_exit(run), 9.0, none_exit(run))) == ([], [], [], [0, 1])


def test_a_cancel_leaves_answered_rows_alone() -> None:
    s = scheduler()
    s.submit(Submission(1, 3), 0.0)
    s.submit(Submission(2, 1), 0.0)
    started(s.next(0, 0.0))
    s.update(0, flags("x..."), 0.25, flags("x..."))
    started(s.next(0, 0.25))
    s.cancel(1)
    # Row 1 becomes sure in the stage during which its caller left.
    assert fates(s.update(0, flags(".x.."), 0.5, flags(".x.."))) == ([1], [2], [0, 1, 3], [])
    assert s.take_dropped() == [Dropped(1, 1, DropCause.CANCELLED)]
    assert lost(s) == [(1, 2, 2, False)]
    s.cancel(1)
    assert pairs(started(s.next(0, 0.5))) == [(1, 0), (1, 1), (2, 0)]
    assert fates(s.update(0, flags("..."), 0.75, flags("..."))) == ([2], [], [], [0, 1])
    assert (lost(s), s.take_dropped()) == ([], [])


def test_answered_rows_still_count_as_rows_of_the_batch() -> None:
    """Answered rows fill the device like the others: no batch starts in parallel under τ_b = 2."""
    s = scheduler(streams=2, parallel=ParallelLimit(4, fixed=2))
    s.submit(Submission(1, 8), 0.0)
    started(s.next(0, 0.0))
    s.update(0, flags("xxx."), 0.25, flags("x..."))
    assert isinstance(s.next(1, 0.25), Idle)
    started(s.next(0, 0.25))
    s.update(0, flags(".x"), 0.5, flags(".."))
    assert pairs(started(s.next(1, 0.5))) == [(1, 4), (1, 5), (1, 6), (1, 7)]


def test_a_late_answer_is_counted_once() -> None:
    limit = ParallelLimit(4, max_violations=0.5)
    s = scheduler("delay", parallel=limit)
    s.submit(Submission(1, 2, deadline_s=1.0), 0.0)
    started(s.next(0, 0.0))
    s.update(0, flags("x."), 0.5, flags("x."))  # in time
    assert (limit._seen, limit._late) == (1, 0)
    started(s.next(0, 0.5))
    s.update(0, flags(".x"), 2.0, flags(".x"))  # late
    assert (limit._seen, limit._late) == (2, 1)
    started(s.next(0, 2.0))
    s.update(0, flags("xx"), 3.0, flags("xx"))  # neither is answered here
    assert (limit._seen, limit._late) == (2, 1)


def test_what_runs_on_counts_as_going_on_where_batches_are_planned() -> None:
    """3 of 4 rows are there at stage 1; 4 rows weigh 4 of the 512 that are remembered."""
    s = after_the_first_stage("xx..", "x...")
    assert s.latencies.variants[0].going_on[0] == 1.0 + 4 / 512 * (3 / 4 - 1.0)


def test_answering_some_changes_a_copy() -> None:
    samples = row_set([0, 0, 0], deadlines_s=5.0, sample_ids=[7, 8, 9])
    changed = samples.answering(np.array([0, 2]))
    assert changed.deadlines_s.tolist() == [NEVER, 5.0, NEVER]
    assert (changed.answered.tolist(), changed.unanswered) == ([True, False, True], 1)
    assert (samples.deadlines_s.tolist(), samples.unanswered) == ([5.0] * 3, 3)
    assert changed.dropped(DropCause.CANCELLED) == [Dropped(0, 1, DropCause.CANCELLED)]
    assert changed.take(np.array([0, 2])).dropped(DropCause.CANCELLED) == []


# Failures


def test_a_failure_loses_answered_rows_and_tries_the_others_again() -> None:
    s = after_the_first_stage("x..", "x..")
    started(s.next(0, 0.25))
    s.failed(0, 0.5)
    assert lost(s) == [(1, 0, 0, True)]
    assert s.take_dropped() == []
    assert (s.in_flight, s.auditing, s.retried) == (2, 0, 2)
    again = started(s.next(0, 0.5))
    assert (again.stage, pairs(again), again.sample_ids.tolist()) == (0, [(1, 1), (1, 2)], [1, 2])


def test_a_batch_of_answered_rows_that_fails_is_gone() -> None:
    s = after_the_first_stage("xx", "xx")
    started(s.next(0, 0.25))
    s.failed(0, 0.5)
    assert lost(s) == [(1, 0, 0, True), (1, 1, 1, True)]
    assert (s.take_dropped(), s.busy, s.retried) == ([], False, 0)


def test_what_fails_a_second_time_is_lost_and_its_answered_rows_too() -> None:
    s = after_the_first_stage("...", "...")
    s.failed(0, 0.25)
    assert lost(s) == []  # all are tried again
    started(s.next(0, 0.25))
    s.update(0, flags(".x."), 0.5, flags(".x."))
    started(s.next(0, 0.5))
    s.failed(0, 0.75)
    assert s.take_dropped() == [Dropped(1, 2, DropCause.FAILED)]
    assert sorted(lost(s)) == [(1, 0, 0, False), (1, 1, 1, True), (1, 2, 2, False)]
    assert not s.busy


def test_a_failure_of_a_withdrawn_request_loses_each_row_once() -> None:
    s = after_the_first_stage("x.", "x.")
    started(s.next(0, 0.25))
    s.cancel(1)
    s.failed(0, 0.5)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.CANCELLED)]
    assert sorted(lost(s)) == [(1, 0, 0, True), (1, 1, 1, False)]
    assert not s.busy


# Numbers, and what is told of those that leave without


def test_samples_are_numbered_in_the_order_in_which_they_start() -> None:
    s = scheduler(streams=2)
    s.submit(Submission(1, 5), 0.0)
    s.submit(Submission(2, 2, priority=1), 0.0)
    first, second = started(s.next(0, 0.0)), started(s.next(1, 0.0))
    assert pairs(first) == [(2, 0), (2, 1), (1, 0), (1, 1)]
    assert first.sample_ids.tolist() == [0, 1, 2, 3]
    assert pairs(second) == [(1, 2), (1, 3), (1, 4)]
    assert second.sample_ids.tolist() == [4, 5, 6]
    s.update(0, flags("x.x."), 0.25)
    assert started(s.next(0, 0.25)).sample_ids.tolist() == [1, 3]
    s.failed(0, 0.25)
    s.update(1, all_exit(second), 0.25)
    s.submit(Submission(3, 1), 0.25)
    # The two requests are tried again one by one, where they did not fail; then comes what is new.
    for request, sample_id in ((2, 1), (1, 3), (3, 7)):
        again = started(s.next(1, 0.25))
        assert (again.requests.tolist(), again.sample_ids.tolist()) == ([request], [sample_id])
        s.update(1, all_exit(again), 0.25)


def test_what_never_started_is_not_lost() -> None:
    s = scheduler(latencies=table(first_s=1.0, more_s=0.0))
    s.submit(Submission(1, 1, deadline_s=5.0), 0.0)
    s.cancel(1)
    s.submit(Submission(2, 1, deadline_s=0.5), 0.0)  # infeasible: a stage takes 1 s
    assert isinstance(s.next(0, 0.0), Idle)
    s.submit(Submission(3, 1, deadline_s=0.5), 0.0)
    s.submit(Submission(4, 1), 1.0)
    assert s.take_dropped() == [
        Dropped(1, 1, DropCause.CANCELLED),
        Dropped(2, 1, DropCause.INFEASIBLE),
        Dropped(3, 1, DropCause.EXPIRED),
    ]
    assert lost(s) == []
    assert started(s.next(0, 1.0)).sample_ids.tolist() == [0]


def test_a_retry_that_expires_or_is_withdrawn_is_lost() -> None:
    s = scheduler(streams=2)
    s.submit(Submission(1, 1, deadline_s=2.0), 0.0)
    s.submit(Submission(2, 2, deadline_s=3.0), 0.0)
    started(s.next(0, 0.0))
    s.failed(0, 0.25)
    s.cancel(2)
    assert s.take_dropped() == [Dropped(2, 2, DropCause.CANCELLED)]
    assert lost(s) == [(2, 0, 1, False), (2, 1, 2, False)]
    s.submit(Submission(3, 1), 2.0)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
    assert lost(s) == [(1, 0, 0, False)]


# At splits


@pytest.mark.parametrize("policy", ["refill", "rebatch"])
def test_answered_rows_wait_at_a_split_with_the_others(policy: str) -> None:
    s = scheduler(policy)
    s.submit(Submission(1, 4), 0.0)
    first = started(s.next(0, 0.0))
    outcome = s.update(0, flags("xx.."), 0.25, flags("x..."))
    assert fates(outcome) == ([0, 1], [], [0, 2, 3], [])
    assert outcome.buffered == first.batch
    assert (s.in_flight, s.auditing) == (2, 1)
    s.submit(Submission(2, 2), 0.25)
    second = started(s.next(0, 0.25))
    assert s.update(0, flags("xx"), 0.5, flags("x.")).buffered == second.batch
    merged = started(s.next(0, 0.5))
    assert (merged.stage, pairs(merged)) == (1, [(1, 0), (1, 2), (1, 3), (2, 0)])
    assert merged.sample_ids.tolist() == [0, 2, 3, 4]
    assert [(p.number, p.positions.tolist()) for p in merged.pieces] == [
        (first.batch, [0, 1, 2]),
        (second.batch, [0]),
    ]
    outcome = s.update(0, flags("xx.x"), 0.75, flags("...."))
    assert fates(outcome) == ([1], [], [0, 2, 3], [])


def test_a_batch_that_only_feedback_keeps_full_runs_on() -> None:
    s = after_the_first_stage("xxx.", "xxx.", policy="refill")
    assert not s.waiting
    assert started(s.next(0, 0.25)).pieces == ()


def test_rebatch_gains_nothing_where_all_run_on() -> None:
    """The same two of three rows leave, or run on: only the first makes room."""
    assert after_the_first_stage("xx.", "...", policy="rebatch").waiting
    assert not after_the_first_stage("xx.", "xx.", policy="rebatch").waiting


@pytest.mark.parametrize("cause", [DropCause.CANCELLED, DropCause.EXPIRED])
def test_at_a_split_answered_rows_stay_where_others_leave(cause: DropCause) -> None:
    s = after_the_first_stage("xx.", "x..", policy="refill", deadline_s=2.0)
    assert (s.in_flight, s.auditing) == (1, 1)
    if cause is DropCause.CANCELLED:
        s.cancel(1)
    run = started(s.next(0, 2.0))
    assert (run.stage, pairs(run)) == (1, [(1, 0)])
    assert [piece.positions.tolist() for piece in run.pieces] == [[0]]
    assert s.take_dropped() == [Dropped(1, 1, cause)]
    assert lost(s) == [(1, 2, 2, False)]
    assert (s.in_flight, s.auditing) == (0, 1)


def test_answered_rows_at_a_split_go_on_when_there_is_nothing_else() -> None:
    s = after_the_first_stage("xx", "x.", policy="refill", deadline_s=2.0)
    assert (s.waiting, s.in_flight, s.auditing) == (True, 0, 1)
    run = started(s.next(0, 50.0))
    assert (run.stage, pairs(run), run.deepest) == (1, [(1, 0)], 2)
    assert s.update(0, flags("."), 50.25, flags(".")).buffered is not None
    assert started(s.next(0, 50.25)).stage == 2
    assert fates(s.update(0, flags("."), 50.5, flags("."))) == ([], [], [], [0])
    assert s.take_dropped() == []


# A depth that is forced


@pytest.mark.parametrize(("policy", "deadline_s"), [("fixed:1", NEVER), ("slackfit", 2.5)])
def test_feedback_ends_where_the_batch_must_not_go_deeper(policy: str, deadline_s: float) -> None:
    """Stages take 1 s: SlackFit has time for two of three. What ended there is not the model's."""
    s = scheduler(policy, latencies=table(first_s=1.0, more_s=0.0))
    s.submit(Submission(1, 4, deadline_s), 0.0)
    run = started(s.next(0, 0.0))
    assert (run.deepest, len(run.requests)) == (1, 4)
    assert fates(s.update(0, flags("xx.."), 1.0, flags("x.x."))) == ([0, 1], [], [0, 2, 3], [])
    assert started(s.next(0, 1.0)).stage == 1
    # Row 1 here is not sure and is forced to leave; nobody can run on from here.
    assert fates(s.update(0, flags("..x"), 2.0, flags("xxx"))) == ([1, 2], [], [], [0])
    assert (s.busy, lost(s)) == (False, [])


def test_at_a_forced_first_exit_there_is_no_feedback() -> None:
    s = scheduler("fixed:0")
    s.submit(Submission(1, 2), 0.0)
    assert started(s.next(0, 0.0)).deepest == 0
    assert fates(s.update(0, flags("x."), 0.25, flags("xx"))) == ([0, 1], [], [], [])
    assert (s.busy, s.auditing) == (False, 0)


# Making way for samples that wait


def test_a_batch_without_waiting_clients_yields() -> None:
    s = scheduler()
    s.submit(Submission(1, 2), 0.0)
    first = started(s.next(0, 0.0))
    s.submit(Submission(2, 1), 0.1)
    outcome = s.update(0, flags("xx"), 0.25, flags("xx"))
    assert fates(outcome) == ([0, 1], [], [0, 1], [])
    assert outcome.buffered == first.batch
    run = started(s.next(0, 0.25))
    assert (run.stage, pairs(run)) == (0, [(2, 0)])
    assert (s.in_flight, s.auditing, s.queued) == (1, 2, 0)
    s.update(0, flags("x"), 0.5, flags("."))
    resumed = started(s.next(0, 0.5))
    assert (resumed.stage, pairs(resumed)) == (1, [(1, 0), (1, 1)])
    assert [(p.number, p.positions.tolist()) for p in resumed.pieces] == [(first.batch, [0, 1])]
    s.update(0, flags(".."), 0.75, flags(".."))
    assert started(s.next(0, 0.75)).stage == 2
    assert fates(s.update(0, flags(".."), 1.0, flags(".."))) == ([], [], [], [0, 1])
    assert not s.busy


def test_a_batch_makes_way_at_every_stage() -> None:
    s = after_the_first_stage("x", "x")
    assert started(s.next(0, 0.25)).stage == 1
    s.submit(Submission(2, 1), 0.3)
    assert s.update(0, flags("."), 0.5, flags(".")).buffered is not None
    assert pairs(started(s.next(0, 0.5))) == [(2, 0)]


def test_a_batch_with_an_unanswered_sample_goes_on() -> None:
    s = scheduler()
    s.submit(Submission(1, 2), 0.0)
    started(s.next(0, 0.0))
    s.submit(Submission(2, 1), 0.1)
    assert s.update(0, flags("x."), 0.25, flags("x.")).buffered is None
    assert started(s.next(0, 0.25)).stage == 1


def test_no_more_than_a_batch_makes_way() -> None:
    """Under overload there is always somebody who waits."""
    s = scheduler()  # of batches of 4
    for request in range(1, 9):
        s.submit(Submission(request, 1 if request > 1 else 4), 0.0)
    assert len(started(s.next(0, 0.0)).requests) == 4
    assert s.update(0, flags("xxxx"), 0.25, flags("xxxx")).buffered is not None
    assert len(started(s.next(0, 0.25)).requests) == 4
    assert s.update(0, flags("xxxx"), 0.5, flags("xxxx")).buffered is None
    assert started(s.next(0, 0.5)).stage == 1
    assert s.auditing == 8


def test_a_sample_that_waits_for_others_does_not_keep_feedback_waiting() -> None:
    """A policy that waits for batch mates leaves the stream to what made way."""
    s = scheduler("delay", max_delay_s=1.0)
    s.submit(Submission(1, 4), 0.0)
    started(s.next(0, 0.0))
    s.submit(Submission(2, 1), 0.1)
    s.update(0, flags("xxxx"), 0.25, flags("xxxx"))
    assert started(s.next(0, 0.25)).stage == 1


def test_answers_are_expected_where_they_come_though_all_run_on() -> None:
    """The stream is busy to the end for every row; half have their answer after the first stage."""
    latencies = Latencies([[0.0, 1.0], [0.0, 3.0]], [1.0, 1.0], unanswered=[0.5, 1.0])
    assert latencies.shrinking.answer_s[1] == 0.5 * 1.0 + 0.5 * 4.0
    assert latencies.shrinking.busy_s[1][1] == 4.0
    assert latencies.shrinking.earliest_s == 1.0
    assert latencies.largest_shrinking_batch(1.0) == 1
    for _ in range(2000):
        latencies.observe_shrinking(0, 4, 4, 0, (4, 4))
    assert latencies.shrinking.answer_s[1] == pytest.approx(4.0, abs=0.01)


def test_rows_without_an_answer_are_observed_apart() -> None:
    s = after_the_first_stage("xx..", "xx..")
    table = s.latencies.variants[0]
    assert (table.going_on[0], table.unanswered[0]) == (1.0, 1.0 - 0.5 * 4 / 512)
