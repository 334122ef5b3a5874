"""SuperServe's experiments on an example: objectives by bisection, and what counts as better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.superserve_example import ObjectiveCase, tightest
from tests.facts import facts

from offramp.tools.bench.common.outcomes import Summary
from offramp.tools.bench.common.traces import constant


def summary(attainment: float, accuracy: float) -> Summary:
    return Summary(
        requests=10,
        offered_rps=1.0,
        throughput_rps=1.0,
        goodput_rps=1.0,
        slo_ms=10.0,
        attainment=attainment,
        latency_ms={},
        failures={},
        agreement=accuracy,
        exit_shares={},
        forced_share=0.0,
        mean_batch_size=None,
    )


def case(ours: Summary, **fixed: Summary) -> ObjectiveCase:
    rows = {"slackfit": ours, **{f"fixed:{name}": row for name, row in fixed.items()}}
    return ObjectiveCase(trace=constant(1.0, 10.0), slo_s=0.01, rows=rows)


@pytest.mark.parametrize("least", [0.0123, 0.1, 3.3])
def test_the_tightest_value_is_found_to_a_percent(least: float) -> None:
    found = tightest(lambda value: value >= least, 1e-3, 10.0)
    assert least <= found <= 1.01 * least


def test_without_a_value_that_holds_it_says_so() -> None:
    with pytest.raises(ValueError, match=facts("enough", "at most 2 s")):
        tightest(lambda _: False, 1e-3, 2.0)


def test_slackfit_is_held_against_the_best_fixed_point_that_is_in_time() -> None:
    small, large = summary(1.0, 0.80), summary(0.9, 0.95)
    found = case(summary(0.9995, 0.82), small=small, large=large)
    assert found.best_fixed == ("fixed:small", small)
    assert found.gain == pytest.approx(0.02)
    assert found.describe().endswith("(fixed:small); goal reached")


@pytest.mark.parametrize("ours", [summary(0.9995, 0.805), summary(0.99, 0.9)])
def test_the_goal_takes_both_attainment_and_accuracy(ours: Summary) -> None:
    assert case(ours, small=summary(1.0, 0.80)).describe().endswith("goal NOT reached")


def test_the_fastest_point_is_a_fixed_one_too() -> None:
    found = case(summary(0.9995, 0.82), small=summary(1.0, 0.80))
    found = replace(found, rows={**found.rows, "cheapest": summary(1.0, 0.85)})
    assert found.gain == pytest.approx(-0.03)


def test_where_no_fixed_point_is_in_time_there_is_nothing_to_compare() -> None:
    found = case(summary(0.9995, 0.9), small=summary(0.9, 0.8))
    assert found.gain is None
    assert "no fixed point attains 0.999" in found.describe()
