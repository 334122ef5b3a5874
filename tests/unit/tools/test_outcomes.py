"""Figures of runs that are small enough to work out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END
from offramp.tools.bench.common.outcomes import (
    Outcomes,
    Status,
    Timeline,
    hdr_table,
    summarise,
    timeline,
)

NAN = math.nan


def outcomes(**changed: Any) -> Outcomes:
    """Five requests over 2 s: three answered, the last of them at 2.5 s."""
    given = {
        "intended_s": [0.0, 0.5, 1.0, 1.5, 1.75],
        "latency_s": [0.010, NAN, 0.030, NAN, 0.750],
        "status": [Status.OK, Status.REJECTED, Status.OK, Status.EXPIRED, Status.OK],
        "exit": [2, 0, MODEL_END, 0, 5],
        "forced": [False, False, False, False, True],
        "agrees": [1, -1, -1, -1, 0],
        "batch_size": [1, 0, 4, 0, 4],
        **changed,
    }
    kinds = Outcomes.__annotations__
    assert set(given) | {"duration_s"} == set(kinds)
    types = {"intended_s": float, "latency_s": float, "status": np.uint8, "exit": np.int16,
             "forced": bool, "agrees": np.int8, "batch_size": np.int16}  # fmt: skip
    arrays: dict[str, Any] = {
        name: None if given[name] is None else np.array(given[name], kind)
        for name, kind in types.items()
    }
    return Outcomes(**arrays, duration_s=2.0)


def nothing() -> Outcomes:
    return outcomes(**{name: [] for name in Outcomes.__annotations__ if name != "duration_s"})


def same(found: np.ndarray[Any, Any], expected: list[Any]) -> bool:
    return bool(np.array_equal(found, np.array(expected, float), equal_nan=True))


def test_every_figure_of_five_requests() -> None:
    summary = summarise(outcomes(), slo_ms=30.0)
    assert summary.to_json() == {
        "requests": 5,
        "offered_rps": 2.5,
        "throughput_rps": pytest.approx(1.2),  # 3 answers until 2.5 s
        "goodput_rps": pytest.approx(0.8),  # 2 of them within 30 ms
        "slo_ms": 30.0,
        "attainment": 0.4,
        "latency_ms": pytest.approx(
            {"mean": 790 / 3, "p50": 30, "p90": 750, "p95": 750, "p99": 750, "p99.9": 750,
             "max": 750}
        ),
        "failures": {"expired": 1, "rejected": 1, "failed": 0, "unanswered": 0},
        "agreement": 0.5,
        "exit_shares": pytest.approx({"exit 2": 1 / 3, "exit 5": 1 / 3, "final": 1 / 3}),
        "forced_share": pytest.approx(1 / 3),
        "mean_batch_size": 3.0,
    }  # fmt: skip
    json.dumps(summary.to_json(), allow_nan=False)


def test_without_an_objective_nothing_is_attained_and_all_answers_are_good() -> None:
    summary = summarise(outcomes(), slo_ms=None)
    assert (summary.slo_ms, summary.attainment) == (None, None)
    assert summary.goodput_rps == summary.throughput_rps


def test_the_span_is_the_load_where_the_last_answer_is_within_it() -> None:
    quick = outcomes(latency_s=[0.01, NAN, 0.03, NAN, 0.02])
    assert summarise(quick, slo_ms=None).throughput_rps == 1.5


def test_a_late_answer_that_is_not_ok_does_not_count() -> None:
    late = outcomes(latency_s=[0.010, NAN, 0.030, 0.001, 0.750])
    assert summarise(late, slo_ms=30.0) == summarise(outcomes(), slo_ms=30.0)


def test_what_is_not_known_is_none() -> None:
    summary = summarise(outcomes(agrees=[-1] * 5, batch_size=None), slo_ms=30.0)
    assert (summary.agreement, summary.mean_batch_size) == (None, None)
    summary = summarise(outcomes(batch_size=[0] * 5), slo_ms=30.0)
    assert summary.mean_batch_size is None


def test_a_run_without_answers() -> None:
    summary = summarise(outcomes(status=[Status.UNANSWERED] * 5, latency_s=[NAN] * 5), slo_ms=30.0)
    assert summary.failures == {"expired": 0, "rejected": 0, "failed": 0, "unanswered": 5}
    assert (summary.latency_ms, summary.exit_shares, summary.forced_share) == ({}, {}, 0.0)
    assert (summary.throughput_rps, summary.attainment, summary.agreement) == (0.0, 0.0, None)


def test_a_run_without_requests() -> None:
    summary = summarise(nothing(), slo_ms=30.0)
    assert (summary.requests, summary.offered_rps, summary.attainment) == (0, 0.0, None)
    assert same(timeline(nothing(), slo_ms=30.0, windows=2).attainment, [NAN, NAN])


def test_percentiles_are_latencies_that_a_request_had() -> None:
    many = Outcomes(
        intended_s=np.arange(1000) / 1000,
        latency_s=np.arange(1000, 0, -1) / 1000,
        status=np.zeros(1000, np.uint8),
        exit=np.full(1000, MODEL_END, np.int16),
        forced=np.zeros(1000, bool),
        agrees=np.ones(1000, np.int8),
        duration_s=1.0,
    )
    assert summarise(many, slo_ms=None).latency_ms == pytest.approx(
        {"mean": 500.5, "p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99.9": 999, "max": 1000}
    )
    assert timeline(many, slo_ms=None, windows=1).p99_ms.tolist() == pytest.approx([990])


def test_the_timeline_of_five_requests() -> None:
    """Windows of 1 s: requests 0 and 1, then 2, 3 and 4."""
    found = timeline(outcomes(), slo_ms=30.0, windows=2)
    assert found.labels == ("exit 2", "exit 5", "final")
    assert (found.window_s, found.start_s.tolist()) == (1.0, [0.0, 1.0])
    assert same(found.offered_rps, [2, 3])
    assert same(found.answered_rps, [1, 2])
    assert found.attainment.tolist() == pytest.approx([0.5, 1 / 3])
    assert found.p50_ms.tolist() == pytest.approx([10, 30])
    assert found.p99_ms.tolist() == pytest.approx([10, 750])
    assert same(found.agreement, [1, 0])
    assert same(found.exit_shares, [[1, 0, 0], [0, 0.5, 0.5]])
    assert same(found.mean_depth, [1, 2.5])
    assert same(found.batch_size, [1, 4])


def test_windows_without_anything_are_nan_and_null_in_json() -> None:
    found = timeline(outcomes(), slo_ms=None, windows=8)  # of 0.25 s; answers in 0, 4 and 7
    answered = [0, 4, 7]
    for values in (found.p50_ms, found.p99_ms, found.mean_depth, found.exit_shares[:, 0]):
        assert np.flatnonzero(~np.isnan(values)).tolist() == answered
    assert np.flatnonzero(~np.isnan(found.agreement)).tolist() == [0, 7]
    assert np.isnan(found.attainment).all()
    assert found.offered_rps.tolist() == [4, 0, 4, 0, 4, 0, 4, 4]
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert set(document) == set(Timeline.__annotations__)
    assert document["agreement"] == [1, None, None, None, None, None, None, 0]
    assert document["exit_shares"][1] == [None, None, None]


def test_unknown_batch_sizes_leave_the_timeline_without() -> None:
    found = timeline(outcomes(batch_size=None), slo_ms=None, windows=2)
    assert same(found.batch_size, [NAN, NAN])


def test_quantiles_by_window_are_those_of_each_window_alone() -> None:
    random = np.random.default_rng(0)
    size = 5000
    run = Outcomes(
        intended_s=np.sort(random.uniform(0, 10, size)),
        latency_s=random.exponential(0.01, size),
        status=(random.random(size) < 0.1).astype(np.uint8),
        exit=random.integers(-1, 3, size).astype(np.int16),
        forced=np.zeros(size, bool),
        agrees=np.ones(size, np.int8),
        duration_s=10.0,
    )
    found = timeline(run, slo_ms=5.0, windows=7)
    for index in range(7):
        start = found.start_s[index]
        inside = (run.intended_s >= start) & (run.intended_s < start + found.window_s)
        alone = run.latency_s[inside & (run.status == 0)] * 1e3
        expected = np.quantile(alone, [0.5, 0.99], method="inverted_cdf")
        assert [found.p50_ms[index], found.p99_ms[index]] == pytest.approx(expected)
        good = inside & (run.status == 0) & (run.latency_s <= 0.005)
        assert found.attainment[index] == pytest.approx(good.sum() / inside.sum())
    assert found.exit_shares.sum(axis=1) == pytest.approx(np.ones(7))


def test_a_timeline_needs_a_window() -> None:
    with pytest.raises(ValueError, match="0 windows"):
        timeline(outcomes(), slo_ms=None, windows=0)


def test_a_warm_up_is_left_out_and_time_starts_after_it() -> None:
    kept = outcomes().drop_warm_up(1.0)
    assert kept.intended_s.tolist() == [0.0, 0.5, 0.75]
    assert kept.exit.tolist() == [MODEL_END, 0, 5]
    assert kept.duration_s == 1.0
    summary = summarise(kept, slo_ms=30.0)
    assert (summary.requests, summary.offered_rps) == (3, 3.0)
    assert summary.throughput_rps == pytest.approx(2 / 1.5)
    assert outcomes().drop_warm_up(0.0).intended_s.tolist() == outcomes().intended_s.tolist()


@pytest.mark.parametrize("seconds", [-1.0, 2.0, NAN])
def test_a_warm_up_lies_within_the_load(seconds: float) -> None:
    with pytest.raises(ValueError, match="warm-up"):
        outcomes().drop_warm_up(seconds)


def test_outcomes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one element per request.*'exit': \(2,\)"):
        outcomes(exit=[0, 1])
    with pytest.raises(ValueError, match="1 requests are OK without a latency"):
        outcomes(latency_s=[NAN, NAN, 0.03, NAN, 0.75])
    with pytest.raises(ValueError, match="duration_s is 0"):
        replace(outcomes(), duration_s=0.0)


def test_the_tail_is_halved_until_no_sample_remains() -> None:
    latency_s = np.array([0.004, NAN, 0.001, 0.002, 0.003, 0.008, 0.007, 0.006, 0.005])
    table = hdr_table(latency_s)
    percentiles, values, counts = zip(*table, strict=True)
    assert percentiles == (0, 50, 75, 87.5, 100)
    assert values == pytest.approx((1, 4, 6, 7, 8))
    assert counts == (1, 4, 6, 7, 8)


def test_counts_of_the_tail_include_equal_samples() -> None:
    assert hdr_table(np.full(3, 0.5)) == [(0, 500, 3), (50, 500, 3), (100, 500, 3)]


def test_the_tail_of_one_sample_and_of_none() -> None:
    assert hdr_table(np.array([0.25])) == [(0, 250, 1), (100, 250, 1)]
    assert hdr_table(np.array([NAN])) == []
