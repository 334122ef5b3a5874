"""Conditions under which the first of a queue is dropped for the others."""

from __future__ import annotations

import pytest

from offramp.engine.scheduling import SampleQueue, Submission
from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.early_drop import EarlyDrop

PAYS = [(1.0, 1.0), (2.0, 2.0)]
"""One row a second after a second, or two a second after two."""


def gives_up(
    rule: EarlyDrop, slack_s: float, others: int, last_s: float, *, priority: int = 0
) -> bool:
    """Return True if the first is dropped for some others, all due at the same time."""
    queue = SampleQueue(10_000, full=4)
    queue.push(Submission(0, 1, slack_s, priority), 0.0)
    if others:
        queue.push(Submission(1, others, last_s), 0.0)
    bucket = queue.ready(0.0)
    assert isinstance(bucket, Bucket)
    return rule.gives_up(queue, bucket, 0.0, 1.0)


@pytest.mark.parametrize(
    ("slack_s", "others", "last_s", "given_up"),
    [
        (1.5, 7, 8.0, False),  # one row a second is enough
        (1.5, 8, 8.0, True),  # it is not, and the larger batch is
        (1.5, 98, 8.0, True),  # nothing is enough, but the larger batch is much faster
        (2.0, 98, 8.0, False),  # the first sample can wait for the larger batch
        (1.5, 98, 1.9, False),  # the last cannot either
        (1.5, 98, 1.5, False),  # all are as urgent
        (0.5, 1, 8.0, True),  # it allows nothing
    ],
)
def test_who_slows_the_others_down_is_given_up(
    slack_s: float, others: int, last_s: float, given_up: bool
) -> None:
    assert gives_up(EarlyDrop(PAYS, streams=1), slack_s, others, last_s) is given_up


def test_two_streams_keep_up_with_twice_as_much() -> None:
    assert not gives_up(EarlyDrop(PAYS, streams=2), 1.5, 15, 8.0)
    assert gives_up(EarlyDrop(PAYS, streams=2), 1.5, 16, 8.0)


def test_where_batches_bring_nothing_nobody_is_given_up() -> None:
    linear = EarlyDrop([(0.5 * n, 2.0) for n in (1, 2, 4, 8)], streams=1)
    assert not gives_up(linear, 0.5, 1000, 8.0)


def test_one_that_can_wait_for_an_hour_does_not_make_the_others_patient() -> None:
    rule = EarlyDrop(PAYS, streams=1)
    assert gives_up(rule, 1.5, 8, 8.0)
    assert gives_up(rule, 1.5, 8, 3600.0)


def test_no_sample_is_dropped_for_lower_priorities() -> None:
    rule = EarlyDrop(PAYS, streams=1)
    assert gives_up(rule, 1.5, 98, 8.0)
    assert not gives_up(rule, 1.5, 98, 8.0, priority=1)


def test_what_waits_in_other_buckets_counts_too() -> None:
    queue = SampleQueue(10_000, full=4)
    for number, batch_key in enumerate("abcdefghi"):
        queue.push(Submission(number, 1, 1.5 if not number else 8.0, 0, batch_key), 0.0)
    queue.push(Submission(99, 1, 8.0, 0, "a"), 0.0)
    bucket = queue.ready(0.0)
    assert isinstance(bucket, Bucket)
    assert bucket.size == 2
    assert EarlyDrop(PAYS, streams=1).gives_up(queue, bucket, 0.0, 1.0)


def test_the_last_deadline_is_the_last_whoever_came_first() -> None:
    """The most urgent sample comes after those that it would slow down."""
    queue = SampleQueue(10_000, full=4)
    queue.push(Submission(1, 8, 8.0), 0.0)
    queue.push(Submission(0, 1, 1.5), 0.0)
    bucket = queue.ready(0.0)
    assert isinstance(bucket, Bucket)
    assert EarlyDrop(PAYS, streams=1).gives_up(queue, bucket, 0.0, 1.0)


def test_those_that_were_served_make_nobody_patient() -> None:
    """All that had time until 8 s are gone, and what waits is equally urgent."""
    queue = SampleQueue(10_000, full=4)
    queue.push(Submission(0, 1, 8.0), 0.0)
    served = queue.ready(0.0)
    assert isinstance(served, Bucket)
    queue.take(served, 1)
    queue.push(Submission(1, 1, 0.5), 0.0)
    queue.push(Submission(2, 9, 0.5), 0.0)
    bucket = queue.ready(0.0)
    assert isinstance(bucket, Bucket)
    assert not EarlyDrop(PAYS, streams=1).gives_up(queue, bucket, 0.0, 1.0)


def test_those_that_were_served_do_not_lower_the_priority() -> None:
    """An urgent sample is given up for others of its own priority, though lower ones were here."""
    queue = SampleQueue(10_000, full=4)
    queue.push(Submission(0, 1, 8.0, -1), 0.0)
    served = queue.ready(0.0)
    assert isinstance(served, Bucket)
    queue.take(served, 1)
    queue.push(Submission(1, 1, 1.5), 0.0)
    queue.push(Submission(2, 8, 8.0), 0.0)
    bucket = queue.ready(0.0)
    assert isinstance(bucket, Bucket)
    assert EarlyDrop(PAYS, streams=1).gives_up(queue, bucket, 0.0, 1.0)
