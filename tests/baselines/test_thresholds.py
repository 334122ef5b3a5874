"""Threshold tuning: the bound is always kept, and the search is as good as exact ones."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import facts
from tests.unit.certify.problems import (
    Problem,
    greedy_loops,
    grid_optimum,
    realistic,
    tree_optimum,
    two_exit_optimum,
    unstructured,
)

from offramp.baselines import thresholds
from offramp.baselines.thresholds import (
    METHODS,
    beam_search,
    confidence_threshold,
    greedy_error_thresholds,
    tune,
)
from offramp.bundle.schema.policy import NEVER
from offramp.certify import Records, evaluate
from offramp.certify.binomial import count_allowed

# few distinct confidences, so that ties are frequent; 1 and 0 included
tied = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])


@st.composite
def problems(draw: st.DrawFn, exits: int = 4, rising: bool = True) -> Problem:
    rows = draw(st.integers(1, exits))
    samples = draw(st.integers(1, 12))
    cell = st.one_of(tied, st.floats(0, 1, width=32))
    matrix = st.lists(
        st.lists(cell, min_size=samples, max_size=samples), min_size=rows, max_size=rows
    )
    flags = st.lists(
        st.lists(st.booleans(), min_size=samples, max_size=samples), min_size=rows, max_size=rows
    )
    latency = draw(st.lists(st.integers(1, 20), min_size=rows + 1, max_size=rows + 1))
    times = np.cumsum(latency) if rising else np.array(latency)
    return (
        np.array(draw(matrix), dtype=np.float32),
        np.array(draw(flags)),
        times.astype(np.float64),
    )


@given(problem=problems(rising=False), bound=st.floats(0, 1), method=st.sampled_from(METHODS))
@settings(max_examples=300, deadline=None)
def test_tuned_thresholds_keep_the_bound_and_never_cost_time(
    problem: Problem, bound: float, method: str
) -> None:
    tuned = tune(*problem, bound, method)
    found = evaluate(*problem, tuned.thresholds)
    assert found.disagreement <= bound
    assert tuned.savings == found.savings >= 0.0
    assert tuned.disagreement == found.disagreement
    assert tuned.exit_shares.tolist() == found.exit_shares.tolist()


@given(problem=problems(rising=False), bound=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_search_never_saves_less_than_greedy_or_path(problem: Problem, bound: float) -> None:
    searched = tune(*problem, bound).savings
    for method in ("greedy", "path"):
        assert searched >= tune(*problem, bound, method).savings - 1e-12  # order of summation


@given(problem=problems(exits=2), bound=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_search_is_exact_on_small_problems(problem: Problem, bound: float) -> None:
    allowed = count_allowed(bound, problem[0].shape[1])
    optimum = grid_optimum(problem, allowed)
    assert tree_optimum(problem, allowed) == pytest.approx(optimum, abs=1e-12)
    if len(problem[0]) == 2:
        assert two_exit_optimum(problem, allowed) == pytest.approx(optimum, abs=1e-12)
    assert tune(*problem, bound).savings == pytest.approx(optimum, abs=1e-12)


@given(problem=problems(exits=3), bound=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_more_budget_never_saves_less_on_small_problems(problem: Problem, bound: float) -> None:
    assert tune(*problem, bound).savings >= tune(*problem, bound / 2).savings - 1e-12


@pytest.mark.parametrize("draw", [realistic, unstructured])
@pytest.mark.parametrize("seed", range(10))
def test_search_is_within_a_percent_of_the_optimum_at_full_size(draw, seed: int) -> None:
    problem = draw(seed, exits=10, samples=512)
    optimum = tree_optimum(problem, allowed=5)
    searched = tune(*problem, 0.01)
    assert searched.disagreement <= 0.01
    assert 0.99 * optimum <= searched.savings <= optimum + 1e-12
    assert searched.savings >= tune(*problem, 0.01, "greedy").savings - 1e-12


@pytest.mark.parametrize("draw", [realistic, unstructured])
@pytest.mark.parametrize("bound", [0.01, 0.05])
@pytest.mark.parametrize("seed", range(10))
def test_search_is_within_a_percent_of_the_optimum_of_two_exits(
    draw, bound: float, seed: int
) -> None:
    problem = draw(seed, exits=2, samples=512)
    optimum = two_exit_optimum(problem, count_allowed(bound, 512))
    assert 0.99 * optimum <= tune(*problem, bound).savings <= optimum + 1e-12


@pytest.mark.parametrize("draw", [realistic, unstructured])
@pytest.mark.parametrize(("samples", "bound"), [(512, 0.05), (2048, 0.01)])
def test_search_is_within_a_percent_of_a_beam_many_times_as_wide(
    draw, samples: int, bound: float
) -> None:
    problem = draw(7, samples=samples)
    records = Records.of(*problem)
    allowed = count_allowed(bound, samples)
    searched = tune(*problem, bound)
    wide = beam_search(records, allowed, searched.thresholds, width=1000)
    assert searched.savings >= 0.99 * evaluate(*problem, wide).savings


@pytest.mark.parametrize("draw", [realistic, unstructured])
def test_savings_rise_with_the_budget(draw) -> None:
    problem = draw(3, samples=512)
    savings = [tune(*problem, bound).savings for bound in (0.0, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0)]
    steps = np.diff(savings)
    assert (steps > -0.002).all()  # the search is near-exact, not exact, at large budgets
    assert savings[-1] == pytest.approx(1 - problem[2][0] / problem[2][-1])  # all at exit 0


@pytest.mark.parametrize("draw", [realistic, unstructured])
@pytest.mark.parametrize(("exits", "samples", "bound"), [(10, 300, 0.01), (3, 200, 0.05)])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_bit_for_bit_the_plain_loops(
    draw, exits: int, samples: int, bound: float, seed: int
) -> None:
    problem = draw(seed, exits=exits, samples=samples)
    allowed = count_allowed(bound, samples)
    assert greedy_error_thresholds(Records.of(*problem), allowed) == greedy_loops(problem, allowed)


@given(problem=problems(rising=False), bound=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_greedy_is_bit_for_bit_the_plain_loops_on_ties(problem: Problem, bound: float) -> None:
    allowed = count_allowed(bound, problem[0].shape[1])
    assert greedy_error_thresholds(Records.of(*problem), allowed) == greedy_loops(problem, allowed)


@given(
    error=st.one_of(st.floats(1e-4, 2), st.integers(1, 12000).map(lambda i: i / 10000)),
    confidence=st.floats(0, 1, width=32),
)
@settings(max_examples=300, deadline=None)
def test_converted_thresholds_decide_like_the_error_threshold(
    error: float, confidence: float
) -> None:
    threshold = confidence_threshold(error)
    assert float(np.float32(threshold)) == threshold
    assert (confidence >= threshold) == (1 - confidence < error)


def test_an_error_threshold_of_zero_never_exits() -> None:
    assert confidence_threshold(0.0) == NEVER


def test_path_uses_one_threshold_and_the_best_of_them() -> None:
    problem = realistic(11, exits=3, samples=200)
    tuned = tune(*problem, 0.02, "path")
    assert len(set(tuned.thresholds.tolist())) == 1
    options = [evaluate(*problem, np.full(3, c)) for c in np.unique(problem[0])]
    best = max(o.savings for o in options if o.disagreement <= 0.02)
    assert tuned.savings == best


@pytest.mark.parametrize("method", METHODS)
def test_where_every_exit_is_wrong_nothing_exits(method: str) -> None:
    confidence = np.full((3, 20), 0.99, dtype=np.float32)
    tuned = tune(confidence, np.zeros((3, 20), bool), np.array([1.0, 2, 3, 4]), 0.01, method)
    assert tuned.savings == 0.0
    assert tuned.exit_shares.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_sample_at_full_confidence_blocks_its_ties(method: str) -> None:
    confidence = np.ones((1, 4), dtype=np.float32)
    agrees = np.array([[True, True, True, False]])
    tuned = tune(confidence, agrees, np.array([1.0, 2.0]), 0.2, method)
    assert tuned.thresholds.tolist() == [NEVER]
    assert tune(confidence, agrees, np.array([1.0, 2.0]), 0.25, method).savings == 0.5


@pytest.mark.parametrize("method", METHODS)
def test_where_all_agree_everything_leaves_at_the_first_exit(method: str) -> None:
    confidence, _, latency = realistic(0, exits=4, samples=50)
    tuned = tune(confidence, np.ones((4, 50), bool), latency, 0.0, method)
    assert tuned.savings == pytest.approx(1 - latency[0] / latency[-1])


def test_searched_thresholds_are_as_conservative_as_their_exits_allow() -> None:
    confidence, agrees, latency = realistic(5)
    tuned = tune(confidence, agrees, latency, 0.01)
    leaves = confidence >= tuned.thresholds[:, None]
    first = np.vstack([leaves, np.ones(512, bool)]).argmax(axis=0)
    for exit_, threshold in enumerate(tuned.thresholds):
        here = confidence[exit_, first == exit_]
        assert threshold == (here.min() if here.size else NEVER)


def test_savings_are_against_the_vanilla_model_where_it_is_given() -> None:
    confidence, agrees, latency = realistic(5, exits=3, samples=100)
    with_ramps = tune(confidence, agrees, latency, 0.02)
    vanilla = tune(confidence, agrees, latency, 0.02, vanilla_ms=latency[-1] * 0.9)
    assert vanilla.thresholds.tolist() == with_ramps.thresholds.tolist()
    assert 1 - vanilla.savings == pytest.approx((1 - with_ramps.savings) / 0.9)


@given(samples=st.integers(1, 5000), bound=st.floats(0, 1))
def test_allowed_errors_are_the_most_that_keep_the_bound(samples: int, bound: float) -> None:
    allowed = count_allowed(bound, samples)
    assert allowed / samples <= bound
    assert allowed == samples or (allowed + 1) / samples > bound
    assert abs(allowed - Fraction(bound) * samples) <= 1


def test_tuning_is_deterministic() -> None:
    first, second = (tune(*realistic(2), 0.01) for _ in range(2))
    assert first.thresholds.tolist() == second.thresholds.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_no_samples_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="no exits or no samples"):
        tune(np.zeros((2, 0)), np.zeros((2, 0), bool), np.array([1.0, 2, 3]), 0.01, method)


@pytest.mark.parametrize("bound", [-0.1, 1.1, np.nan])
def test_a_bound_outside_0_to_1_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="max_disagreement must be in"):
        tune(*realistic(0, exits=2, samples=10), bound)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'annealing', expected one of search, greedy, path"):
        tune(*realistic(0, exits=2, samples=10), 0.01, "annealing")


def test_a_method_that_oversteps_its_bound_is_stopped_without_asserts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``python -O`` leaves asserts out, and thresholds that break the bound would be served."""
    monkeypatch.setattr(thresholds, "search_thresholds", lambda records, _: np.zeros(records.exits))
    confidence, agrees = np.full((1, 4), 0.5, np.float32), np.array([[True, True, False, False]])
    with pytest.raises(RuntimeError, match=facts("'search'", "2 of 4 samples", "1 are")):
        tune(confidence, agrees, np.array([1.0, 2.0]), 0.25)
