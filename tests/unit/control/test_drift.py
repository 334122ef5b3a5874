"""The drift alarm: equals a plain loop, rings soon when it should, and seldom when not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.engine.control.drift import DriftAlarm

EPSILON = 0.01


def loop(alarm: DriftAlarm, losses: np.ndarray, q: np.ndarray) -> list[np.ndarray]:
    """M after every sample, by the definition."""
    sums, history = alarm.sums.copy(), []
    for x, p in zip(losses, q, strict=True):
        bets = (alarm.risks - alarm.bound) / (alarm.bound * (1 / p - alarm.bound))
        sums = (sums + p) * (1 + bets * (x - alarm.bound))
        history.append(sums)
    return history


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    risk=st.floats(0.0, 0.1),
    qs=st.lists(st.sampled_from([1.0, 0.3, 0.02]), min_size=1, max_size=4),
)
def test_equals_the_recursion_sample_by_sample(seed: int, risk: float, qs: list[float]) -> None:
    """Powers against products of up to some hundred factors: 1e-9 leaves room for rounding."""
    rng = np.random.default_rng(seed)
    alarm = DriftAlarm(EPSILON, rate=1e-300)  # never rings, so that sums can be compared
    for _ in range(3):
        q = np.repeat(qs, rng.integers(1, 60, size=len(qs)))
        losses = (rng.random(len(q)) < risk) * (rng.random(len(q)) < q) / q
        expected = loop(alarm, losses, q)[-1]
        assert alarm.add(losses, q) is None
        np.testing.assert_allclose(alarm.sums, expected, rtol=1e-9)


def test_rings_at_the_sample_where_the_recursion_crosses() -> None:
    """Losses only make M cross; runs without are looked at when they end."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        alarm = DriftAlarm(EPSILON, rate=1e-4)
        losses, q = (rng.random(3_000) < 0.05).astype(float), np.ones(3_000)
        crossed = [m.mean() >= 1e4 for m in loop(alarm, losses, q)].index(True)
        assert alarm.add(losses, q) == crossed


def test_chunks_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    losses, q = (rng.random(900) < 0.01).astype(float), np.ones(900)
    whole, parts = DriftAlarm(EPSILON), DriftAlarm(EPSILON)
    assert whole.add(losses, q) is None
    for part in np.split(losses, [8, 100, 101, 612]):
        assert parts.add(part, np.ones(len(part))) is None
    np.testing.assert_allclose(whole.sums, parts.sums, rtol=1e-9)


@pytest.mark.parametrize("q", [1.0, 0.02])
def test_abrupt_drift_to_five_percent_is_noticed_within_600_audits(q: float) -> None:
    """The rate is at least 95 % of 200 streams, after some time without drift."""
    rng = np.random.default_rng(2)
    noticed = 0
    for _ in range(200):
        alarm = DriftAlarm(EPSILON)
        before = (rng.random(round(2_000 / q)) < 0.005 * q) / q
        assert alarm.add(before, np.full(len(before), q)) is None
        after = (rng.random(round(600 / q)) < 0.05 * q) / q
        noticed += alarm.add(after, np.full(len(after), q)) is not None
    assert noticed >= 190


@pytest.mark.parametrize("q", [1.0, 0.05])
def test_false_alarms_are_as_rare_as_promised(q: float) -> None:
    """With a = 1/2,000 and a risk of exactly ε, 200 streams of 1,000 audits ring at most about 200
    · 1,000 / 2,000 = 100 times; this bound is loose, since M must also grow from 0.
    """
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(200):
        alarm = DriftAlarm(EPSILON, rate=1 / 2_000)
        size = round(1_000 / q)
        losses = (rng.random(size) < EPSILON * q) / q
        alarms += alarm.add(losses, np.full(size, q)) is not None
    assert 1 <= alarms <= 100


def test_level_says_how_near_it_is() -> None:
    alarm = DriftAlarm(EPSILON, rate=1e-3)
    assert alarm.level == 0
    assert alarm.add(np.ones(3), np.ones(3)) is None
    assert 0 < alarm.level < 1
    assert alarm.add(np.ones(30), np.ones(30)) is not None
    assert alarm.level >= 1
    alarm.reset()
    assert alarm.level == 0


def test_state_goes_on() -> None:
    one = DriftAlarm(EPSILON)
    one.add(np.array([0.0, 1.0, 0.0]), np.ones(3))
    other = DriftAlarm(EPSILON)
    other.restore(one.state())
    assert np.array_equal(one.sums, other.sums)
    with pytest.raises(ValueError, match="sums"):
        other.restore({"sums": np.array([1.0])})
    with pytest.raises(ValueError, match="sums"):
        other.restore({"sums": np.full(len(one.sums), -1.0)})


def test_nothing_is_fine() -> None:
    assert DriftAlarm(EPSILON).add(np.empty(0), np.empty(0)) is None


@pytest.mark.parametrize(("bound", "rate"), [(0.0, 1e-5), (1.0, 1e-5), (0.01, 0.0), (0.01, 1.0)])
def test_settings_must_be_inside(bound: float, rate: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        DriftAlarm(bound, rate=rate)


@pytest.mark.parametrize("bound", [0.001, 0.2, 0.95])
def test_any_bound_has_risks_to_look_for(bound: float) -> None:
    alarm = DriftAlarm(bound)
    assert ((alarm.risks > bound) & (alarm.risks < 1)).all()
    assert (1 - alarm._bets(1.0) * bound >= 0).all()
