"""Threshold paths: each level's wealth equals a plain loop; wrong levels rarely pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.certify.population import (
    Population,
    policy_of,
    synthetic,
    synthetic_costs,
)

from offramp.bundle.schema.policy import NEVER
from offramp.certify import (
    MODEL_END,
    AgreementCurve,
    Observations,
    ThresholdPath,
    Weighted,
    Window,
    evaluate,
    fit_curves,
)
from offramp.certify.agreement import LEVELS, lay_path, refit
from offramp.certify.betting import Wealth
from offramp.certify.path import look_ahead
from offramp.certify.threshold_path import alpha_of
from offramp.engine.control.candidates import SavingsEstimator
from offramp.engine.control.control_settings import CertifiedSettings
from offramp.engine.control.costs import CostModel

EPSILON = 0.01


def path_of(levels: list[float], exits: int) -> np.ndarray:
    return np.repeat(np.array([NEVER, *levels])[:, None], exits, axis=1)


def levels_under_test(
    thresholds: np.ndarray, exits: tuple[int, ...] | None = None, *, alpha: float = 0.05
) -> ThresholdPath:
    exits = tuple(range(thresholds.shape[1])) if exits is None else exits
    shares = np.full((len(thresholds), len(exits) + 1), 1 / (len(exits) + 1))
    return ThresholdPath(exits, thresholds, shares, bound=EPSILON, alpha=alpha)


def loss_by_loop(threshold_path: ThresholdPath, seen: Observations) -> np.ndarray:
    """float64[levels, n], by the definition."""
    loss = np.zeros((threshold_path.levels, len(seen)))
    for level in range(threshold_path.levels):
        for i in range(len(seen)):
            if seen.final[i] < 0:
                continue
            ran_with = seen.audit_probability[i] if seen.answered_at[i] != MODEL_END else 1.0
            for place, exit_ in enumerate(threshold_path.exits):
                if seen.confidence[exit_, i] >= threshold_path.thresholds[level, place]:
                    wrong = seen.prediction[exit_, i] != seen.final[i]
                    loss[level, i] = wrong / ran_with
                    break
    return loss


def ready(threshold_path: ThresholdPath, population: Population, q: float = 1.0) -> None:
    """Show it a sample that ran to the end, which does not count yet."""
    never = policy_of(dict.fromkeys(range(len(population.confidence)), NEVER))
    threshold_path.add(population.serve(never, np.arange(1), q=q, rng=np.random.default_rng(0)))
    assert threshold_path.samples == 0


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1_000), q=st.sampled_from([1.0, 0.3, 0.05]), some=st.booleans())
def test_wealth_of_every_level_equals_the_loop(seed: int, q: float, some: bool) -> None:
    population = synthetic(seed, size=600, hardness=2.0)
    rng = np.random.default_rng(seed)
    exits = (0, 2) if some else (0, 1, 2)
    path = np.sort(rng.random((8, len(exits))), axis=0)[::-1]
    threshold_path = levels_under_test(
        np.concatenate([np.full((1, len(exits)), NEVER), path]), exits
    )
    ready(threshold_path, population, q)
    log = np.zeros(threshold_path.levels)
    served = policy_of({0: 0.9, 1: 0.95, 2: 0.8})
    for size in (40, 64):
        seen = population.serve(served, rng.integers(600, size=size), q=q, rng=rng)
        bets = threshold_path.wealth.bets(1 / q)
        loss = loss_by_loop(threshold_path, seen)
        log += np.log(1 + bets[:, None] * (EPSILON - loss)).sum(axis=1)
        threshold_path.add(seen)
        np.testing.assert_allclose(threshold_path.wealth.log, log, rtol=1e-9, atol=1e-12)
    assert threshold_path.samples == 104


def test_losses_have_the_mean_of_the_risk_whoever_serves() -> None:
    """Levels to both sides of the one served, audited at 10 %; 300,000 samples put every estimate
    within 5 standard errors of the true risk."""
    population = synthetic(0, hardness=1.0)
    levels = [0.99, 0.95, 0.9, 0.8]
    threshold_path = levels_under_test(path_of(levels, 3))
    rng = np.random.default_rng(0)
    served, total, n = policy_of({0: 0.95, 1: 0.95, 2: 0.95}), np.zeros(5), 0
    for _ in range(100):
        seen = population.serve(served, rng.integers(population.size, size=3_000), q=0.1, rng=rng)
        rows = np.flatnonzero(seen.complete)
        found = threshold_path._losses(
            seen.confidence[:, rows],
            seen.prediction[:, rows] != seen.final[rows],
            seen.weight[rows],
        )
        total += sum((value * count for value, count in found), np.zeros(5))
        n += len(seen)
    for level, u in enumerate(levels, start=1):
        risk = population.risk(policy_of({0: u, 1: u, 2: u}))
        assert abs(total[level] / n - risk) < 5 * math.sqrt(risk * 10 / n)
    assert total[0] == 0


def test_levels_pass_in_order_and_for_good() -> None:
    """Level 1 is right, level 2 wrong on a third of what it answers, level 3 answers no more."""
    confidence = np.array([[0.95, 0.75, 0.2]], dtype=np.float32).repeat(200, axis=1)
    agrees = np.array([[True, False, True]]).repeat(200, axis=1)
    population = Population(confidence=confidence, agrees=agrees)
    threshold_path = levels_under_test(path_of([0.9, 0.7, 0.5], 1))
    ready(threshold_path, population)
    never, rng = policy_of({0: NEVER}), np.random.default_rng(0)
    assert threshold_path.certified == 0
    for _ in range(20):
        threshold_path.add(population.serve(never, np.arange(600), q=1.0, rng=rng))
    assert threshold_path.certified == 1
    assert threshold_path.wealth.highest[2] < math.log(20)
    assert threshold_path.risk[2] == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize("q", [1.0, 0.05])
def test_a_wrong_level_rarely_ever_passes(q: float) -> None:
    """Levels of risk 0.2 %, just above ε, and 3 %; 400 paths of 8,000 audited samples each,
    the policy served being the second. Passing the second is wrong: at most 5 % may, and three
    standard errors of 400 draws are 3.3 %."""
    rng = np.random.default_rng(7)
    risks = np.array([0.0, 0.002, 0.0101, 0.03])
    wrong = 0
    for _ in range(400):
        wealth = Wealth(np.full(4, EPSILON))
        for _ in range(40):
            n = round(200 / q)
            steps = rng.binomial(n, np.diff(risks, prepend=0.0) * q)
            wealth.add(n, [(1 / q, np.cumsum(steps).astype(float))], largest=1 / q)
        passed = wealth.highest >= math.log(20)
        wrong += bool(passed[1] and passed[2])
    assert wrong <= 400 * (0.05 + 0.033)


def test_what_lacks_an_exit_is_no_evidence() -> None:
    population = synthetic(0, size=1_000)
    threshold_path = levels_under_test(path_of([0.9], 3))
    rng = np.random.default_rng(0)
    without, within = policy_of({0: 0.9, 2: 0.9}), policy_of({0: 0.9, 1: NEVER, 2: 0.9})
    rows = np.arange(50)
    for policy, counted in ((without, 0), (within, 0), (within, 50), (without, 50), (within, 50)):
        threshold_path.add(population.serve(policy, rows, q=0.5, rng=rng))
        assert threshold_path.samples == counted
    threshold_path.add(population.serve(within, rows, q=0.5, rng=rng))
    assert threshold_path.samples == 100


def test_nothing_counts_while_nothing_ran_to_the_end() -> None:
    """For samples that left early the active exits are unknown."""
    confidence = np.ones((2, 10), dtype=np.float32)
    population = Population(confidence=confidence, agrees=np.ones((2, 10), dtype=np.bool_))
    threshold_path = levels_under_test(path_of([0.9], 2))
    policy = policy_of({0: 0.9, 1: 0.9})
    rng = np.random.default_rng(0)
    threshold_path.add(population.serve(policy, np.arange(10), q=1e-12, rng=rng))
    assert threshold_path.samples == 0


def test_without_an_exit_the_first_levels_stay() -> None:
    thresholds = np.array([[NEVER, NEVER], [0.9, NEVER], [0.8, NEVER], [0.7, 0.9]])
    threshold_path = levels_under_test(thresholds, (1, 4))
    population = synthetic(0, exits=5, size=500)
    never = policy_of(dict.fromkeys(range(5), NEVER))
    rng = np.random.default_rng(0)
    for _ in range(3):
        threshold_path.add(population.serve(never, np.arange(500), q=1.0, rng=rng))
    shorter = threshold_path.without([4])
    assert shorter.exits == (1,)
    assert shorter.thresholds.tolist() == [[NEVER], [0.9], [0.8]]
    assert shorter.shares.shape == (3, 2)
    assert shorter.wealth.log.tolist() == threshold_path.wealth.log[:3].tolist()
    assert shorter.certified == min(threshold_path.certified, 2)
    shorter.add(population.serve(never, np.arange(500), q=1.0, rng=rng))
    assert shorter.samples == threshold_path.samples + 500


def test_state_goes_on_with_the_evidence() -> None:
    population = synthetic(0, size=2_000)
    threshold_path = levels_under_test(path_of([0.999, 0.9, 0.5], 3))
    rng = np.random.default_rng(0)
    policy = policy_of(dict.fromkeys(range(3), 0.99))
    for _ in range(3):
        threshold_path.add(population.serve(policy, np.arange(2_000), q=0.5, rng=rng))
    again = ThresholdPath.restored(threshold_path.state(), exits=3)
    assert again.exits == threshold_path.exits
    assert again.certified == threshold_path.certified > 0
    assert again.samples == threshold_path.samples
    seen = population.serve(policy, np.arange(500), q=0.5, rng=rng)
    threshold_path.add(seen)
    again.add(seen)  # not known yet whether all exits are in use
    again.add(seen)
    np.testing.assert_array_equal(again.wealth.log, threshold_path.wealth.log)


def test_a_state_that_claims_too_much_is_refused() -> None:
    state = levels_under_test(path_of([0.9], 1)).state()
    with pytest.raises(ValueError, match="did not pass"):
        ThresholdPath.restored({**state, "certified": 1}, exits=1)


def test_alpha_is_shared_by_all_paths() -> None:
    assert alpha_of(1, 0.05) == 0.025
    assert sum(alpha_of(k, 0.05) for k in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)


def test_the_first_level_must_answer_nothing() -> None:
    with pytest.raises(ValueError, match="no exit may answer"):
        levels_under_test(np.array([[0.9], [0.8]]))


def test_shares_must_fit() -> None:
    with pytest.raises(ValueError, match="shares"):
        ThresholdPath((0,), path_of([0.9], 1), np.ones((2, 3)), bound=EPSILON, alpha=0.05)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1_000))
def test_outlook_is_what_each_level_would_have_done(seed: int) -> None:
    """Against :func:`evaluate` on samples repeated by their weight; sums of floats, 1e-9."""
    rng = np.random.default_rng(seed)
    confidence = rng.random((3, 80)).astype(np.float32)
    agrees = rng.random((3, 80)) < 0.7
    weight = rng.integers(1, 5, size=80)
    path = np.sort(rng.random((6, 3)), axis=0)[::-1]
    found = look_ahead(
        path, Weighted(confidence=confidence, agrees=agrees, weight=weight.astype(float))
    )
    rows = np.repeat(np.arange(80), weight)
    for level in range(6):
        expected = evaluate(confidence[:, rows], agrees[:, rows], np.arange(1.0, 5.0), path[level])
        assert found.risk[level] == pytest.approx(expected.disagreement, abs=1e-9)
        np.testing.assert_allclose(found.shares[level], expected.exit_shares, atol=1e-9)


def weighted(population: Population, rows: np.ndarray) -> Weighted:
    return Weighted(
        confidence=population.confidence[:, rows],
        agrees=population.agrees[:, rows],
        weight=np.ones(len(rows)),
    )


def test_levels_are_dense_around_the_bound() -> None:
    population = synthetic(0)
    samples = weighted(population, np.arange(3_000))
    curves = fit_curves(samples.confidence, samples.agrees)
    fitted = lay_path(curves, samples, bound=EPSILON)
    assert LEVELS / 2 < len(fitted.thresholds) <= LEVELS + 1
    assert (fitted.thresholds[0] == NEVER).all()
    assert (np.diff(fitted.thresholds, axis=0) <= 0).all()
    assert fitted.shares.sum(axis=1) == pytest.approx(1.0)
    near = (fitted.risk > EPSILON / 4) & (fitted.risk < 2 * EPSILON)
    assert near.sum() >= 15
    true = [population.risk(policy_of(dict(enumerate(row)))) for row in fitted.thresholds[near]]
    # 3,000 samples fix the curves to some percent of the disagreement that they expect
    np.testing.assert_allclose(fitted.risk[near], true, rtol=0.35)


def test_a_given_policy_is_a_level() -> None:
    samples = weighted(synthetic(0), np.arange(2_000))
    curves = fit_curves(samples.confidence, samples.agrees)
    anchor = np.array([0.97, 0.93, NEVER])
    fitted = lay_path(curves, samples, bound=EPSILON, anchored_at=anchor)
    assert (fitted.thresholds == anchor).all(axis=1).sum() == 1
    at = int((fitted.thresholds == anchor).all(axis=1).argmax())
    assert (fitted.thresholds[:at] >= anchor).all()
    assert (fitted.thresholds[at:] <= anchor).all()
    assert 0 < at < len(fitted.thresholds) - 1


def test_no_exits_make_a_path_of_one_level() -> None:
    samples = weighted(synthetic(0), np.arange(10)).of(())
    fitted = lay_path((), samples, bound=EPSILON)
    assert fitted.thresholds.shape == (1, 0)
    assert (
        ThresholdPath((), fitted.thresholds, fitted.shares, bound=EPSILON, alpha=0.05).certified
        == 0
    )


def test_refitting_follows_drift_with_few_samples() -> None:
    """600 samples of data where early answers are worse; the path's expectations get near the
    truth, which those of the old curves are far from."""
    before = weighted(synthetic(0), np.arange(3_000))
    curves = fit_curves(before.confidence, before.agrees)
    drifted = synthetic(1, hardness=2.0)
    samples = weighted(drifted, np.arange(600))
    fitted, stale = refit(curves, samples, EPSILON), lay_path(curves, samples, bound=EPSILON)

    def true_risk(thresholds: np.ndarray) -> float:
        return drifted.risk(policy_of(dict(enumerate(thresholds))))

    at = int(np.searchsorted(fitted.risk, EPSILON))
    stale_at = int(np.searchsorted(stale.risk, EPSILON))
    assert true_risk(stale.thresholds[stale_at]) > 4 * EPSILON
    assert EPSILON / 3 < true_risk(fitted.thresholds[at]) < 2.5 * EPSILON


def test_refitting_survives_samples_that_all_agree() -> None:
    samples = Weighted(
        confidence=np.full((1, 300), 0.99, dtype=np.float32),
        agrees=np.ones((1, 300), dtype=np.bool_),
        weight=np.full(300, 5.0),
    )
    fitted = refit([AgreementCurve(slope=1.0, intercept=0.0)], samples, EPSILON)
    assert fitted.curves[0].probability(np.array([0.99]))[0] > 0.99


def test_window_keeps_the_newest_with_their_weights() -> None:
    population = synthetic(0, size=50)
    window = Window(exits=3, capacity=20)
    policy = policy_of({0: 0.9, 2: NEVER})
    rng = np.random.default_rng(0)
    seen = population.serve(policy, np.arange(50), q=0.5, rng=rng)
    for start in range(0, 50, 10):
        window.add(seen.take(slice(start, start + 10)))
    rows = np.flatnonzero(seen.complete)[-20:]
    held = window.seen_by((0, 2))
    np.testing.assert_array_equal(held.confidence, population.confidence[[0, 2]][:, rows])
    np.testing.assert_array_equal(held.agrees, population.agrees[[0, 2]][:, rows])
    early = seen.answered_at[rows] != MODEL_END
    np.testing.assert_array_equal(held.weight, np.where(early, 2.0, 1.0))
    assert len(window.seen_by((0, 1, 2)).weight) == 0  # exit 1 was not in use
    assert window.seen_by((0, 2), 5).weight.tolist() == held.weight[-5:].tolist()
    window.keep(0)
    assert len(window) == 0
    assert len(window.seen_by((0,)).weight) == 0


def test_effective_samples() -> None:
    """Kish: (1 + 1 + 2)² / (1 + 1 + 4)."""
    some = Weighted(
        confidence=np.ones((1, 3), dtype=np.float32),
        agrees=np.ones((1, 3), dtype=np.bool_),
        weight=np.array([1.0, 1.0, 2.0]),
    )
    assert some.effective == pytest.approx(16 / 6)


def test_a_path_anchored_at_a_policy_begins_without_exits() -> None:
    """The policy makes every exit answer."""
    samples = weighted(synthetic(0), np.arange(2_000))
    curves = fit_curves(samples.confidence, samples.agrees)
    fitted = lay_path(curves, samples, bound=EPSILON, anchored_at=np.array([0.97, 0.93, 0.9]))
    assert (fitted.thresholds[0] == NEVER).all()
    assert (fitted.thresholds[1] < NEVER).any()


def doomed(exits: int) -> tuple[Window, CostModel]:
    """400 samples whose every early answer is wrong; an exit after each part of the model."""
    population = synthetic(0, exits=exits, size=400)
    wrong = Population(confidence=population.confidence, agrees=np.zeros((exits, 400), np.bool_))
    never = policy_of(dict.fromkeys(range(exits), NEVER))
    window = Window(exits=exits, capacity=1_000)
    window.add(wrong.serve(never, np.arange(400), q=1.0, rng=np.random.default_rng(0)))
    return window, synthetic_costs(exits)


def test_paths_of_the_same_exits_are_compared_by_their_curves() -> None:
    """The path in use looks bad on the window; but so would the other one: it is the same."""
    window, costs = doomed(2)
    savings = SavingsEstimator(window, costs, CertifiedSettings(max_disagreement=EPSILON))
    sure = [AgreementCurve(slope=1.0, intercept=8.0)] * 2
    fitted = lay_path(sure, savings.recent((0, 1)), bound=EPSILON)
    assert fitted.shares[-1, 0] > 0.5
    same = ThresholdPath((0, 1), fitted.thresholds, fitted.shares, bound=EPSILON, alpha=0.05)
    assert not savings.promises_more(fitted, (0, 1), same)
    nothing = levels_under_test(path_of([], 2))
    assert savings.promises_more(fitted, (0, 1), nothing)


def test_a_path_with_other_exits_is_judged_by_what_was_counted() -> None:
    window, costs = doomed(2)
    savings = SavingsEstimator(window, costs, CertifiedSettings(max_disagreement=EPSILON))
    sure = [AgreementCurve(slope=1.0, intercept=8.0)] * 2
    both = lay_path(sure, savings.recent((0, 1)), bound=EPSILON)
    than = ThresholdPath((0, 1), both.thresholds, both.shares, bound=EPSILON, alpha=0.05)
    alone = lay_path(sure[:1], savings.recent((0,)), bound=EPSILON)
    assert savings.promises_more(alone, (0,), than)
