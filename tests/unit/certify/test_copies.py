"""Samples that stand for several rows count once, and by rows, whichever is stricter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.certify import certify, tuning_path
from offramp.certify.learn_then_test import count_errors


def records(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ease = rng.normal(size=samples)
    confidence = 1 / (1 + np.exp(-(3 + 3 * ease + rng.normal(size=(2, samples)))))
    return confidence, rng.random((2, samples)) < confidence


@given(seed=st.integers(0, 50), copies=st.integers(1, 20))
def test_copies_of_all_samples_alike_are_no_further_evidence(seed: int, copies: int) -> None:
    path = tuning_path(*records(seed + 1000, 2000))
    confidence, agrees = records(seed, 1000)
    once = certify(path, confidence, agrees, max_disagreement=0.02, confidence_level=0.975)
    again = certify(path, confidence, agrees, max_disagreement=0.02, copies=np.full(1000, copies))
    assert once is not None
    assert again is not None
    assert (again.index, again.errors, again.samples) == (once.index, once.errors, 1000)
    assert again.p_value == pytest.approx(2 * once.p_value)  # two tests share the risk


@given(seed=st.integers(0, 50))
def test_errors_are_counted_by_rows_as_if_all_rows_were_there(seed: int) -> None:
    path = tuning_path(*records(seed + 1000, 2000))
    confidence, agrees = records(seed, 300)
    copies = np.random.default_rng(seed).integers(1, 9, 300)
    by_sample, by_row = count_errors(path, confidence, agrees, copies, max_disagreement=0.01)
    rows = np.repeat(np.arange(300), copies)
    (repeated,) = count_errors(path, confidence[:, rows], agrees[:, rows], max_disagreement=0.01)
    assert by_row.errors.tolist() == repeated.errors.tolist()
    assert by_row.of == repeated.of
    assert by_sample.of == 300


def test_a_wrong_answer_that_comes_often_is_not_hidden_by_counting_it_once() -> None:
    confidence = np.linspace(0, 1, 1000)[None]
    agrees = np.ones((1, 1000), np.bool_)
    agrees[0, 500] = False
    copies = np.ones(1000, np.int64)
    copies[500] = 300
    path = np.array([[2.0], [0.9], [0.1]])
    once = certify(path, confidence, agrees, max_disagreement=0.01)
    often = certify(path, confidence, agrees, max_disagreement=0.01, copies=copies)
    assert once is not None
    assert often is not None
    assert (once.index, often.index) == (2, 1)
    assert often.p_value == pytest.approx(2 * 0.99**1000)
