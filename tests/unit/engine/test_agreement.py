"""Comparison of answers: for each task, when two agree, and their codes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.bundle import Answer
from offramp.bundle.schema.answers import AnswerForm, AnswerTask, TaskKind
from offramp.engine.answers.agreement import AGREED, DIFFERED, agreement_of


def answer(kind: TaskKind, classes: int, form: AnswerForm = "logits", **terms: float) -> Answer:
    return Answer(
        output="y",
        classes=classes,
        form=form,
        task=AnswerTask(kind=kind, **terms),  # type: ignore[arg-type]
    )


def test_a_class_is_its_own_code() -> None:
    agreement = agreement_of(answer("classification", 3))
    said = agreement.reduce(np.array([[0.0, 2, 1], [3, 2, 1]]))
    assert agreement.codes(said).tolist() == [1, 0]
    assert agreement.codes_against(said, said[::-1]).tolist() == [1, 0]
    assert agreement.agree(said, np.array([1, 1])).tolist() == [True, False]


@pytest.mark.parametrize(("form", "bound"), [("logits", 0.0), ("probabilities", 0.5)])
def test_labels_agree_where_all_are_the_same(form: AnswerForm, bound: float) -> None:
    agreement = agreement_of(answer("multi-label", 3, form))
    ours = agreement.reduce(bound + np.array([[0.1, -0.1, 0.2], [0.1, 0.1, 0.1]]))
    ends = agreement.reduce(bound + np.array([[0.3, -0.4, 0.0], [0.1, 0.1, -0.1]]))
    assert agreement.agree(ours, ends).tolist() == [True, False]
    assert agreement.codes(ours).tolist() == [0b101, 0b111]


@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_codes_of_label_sets_are_equal_where_the_sets_are(labels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((20, labels))
    scores[10:] = np.where(rng.random((10, labels)) < 0.9, scores[:10], -scores[:10])
    agreement = agreement_of(answer("multi-label", labels))
    codes, sets = agreement.codes(agreement.reduce(scores)), scores >= 0
    same = (sets[:, None] == sets[None]).all(axis=2)
    np.testing.assert_array_equal(codes[:, None] == codes[None], same)
    assert (codes >= 0).all()
    assert (codes < answer("multi-label", labels).task.code_bound(labels)).all()


def test_enough_pixels_have_to_be_equal() -> None:
    agreement = agreement_of(answer("segmentation", 2, share=0.75))
    ends = np.zeros((3, 2, 2, 4), np.float32)
    ends[:, 1] = 1
    ours = ends.copy()
    ours[1, 1, 0, :2] = -1  # two of eight pixels
    ours[2, 1, 0, :3] = -1
    agrees = agreement.agree(agreement.reduce(ours), agreement.reduce(ends))
    assert agrees.tolist() == [True, True, False]
    codes = agreement.codes_against(agreement.reduce(ours), agreement.reduce(ends))
    assert codes.tolist() == [AGREED, AGREED, DIFFERED]
    assert agreement.codes(agreement.reduce(ends)).tolist() == [AGREED] * 3


def test_maps_of_classes_are_compared_as_they_are() -> None:
    agreement = agreement_of(answer("segmentation", 300, "classes"))
    ends = np.array([[[1, 299], [5, 43]]])
    assert agreement.agree(agreement.reduce(ends), agreement.reduce(ends)).all()
    assert not agreement.agree(agreement.reduce(ends - 256), agreement.reduce(ends)).any()


def test_tokens_that_are_masked_do_not_count() -> None:
    agreement = agreement_of(answer("token-classification", 3, share=0.5, mask="m"))
    assert agreement.mask_in({"m": np.ones((1, 4))}) is not None
    ends = np.eye(3)[np.array([[0, 1, 2, 0]] * 2)]
    ours = np.eye(3)[np.array([[0, 1, 1, 1], [2, 2, 2, 0]])]
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
    reduced = agreement.reduce(ours), agreement.reduce(ends)
    assert agreement.agree(*reduced, mask).tolist() == [True, False]
    assert agreement.agree(*reduced).tolist() == [True, True]


def test_key_points_have_to_be_near() -> None:
    agreement = agreement_of(answer("pose", 2, "values", within=0.25, share=1.0))
    ends = np.zeros((3, 2, 4, 8), np.float32)
    ends[:, 0, 0, 0] = ends[:, 1, 3, 7] = 1
    ours = ends.copy()
    ours[1, 0, 0, 2] = 2  # two of eight columns away
    ours[2, 0, 0, 3] = 2
    agrees = agreement.agree(agreement.reduce(ours), agreement.reduce(ends))
    assert agrees.tolist() == [True, True, False]


def test_all_values_have_to_be_near_and_nan_is_not() -> None:
    agreement = agreement_of(answer("regression", 2, "values", within=0.5))
    ends = np.zeros((3, 2))
    ours = np.array([[0.5, -0.5], [0.6, 0], [np.nan, 0]])
    agrees = agreement.agree(agreement.reduce(ours), agreement.reduce(ends))
    assert agrees.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        ({"kind": "classification", "share": 0.5}, "share is 0.5 for classification"),
        ({"kind": "segmentation", "within": 0.5}, "within is 0.5 for segmentation"),
        ({"kind": "pose", "mask": "m"}, "mask is 'm' for pose"),
        ({"kind": "pose", "share": 0.0}, "share has 0"),
    ],
)
def test_terms_that_a_task_does_not_have(terms: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AnswerTask(**terms)


def test_a_form_that_a_task_does_not_have() -> None:
    with pytest.raises(ValueError, match="form 'logits' is none of regression: values"):
        answer("regression", 1)
