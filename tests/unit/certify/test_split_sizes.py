"""Sizes of splits, errors within a bound, and confidence levels of two statements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.certify.binomial import (
    both_hold,
    count_allowed,
    half_risk,
    least_to_split,
    split_sizes,
)


@pytest.mark.parametrize(
    ("samples", "certify", "sizes"),
    [
        (2000, 299, (1200, 300)),  # a quarter certifies: 500
        (1000, 299, (551, 150)),  # as many certify as must
        (14, 6, (6, 2)),  # as many train as certify
        (13, 6, None),
        (4, 1, (2, 1)),
        (3, 1, None),  # none would tune
    ],
)
def test_split_sizes(samples: int, certify: int, sizes: tuple[int, int] | None) -> None:
    assert split_sizes(samples, certify) == sizes


@pytest.mark.parametrize("certify", [1, 6, 7, 59, 299])
def test_least_to_split_is_the_least(certify: int) -> None:
    least = least_to_split(certify)
    assert split_sizes(least, certify)
    assert not any(split_sizes(fewer, certify) for fewer in range(least))


@given(bound=st.floats(0, 1), samples=st.integers(1, 5000))
def test_count_allowed_is_the_most_within_the_bound(bound: float, samples: int) -> None:
    allowed = count_allowed(bound, samples)
    assert allowed / samples <= bound < (allowed + 1) / samples


def test_count_allowed_at_a_bound_that_division_rounds_to() -> None:
    assert (count_allowed(0.29, 100), count_allowed(0, 7), count_allowed(1, 7)) == (29, 0, 7)


@pytest.mark.parametrize("bound", [-0.1, 1.1, float("nan")])
def test_count_allowed_refuses_what_is_no_share(bound: float) -> None:
    with pytest.raises(ValueError, match=r"max_disagreement must be in \[0, 1\], got"):
        count_allowed(bound, 10)


def test_two_statements_at_half_the_risk_hold_together() -> None:
    assert half_risk(0.95) == pytest.approx(0.975)
    assert half_risk(0.4) == pytest.approx(0.7)
    assert both_hold(0.975) == pytest.approx(0.95)
