"""Wealth of bets: equals a plain loop, is a supermartingale under the null, and bounds a risk."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.certify.betting import UpperBound, Wealth

EPSILON = 0.01


def losses_of(loss: np.ndarray) -> list[tuple[float, np.ndarray]]:
    values = np.unique(loss[loss > 0])
    return [(float(v), np.array([(loss == v).sum()])) for v in values]


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    q=st.sampled_from([0.01, 0.1, 1.0]),
    risk=st.floats(0.0, 0.2),
    bound=st.sampled_from([0.001, 0.01, 0.3]),
)
def test_wealth_is_the_product_over_samples(seed: int, q: float, risk: float, bound: float) -> None:
    """The closed form for a chunk equals the loop; both sum logarithms, so 1e-9 is rounding."""
    rng = np.random.default_rng(seed)
    wealth = Wealth(np.array([bound]))
    log = 0.0
    for size in (7, 64, 1, 300):
        audited = (rng.random(size) < risk * q) / q
        free = np.where(audited > 0, 0.0, rng.random(size) < risk / 4)
        loss = audited + free
        bet = float(wealth.bets(1 / q)[0])
        for x in loss:
            log += math.log(1 + bet * (bound - x))
        wealth.add(size, losses_of(loss), largest=1 / q)
        assert wealth.log[0] == pytest.approx(log, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), q=st.floats(0.005, 1.0), bound=st.floats(1e-4, 0.9))
def test_no_bet_can_lose_everything(seed: int, q: float, bound: float) -> None:
    rng = np.random.default_rng(seed)
    wealth = Wealth(np.array([bound]))
    for _ in range(20):
        bets = wealth.bets(1 / q)
        assert (bets >= 0).all()
        assert (1 + bets * (bound - 1 / q) > 0.1).all()
        count = np.array([rng.integers(0, 3)])
        wealth.add(50, [(1 / q, count)], largest=1 / q)


def test_without_disagreement_few_samples_certify() -> None:
    """Bets of at most 0.85 of 1/(1 − ε) need log(20) / log(1.0085) = 354 samples if full at once;
    the prior makes the first bets smaller.
    """
    wealth = Wealth(np.array([EPSILON]))
    samples = 0
    while wealth.log[0] < math.log(20):
        wealth.add(8, [], largest=1.0)
        samples += 8
    assert 354 <= samples <= 480


def test_mean_wealth_stays_at_one_when_the_null_hypothesis_just_holds() -> None:
    """The expected wealth is exactly 1 at risk = ε, for any bets; 4,000 streams of 128 samples put
    the mean within 5 standard errors.
    """
    rng = np.random.default_rng(0)
    for q in (1.0, 0.1):
        streams = Wealth(np.full(4_000, EPSILON))
        for _ in range(2):
            count = rng.binomial(64, EPSILON * q, size=4_000).astype(float)
            streams.add(64, [(1 / q, count)], largest=1 / q)
        wealth = np.exp(streams.log)
        error = wealth.std() / math.sqrt(len(wealth))
        assert abs(wealth.mean() - 1) < 5 * error


@pytest.mark.parametrize("q", [1.0, 0.05])
def test_a_risk_at_the_bound_is_rarely_certified(q: float) -> None:
    """2,000 streams of 6,400 (q = 1) or 64,000 samples, looked at after every chunk: at most 5 %
    ever reach 20. Three standard errors of 2,000 draws at 5 % are 1.5 %."""
    rng = np.random.default_rng(1)
    streams = Wealth(np.full(2_000, EPSILON))
    size = round(64 / q)
    for _ in range(100):
        count = rng.binomial(size, EPSILON * q, size=2_000).astype(float)
        streams.add(size, [(1 / q, count)], largest=1 / q)
    wrong = float((streams.highest >= math.log(20)).mean())
    assert wrong <= 0.05 + 0.015
    assert wrong > 0.001  # else the bets are so small that the test says nothing


def test_changing_audit_probability_keeps_the_certificate_honest() -> None:
    rng = np.random.default_rng(2)
    streams = Wealth(np.full(2_000, EPSILON))
    for step in range(120):
        q = (1.0, 0.02, 0.3)[step % 3]
        size = round(50 / q)
        count = rng.binomial(size, EPSILON * q, size=2_000).astype(float)
        streams.add(size, [(1 / q, count)], largest=1 / q)
    assert float((streams.highest >= math.log(20)).mean()) <= 0.05 + 0.015


def test_data_that_become_easier_get_a_second_chance_soon() -> None:
    """5 % wrong for 20,000 samples, then none: with the long memory alone bets would stay at 0
    for another 8,000 · ln 5 = 12,900 samples."""
    rng = np.random.default_rng(3)
    wealth = Wealth(np.array([EPSILON]))
    for _ in range(200):
        wealth.add(100, [(1.0, np.array([rng.binomial(100, 0.05)]))], largest=1.0)
    assert wealth.bets(1.0)[0] == 0
    samples = 0
    while wealth.bets(1.0)[0] == 0:
        wealth.add(100, [], largest=1.0)
        samples += 100
    assert samples <= 4_000


def test_upper_bound_holds_and_tightens() -> None:
    """500 streams at a risk of 2 % and α = 0.1: the bound fails in at most that share (three
    standard errors: 4 %), and ends below twice the risk. Grid points are a factor of 1.15 apart."""
    rng = np.random.default_rng(4)
    failed, ends = 0, []
    for _ in range(100):
        bound, last, ever = UpperBound(0.1), 1.0, False
        assert bound.value == 1.0
        for _ in range(50):
            bound.add((rng.random(100) < 0.02).astype(float), largest=1.0)
            assert bound.value <= last
            last = bound.value
            ever |= last < 0.02
        failed += ever
        ends.append(last)
    assert failed <= 10 + 9
    assert 0.02 < np.median(ends) < 0.035


def test_upper_bound_in_audit_mode() -> None:
    rng = np.random.default_rng(5)
    bound = UpperBound(0.05)
    for _ in range(200):
        bound.add((rng.random(500) < 0.005 * 0.05) / 0.05, largest=20.0)
    assert 0.005 < bound.value < 0.012


def test_state_continues_where_it_was() -> None:
    rng = np.random.default_rng(6)
    one = UpperBound(0.05)
    one.add((rng.random(2_000) < 0.01).astype(float), largest=1.0)
    other = UpperBound(0.5)
    other.restore(one.state())
    more = (rng.random(500) < 0.01).astype(float)
    one.add(more, largest=1.0)
    other.add(more, largest=1.0)
    assert other.alpha == one.alpha == 0.05
    assert other.value == one.value
    assert np.array_equal(other._wealth.log, one._wealth.log)


def test_state_of_something_else_is_refused() -> None:
    wealth = Wealth(np.full(3, EPSILON))
    with pytest.raises(ValueError, match="log"):
        wealth.restore(Wealth(np.full(4, EPSILON)).state())


@pytest.mark.parametrize("bounds", [[0.0], [1.0], [np.nan]])
def test_bounds_must_be_inside(bounds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\)"):
        Wealth(np.array(bounds))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_must_be_inside(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        UpperBound(alpha)
