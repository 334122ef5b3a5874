"""Survivors that wait at a split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduling.helpers import row_set

from offramp.engine.scheduling.buffered import BufferedQueue
from offramp.engine.scheduling.decisions import Piece, RowSet

NEVER = float("inf")


def rows(*samples: tuple[int, float] | tuple[int, float, int]) -> RowSet:
    """Samples as (request, deadline, priority 0); their rows count from 0."""
    return row_set(
        [sample[0] for sample in samples],
        deadlines_s=[sample[1] for sample in samples],
        priorities=[sample[2] if len(sample) > 2 else 0 for sample in samples],
    )


def taken(queue: BufferedQueue, limit: int) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Requests, and pieces as (number, positions), of the fullest bucket."""
    samples, pieces = queue.take(queue.fullest(), limit)
    return samples.requests.tolist(), plain(pieces)


def plain(pieces: tuple[Piece, ...]) -> list[tuple[int, list[int]]]:
    return [(piece.number, piece.positions.tolist()) for piece in pieces]


def discarded(queue: BufferedQueue) -> list[int]:
    numbers, queue.discarded = queue.discarded, []
    return numbers


def test_all_that_fit_are_taken_batch_after_batch() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 9.0), (2, 5.0)), "a", 10, 0.0)
    queue.buffer(rows((3, 1.0)), "a", 11, 0.0)
    assert taken(queue, 3) == ([1, 2, 3], [(10, [0, 1]), (11, [0])])
    assert (queue.size, queue.buckets) == (0, {})
    assert discarded(queue) == [10, 11]


def test_if_not_all_fit_the_most_urgent_are_taken() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 0.9), (2, 0.5), (3, 0.7)), "a", 10, 0.0)
    queue.buffer(rows((4, 0.6), (5, 0.8)), "a", 11, 0.0)
    assert taken(queue, 3) == ([2, 3, 4], [(10, [1, 2]), (11, [0])])
    assert discarded(queue) == []
    assert queue.size == 2
    assert taken(queue, 3) == ([1, 5], [(10, [0]), (11, [1])])
    assert discarded(queue) == [10, 11]


def test_rows_of_a_batch_without_urgent_rows_are_discarded() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 0.9), (2, 0.8)), "a", 10, 0.0)
    queue.buffer(rows((3, 0.1), (4, 0.2)), "a", 11, 0.0)
    assert taken(queue, 2) == ([3, 4], [(11, [0, 1])])
    assert discarded(queue) == [11]


def test_a_higher_priority_goes_before_an_earlier_deadline() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 0.1), (2, 0.9, 1), (3, 0.8, 1)), "a", 10, 0.0)
    assert taken(queue, 1) == ([3], [(10, [2])])
    assert taken(queue, 1) == ([2], [(10, [1])])


def test_without_a_deadline_a_sample_is_due_a_second_after_it_was_buffered() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, NEVER)), "a", 10, 5.0)
    queue.buffer(rows((2, 5.9), (3, 6.1)), "a", 11, 5.5)
    bucket = queue.most_urgent()
    assert bucket.due_s == 5.9
    assert taken(queue, 2) == ([1, 2], [(10, [0]), (11, [0])])
    assert queue.most_urgent().due_s == 6.1


def test_the_fullest_bucket_and_the_most_urgent_one_are_found() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 0.9), (2, 0.9)), "a", 10, 0.0)
    queue.buffer(rows((3, 0.5)), "b", 11, 0.0)
    assert queue.fullest().batch_key == "a"
    assert queue.most_urgent().batch_key == "b"


def test_exactly_those_expire_whose_deadline_is_reached() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 3.0), (2, 4.0), (1, 3.0)), "a", 10, 0.0)
    queue.buffer(rows((3, 3.5)), "b", 11, 0.0)
    assert queue.expire(2.999) == []
    assert [samples.requests.tolist() for samples in queue.expire(3.5)] == [[1, 1], [3]]
    assert discarded(queue) == [11]
    assert (queue.size, queue.deadline_s, list(queue.buckets)) == (1, 4.0, [("a", 0)])
    assert taken(queue, 4) == ([2], [(10, [1])])


def test_a_request_is_removed_from_every_batch_that_it_is_in() -> None:
    queue = BufferedQueue()
    queue.buffer(rows((1, 9.0), (2, 9.0)), "a", 10, 0.0)
    queue.buffer(rows((1, 9.0)), "a", 11, 0.0)
    assert [samples.requests.tolist() for samples in queue.remove(1)] == [[1], [1]]
    assert discarded(queue) == [11]
    assert queue.remove(1) == []
    assert taken(queue, 4) == ([2], [(10, [1])])


@given(
    batches=st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 1)),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=6,
    ),
    limits=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_everybody_is_taken_once_in_order_of_urgency(
    batches: list[list[tuple[int, int, int]]], limits: list[int]
) -> None:
    queue = BufferedQueue()
    waiting: dict[tuple[int, int], tuple[int, float]] = {}
    for number, samples in enumerate(batches):
        given_ = [(request, due / 40, priority) for request, due, priority in samples]
        queue.buffer(rows(*given_), "a", number, 0.0)
        for position, (_, deadline_s, priority) in enumerate(given_):
            waiting[number, position] = (-priority, deadline_s)
    gone: list[int] = []
    for limit in limits:
        if not queue.size:
            break
        taken_, pieces = queue.take(queue.fullest(), limit)
        chosen = [(n, position) for n, positions in plain(pieces) for position in positions]
        assert len(chosen) == len(taken_.requests) == min(limit, len(waiting))
        keys = [waiting.pop(item) for item in chosen]
        assert not waiting or max(keys) <= min(waiting.values())
        gone += discarded(queue)
        assert sorted(set(range(len(batches))) - {n for n, _ in waiting}) == sorted(gone)
    assert not waiting
