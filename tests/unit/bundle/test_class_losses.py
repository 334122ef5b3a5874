"""Counting disagreement by class, and certifying a bound for each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.bundle import ActiveExit, Answer, AnswerTask, ExitPolicy
from offramp.bundle.records import (
    CERTIFY,
    TUNE,
    ClassLoss,
    class_strata,
    count_label_losses,
    count_losses,
    harmed,
    losses_on_records,
    uncertified,
)
from offramp.certify import allowed_errors, certify

THREE = Answer(output="y", classes=3, form="logits")
LABELS = Answer(output="y", classes=3, form="logits", task=AnswerTask(kind="multi-label"))
VALUES = Answer(output="y", classes=3, form="values", task=AnswerTask(kind="regression"))


def test_classes_are_counted_and_the_largest_share_comes_first() -> None:
    codes = np.array([0, 0, 0, 0, 2, 2])
    differs = np.array([True, False, False, False, True, False])
    assert count_losses(THREE, codes, differs) == (
        ClassLoss(number=2, samples=2, lost=1),
        ClassLoss(number=0, samples=4, lost=1),
    )


def test_a_sample_with_several_labels_counts_for_each() -> None:
    codes = np.array([0b101, 0b100, 0b000])  # labels 0 and 2, label 2, none
    differs = np.array([True, False, True])
    assert count_losses(LABELS, codes, differs) == (
        ClassLoss(number=0, samples=1, lost=1),
        ClassLoss(number=2, samples=2, lost=1),
    )


def test_answers_without_classes_are_not_counted() -> None:
    assert count_losses(VALUES, np.array([1, 1]), np.array([True, False])) == ()


def test_labels_that_are_no_class_are_left_out() -> None:
    differs = np.array([True, True, False])
    found = count_label_losses(THREE, np.array([1, -1, 7]), differs)
    assert found == (ClassLoss(number=1, samples=1, lost=1),)
    assert count_label_losses(THREE, None, differs) == ()


def test_only_the_certify_split_and_exits_in_use_count() -> None:
    records = {
        "split": np.array([TUNE, CERTIFY, CERTIFY, CERTIFY], np.uint8),
        "confidence": np.array([[0.9, 0.9, 0.4, 0.9], [0.9, 0.9, 0.9, 0.9]], np.float32),
        "prediction": np.array([[1, 1, 1, 0], [2, 2, 2, 2]], np.int32),
        "final_prediction": np.array([0, 0, 0, 0], np.int32),
    }
    policy = ExitPolicy(version=1, active=(ActiveExit(exit=0, threshold=0.5),))
    assert losses_on_records(THREE, policy, records) == (ClassLoss(number=0, samples=3, lost=1),)


@pytest.mark.parametrize(
    ("samples", "lost", "told"),
    [(266, 124, True), (3, 1, False), (100, 11, True), (100, 9, False), (5, 0, False)],
)
def test_a_class_is_harmed_where_it_surely_loses_ten_times_the_bound(
    samples: int, lost: int, told: bool
) -> None:
    loss = ClassLoss(number=1, samples=samples, lost=lost)
    assert harmed([loss], 0.01) == ((loss,) if told else ())


def test_classes_of_few_samples_have_no_bound_and_are_named() -> None:
    codes = np.repeat([0, 1], [100, 20])
    strata = class_strata(THREE, codes, max_disagreement=0.05, confidence_level=0.95)
    assert [s.name for s in strata] == ["class 0"]  # 59 samples are the least at 5 %
    np.testing.assert_array_equal(strata[0].rows, np.arange(100))
    losses = count_losses(THREE, codes, np.zeros(120, bool))
    few = uncertified(THREE, losses, max_disagreement=0.05, confidence_level=0.95)
    assert few == (1, 2)
    assert class_strata(THREE, codes, max_disagreement=None, confidence_level=0.95) == ()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.02, 0.05, 0.2]))
def test_no_certified_level_loses_more_of_a_class_than_its_test_allows(
    seed: int, bound: float
) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.choice(3, 2000, p=[0.9, 0.07, 0.03])
    confidence = rng.random((1, 2000)).astype(np.float32)
    wrong = np.array([0.001, 0.02, rng.random()])[codes]
    agrees = rng.random((1, 2000)) >= wrong
    path = np.linspace(1, 0, 50)[:, None]
    strata = class_strata(THREE, codes, max_disagreement=bound, confidence_level=0.95)
    free = certify(path, confidence, agrees, max_disagreement=0.05)
    bounded = certify(path, confidence, agrees, max_disagreement=0.05, strata=strata)
    assert free is not None
    assert bounded is not None
    assert bounded.index <= free.index
    leaves = confidence[0] >= bounded.thresholds[0]
    for stratum in strata:
        lost = int((leaves & ~agrees[0])[stratum.rows].sum())
        assert lost <= allowed_errors(len(stratum.rows), bound, 0.95)
