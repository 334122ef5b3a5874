"""The benchmark of switching: which runs belong to which decision."""

from __future__ import annotations

import pytest
from benchmarks.switching import BatchTimes, batch_times, quantiles


def test_a_batch_has_the_runs_from_its_decision_to_the_next_one() -> None:
    """Three batches, of two, one and two runs; the second changes the variant, the third not."""
    decisions = [(0.0, 1), (1.0, 2), (2.0, 2)]
    runs = [(0.25, 0.5), (0.5, 0.75), (1.5, 1.75), (2.125, 2.25), (2.375, 2.5)]
    assert batch_times(decisions, runs) == [
        BatchTimes(variant=1, switched=False, start_ms=250.0, run_ms=500.0),
        BatchTimes(variant=2, switched=True, start_ms=500.0, run_ms=250.0),
        BatchTimes(variant=2, switched=False, start_ms=125.0, run_ms=375.0),
    ]


def test_a_decision_without_a_run_is_left_out() -> None:
    found = batch_times([(0.0, 0), (1.0, 1)], [(1.5, 2.0)])
    assert [(t.variant, t.start_ms) for t in found] == [(1, 500.0)]


def test_batches_after_a_switch_are_told_from_others() -> None:
    times = [
        BatchTimes(variant=0, switched=switched, start_ms=start, run_ms=2 * start)
        for switched, start in ((True, 1.0), (True, 3.0), (False, 5.0))
    ]
    found = quantiles(times)
    assert found["switched"]["start_p50_ms"] == 2.0
    assert found["switched"]["run_p99_ms"] == pytest.approx(5.96)
    assert found["same"]["start_p99_ms"] == 5.0
