"""Requests refused at admission under overload, and requests that are accepted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.scheduling.helpers import Watched, none_exit, points_of, scheduler, started, table

from offramp.engine.scheduling import (
    DropCause,
    ModelScheduler,
    SampleQueue,
    SchedulerFullError,
    Submission,
)
from offramp.engine.scheduling.admission import HEADROOM, MEMORY_S, AdmissionControl
from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.tools.bench.common.outcomes import Outcomes, Status
from offramp.tools.bench.common.traces import poisson
from offramp.tools.bench.simulated_model import Behaviour
from offramp.tools.bench.simulation import SimulatedLoad, simulate

SLO_S = 0.05
TABLE = table(stages=3, size=16, first_s=0.002, more_s=0.0002)
CAPACITY = 16 / (3 * (0.002 + 15 * 0.0002))
"""Samples per second in full batches without early exits."""
BEHAVIOUR = Behaviour(exits=(0, 1, -1), leaves_at=np.full(10, 2), agrees=np.ones((3, 10), np.bool_))


@pytest.fixture
def open_door(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accept all requests, as if there were no admission control."""
    with monkeypatch.context() as patch:
        patch.setattr(AdmissionControl, "refuses", lambda *_: False)
        yield


def simulated(
    policy: str, times_capacity: float, *, seconds: float = 3.0, slo_s: float = SLO_S
) -> Outcomes:
    trace = poisson(times_capacity * CAPACITY, seconds, seed=3)
    count = len(trace.arrivals_s)
    load = SimulatedLoad(
        arrivals_s=trace.arrivals_s,
        records=np.arange(count) % 10,
        slo_s=slo_s,
        duration_s=seconds,
    )
    points = points_of(TABLE)
    made = Watched(make_scheduler(PolicyName.parse(policy), points, max_batch_size=16))
    return simulate(BEHAVIOUR, made, TABLE.profiled_s, load, streams=1)


def kept(outcomes: Outcomes, slo_s: float = SLO_S) -> int:
    return int((outcomes.latency_s <= slo_s).sum())


def made(outcomes: Outcomes) -> int:
    """Requests that were not refused at the door."""
    return int((outcomes.status != Status.REJECTED).sum())


@pytest.mark.parametrize("policy", ["run-through", "refill", "clockwork", "slackfit"])
def test_below_capacity_no_request_is_refused(policy: str) -> None:
    outcomes = simulated(policy, 0.7)
    assert made(outcomes) == len(outcomes.status)


@pytest.mark.parametrize("policy", ["run-through", "refill", "clockwork"])
@pytest.mark.parametrize("times", [2.0, 4.0, 8.0])
def test_beyond_capacity_little_is_made_that_is_not_kept(policy: str, times: float) -> None:
    outcomes = simulated(policy, times)
    assert made(outcomes) < 1.2 * HEADROOM * kept(outcomes)


@pytest.mark.parametrize("policy", ["run-through", "refill", "clockwork", "slackfit"])
@pytest.mark.parametrize("times", [1.2, 2.0, 4.0])
@pytest.mark.usefixtures("open_door")
def test_goodput_does_not_suffer(
    policy: str, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = kept(simulated(policy, times))
    monkeypatch.undo()
    assert kept(simulated(policy, times)) > 0.95 * without


@pytest.mark.parametrize("policy", ["run-through", "refill", "clockwork", "slackfit"])
@pytest.mark.usefixtures("open_door")
def test_goodput_suffers_little_where_a_deadline_is_barely_longer_than_a_full_batch(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = kept(simulated(policy, 3.0, slo_s=0.02), 0.02)
    monkeypatch.undo()
    assert kept(simulated(policy, 3.0, slo_s=0.02), 0.02) > 0.85 * without


def overloaded(*, waiting: int = 10, priority: int = 0, lost: int = 1000) -> ModelScheduler:
    """A scheduler that has just dropped many samples, while some wait."""
    made = scheduler()
    for number in range(waiting):
        made.submit(Submission(number, 1, 100.0, priority), 0.0)
    made._admission.keep(10, 0.0)
    made._admission.lose(lost, 0.0)
    return made


def share_refused(
    made: ModelScheduler, *, slack_s: float, priority: int = 0, now_s: float = 0.0
) -> float:
    refused = 0
    for _ in range(200):
        try:
            made.admit(1, slack_s, priority, now_s)
        except SchedulerFullError:
            refused += 1
    return refused / 200


def test_who_fears_the_queue_is_refused() -> None:
    assert share_refused(overloaded(), slack_s=0.05) > 0.9


def test_who_can_wait_for_the_queue_is_not_refused() -> None:
    # 10 wait, and 10 were kept in a memory's time
    assert share_refused(overloaded(), slack_s=3 * MEMORY_S) == 0.0
    assert share_refused(overloaded(), slack_s=float("inf")) == 0.0


def test_with_an_empty_queue_nobody_is_refused() -> None:
    assert share_refused(overloaded(waiting=0), slack_s=0.001) == 0.0


def test_who_goes_before_others_is_not_refused() -> None:
    assert share_refused(overloaded(), slack_s=0.05, priority=1) == 0.0
    assert share_refused(overloaded(priority=1), slack_s=0.05, priority=1) > 0.9


def test_when_the_load_has_gone_it_is_forgotten() -> None:
    control = AdmissionControl()
    control.keep(1, 0.0)
    control.lose(1000, 0.0)
    assert control.overloaded
    assert any(control.refuses(1, 0.01, 100, 0.0) for _ in range(3))
    assert not any(control.refuses(1, 0.01, 100, 20 * MEMORY_S) for _ in range(3))
    assert not control.overloaded


def test_after_a_pause_no_request_is_refused_before_one_is_answered() -> None:
    control = AdmissionControl()
    control.lose(1, 0.0)
    assert not any(control.refuses(1, 0.01, 50, 0.0) for _ in range(200))
    control.keep(16, 0.0)
    assert not any(control.refuses(1, 0.01, 50, 0.0) for _ in range(200))
    control.lose(16, 0.0)
    assert any(control.refuses(1, 0.01, 50, 0.0) for _ in range(200))


@pytest.mark.parametrize(("slack_s", "shuts_out"), [(1e-6, False), (1.0, True)])
def test_requests_that_come_too_late_shut_out_no_other(slack_s: float, *, shuts_out: bool) -> None:
    made = overloaded(lost=0)
    for number in range(100, 150):
        made.submit(Submission(number, 1, slack_s), 0.0)
    made.next(0, 2.0)
    made._admission.keep(10, 2.0)
    assert made.overloaded == shuts_out
    assert (share_refused(made, slack_s=0.05, now_s=2.0) > 0.5) == shuts_out


@pytest.mark.parametrize(
    ("started_s", "slack_s", "shuts_out"), [(0.0, 0.3, False), (0.5, 1.0, True)]
)
def test_a_late_sample_that_was_started_counts_like_one_that_waited(
    started_s: float, slack_s: float, *, shuts_out: bool
) -> None:
    made = scheduler("delay")  # three stages of 0.25 s
    made.submit(Submission(1, 1, slack_s), 0.0)
    stays = np.zeros(1, np.bool_)
    made.next(0, started_s)
    made.update(0, stays, started_s + 0.25)
    made.update(0, stays, started_s + 0.5)
    assert [item.cause for item in made.take_dropped()] == [DropCause.EXPIRED]
    assert made.overloaded == shuts_out


def test_what_the_headroom_covers_is_left_to_the_policy() -> None:
    control = AdmissionControl()
    control.keep(1000, 0.0)
    control.lose(int(1000 * (HEADROOM - 1)) - 1, 0.0)
    assert not any(control.refuses(1, 0.0, 100, 0.0) for _ in range(200))
    control.lose(1000, 0.0)
    assert any(control.refuses(1, 0.0, 100, 0.0) for _ in range(200))


@pytest.mark.parametrize("lowest", [-1, -(2**31)])
def test_a_lower_priority_sample_admits_no_other(lowest: int) -> None:
    made = overloaded()
    made.submit(Submission(1000, 1, 100.0, lowest), 0.0)
    assert share_refused(made, slack_s=0.05) > 0.9


def test_only_those_before_it_count() -> None:
    made = overloaded(priority=1)
    made.submit(Submission(1000, 1, 100.0, 2), 0.0)
    assert share_refused(made, slack_s=0.05, priority=3) == 0.0
    assert share_refused(made, slack_s=0.3, priority=2) == 0.0  # one waits before it
    assert share_refused(made, slack_s=0.3, priority=0) > 0.9  # eleven do


def test_priorities_are_counted_out_as_they_were_counted_in() -> None:
    queue = SampleQueue(100, full=4)
    for number, priority in enumerate([0, 3, -3, 2**31 - 1, -(2**31), 0]):
        queue.push(Submission(number, 3, 1.0 + number, priority), 0.0)
    assert [queue.ahead(p) for p in (9, 3, 0, -3, -9)] == [3, 6, 12, 15, 18]
    queue.remove(1, DropCause.CANCELLED)
    assert queue.ahead(0) == 9
    while queue.size:
        bucket = queue.ready(0.0)
        assert isinstance(bucket, Bucket)
        queue.take(bucket, 2)
    assert queue.ahead(-9) == 0
    queue.push(Submission(9, 3, 1.0, 5), 0.0)
    assert len(queue.expire(2.0)) == 1
    assert queue.ahead(-9) == 0


def test_who_was_withdrawn_is_no_sign_of_overload() -> None:
    made = scheduler()
    for number in range(4):
        made.submit(Submission(number, 1, 100.0), 0.0)
    run = started(made.next(0, 0.0))
    for number in range(4):
        made.cancel(number)
    made.update(0, none_exit(run), 0.1)
    assert made.take_dropped()
    assert not made.overloaded


def test_who_expires_is_one_wherever_it_was() -> None:
    waiting = scheduler()
    waiting.submit(Submission(0, 1, 1.0), 0.0)
    waiting.next(0, 2.0)
    running = scheduler()
    running.submit(Submission(0, 1, 1.0), 0.0)
    running.update(0, none_exit(started(running.next(0, 0.0))), 2.0)
    assert waiting.overloaded
    assert running.overloaded
