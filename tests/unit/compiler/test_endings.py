"""The confidence that an exit's graph computes is the one that numpy finds in its answer."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.bundle import Answer
from offramp.bundle.schema.answers import AnswerForm, AnswerTask, TaskKind
from offramp.compiler.exits.endings import (
    CONFIDENCE,
    DescribedTensor,
    PartBuilder,
    add_confidence,
    add_principal,
    end_labels,
    end_values,
)
from offramp.engine.answers.exit_check import exits
from offramp.engine.answers.principal_values import principal_values, sure_of

SHARES = (1.0, 0.99, 0.9, 0.6, 0.5, 0.3)
OPSETS = (13, 18)


def answer(kind: TaskKind, classes: int, form: AnswerForm) -> Answer:
    return Answer(output="y", classes=classes, form=form, task=AnswerTask(kind=kind))


def run(part: PartBuilder, inputs: list[DescribedTensor], outputs, **arrays):
    session = ort.InferenceSession(part.build(inputs, outputs))
    return session.run([name for name, _, _ in outputs], arrays)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("kind", "form", "shape"),
    [
        ("segmentation", "logits", (4, 3, 6, 5)),
        ("segmentation", "probabilities", (4, 3, 6, 5)),
        ("segmentation", "logits", (2, 2, 70, 70)),
        ("token-classification", "logits", (4, 9, 3)),
        ("pose", "values", (4, 3, 6, 5)),
    ],
    ids=str,
)
def test_dense_answers(kind, form, shape, share, fixed, opset) -> None:
    if not fixed and shape[-1] > 8:
        pytest.skip("of maps of unknown size all pixels are looked at")
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 3, shape).astype(np.float32)
    if form == "probabilities":
        scores = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    if form == "values":
        scores[1, 0, 0, 0] = 7
    scores[2 % shape[0]].flat[5] = np.nan
    axis = 2 if kind == "token-classification" else 1
    given = answer(kind, shape[axis], form)
    sizes = shape[1:] if fixed else tuple("tuv"[: len(shape) - 1])
    part = PartBuilder("p/", opset, 8)
    principal, places = add_principal(part, "scores", given, ("batch", *sizes))
    add_confidence(part, principal, share, places=places)
    told: DescribedTensor = ("p/" + CONFIDENCE, "float32", ("batch",))
    (found,) = run(part, [("scores", "float32", ("batch", *sizes))], [told], scores=scores)
    expected = sure_of(principal_values(scores, form, given.task), share)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fixed", [True, False])
def test_tokens_that_a_mask_leaves_out(share: float, fixed: bool) -> None:
    rng = np.random.default_rng(2)
    scores = rng.normal(0, 3, (12, 11, 4)).astype(np.float32)
    mask = (np.arange(11) < np.arange(12)[:, None]).astype(np.float32)
    given = answer("token-classification", 4, "logits")
    part = PartBuilder("p/", 17, 8)
    shape = ("batch", 11 if fixed else "t", 4)
    principal, places = add_principal(part, "scores", given, shape)
    add_confidence(part, principal, share, places=places, mask="mask")
    told: DescribedTensor = ("p/" + CONFIDENCE, "float32", ("batch",))
    inputs: list[DescribedTensor] = [("scores", "float32", shape), ("mask", "float32", shape[:2])]
    (found,) = run(part, inputs, [told], scores=scores, mask=mask)
    expected = sure_of(principal_values(scores, "logits", given.task), share, mask)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["logits", "probabilities"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_labels(form: AnswerForm, share: float, dtype: str) -> None:
    logits = np.random.default_rng(3).normal(0, 2, (6, 5)).astype(np.float32)
    given = answer("multi-label", 5, form)
    part = PartBuilder("p/", 17, 8)
    named = "y" if form == "logits" and dtype == "float32" else ""
    end_labels(part, part.add("Identity", ["scores"], named), given, dtype, share)
    outputs: list[DescribedTensor] = [
        ("p/y", dtype, ("batch", 5)),
        ("p/" + CONFIDENCE, "float32", ("batch",)),
    ]
    inputs: list[DescribedTensor] = [("scores", "float32", ("batch", 5))]
    said, confidence = run(part, inputs, outputs, scores=logits)
    wanted = logits if form == "logits" else 1 / (1 + np.exp(-logits))
    assert said.dtype == dtype
    np.testing.assert_allclose(said, wanted, atol=1e-6 if dtype == "float32" else 4e-3)
    expected = sure_of(principal_values(logits, "logits", given.task), share)
    np.testing.assert_allclose(confidence, expected, atol=1e-6)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    labels=st.integers(1, 20),
    share=st.sampled_from([*SHARES, 2 / 3, 0.1]),
)
def test_a_graph_lets_label_sets_leave_by_the_count_rule(
    seed: int, labels: int, share: float
) -> None:
    """At least n labels must reach the threshold: exactly, also at equal values; NaN reaches
    none.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (8, labels)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.02] = np.nan
    part = PartBuilder("p/", 17, 8)
    scores = part.add("Identity", ["scores"])
    end_labels(part, scores, answer("multi-label", labels, "probabilities"), "float32", share)
    outputs: list[DescribedTensor] = [
        ("p/y", "float32", ("batch", labels)),
        ("p/" + CONFIDENCE, "float32", ("batch",)),
    ]
    inputs: list[DescribedTensor] = [("scores", "float32", ("batch", labels))]
    chance, confidence = run(part, inputs, outputs, scores=logits)
    decided = np.fmax(np.maximum(chance, 1 - chance), np.float32(0))
    wanted = max(math.ceil(share * labels - 1e-6), 1)
    for threshold in (*decided.ravel(), 0.3, 0.6, 0.9, 1.0):
        count = (decided >= np.float32(threshold)).sum(axis=1, dtype=np.int32)
        rule = count >= wanted
        np.testing.assert_array_equal(exits(confidence, threshold), rule)


def test_values_and_the_chance_that_they_are_near() -> None:
    scores = np.random.default_rng(4).normal(0, 2, (6, 4)).astype(np.float32)
    given = answer("regression", 3, "values")
    part = PartBuilder("p/", 17, 8)
    end_values(part, "scores", given, "float32")
    outputs: list[DescribedTensor] = [
        ("p/y", "float32", ("batch", 3)),
        ("p/" + CONFIDENCE, "float32", ("batch",)),
    ]
    said, confidence = run(part, [("scores", "float32", ("batch", 4))], outputs, scores=scores)
    np.testing.assert_array_equal(said, scores[:, :3])
    np.testing.assert_allclose(confidence, 1 / (1 + np.exp(-scores[:, 3])), atol=1e-6)
