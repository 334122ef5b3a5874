"""Confidence is the largest softmax, never reached by what is no number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offramp.bundle import NEVER
from offramp.engine.answers.exit_check import confidence_of, exits

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, max_side=12)


def exact(logits: np.ndarray) -> np.ndarray:
    """Largest softmax in float64."""
    values = logits.astype(np.float64)
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers.max(axis=1) / powers.sum(axis=1)


def logits_of(dtype: type) -> st.SearchStrategy[np.ndarray]:
    """Usual ones, ties, and all that the type holds (of float64 what float32 holds exactly)."""
    width = 16 if dtype is np.float16 else 32
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    numbers = st.one_of(st.floats(-20, 20, width=width), finite, st.just(1.5))
    return hnp.arrays(dtype, SHAPES, elements=numbers)


@given(logits_of(np.float32) | logits_of(np.float16) | logits_of(np.float64))
@example(np.zeros((3, 7), np.float32))
@example(np.full((1, 2), 3e38, np.float32))
@example(np.array([[3e38, -3e38]], np.float32))
@example(np.array([[5.0, 5.0, -np.inf]], np.float32))
def test_logits_give_the_largest_softmax(logits: np.ndarray) -> None:
    before = logits.copy()
    confidence = confidence_of(logits, "logits")
    np.testing.assert_array_equal(logits, before)  # the answer goes out to the client
    assert confidence.dtype == np.float32
    assert confidence.shape == (len(logits),)
    assert ((confidence >= 0) & (confidence <= 1)).all()
    # float32: a dozen of exponentials, each of a few roundings of 6e-8
    np.testing.assert_allclose(confidence, exact(logits), rtol=2e-6)


@given(
    hnp.arrays(np.float32, SHAPES, elements=st.floats(0, 1, width=32)),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_probabilities_give_their_largest(probabilities: np.ndarray, dtype: type) -> None:
    given_ = probabilities.astype(dtype)
    confidence = confidence_of(given_, "probabilities")
    assert confidence.dtype == np.float32
    np.testing.assert_array_equal(confidence, given_.max(axis=1).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("form", ["logits", "probabilities"])
def test_nan_is_no_confidence_and_harms_no_other_row(form, dtype: type) -> None:
    answer = np.array([[0.25, 0.75], [np.nan, 0.75], [0.75, np.nan], [np.nan, np.nan]], dtype)
    sure = {"logits": 1 / (1 + np.exp(-0.5)), "probabilities": 0.75}[form]
    np.testing.assert_allclose(confidence_of(answer, form), [sure, 0, 0, 0], rtol=1e-6)


def test_infinite_logits() -> None:
    inf = np.inf
    answer = np.array([[inf, 0], [inf, inf], [-inf, -inf], [-inf, 0], [inf, -inf]], np.float32)
    # minus infinity rules a class out; plus infinity is an overflow, of which nothing is known
    assert confidence_of(answer, "logits").tolist() == [0, 0, 0, 1, 0]


def test_doubles_beyond_float32_are_an_overflow_too() -> None:
    answer = np.array([[1e300, 0.0], [-1e300, 0.0]])
    assert confidence_of(answer, "logits").tolist() == [0, 1]


def test_probabilities_that_are_none_reach_no_threshold_of_never() -> None:
    answer = np.array([[np.inf, 0], [1.0000001, 0], [-1, -2]], np.float32)
    confidence = confidence_of(answer, "probabilities")
    assert confidence.tolist() == [1, 1, 0]
    assert not exits(confidence, NEVER).any()


@pytest.mark.parametrize("form", ["logits", "probabilities"])
def test_an_empty_batch(form) -> None:
    assert confidence_of(np.empty((0, 4), np.float32), form).shape == (0,)


def test_views_are_understood() -> None:
    wide = np.arange(24, dtype=np.float32).reshape(4, 6) / 10
    np.testing.assert_array_equal(
        confidence_of(wide[::2, ::3], "logits"), confidence_of(wide[::2, ::3].copy(), "logits")
    )


def test_a_threshold_is_reached_by_what_equals_it() -> None:
    confidence = np.array([0.5, 0.75, np.nextafter(np.float32(0.75), np.float32(0))], np.float32)
    assert exits(confidence, 0.75).tolist() == [False, True, False]
    assert exits(confidence, 0.0).tolist() == [True, True, True]


def test_thresholds_are_compared_in_float32_as_on_the_device() -> None:
    third = np.array([1 / 3], np.float32)  # above the double 1/3
    below = np.nextafter(third, np.float32(0))
    assert exits(third, 1 / 3).tolist() == [True]
    assert exits(below, 1 / 3).tolist() == [False]
    tenth = np.array([0.7], np.float32)  # 0.69999999, below the double 0.7
    assert float(tenth[0]) < 0.7
    assert exits(tenth, 0.7).tolist() == [True]


@given(st.floats(0, 1, width=32), st.floats(0, 2, width=32))
def test_float32_thresholds_decide_as_in_any_precision(confidence: float, threshold: float) -> None:
    assert exits(np.array([confidence], np.float32), threshold)[0] == (confidence >= threshold)


def test_never_is_never_reached() -> None:
    assert exits(np.array([0, 0.5, 1], np.float32), NEVER).tolist() == [False] * 3
    assert exits(np.ones(1, np.float32), 1.0).tolist() == [True]
