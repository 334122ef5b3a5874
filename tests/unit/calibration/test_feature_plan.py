"""Passes are as few as the limit allows, and samples are left out only when passes run out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import tells

from offramp.calibration.data.dataset import DataError
from offramp.calibration.heads.feature_plan import (
    GIB,
    MOST_PASSES,
    SampleCounts,
    balanced_groups,
    plan_features,
)

COUNTS = SampleCounts(train=6000, made=6000, tune=1500)


def test_one_pass_where_everything_fits() -> None:
    plan = plan_features([10, 20, 30], COUNTS, 60 * 13_500)
    assert plan.groups == ((0, 1, 2),)
    assert plan.counts == COUNTS
    assert plan.size_bytes == 60 * 13_500


def test_another_pass_where_a_byte_is_missing() -> None:
    plan = plan_features([10, 20, 30], COUNTS, 60 * 13_500 - 1)
    assert plan.groups == ((0, 1), (2,))
    assert plan.counts == COUNTS
    assert plan.size_bytes == 30 * 13_500


def test_made_samples_are_left_out_first() -> None:
    plan = plan_features([8] * 8, COUNTS, 16 * 10_000)
    assert plan.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert plan.counts == SampleCounts(train=6000, made=2500, tune=1500)
    assert plan.size_bytes == 16 * 10_000


def test_then_real_ones_that_train() -> None:
    plan = plan_features([16], COUNTS, 16 * 5000 + 15)
    assert plan.counts == SampleCounts(train=3500, made=0, tune=1500)


def test_too_few_samples_are_refused_with_what_would_be_needed() -> None:
    with pytest.raises(DataError) as caught:
        plan_features([4 * GIB // 1000], COUNTS, 9 * GIB)
    said = ("2,500 samples", "10.00 GiB", "4 passes", "9.00 GiB of --scratch-limit")
    tells(str(caught.value), *said, "raise it")
    few = SampleCounts(train=300, made=300, tune=100)
    with pytest.raises(DataError, match="at least 400 samples"):
        plan_features([1000], few, 399 * 1000)
    assert plan_features([1000], few, 400 * 1000).counts.train == 300


def test_candidates_without_features_take_no_pass() -> None:
    assert plan_features([0, 0], COUNTS, 1).groups == ((0, 1),)
    assert plan_features([0, 5, 0, 5, 0], COUNTS, 5 * 13_500).groups == ((0, 1, 2), (3, 4))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, MOST_PASSES))
def test_groups_are_neighbours_and_as_even_as_can_be(sizes: list[int], groups: int) -> None:
    found = balanced_groups(sizes, groups)
    assert [i for group in found for i in group] == list(range(len(sizes)))
    assert len(found) <= groups
    assert all(found)
    largest = max(sum(sizes[i] for i in group) for group in found)
    assert largest == _smallest_possible(sizes, groups)


def _smallest_possible(sizes: list[int], groups: int) -> int:
    """Try every place for the last border."""
    if groups == 1:
        return sum(sizes)
    return min(
        max(_smallest_possible(sizes[:i], groups - 1), sum(sizes[i:]))
        for i in range(1, len(sizes) + 1)
    )
