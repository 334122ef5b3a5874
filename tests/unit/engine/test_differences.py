"""Differences are relative to the size of their part, not to other parts of the tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import tells

from offramp.bundle import Answer
from offramp.bundle.schema.answers import AnswerTask
from offramp.engine.answers.differences import Scales, compare, relative_difference

MASKS = (-1e2, -1e4, -65504.0, -1e9, -3.4e38, -1e30, 1e6, -math.inf, math.inf, math.nan)


def answer(kind: str = "classification", form: str = "logits") -> Answer:
    return Answer(output="y", classes=4, form=form, task=AnswerTask(kind=kind))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 30.0]), st.sampled_from([2, 3, 4]))
def test_of_ordinary_values_it_is_the_share_of_the_largest(seed, size, rank) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.standard_normal((16, *(5, 3, 4)[: rank - 1])) * size
    found = wanted + rng.standard_normal(wanted.shape) * 1e-4 * size
    expected = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert relative_difference(found, wanted) == pytest.approx(expected)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    mask=st.sampled_from(MASKS),
    share=st.floats(0.1, 0.9),
    columns=st.booleans(),
)
def test_a_mask_hides_nothing_of_the_others(seed, mask, share, columns) -> None:
    """Classes that are masked always, or for some samples, by a number, infinity or NaN."""
    rng = np.random.default_rng(seed)
    plain = rng.standard_normal((32, 8)) * 5
    masked = np.broadcast_to(rng.random((1, 8)) < share, (32, 8)) if columns else None
    masked = rng.random((32, 8)) < share if masked is None else masked.copy()
    masked[:, 0] = False
    wanted = np.where(masked, plain + mask, plain)
    found = wanted.copy()
    row, column = rng.choice(np.argwhere(~masked))
    found[row, column] += 0.1
    assert relative_difference(wanted, wanted) == 0
    least = 0.1 / np.abs(plain).max() * 0.99
    # A mask that is hardly larger than what it masks is one of the values.
    assert relative_difference(found, wanted) >= (least / 32 if mask == -1e2 else least)


def test_what_is_masked_is_compared_at_its_own_size() -> None:
    wanted = np.array([[1.0, -1e9], [2.0, -1e9]])
    found = wanted + np.array([[0.0, 10.0], [0.0, 0.0]])
    difference = compare(found, wanted, answer=answer())
    assert difference.share == pytest.approx(1e-8)
    told = difference.describe()
    tells(told, "1.0e-08", "-1e+09 instead of -1e+09", "sample 0, class 1", "1e+09")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinities_and_nan_are_right_where_they_are_expected(value: float) -> None:
    wanted = np.array([[1.0, value], [2.0, value]])
    assert relative_difference(wanted.copy(), wanted) == 0
    assert relative_difference(np.ones((2, 2)), wanted) == math.inf
    assert relative_difference(wanted, np.ones((2, 2))) == math.inf
    assert compare(wanted, np.ones((2, 2))).worst.startswith(f"{value:g} instead of 1 (sample 0, ")


def test_columns_of_other_units_have_their_own_scale() -> None:
    wanted = np.array([[1.0, 1e6], [0.5, 2e6]])
    found = wanted + np.array([[0.1, 0.0], [0.0, 0.0]])
    assert relative_difference(found, wanted) == pytest.approx(0.1)


def test_a_column_of_zeros_may_round_as_the_others_do() -> None:
    wanted = np.array([[0.0, 8.0], [0.0, -4.0]])
    assert relative_difference(wanted + 1e-6, wanted) == pytest.approx(1e-6 / 8)
    assert relative_difference(np.full((2, 2), 0.5), np.zeros((2, 2))) == 0.5


def test_more_samples_tell_more_of_the_scale() -> None:
    many = np.array([[20.0, -18.0], [0.02, 0.01]])
    assert relative_difference(many[1:] + 1e-4, many[1:], Scales.of(many)) == pytest.approx(5e-6)


def test_other_shapes_differ_infinitely() -> None:
    difference = compare(np.ones((2, 3)), np.ones((2, 4)))
    assert (difference.share, difference.worst) == (math.inf, "shape [2, 3], expected [2, 4]")
    assert relative_difference(np.ones((0, 3)), np.ones((0, 3))) == 0
    assert relative_difference(np.float32(1.5), np.float32(1.0)) == 0.5


# Each column is ten times as large as the last: no gap shows what is apart.
CONTINUOUS = np.array([[1.0, 1.5, -10.0, -100.0, -1e3, -1e4, -1e5, -1e6, -1e7]])


def test_another_decision_counts_whatever_the_scale() -> None:
    found = CONTINUOUS.copy()
    found[0, 0] = 1.6
    difference = compare(found, CONTINUOUS, answer=answer())
    assert difference.share == pytest.approx(0.5 / 2 / 1.5)
    assert difference.worst.startswith("another decision for sample 0")
    assert relative_difference(found, CONTINUOUS) < difference.share


def test_ties_within_rounding_may_be_decided_otherwise() -> None:
    wanted = np.array([[3.0, 3.000001, -1e9], [5.0, 1.0, -1e9]])
    found = np.array([[3.000001, 3.0, -1e9], [5.0, 1.0, -1e9]])
    assert compare(found, wanted, answer=answer()).share < 1e-6


@pytest.mark.parametrize(
    ("kind", "form", "wanted", "found", "share"),
    [
        ("multi-label", "logits", [[2.0, -0.5]], [[2.0, 0.1]], 0.3),
        ("multi-label", "probabilities", [[0.9, 0.45]], [[0.9, 0.55]], 0.1 / 0.9),
        ("token-classification", "logits", [[[4.0, 0.0]]], [[[1.0, 1.5]]], 0.75),
        ("segmentation", "logits", [[[[4.0]], [[0.0]]]], [[[[1.0]], [[1.5]]]], 0.75),
        ("pose", "values", [[[[0.8, 0.2]]]], [[[[0.3, 0.4]]]], 0.625),
    ],
)
def test_decisions_are_those_of_the_task(kind, form, wanted, found, share) -> None:
    difference = compare(np.array(found), np.array(wanted), answer=answer(kind, form))
    assert difference.share == pytest.approx(share)
