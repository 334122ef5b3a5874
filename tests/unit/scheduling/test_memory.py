"""Memory is bounded by what waits and runs, not by what there was."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from tests.marks import slow_but
from tests.unit.scheduling.helpers import Watched, scheduler, sizes, table

from offramp.engine.scheduling import Run, SchedulerFullError, Submission

REQUESTS = 20_000
CAPACITY = 32
BOUND = 400
"""Size limit of every container; a few times the capacity, and far below the number of requests."""


def serve(s: Watched, now_s: float, rng: np.random.Generator) -> None:
    """Run one stage of each stream's run."""
    for stream in range(2):
        run = s.next(stream, now_s)
        if isinstance(run, Run):
            if rng.random() < 0.02:
                s.failed(stream, now_s)
            else:
                exited, runs_on = rng.random((2, len(run.requests))) < 0.5
                s.update(stream, exited | (run.stage == 2), now_s, runs_on)


@pytest.mark.parametrize(
    ("batch_keys", "max_delay_s"),
    [("one", 0.0), ("few", 5.0), ("all distinct", 0.0), ("all distinct", 3600.0)],
)
@pytest.mark.parametrize("policy", slow_but(["refill"], ["run-through", "refill", "slackfit"]))
def test_containers_stay_small_however_many_requests_there_were(
    policy: str, max_delay_s: float, batch_keys: str
) -> None:
    rng = np.random.default_rng(0)
    fast = table(first_s=0.005, more_s=0.001)
    s = scheduler(policy, latencies=fast, capacity=CAPACITY, max_delay_s=max_delay_s, streams=2)
    recent: deque[int] = deque(maxlen=CAPACITY)
    kinds = {"one": 1, "few": 5, "all distinct": REQUESTS}[batch_keys]
    largest: dict[str, int] = {}
    now_s = 0.0
    for number in range(REQUESTS):
        now_s += 0.01
        deadline_s = now_s + float(rng.choice([0.05, 1.0, 100.0, np.inf]))
        priority, count = int(rng.integers(-1, 2)), int(rng.integers(1, 7))
        try:
            s.submit(Submission(number, count, deadline_s, priority, number % kinds), now_s)
            recent.append(number)
        except SchedulerFullError:
            s.cancel(recent.popleft())
        if rng.random() < 0.3 and recent:
            s.cancel(int(rng.choice(recent)))
        if rng.random() < 0.7:
            serve(s, now_s, rng)
        s.take_dropped()
        s.take_lost()
        s.take_discarded()
        if number % 10 == 0:
            for name, size in sizes(s).items():
                largest[name] = max(largest.get(name, 0), size)
    assert max(largest.values()) <= BOUND, largest


def test_cancelled_requests_of_low_priority_and_own_batch_key_leak_nothing() -> None:
    """They never reach the top of the heap of ready buckets: more urgent requests always come
    first.
    """
    s = scheduler(capacity=8)
    s.submit(Submission(0, 1, priority=1), 0.0)
    for number in range(1, 5000):
        s.submit(Submission(number, 1, priority=-1, batch_key=number), 0.0)
        s.cancel(number)
        assert len(s.take_dropped()) == 1
    assert max(sizes(s).values()) <= BOUND, sizes(s)


def test_full_batches_of_own_batch_key_leave_no_timers_behind() -> None:
    s = scheduler(capacity=8, max_delay_s=3600.0)
    for number in range(5000):
        s.submit(Submission(2 * number, 1, batch_key=number), 0.0)
        s.submit(Submission(2 * number + 1, 3, batch_key=number), 0.0)
        assert isinstance(s.next(0, 0.0), Run)
        s.update(0, np.ones(4, np.bool_), 0.0)
    assert max(sizes(s).values()) <= BOUND, sizes(s)
