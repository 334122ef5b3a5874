"""Audit rates: within the budget, rarely changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.engine.control.active_policy import AuditRate, AuditSettings, affordable

SHARES = np.array([0.5, 0.3, 0.2])
LATENCY_MS = np.array([2.0, 6.0, 10.0])


def test_affordable_by_hand() -> None:
    """Without audits 0.5·2 + 0.3·6 + 0.2·10 = 4.8 ms; an audit of all adds 0.5·8 + 0.3·4 = 5.2 ms.
    q · 5.2 = 5 % of (4.8 + q · 5.2), so q = 0.05 / 0.95 · 4.8 / 5.2."""
    q = affordable(SHARES, LATENCY_MS, 0.05)
    assert q == pytest.approx(0.05 / 0.95 * 4.8 / 5.2)
    assert q * 5.2 / (4.8 + q * 5.2) == pytest.approx(0.05)


def test_where_nothing_leaves_early_audits_are_free() -> None:
    assert affordable(np.array([0.0, 0.0, 1.0]), LATENCY_MS, 0.05) == 1.0


@given(
    shares=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    budget=st.floats(0.001, 0.999),
)
def test_the_budget_is_kept(shares: list[float], budget: float) -> None:
    share = np.array(shares) / sum(shares)
    q = affordable(share, LATENCY_MS, budget)
    more = q * float(share @ (10.0 - LATENCY_MS))
    assert 0 < q <= 1
    assert more <= budget * (float(share @ LATENCY_MS) + more) * (1 + 1e-9)


def test_starts_within_the_budget_at_a_step() -> None:
    rate = AuditRate(AuditSettings(), SHARES, LATENCY_MS)
    most = affordable(SHARES, LATENCY_MS, 0.05)
    assert most / 2**0.25 < rate.value <= most


def test_falls_to_a_quarter_when_no_evidence_is_needed() -> None:
    rate = AuditRate(AuditSettings(), SHARES, LATENCY_MS)
    most = affordable(SHARES, LATENCY_MS, 0.05)
    assert rate.aim(SHARES, LATENCY_MS, needed=True) == most
    assert rate.aim(SHARES, LATENCY_MS, needed=False) == pytest.approx(most / 4)


def test_never_below_the_least() -> None:
    early = np.array([0.99, 0.0, 0.01])
    rate = AuditRate(AuditSettings(budget=0.001), early, LATENCY_MS)
    assert rate.value == 0.01
    assert rate.aim(early, LATENCY_MS, needed=False) == 0.01


def test_changes_rarely_and_only_for_a_reason() -> None:
    rate = AuditRate(AuditSettings(every=500), SHARES, LATENCY_MS)
    rate.set(0.05)
    start = rate.value
    rate.follow(0.01, 499)
    assert rate.value == start  # too soon
    rate.follow(start * 1.2, 1)
    assert rate.value == start  # not far enough
    rate.follow(0.02, 0)
    assert 0.02 / 2**0.25 < rate.value <= 0.02
    rate.follow(0.05, 499)
    assert rate.value < 0.021
    rate.follow(0.05, 1)
    assert rate.value == start


@pytest.mark.parametrize("name", ["budget", "least", "steady"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_settings_are_shares(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        AuditSettings(**{name: value})
