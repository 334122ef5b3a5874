"""Useless exits are dropped, budgets kept, and what is shipped is what was certified."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.bundle import NEVER
from offramp.calibration.choose import selection
from offramp.calibration.choose.selection import Candidates, CostModel, certified_policy
from offramp.certify import binomial_cdf, evaluate, samples_needed, savings_of, tuning_path, walk

PROMISE = {"max_disagreement": 0.05, "confidence_level": 0.9}
COST = CostModel(
    source_ms=10.0,
    segments_ms=(2.0, 3.0, 5.0),
    stages_ms=(0.05, 0.05),
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


def choose_active(confidence, agrees, cost, *, max_overhead=None, **promise) -> tuple[int, ...]:
    return Candidates(confidence, agrees, **promise).choose(cost, max_overhead=max_overhead)


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
    cost = replace(COST, after_segment=(), exits_ms=(), stages_ms=())
    assert choose_active(nothing, nothing > 0, cost, max_overhead=0.5, **PROMISE) == ()


@pytest.mark.parametrize(
    ("max_overhead", "active"),
    [(0.03, (0, 1)), (0.029, (1,)), (0.015, (1,)), (0.014, ())],
)
def test_the_budget_is_kept(max_overhead: float, active: tuple[int, ...]) -> None:
    """Each exit adds 0.15 ms to 10 ms; the second alone saves more than the first alone."""
    cost = replace(COST, exits_ms=(0.09999, 0.09999))  # clear of rounding
    assert choose([0.3, 0.8], cost, max_overhead=max_overhead) == active


def test_without_a_limit_overhead_is_a_price() -> None:
    """Two exits that add 12 % where none is taken, and save ten times as much in all."""
    dear = replace(COST, exits_ms=(0.55, 0.55))
    assert dear.overhead([0, 1]) == pytest.approx(0.12)
    assert choose([0.4, 0.8], dear, max_overhead=None) == (0, 1)
    assert choose([0.4, 0.8], dear, max_overhead=0.1) == (1,)


def test_a_limit_is_only_kept_where_the_measurement_is_sure() -> None:
    """Both exits add 3 %; at ±0.6 % of the model's time they may add 2.4 %."""
    unsure = replace(COST, unsure=0.006)
    assert unsure.sure_overhead([0, 1]) == pytest.approx(0.024)
    assert unsure.sure_overhead([0]) == pytest.approx(0.012)
    assert choose([0.3, 0.8], unsure, max_overhead=0.025) == (0, 1)
    assert choose([0.3, 0.8], COST, max_overhead=0.025) == (1,)
    assert replace(COST, unsure=0.5).sure_overhead([0]) == 0.0


def test_a_further_exit_must_earn_its_gain() -> None:
    """With the first exit hardly any sample leaves in addition to the second, at no cost."""
    free = replace(COST, exits_ms=(0.0, 0.0), stages_ms=(0.0, 0.0))
    known = samples([0.004, 0.8], seed=3)  # 0.4 % of the samples leave 3 ms of 10 earlier
    assert choose_active(*known, free, **PROMISE) == (1,)
    more = samples([0.1, 0.8], seed=3)
    assert choose_active(*more, free, **PROMISE) == (0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_the_best_set(seed: int) -> None:
    rng = np.random.default_rng(seed)
    exits = 5
    cost = CostModel(
        source_ms=10.0,
        segments_ms=(10 / 6,) * 6,
        stages_ms=tuple(rng.uniform(0.01, 0.4, exits)),
        after_segment=tuple(range(exits)),
        exits_ms=tuple(rng.uniform(0.01, 0.3, exits)),
    )
    known = samples(sorted(rng.uniform(0.1, 0.9, exits)), seed=seed)
    candidates = selection.Candidates(*known, **PROMISE)

    def worth(active: tuple[int, ...]) -> float:
        return candidates.savings(active, cost) - selection.MIN_GAIN * len(active)

    every = [s for n in range(exits + 1) for s in itertools.combinations(range(exits), n)]
    best = max(every, key=worth)
    assert worth(candidates.choose(cost)) == pytest.approx(worth(best))


def test_savings_are_those_of_the_path_of_a_set_alone() -> None:
    confidence, agrees = samples([0.3, 0.8])
    candidates = selection.Candidates(confidence, agrees, **PROMISE)
    walked = walk(tuning_path(confidence[1:], agrees[1:]), confidence[1:], agrees[1:])
    saved = savings_of(walked.counts, COST.latency_ms([1]), 10.0)
    allowed = selection.certifiable_errors(2000, 0.05, 0.9)
    assert candidates.savings((1,), COST) == saved[walked.errors <= allowed].max()
    assert candidates.savings((), COST) == 0.0


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
    assert (promise.max_disagreement, promise.confidence_level) == (0.05, 0.9)
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


def test_neighbours_have_one_exit_less_more_or_exchanged() -> None:
    assert selection._neighbours((0, 2), 4) == [
        *[(2,), (0,)],
        *[(1, 2), (2, 3), (0, 1), (0, 3)],
        *[(0, 1, 2), (0, 2, 3)],
    ]
    assert selection._neighbours((), 2) == [(0,), (1,)]
