"""Certified thresholds keep their promise; the statistics under it are exact."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import Told, facts
from tests.unit.certify.problems import realistic

from offramp.bundle.schema.policy import NEVER
from offramp.certify import (
    AgreementCurve,
    allowed_errors,
    binomial_cdf,
    certify,
    common_path,
    evaluate,
    fit_agreement,
    samples_needed,
    upper_bound,
    walk,
)


def exact_cdf(k: int, n: int, p: Fraction) -> Fraction:
    return sum(
        (math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(min(k, n) + 1)), Fraction(0)
    )


@given(n=st.integers(0, 100), k=st.integers(-2, 105), percent=st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_binomial_cdf_is_the_exact_sum(n: int, k: int, percent: int) -> None:
    p = percent / 1000
    exact = float(exact_cdf(k, n, Fraction(percent, 1000)))
    # lgamma errs by some 1e-16 of values up to 1e3
    assert binomial_cdf(k, n, p) == pytest.approx(exact, rel=1e-11, abs=1e-300)


def test_binomial_cdf_of_a_deep_tail_does_not_underflow_early() -> None:
    assert binomial_cdf(0, 20_000, 0.01) == pytest.approx(0.99**20_000, rel=1e-9)
    exact = float(exact_cdf(8, 3_000, Fraction(1, 100)))
    assert binomial_cdf(8, 3_000, 0.01) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize(("n", "p"), [(-1, 0.5), (5, -0.1), (5, 1.1), (5, math.nan)])
def test_binomial_cdf_refuses_what_is_no_distribution(n: int, p: float) -> None:
    with pytest.raises(ValueError, match="expected n >= 0 and p in"):
        binomial_cdf(0, n, p)


@pytest.mark.parametrize(
    ("bound", "level", "samples"),
    [(0.01, 0.95, 299), (0.05, 0.95, 59), (0.5, 0.5, 1), (0.1, 0.9, 22)],
)
def test_samples_needed_is_the_least_that_certify(bound: float, level: float, samples: int) -> None:
    assert samples_needed(bound, level) == samples
    assert (1 - bound) ** samples <= 1 - level < (1 - bound) ** (samples - 1)


@given(n=st.integers(1, 3000), bound=st.floats(0.001, 0.5), level=st.floats(0.5, 0.999))
@settings(max_examples=100, deadline=None)
def test_allowed_errors_are_the_most_that_certify(n: int, bound: float, level: float) -> None:
    allowed = allowed_errors(n, bound, level)
    assert allowed == -1 or binomial_cdf(allowed, n, bound) <= 1 - level
    assert binomial_cdf(allowed + 1, n, bound) > 1 - level


@given(n=st.integers(1, 2000), share=st.floats(0, 1), level=st.floats(0.5, 0.999))
@settings(max_examples=100, deadline=None)
def test_upper_bound_inverts_the_tail(n: int, share: float, level: float) -> None:
    errors = int(share * n)
    bound = upper_bound(errors, n, level)
    if errors == n:
        assert bound == 1.0
    else:
        assert errors / n < bound < 1
        assert binomial_cdf(errors, n, bound) == pytest.approx(1 - level, rel=1e-6)


def test_upper_bound_without_errors_is_the_rule_of_three_made_exact() -> None:
    assert upper_bound(0, 299, 0.95) == pytest.approx(1 - 0.05 ** (1 / 299), rel=1e-12)


IDENTITY = AgreementCurve(slope=1.0, intercept=0.0)
"""Confidence is the probability of agreement."""


def draw_calibrated(
    slope: float, intercept: float, samples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = rng.beta(3, 1, samples).astype(np.float32)
    curve = AgreementCurve(slope=slope, intercept=intercept)
    return confidence, rng.random(samples) < curve.probability(confidence)


@pytest.mark.parametrize(("slope", "intercept"), [(1.0, 0.0), (0.5, 1.0), (2.0, -1.0)])
def test_fit_agreement_recovers_the_curve_that_drew_the_data(
    slope: float, intercept: float
) -> None:
    curve = fit_agreement(*draw_calibrated(slope, intercept, 40_000, seed=1))
    # five standard errors of either at 40,000 samples, measured over other seeds
    assert curve.slope == pytest.approx(slope, abs=0.1)
    assert curve.intercept == pytest.approx(intercept, abs=0.1)


def test_fit_agreement_is_the_minimum_of_the_penalised_loss() -> None:
    confidence, agrees = draw_calibrated(1.5, 0.3, 500, seed=2)
    feature = np.log(confidence.astype(np.float64)) - np.log1p(-confidence.astype(np.float64))

    def loss(slope: float, intercept: float) -> float:
        logit = slope * feature + intercept
        penalty = ((slope - 1) ** 2 + intercept**2) / 2
        return float((np.logaddexp(0, logit) - agrees * logit).sum() + penalty)

    curve = fit_agreement(confidence, agrees)
    least = loss(curve.slope, curve.intercept)
    for slope_step, intercept_step in [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)]:
        assert loss(curve.slope + slope_step, curve.intercept + intercept_step) > least


@pytest.mark.parametrize("agreement", [True, False])
def test_fit_agreement_stays_finite_where_all_samples_are_alike(agreement: bool) -> None:
    confidence = np.linspace(0, 1, 200, dtype=np.float32)  # saturated ones included
    curve = fit_agreement(confidence, np.full(200, agreement))
    assert curve.slope > 0
    assert (curve.probability(np.array([0.5]))[0] > 0.9) == agreement


def test_fit_agreement_stays_rising_where_confidence_misleads() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(2000).astype(np.float32)
    curve = fit_agreement(confidence, rng.random(2000) > confidence)
    assert curve.slope == 0.05
    assert curve.probability(np.array([0.5]))[0] == pytest.approx(0.5, abs=0.05)


def test_fit_agreement_refuses_no_samples_and_nan() -> None:
    with pytest.raises(ValueError, match="no samples"):
        fit_agreement(np.zeros(0), np.zeros(0, bool))
    with pytest.raises(ValueError, match=facts("exit 0, sample 1", "nan")):
        fit_agreement(np.array([0.5, np.nan]), np.ones(2, bool))


@given(
    slope=st.floats(0.05, 20),
    intercept=st.floats(-20, 20),
    level=st.floats(0.01, 0.999999),
    confidence=st.floats(0, 1, width=32),
)
@settings(max_examples=400, deadline=None)
def test_curve_thresholds_decide_like_the_probability_in_float32(
    slope: float, intercept: float, level: float, confidence: float
) -> None:
    curve = AgreementCurve(slope=slope, intercept=intercept)
    threshold = float(curve.threshold(np.array([level]))[0])
    assert float(np.float32(threshold)) == threshold
    probability = curve.probability(np.array([confidence]))[0]
    if abs(probability - level) > 1e-9 * level:  # apart from rounding on the border itself
        assert (np.float32(confidence) >= np.float32(threshold)) == (probability >= level)


def test_common_path_goes_from_no_exits_to_aggressive_without_a_rise() -> None:
    curves = [(1.0, 0.0), (2.0, -3.0), (0.3, 4.0)]
    path = common_path([AgreementCurve(slope=s, intercept=i) for s, i in curves])
    assert path.shape == (400, 3)
    assert (path[0] == NEVER).all()
    assert (np.diff(path, axis=0) <= 0).all()
    assert np.array_equal(path, path.astype(np.float32))
    assert path[-1, 0] == pytest.approx(0.5)  # the identity's threshold is the level
    assert path[-1, 1] == pytest.approx(1 / (1 + math.exp(-1.5)))


def test_levels_of_a_path_are_geometric_in_the_error() -> None:
    error = 1 - common_path([IDENTITY])[100:, 0]  # before, float32 has no value so near to 1
    steps = np.diff(np.log(error))
    assert steps == pytest.approx(np.full(299, math.log(0.5 / 1e-6) / 398), rel=0.05)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_walk_counts_what_evaluate_counts_at_every_level(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    exits, samples, levels = (data.draw(st.integers(1, high)) for high in (4, 30, 12))
    confidence = rng.choice([0, 0.2, 0.5, 0.8, 1.0], (exits, samples)).astype(np.float32)
    agrees = rng.random((exits, samples)) < 0.7
    path = -np.sort(-rng.choice([0, 0.2, 0.5, 0.6, 1.0, NEVER], (levels, exits)), axis=0)
    walked = walk(path, confidence, agrees)
    latency = np.arange(1.0, exits + 2)
    for level in range(levels):
        found = evaluate(confidence, agrees, latency, path[level])
        assert walked.errors[level] == found.errors
        assert (walked.counts[level] / samples).tolist() == found.exit_shares.tolist()


def test_certify_keeps_the_last_level_before_the_first_that_fails() -> None:
    # 1,000 samples of one exit; the wrong ones lie at known confidences
    confidence = np.linspace(1, 0, 1000, dtype=np.float32)[None]
    agrees = np.ones((1, 1000), bool)
    agrees[0, 100:110] = False
    path = np.array([[NEVER], [0.95], [0.896], [0.5]])
    assert walk(path, confidence, agrees).errors.tolist() == [0, 0, 4, 10]
    assert allowed_errors(1000, 0.01, 0.95) == 4
    certificate = certify(path, confidence, agrees, max_disagreement=0.01)
    assert certificate is not None
    assert (certificate.index, certificate.errors, certificate.samples) == (2, 4, 1000)
    assert certificate.thresholds.tolist() == [0.896]
    assert certificate.p_value == binomial_cdf(4, 1000, 0.01) <= 0.05


def test_certify_does_not_jump_over_a_level_that_fails() -> None:
    # exit 1 is wrong on what exit 0 would answer rightly: errors fall again along the path
    confidence = np.array([[0.4] * 400, [0.9] * 400], dtype=np.float32)
    agrees = np.array([[True] * 400, [False] * 400])
    path = np.array([[NEVER, NEVER], [NEVER, 0.8], [0.3, 0.8]])
    assert walk(path, confidence, agrees).errors.tolist() == [0, 400, 0]
    certificate = certify(path, confidence, agrees, max_disagreement=0.01)
    assert certificate is not None
    assert certificate.index == 0


def test_certify_promises_nothing_from_too_few_samples() -> None:
    path = common_path([IDENTITY])
    for samples, promised in [(298, False), (299, True)]:
        confidence = np.full((1, samples), 0.9, dtype=np.float32)
        found = certify(path, confidence, np.ones((1, samples), bool), max_disagreement=0.01)
        assert (found is not None) == promised


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([[0.5], [0.6]], ("exit 0", "level 1", "0.5 to 0.6")),
        ([[np.nan]], ("NaN",)),
        ([[0.5, 0.5]], ("[levels, exits] thresholds, got shape (1, 2)", "1 rows")),
    ],
)
def test_certify_refuses_what_is_no_path(path: list[list[float]], message: Told) -> None:
    with pytest.raises(ValueError, match=facts(*message)):
        certify(np.array(path), np.ones((1, 5)), np.ones((1, 5), bool), max_disagreement=0.01)


@pytest.mark.parametrize(("bound", "level"), [(0.0, 0.95), (1.0, 0.95), (0.01, 1.0), (0.01, 0.0)])
def test_certify_refuses_promises_of_nothing(bound: float, level: float) -> None:
    path = common_path([IDENTITY])
    with pytest.raises(ValueError, match="must be in"):
        certify(
            path,
            np.ones((1, 5)),
            np.ones((1, 5), bool),
            max_disagreement=bound,
            confidence_level=level,
        )


@pytest.mark.parametrize("calibrated", [False, True])
def test_certified_policies_break_the_promise_as_seldom_as_stated(calibrated: bool) -> None:
    """The population is 60,000 samples; certify splits are drawn from it with replacement.

    So the true disagreement of every level is known, and the assumption holds exactly.
    """
    confidence, agrees, _ = realistic(0, exits=5, samples=60_000)
    curves = [IDENTITY] * 5
    if calibrated:
        fit = [realistic(0, exits=5, samples=2_000)[i] for i in (0, 1)]
        curves = [fit_agreement(c, a) for c, a in zip(*fit, strict=True)]
    path = common_path(curves)
    truth = walk(path, confidence, agrees).errors / 60_000
    rng = np.random.default_rng(0)
    broken, levels = 0, []
    for _ in range(400):
        drawn = rng.integers(0, 60_000, 1_000)
        found = certify(path, confidence[:, drawn], agrees[:, drawn], max_disagreement=0.02)
        assert found is not None
        broken += truth[found.index] > 0.02
        levels.append(truth[found.index])
    # at most 5 % are promised; 20 of 400, plus three standard deviations of such a count
    assert broken <= 20 + 3 * math.sqrt(400 * 0.05 * 0.95)
    assert broken > 0  # else the test would see nothing
    assert np.median(levels) > 0.005  # and the promise is not kept by doing nothing
