"""A batch whose worker is lost goes on at its stage, on whichever stream asks first."""

from __future__ import annotations

import numpy as np
from tests.unit.scheduling.helpers import all_exit, none_exit, pairs, scheduler, started, table

from offramp.engine.scheduling import (
    DeviceScheduler,
    DropCause,
    ModelScheduler,
    Run,
    Submission,
)
from offramp.engine.scheduling.decisions import NOTHING
from offramp.engine.scheduling.scheduler import MOST_LOSSES


def with_batch(*, streams: int = 2) -> tuple[ModelScheduler, Run]:
    """Two requests, of three samples and of one, run on stream 0 as one batch."""
    s = scheduler(latencies=table(first_s=0.25, more_s=0.125), streams=streams)
    s.submit(Submission(7, 3, 5.0), 0.0)
    s.submit(Submission(8, 1), 0.0)
    return s, started(s.next(0, 0.0))


def test_an_interrupted_stage_runs_again_before_anything_new() -> None:
    s, run = with_batch()
    s.update(0, none_exit(run), 0.1)
    second = started(s.next(0, 0.1))
    assert second.stage == 1
    number = s.interrupted(0, 0.2).buffered
    s.submit(Submission(9, 1, priority=5), 0.2)
    again = started(s.next(1, 0.3))
    assert (again.stage, pairs(again)) == (1, pairs(run))
    ((kept, positions),) = again.pieces
    assert (kept, positions.tolist()) == (number, [0, 1, 2, 3])
    assert s.take_discarded() == [number]
    assert (s.resumed, s.retried, s.in_flight) == (4, 0, 4)
    assert pairs(started(s.next(0, 0.3))) == [(9, 0)]


def test_who_left_or_is_late_is_not_resumed() -> None:
    s, run = with_batch()
    number = s.interrupted(0, 0.2).buffered
    s.cancel(8)
    assert [(d.request, d.cause) for d in s.take_dropped()] == [(8, DropCause.CANCELLED)]
    assert not s.take_discarded()
    again = started(s.next(0, 0.3))
    ((_, positions),) = again.pieces
    assert (pairs(again), positions.tolist()) == (pairs(run)[1:], [1, 2, 3])
    later = s.interrupted(0, 0.4).buffered
    assert later != number
    assert not isinstance(s.next(1, 5.0), Run)
    assert [(d.request, d.count, d.cause) for d in s.take_dropped()] == [(7, 3, DropCause.EXPIRED)]
    assert s.take_discarded() == [number, later]
    assert (s.busy, s.resumed) == (False, 4 + 3)


def test_unawaited_results_are_not_kept() -> None:
    s, run = with_batch()
    s.cancel(8)
    assert s.interrupted(0, 6.0).buffered is None
    assert sum(d.count for d in s.take_dropped()) == len(run.requests)
    assert (s.take_discarded(), s.busy, s.resumed) == ([], False, 0)


def test_what_has_its_answer_is_resumed_too() -> None:
    s, run = with_batch()
    s.update(0, all_exit(run), 0.1, np.ones(4, np.bool_))
    assert started(s.next(0, 0.1)).stage == 1
    assert s.interrupted(0, 9.0).buffered is not None
    again = started(s.next(1, 9.0))
    assert (again.stage, s.auditing, s.in_flight) == (1, 4, 0)


def test_a_batch_that_loses_worker_after_worker_has_failed() -> None:
    s, _ = with_batch()
    for loss in range(1, MOST_LOSSES):
        assert s.interrupted(0, 0.0).buffered is not None
        assert s.resumed == 4 * loss
        assert len(started(s.next(0, 0.0)).requests) == 4
    assert s.interrupted(0, 0.0).buffered is None
    assert (s.resumed, s.retried) == (4 * (MOST_LOSSES - 1), 4)
    assert {request for request, _ in pairs(started(s.next(1, 0.0)))} == {8}, "each one alone"


def test_a_stream_without_a_batch_loses_nothing() -> None:
    s, _ = with_batch()
    assert s.interrupted(1, 0.0) is NOTHING
    assert (s.resumed, s.in_flight) == (0, 4)


def test_a_device_passes_the_interruption_on_to_the_model_that_runs() -> None:
    models = {name: scheduler(streams=2) for name in "ab"}
    device = DeviceScheduler(models)
    device.submit("b", Submission(1), 0.0)
    assert device.interrupted(0, 0.0).buffered is None
    device.next(0, 0.0)
    number = device.interrupted(0, 1.0).buffered
    assert number is not None
    assert models["b"].resumed == 1
    device.submit("a", Submission(2), 1.0)
    assert device.interrupted(0, 1.0).buffered is None, "it is not running any more"
