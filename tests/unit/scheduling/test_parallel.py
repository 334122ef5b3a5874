"""PAME's τ_b: when a batch may start next to others."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.scheduling.helpers import SIZE, scheduler, started, table

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    ParallelLimit,
    Submission,
    Wait,
)


def test_a_batch_starts_in_parallel_exactly_when_below_tau_b() -> None:
    s = scheduler(streams=2, parallel=ParallelLimit(4, fixed=2))
    s.submit(Submission(1, 8), 0.0)
    started(s.next(0, 0.0))
    assert isinstance(s.next(1, 0.0), Idle)
    s.update(0, np.array([True, True, False, False]), 1.0)  # 2 rows are left: not below 2
    assert isinstance(s.next(1, 1.0), Idle)
    started(s.next(0, 1.0))
    s.update(0, np.array([True, False]), 2.0)
    assert len(started(s.next(1, 2.0)).requests) == 4


def test_every_running_batch_has_to_be_small() -> None:
    limit = ParallelLimit(8, fixed=3)
    limit.running(0, 2)
    limit.running(1, 3)
    assert not limit.allows(2)
    assert limit.allows(1)  # its own batch does not count
    limit.running(1, 0)
    assert limit.allows(2)


def test_a_batch_minds_only_those_on_its_own_device() -> None:
    limit = ParallelLimit(8, fixed=3, devices=2)
    limit.running(0, 8)
    assert limit.allows(1)
    assert not limit.allows(2)
    limit.running(1, 2)
    assert limit.allows(3)


@pytest.mark.parametrize("limit", [ParallelLimit(4), ParallelLimit(4, fixed=5)])
def test_above_the_largest_batch_nothing_is_limited(limit: ParallelLimit) -> None:
    limit.running(0, 4)
    assert limit.allows(1)
    assert not limit.limits


def test_tau_b_of_one_runs_batches_one_after_another() -> None:
    limit = ParallelLimit(4, fixed=1)
    assert limit.allows(1)
    limit.running(0, 1)
    assert not limit.allows(1)
    assert limit.limits


def test_tau_b_follows_the_share_of_late_samples() -> None:
    """After 256 samples: down by one above 10 %, up by one below 5 %, as it is between."""
    limit = ParallelLimit(3, max_violations=0.1)
    assert (limit.value, limit.limits, limit.adapts) == (4, False, True)
    limit.observe(255, 255)
    assert limit.value == 4
    limit.observe(1, 0)
    assert (limit.value, limit.limits) == (3, True)
    limit.observe(256, 26)  # 10.2 %
    assert limit.value == 2
    limit.observe(256, 25)  # 9.8 %
    limit.observe(256, 13)  # 5.1 %
    assert limit.value == 2
    limit.observe(256, 12)  # 4.7 %
    assert limit.value == 3
    for _ in range(5):
        limit.observe(256, 0)
    assert limit.value == 4
    for _ in range(9):
        limit.observe(256, 256)
    assert limit.value == 1


def test_a_fixed_tau_b_follows_nothing() -> None:
    limit = ParallelLimit(4, fixed=2)
    limit.observe(10_000, 10_000)
    assert (limit.value, limit.adapts) == (2, False)


def test_only_what_was_answered_says_whether_batches_hinder_each_other() -> None:
    limit = ParallelLimit(4, max_violations=0.1)
    s = scheduler("delay", latencies=table(first_s=0.01, more_s=0.0), parallel=limit)
    s.submit(Submission(1, 1, deadline_s=1.0), 0.0)
    s.submit(Submission(2, 1, deadline_s=1.25), 0.0)
    s.submit(Submission(3, 1), 0.0)
    assert started(s.next(0, 0.0)).requests.tolist() == [1, 3, 2]
    s.update(0, np.array([True, False, False]), 1.5)  # 1 has its answer late, 2 has none
    assert (limit._seen, limit._late) == (1, 1)
    s.submit(Submission(5, 1, deadline_s=4.0), 3.0)
    s.submit(Submission(6, 1, deadline_s=9.0), 5.0)  # 5 expires in the queue
    started(s.next(0, 5.0))
    s.update(0, np.array([True]), 6.0)  # 3 has no deadline
    assert started(s.next(0, 6.0)).requests.tolist() == [6]
    s.update(0, np.array([True]), 7.0)
    assert (limit._seen, limit._late) == (2, 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"fixed": 0}, "τ_b is 0"),
        ({"max_violations": 0.0}, "violation ratio is 0.0"),
        ({"max_violations": 1.0}, "violation ratio is 1.0"),
        ({"fixed": 1, "max_violations": 0.5}, "got both"),
    ],
)
def test_limits_that_make_no_sense_are_refused(how: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLimit(4, **how)  # type: ignore[arg-type]


def test_who_may_not_start_still_keeps_time_for_deadlines() -> None:
    s = scheduler(streams=2, parallel=ParallelLimit(SIZE, fixed=1))
    s.submit(Submission(0, 1), 0.0)
    started(s.next(0, 0.0))
    s.submit(Submission(1, 1, 3.5), 0.0)
    assert s.next(1, 0.0) == Wait(3.5)
    s.next(1, 3.5)
    assert s.take_dropped() == [Dropped(1, 1, DropCause.EXPIRED)]
