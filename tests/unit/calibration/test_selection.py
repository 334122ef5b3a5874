"""Useless exits are dropped, budgets kept, and what is shipped is what was certified."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.bundle import NEVER
from offramp.calibration import selection
from offramp.calibration.selection import (
    CostModel,
    certified_policy,
    choose_active,
)
from offramp.engine.control import binomial_cdf, evaluate, samples_needed
from offramp.engine.control.agreement import tuning_path

PROMISE = {"max_disagreement": 0.05, "confidence_level": 0.9}
COST = CostModel(
    source_ms=10.0,
    segments_ms=(2.0, 3.0, 5.0),
    stage_ms=0.05,
    after_segment=(0, 1),
    exits_ms=(0.1, 0.1),
)


def samples(shares_known: list[float], *, count: int = 2000, seed: int = 0):
    """Exits that are sure (≥ 0.9) and right on a share of the samples, else guess (≤ 0.6)."""
    rng = np.random.default_rng(seed)
    hardness = rng.random(count)
    confidence, agrees = [], []
    for share in shares_known:
        easy = hardness < share
        confidence.append(np.where(easy, rng.uniform(0.9, 1, count), rng.uniform(0.4, 0.6, count)))
        agrees.append(easy | (rng.random(count) < 0.5))
    return np.array(confidence, np.float32), np.array(agrees)


def choose(shares: list[float], cost: CostModel = COST, **options) -> tuple[int, ...]:
    settings = {"max_overhead": 0.5, **PROMISE, **options}
    return choose_active(*samples(shares), cost, **settings)


def test_exits_that_help_each_other_stay() -> None:
    assert choose([0.4, 0.8]) == (0, 1)


def test_an_exit_that_answers_nothing_is_dropped() -> None:
    assert choose([0.0, 0.8]) == (1,)


def test_an_exit_that_comes_too_late_for_its_cost_is_dropped() -> None:
    assert choose([0.4, 0.42]) == (0,)  # 2 % of the samples save 5 ms, all others pay 0.15 ms


def test_an_exit_that_costs_more_than_it_saves_is_dropped() -> None:
    dear = replace(COST, exits_ms=(0.1, 4.0))
    assert choose([0.4, 0.8], dear) == (0,)
    assert choose([0.4, 0.8], replace(COST, exits_ms=(9.0, 9.0))) == ()


def test_no_exit_helps() -> None:
    assert choose([0.0, 0.0]) == ()


def test_there_are_no_exits() -> None:
    nothing = np.empty((0, 50), np.float32)
    cost = replace(COST, after_segment=(), exits_ms=())
    assert choose_active(nothing, nothing > 0, cost, max_overhead=0.5, **PROMISE) == ()


@pytest.mark.parametrize(
    ("max_overhead", "active"),
    [(0.03, (0, 1)), (0.029, (1,)), (0.015, (1,)), (0.014, ())],
)
def test_the_budget_is_kept(max_overhead: float, active: tuple[int, ...]) -> None:
    """Each exit adds 0.15 ms to 10 ms; the second alone saves more than the first alone."""
    cost = replace(COST, exits_ms=(0.09999, 0.09999))  # clear of rounding
    assert choose([0.3, 0.8], cost, max_overhead=max_overhead) == active


def test_the_budget_holds_at_other_batch_sizes_too() -> None:
    elsewhere = replace(COST, source_ms=2.0, segments_ms=(0.4, 0.6, 1.0))  # 0.15 ms are 7.5 %
    assert choose([0.3, 0.8], max_overhead=0.1, everywhere=[COST]) == (0, 1)
    assert choose([0.3, 0.8], max_overhead=0.1, everywhere=[elsewhere]) == (1,)
    assert choose([0.3, 0.8], max_overhead=0.05, everywhere=[elsewhere]) == ()


def certified(shares: list[float], active: tuple[int, ...], cost: CostModel = COST, **options):
    tune, certify = samples(shares, seed=1), samples(shares, seed=2)
    rows = list(active)
    path = tuning_path(tune[0][rows], tune[1][rows]) if rows else np.empty((0, 0))
    return certified_policy(active, path, *certify, cost, **{**PROMISE, **options}), certify


def test_the_policy_s_promise_is_what_the_certify_split_says() -> None:
    policy, (confidence, agrees) = certified([0.4, 0.8], (0, 1))
    assert [a.exit for a in policy.active] == [0, 1]
    assert policy.promise is not None
    thresholds = np.array([a.threshold for a in policy.active])
    assert (thresholds == thresholds.astype(np.float32)).all()  # the check is in float32
    found = evaluate(confidence, agrees, COST.latency_ms([0, 1]), thresholds, vanilla_ms=10.0)
    promise = policy.promise
    assert (promise.max_disagreement, promise.confidence) == (0.05, 0.9)
    assert promise.certify_samples == 2000
    assert promise.certify_errors == found.errors
    assert promise.p_value == binomial_cdf(found.errors, 2000, 0.05) <= 0.1
    assert promise.predicted_savings == pytest.approx(found.savings)
    # 40 % leave after 2.15 ms, 40 % after 5.3 ms, 20 % after 10.3 ms, and a few guesses more
    assert found.savings == pytest.approx(0.5, abs=0.05)


def test_exits_beyond_the_active_ones_do_not_matter() -> None:
    policy, (confidence, agrees) = certified([0.4, 0.8], (1,))
    assert [a.exit for a in policy.active] == [1]
    assert policy.promise is not None
    threshold = np.array([policy.active[0].threshold])
    found = evaluate(confidence[1:], agrees[1:], COST.latency_ms([1]), threshold, vanilla_ms=10.0)
    assert policy.promise.predicted_savings == pytest.approx(found.savings)


def test_no_active_exits_no_promise() -> None:
    policy, _ = certified([0.4, 0.8], ())
    assert (policy.active, policy.promise) == ((), None)


def test_too_few_samples_to_promise_anything() -> None:
    tune = samples([0.4, 0.8], seed=1)
    few = samples_needed(0.05, 0.9) - 1
    certify = samples([1.0, 1.0], count=few, seed=2)
    policy = certified_policy((0, 1), tuning_path(*tune), *certify, COST, **PROMISE)
    assert (policy.active, policy.promise) == ((), None)


def test_a_policy_that_would_cost_time_is_not_shipped() -> None:
    policy, _ = certified([0.4, 0.8], (0, 1), replace(COST, exits_ms=(9.0, 9.0)))
    assert (policy.active, policy.promise) == ((), None)


def test_an_exit_at_never_is_left_out_and_costs_nothing() -> None:
    confidence, agrees = samples([0.0, 0.8])
    path = np.array([[NEVER, NEVER], [NEVER, 0.95], [NEVER, 0.9]])
    policy = certified_policy((0, 1), path, confidence, agrees, COST, **PROMISE)
    assert [(a.exit, a.threshold) for a in policy.active] == [(1, 0.9)]
    found = evaluate(
        confidence[1:], agrees[1:], COST.latency_ms([1]), np.array([0.9]), vanilla_ms=10.0
    )
    assert policy.promise is not None
    assert policy.promise.predicted_savings == pytest.approx(found.savings)
    never = certified_policy((0, 1), path[:1], confidence, agrees, COST, **PROMISE)
    assert (never.active, never.promise) == ((), None)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(0, 50))
@settings(max_examples=25, deadline=None)
def test_whatever_is_chosen_is_certified_and_saves_time(shares: list[float], seed: int) -> None:
    tune, certify = (samples(shares, count=400, seed=seed + i) for i in (0, 1000))
    active = choose_active(*tune, COST, max_overhead=0.5, **PROMISE)
    rows = list(active)
    path = tuning_path(tune[0][rows], tune[1][rows]) if rows else np.empty((0, 0))
    policy = certified_policy(active, path, *certify, COST, **PROMISE)
    assert {a.exit for a in policy.active} <= set(active)
    assert (policy.promise is None) == (not policy.active)
    if policy.promise is not None:
        assert policy.promise.p_value <= 0.1 + 1e-12
        assert policy.promise.predicted_savings > 0


def test_sets_with_one_exit_exchanged() -> None:
    assert set(selection._swapped((0, 2), 4)) == {(1, 2), (2, 3), (0, 1), (0, 3)}
    assert selection._swapped((), 4) == []
