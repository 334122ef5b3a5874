"""The order statistic that is the confidence, and PAME's count rule: the same decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.bundle.schema.answers import AnswerForm, AnswerTask, TaskKind
from offramp.engine.answers.exit_check import confidence_of, exits
from offramp.engine.answers.principal_values import (
    HIGHEST,
    MOST_PLACES,
    principal_values,
    stride_of,
    sure_of,
)


def highest_at(maps: np.ndarray, threshold: float, *, highest: int) -> np.ndarray:
    """Count the highest values of each heat map that reach the threshold (PAME 5.3)."""
    principal = np.sort(maps.reshape(*maps.shape[:2], -1), axis=2)[:, :, -highest:]
    return exits(principal, threshold).sum(axis=(1, 2))


def pixels_at(answer: np.ndarray, form: AnswerForm, threshold: float) -> np.ndarray:
    """Count the pixels whose confidence reaches the threshold (PAME 5.3)."""
    pixels = np.moveaxis(answer, 1, 3).reshape(-1, answer.shape[1])
    return exits(confidence_of(pixels, form), threshold).reshape(len(answer), -1).sum(axis=1)


def counted(share: float, places: int) -> int:
    return max(math.ceil(share * places - 1e-6), 1)


@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([1.0, 0.99, 0.9, 0.75, 0.5, 0.1]),
    form=st.sampled_from(["logits", "probabilities"]),
)
def test_pixels_the_order_statistic_is_the_count_rule(
    seed: int, share: float, form: AnswerForm
) -> None:
    rng = np.random.default_rng(seed)
    shape = (4, int(rng.integers(2, 6)), int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    answer = rng.normal(0, 3, shape).astype(np.float32)
    if form == "probabilities":
        answer = np.exp(answer) / np.exp(answer).sum(axis=1, keepdims=True)
    principal = principal_values(answer, form, AnswerTask(kind="segmentation"))
    sure = sure_of(principal, share)
    for threshold in (*sure, 0.3, 0.9):  # also exactly at each confidence
        count = (principal >= np.float32(threshold)).sum(axis=1)
        by_count = count >= counted(share, principal.shape[1])
        np.testing.assert_array_equal(exits(sure, threshold), by_count)
    for threshold in (0.3, 0.6, 0.9):  # away from confidences, where softmax rounds otherwise
        rule = pixels_at(answer, form, threshold) >= counted(share, principal.shape[1])
        np.testing.assert_array_equal(exits(sure, threshold), rule)


@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([1.0, 0.9, 0.5, 0.2]))
def test_heat_maps_the_order_statistic_is_the_count_rule(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    maps = rng.random((5, int(rng.integers(1, 5)), 6, 4), dtype=np.float32)
    task = AnswerTask(kind="pose", within=0.1)
    principal = principal_values(maps, "values", task)
    assert principal.shape == (5, maps.shape[1] * HIGHEST)
    sure = sure_of(principal, share)
    for threshold in (*sure, 0.2, 0.95):
        count = highest_at(maps, float(threshold), highest=HIGHEST)
        rule = count >= counted(share, principal.shape[1])
        np.testing.assert_array_equal(exits(sure, threshold), rule)


@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([1.0, 0.9, 0.75, 2 / 3, 0.5, 1 / 3, 0.1]),
    form=st.sampled_from(["logits", "probabilities"]),
)
def test_labels_the_order_statistic_is_the_count_rule(
    seed: int, share: float, form: AnswerForm
) -> None:
    rng = np.random.default_rng(seed)
    answer = rng.normal(0, 3, (6, int(rng.integers(1, 40)))).astype(np.float32)
    if form == "probabilities":
        answer = 1 / (1 + np.exp(-answer))
    answer[rng.random(answer.shape) < 0.02] = np.nan
    principal = principal_values(answer, form, AnswerTask(kind="multi-label"))
    assert principal.shape == answer.shape, "one of each label"
    known = ~np.isnan(answer)
    assert (principal[known] >= 0.5).all(), "of what was decided, yes or no"
    assert (principal[~known] == 0).all()
    sure = sure_of(principal, share)
    for threshold in (*principal.ravel(), *sure, 0.3, 0.6, 0.9, 1.0):
        rule = (principal >= np.float32(threshold)).sum(axis=1) >= counted(
            share, principal.shape[1]
        )
        np.testing.assert_array_equal(exits(sure, threshold), rule)


@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([1.0, 0.98, 0.9, 0.5, 0.1]))
def test_tokens_the_order_statistic_is_the_count_rule(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    answer = rng.normal(0, 3, (6, 9, 4)).astype(np.float32)
    mask = (np.arange(9) < rng.integers(1, 10, 6)[:, None]).astype(np.int64)
    principal = principal_values(answer, "logits", AnswerTask(kind="token-classification"))
    sure = sure_of(principal, share, mask)
    wanted = np.array([counted(share, int(places)) for places in mask.sum(axis=1)], np.int32)
    for threshold in (*principal.ravel(), 0.3, 0.9):
        count = ((principal >= np.float32(threshold)) & (mask == 1)).sum(axis=1)
        np.testing.assert_array_equal(exits(sure, threshold), count >= wanted)


@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([1.0, 0.98, 0.9, 0.5]))
def test_a_mask_leaves_tokens_out(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    principal = rng.random((6, 11), dtype=np.float32)
    lengths = rng.integers(0, 12, 6)
    mask = (np.arange(11) < lengths[:, None]).astype(np.int64)
    sure = sure_of(principal, share, mask)
    for row, length in enumerate(lengths):
        alone = sure_of(principal[row : row + 1, :length], share)[0] if length else 0.0
        assert sure[row] == alone


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("multi-label", (2, 4)),
        ("token-classification", (2, 5, 3)),
        ("segmentation", (2, 3, 4, 4)),
        ("pose", (2, 3, 4, 4)),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_confidences_are_between_0_and_1_whatever_answers_are(
    kind: TaskKind, shape: tuple[int, ...], bad: float
) -> None:
    answer = np.random.default_rng(0).normal(0, 50, shape).astype(np.float32)
    answer[0].flat[0] = bad
    form: AnswerForm = "values" if kind == "pose" else "logits"
    found = confidence_of(answer, form, AnswerTask(kind=kind))
    assert found.dtype == np.float32
    assert ((found >= 0) & (found <= 1)).all()
    if np.isnan(bad):
        assert found[0] <= found[1]


def test_of_large_maps_a_grid_is_looked_at() -> None:
    assert stride_of(32, 32) == 1
    step = stride_of(1024, 2048)
    assert math.ceil(1024 / step) * math.ceil(2048 / step) <= MOST_PLACES
    answer = np.zeros((1, 2, 130, 130), np.float32)
    answer[0, 0, ::5, ::5] = 9  # sure where it is looked at, and nowhere else
    assert stride_of(130, 130) == 5
    principal = principal_values(answer, "logits", AnswerTask(kind="segmentation"))
    assert principal.shape == (1, 26 * 26)


def test_values_say_nothing_of_how_sure_they_are() -> None:
    task = AnswerTask(kind="regression", within=0.1)
    assert confidence_of(np.zeros((3, 2), np.float32), "values", task).tolist() == [1, 1, 1]
