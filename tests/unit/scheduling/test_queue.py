"""The queue in front of stage 0, at exact instants and against a plain list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import facts

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    SampleQueue,
    SchedulerFullError,
    Submission,
)
from offramp.engine.scheduling.buckets import Bucket, SortedQueue

NEVER = float("inf")


def filled(*submissions: Submission, max_delay_s: float = 0.0, at: float = 0.0) -> SampleQueue:
    queue = SampleQueue(64, full=4, max_delay_s=max_delay_s)
    for submission in submissions:
        queue.push(submission, at)
    return queue


def take(queue: SampleQueue, now_s: float, limit: int = 4) -> list[tuple[int, int]]:
    """(request, row) of the batch that is formed now."""
    bucket = queue.ready(now_s)
    assert isinstance(bucket, Bucket), f"ready at {bucket} only"
    taken = queue.take(bucket, limit)
    return list(zip(taken.requests.tolist(), taken.rows.tolist(), strict=True))


def test_a_bucket_becomes_ready_when_it_holds_a_full_batch() -> None:
    queue = filled(Submission(1, 3), max_delay_s=2.0, at=10.0)
    assert queue.ready(10.0) == 12.0
    queue.push(Submission(2, 1), 11.0)
    assert take(queue, 11.0) == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert queue.ready(11.0) == NEVER


def test_a_bucket_becomes_ready_when_its_oldest_sample_has_waited_long_enough() -> None:
    queue = filled(Submission(1, 1), max_delay_s=2.0, at=10.0)
    queue.push(Submission(2, 1, deadline_s=10.5, priority=5), 10.25)
    assert queue.ready(11.999) == 12.0
    assert take(queue, 12.0) == [(2, 0), (1, 0)]


def test_what_is_left_of_a_batch_becomes_ready_by_its_own_age() -> None:
    queue = filled(Submission(1, 4), max_delay_s=2.0, at=10.0)
    queue.push(Submission(2, 1), 11.0)
    assert take(queue, 11.5) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert queue.ready(12.0) == 13.0
    assert take(queue, 13.0) == [(2, 0)]


def test_what_is_left_of_a_batch_and_is_full_does_not_wait() -> None:
    queue = filled(Submission(1, 9), max_delay_s=2.0, at=10.0)
    assert take(queue, 10.0) == [(1, row) for row in range(4)]
    assert take(queue, 10.0) == [(1, row) for row in range(4, 8)]
    assert queue.ready(10.0) == 12.0
    assert take(queue, 12.0) == [(1, 8)]


def test_a_bucket_that_was_emptied_is_not_ready_for_its_next_sample() -> None:
    queue = filled(Submission(1, 4), max_delay_s=2.0, at=10.0)
    queue.remove(1, DropCause.CANCELLED)
    queue.push(Submission(2, 1), 11.0)
    assert queue.ready(12.5) == 13.0


def test_the_oldest_sample_that_left_gives_no_reason_to_hurry() -> None:
    queue = filled(Submission(1, 1), max_delay_s=2.0, at=10.0)
    queue.push(Submission(2, 1), 11.5)
    queue.remove(1, DropCause.CANCELLED)
    assert queue.ready(12.0) == 13.5


def test_of_the_ready_buckets_the_one_with_the_most_urgent_sample_is_served() -> None:
    queue = filled(
        Submission(1, 1, deadline_s=9.0, batch_key="a"),
        Submission(2, 1, deadline_s=5.0, batch_key="b"),
        Submission(3, 1, deadline_s=7.0, batch_key="c"),
        Submission(4, 1, deadline_s=6.0, batch_key="a"),
    )
    assert [take(queue, 0.0) for _ in range(3)] == [[(2, 0)], [(4, 0), (1, 0)], [(3, 0)]]


def test_a_full_bucket_hurries_no_other() -> None:
    queue = filled(
        Submission(1, 1, deadline_s=5.0, batch_key="a"),
        Submission(2, 4, batch_key="b"),
        max_delay_s=1.0,
    )
    assert take(queue, 0.0) == [(2, row) for row in range(4)]
    assert queue.ready(0.0) == 1.0
    assert take(queue, 1.0) == [(1, 0)]


def test_a_higher_priority_goes_before_an_earlier_deadline() -> None:
    queue = filled(
        Submission(1, 1, deadline_s=1.0),
        Submission(2, 1, deadline_s=9.0, priority=1),
        Submission(3, 1, priority=-1),
        Submission(4, 1, deadline_s=8.0, priority=1),
    )
    assert take(queue, 0.0) == [(4, 0), (2, 0), (1, 0), (3, 0)]


def test_equals_go_in_the_order_of_arrival() -> None:
    queue = filled(*(Submission(number, 1, deadline_s=5.0) for number in (3, 1, 2)))
    assert take(queue, 0.0) == [(3, 0), (1, 0), (2, 0)]


def test_a_request_without_a_deadline_is_ordered_as_if_it_had_a_second() -> None:
    queue = filled(Submission(1, 1))
    queue.push(Submission(2, 1, deadline_s=0.999), 0.5)
    queue.push(Submission(3, 1, deadline_s=1.001), 0.5)
    assert take(queue, 0.5) == [(2, 0), (1, 0), (3, 0)]


def test_a_request_without_a_deadline_never_expires() -> None:
    queue = filled(Submission(1, 1))
    assert queue.expire(1e9) == ()
    assert queue.next_expiry_s() == NEVER
    assert take(queue, 1e9) == [(1, 0)]


def test_flush_ends_every_wait_for_good() -> None:
    queue = filled(Submission(1, 1, batch_key="a"), Submission(2, 1), max_delay_s=60.0)
    queue.flush()
    assert take(queue, 0.0) == [(1, 0)]
    assert take(queue, 0.0) == [(2, 0)]
    queue.push(Submission(3, 1), 0.0)
    assert take(queue, 0.0) == [(3, 0)]


def test_the_queue_takes_all_samples_of_a_request_or_none() -> None:
    queue = SampleQueue(5, full=4)
    queue.push(Submission(1, 4), 0.0)
    with pytest.raises(SchedulerFullError, match=facts("2 samples", "4 of 5")):
        queue.push(Submission(2, 2), 0.0)
    assert queue.size == 4
    queue.push(Submission(3, 1), 0.0)
    assert take(queue, 0.0, limit=3) == [(1, 0), (1, 1), (1, 2)]
    queue.push(Submission(4, 3), 0.0)
    assert queue.size == 5


def test_a_request_is_taken_in_parts_and_the_rest_of_it_removed() -> None:
    queue = filled(Submission(1, 6))
    assert take(queue, 0.0, limit=2) == [(1, 0), (1, 1)]
    assert take(queue, 0.0, limit=3) == [(1, 2), (1, 3), (1, 4)]
    assert queue.remove(1, DropCause.FAILED) == Dropped(1, 1, DropCause.FAILED)
    assert queue.remove(1, DropCause.FAILED) is None
    assert (queue.size, queue.ready(0.0)) == (0, NEVER)


def test_what_was_taken_whole_cannot_be_removed() -> None:
    queue = filled(Submission(1, 2))
    take(queue, 0.0)
    assert queue.remove(1, DropCause.CANCELLED) is None


def test_exactly_those_expire_whose_deadline_is_reached() -> None:
    queue = filled(
        Submission(1, 2, deadline_s=5.0),
        Submission(2, 1, deadline_s=3.0, batch_key="b"),
        Submission(3, 1, deadline_s=4.0),
    )
    assert queue.next_expiry_s() == 3.0
    assert queue.expire(2.999) == ()
    assert list(queue.expire(4.0)) == [
        Dropped(2, 1, DropCause.EXPIRED),
        Dropped(3, 1, DropCause.EXPIRED),
    ]
    assert (queue.next_expiry_s(), queue.size) == (5.0, 2)


def test_a_deadline_earlier_than_all_before_is_noticed_and_one_taken_is_forgotten() -> None:
    queue = filled(Submission(1, 1, deadline_s=5.0))
    queue.push(Submission(2, 1, deadline_s=2.0), 0.0)
    assert take(queue, 0.0, limit=1) == [(2, 0)]
    assert queue.next_expiry_s() == 5.0
    assert list(queue.expire(3.0)) == []
    assert list(queue.expire(5.0)) == [Dropped(1, 1, DropCause.EXPIRED)]


@dataclass(eq=False)
class Life:
    """An item of a sorted queue."""

    left: int = 1


@given(st.lists(st.one_of(st.integers(0, 50), st.sampled_from(["pop", "kill"])), max_size=300))
def test_a_sorted_queue_gives_the_living_in_order(events: list[int | str]) -> None:
    queue: SortedQueue[Life] = SortedQueue()
    living: list[tuple[tuple[int, int], Life]] = []
    for number, event in enumerate(events):
        if isinstance(event, int):
            item = Life()
            queue.push((event, number), item)
            living.append(((event, number), item))
            assert len(queue._in_order) + len(queue._heap) <= 2 * len(living) + 64
        elif living:
            key, item = min(living, key=lambda e: e[0]) if event == "pop" else living[-1]
            living.remove((key, item))
            item.left = 0
            queue.used_up()
        expected = min(living, key=lambda e: e[0], default=None)
        assert queue.head() == expected


@dataclass
class Plain:
    """A request as the naive queue knows it."""

    key: tuple[float, float, int]
    request: int
    first: int
    left: int
    deadline_s: float
    batch_key: int
    submitted_s: float


class Naive:
    """The same queue as a list: everything is searched for."""

    def __init__(self, max_delay_s: float) -> None:
        self.max_delay_s = max_delay_s
        self.waiting: list[Plain] = []
        self.marked: set[int] = set()

    def bucket(self, batch_key: int) -> list[Plain]:
        return sorted((p for p in self.waiting if p.batch_key == batch_key), key=lambda p: p.key)

    def size(self, batch_key: int) -> int:
        return sum(p.left for p in self.bucket(batch_key))

    def push(self, plain: Plain) -> None:
        self.waiting.append(plain)
        if self.max_delay_s <= 0 or self.size(plain.batch_key) >= 4:
            self.marked.add(plain.batch_key)

    def remove(self, which: list[Plain]) -> None:
        self.waiting = [p for p in self.waiting if p not in which]
        self.marked &= {p.batch_key for p in self.waiting}

    def ready(self, now_s: float) -> tuple[int | None, float]:
        """The bucket, or when there is one."""
        due = {p.batch_key: NEVER for p in self.waiting}
        for plain in self.waiting:
            due_s = plain.submitted_s + self.max_delay_s
            due[plain.batch_key] = min(due[plain.batch_key], due_s)
        self.marked |= {batch_key for batch_key, due_s in due.items() if due_s <= now_s}
        ready = [p for p in self.waiting if p.batch_key in self.marked]
        if ready:
            return min(ready, key=lambda p: p.key).batch_key, now_s
        return None, min(due.values(), default=NEVER)

    def take(self, batch_key: int, limit: int) -> list[tuple[int, int]]:
        rows = []
        for plain in self.bucket(batch_key):
            count = min(plain.left, limit)
            rows += [(plain.request, plain.first + i) for i in range(count)]
            plain.first, plain.left, limit = plain.first + count, plain.left - count, limit - count
        self.waiting = [p for p in self.waiting if p.left]
        if self.max_delay_s > 0 and self.size(batch_key) < 4:
            self.marked.discard(batch_key)
        self.marked &= {p.batch_key for p in self.waiting}
        return rows


EVENTS = st.one_of(
    st.tuples(
        st.just("push"),
        st.integers(1, 6),
        st.one_of(st.just(NEVER), st.integers(1, 12).map(lambda q: q / 4)),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("remove"), st.integers(0, 40)),
    st.tuples(st.just("pass"), st.integers(1, 6)),
)


@given(
    events=st.lists(EVENTS, max_size=60),
    max_delay_s=st.sampled_from([0.0, 0.5, 2.0]),
    flush_at=st.one_of(st.none(), st.integers(0, 60)),
)
def test_the_queue_does_what_a_list_would(
    events: list[tuple[object, ...]], max_delay_s: float, flush_at: int | None
) -> None:
    queue, naive, now_s = (
        SampleQueue(1000, full=4, max_delay_s=max_delay_s),
        Naive(max_delay_s),
        0.0,
    )
    for number, (event, *how) in enumerate(events):
        if number == flush_at:
            queue.flush()
            naive.max_delay_s = 0.0
        if event == "push":
            count, slack, priority, batch_key = how
            assert isinstance(count, int) and isinstance(priority, int)
            assert isinstance(slack, (int, float)) and isinstance(batch_key, int)
            deadline_s = now_s + slack
            queue.push(Submission(number, count, deadline_s, priority, batch_key), now_s)
            order_s = now_s + 1.0 if slack == NEVER else deadline_s
            key = (-priority, order_s, number)
            naive.push(Plain(key, number, 0, count, deadline_s, batch_key, now_s))
        elif event == "take":
            batch_key, due_s = naive.ready(now_s)
            bucket = queue.ready(now_s)
            if batch_key is None:
                assert not isinstance(bucket, Bucket)
                assert now_s < bucket <= due_s, "woken too late, or at once for nothing"
                continue
            assert isinstance(bucket, Bucket)
            assert bucket.batch_key == batch_key
            assert isinstance(how[0], int)
            taken = queue.take(bucket, how[0])
            rows = zip(taken.requests.tolist(), taken.rows.tolist(), strict=True)
            assert list(rows) == naive.take(batch_key, how[0])
        elif event == "remove":
            gone = [p for p in naive.waiting if p.request == how[0]]
            dropped = queue.remove(int(str(how[0])), DropCause.CANCELLED)
            assert (dropped.count if dropped else 0) == sum(p.left for p in gone)
            naive.remove(gone)
        else:
            assert isinstance(how[0], int)
            now_s += how[0] / 4
            gone = [p for p in naive.waiting if p.deadline_s <= now_s]
            expired = [(item.request, item.count) for item in queue.expire(now_s)]
            assert sorted(expired) == sorted((p.request, p.left) for p in gone)
            naive.remove(gone)
        assert queue.size == sum(p.left for p in naive.waiting)
        first = min((p.deadline_s for p in naive.waiting), default=NEVER)
        assert queue.next_expiry_s() == first
