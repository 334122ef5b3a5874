"""Confidences of an exit's graph, by each criterion, equal numpy's for its answer."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.bundle import Answer
from offramp.bundle.schema.answers import IN_GRAPH, AnswerTask, Criterion
from offramp.calibration.heads.objectives import fit_certainty
from offramp.compiler.exits.endings import CONFIDENCE, PartBuilder, end_classes, with_certainty
from offramp.engine.answers.certainty import log_odds, statistics_of, sure_by
from offramp.engine.answers.exit_check import confidence_of

WEIGHTS = (0.7, -0.4, 1.3, 0.5)
NUMBERS = st.sampled_from([-np.inf, np.inf, np.nan, -90.0, -1.0, 0.0, 0.5, 1.0, 3.0, 30.0, 90.0])
# One row at least: older ONNX Runtimes end the process in a TopK of no rows, which nothing runs.
LOGITS = st.tuples(st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=NUMBERS)
)


def exit_of(criterion: str, classes: int, form="logits", opset: int = 17) -> bytes:
    answer = Answer(output="y", classes=classes, form=form, criterion=Criterion(name=criterion))
    part = PartBuilder("p/", opset, 8)
    scores = part.add("Identity", ["scores"], "y" if form == "logits" else "")
    weights = WEIGHTS if criterion == "learned" else ()
    end_classes(part, scores, answer, "float32", weights)
    told = [("p/y", "float32", ("batch", classes)), ("p/" + CONFIDENCE, "float32", ("batch",))]
    return part.build([("scores", "float32", ("batch", classes))], told)


def run(graph: bytes, logits):
    session = ort.InferenceSession(graph)
    return session.run(["p/y", "p/" + CONFIDENCE], {"scores": logits})


@pytest.mark.parametrize("form", ["logits", "probabilities"])
@pytest.mark.parametrize("criterion", IN_GRAPH)
@settings(max_examples=60, deadline=None)
@given(logits=LOGITS)
def test_graphs_say_what_numpy_says(criterion: str, form, logits) -> None:
    answer, found = run(exit_of(criterion, logits.shape[1], form), logits)
    expected = sure_by(statistics_of(answer, form), criterion, WEIGHTS)
    # float32's steps near 1, which log-odds see much of, and learned weighs
    np.testing.assert_allclose(np.fmax(found, 0), expected, rtol=0, atol=3e-6)
    assert ((expected >= 0) & (expected <= 1)).all()
    bad = np.isnan(answer).any(axis=1) | np.isposinf(logits).any(axis=1)
    assert (expected[bad] == 0).all()


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("criterion", IN_GRAPH)
def test_random_logits_and_ties(criterion: str, opset: int) -> None:
    logits = np.random.default_rng(1).normal(0, 4, (500, 7)).astype(np.float32)
    logits[::5] = logits[::5].round()
    logits[3] = 1
    answer, found = run(exit_of(criterion, 7, opset=opset), logits)
    expected = sure_by(statistics_of(answer, "logits"), criterion, WEIGHTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)
    if criterion != "learned":  # of all classes alike
        assert found[3] == pytest.approx(1 / 7 if criterion == "probability" else 0, abs=1e-6)


@pytest.mark.parametrize("criterion", ["entropy", "margin"])
def test_another_criterion_takes_the_place_of_that_of_a_graph(criterion: str) -> None:
    logits = np.random.default_rng(2).normal(0, 4, (50, 7)).astype(np.float32)
    graph = exit_of("probability", 7)
    answer = Answer(output="y", classes=7, form="logits")
    changed = with_certainty(graph, {"p/y": "p/confidence"}, answer, "float32", criterion)
    said, found = run(changed, logits)
    np.testing.assert_array_equal(said, logits)
    np.testing.assert_allclose(found, run(exit_of(criterion, 7), logits)[1], rtol=0, atol=1e-6)


def test_the_statistics_of_known_answers() -> None:
    answers = np.array([[0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    found = statistics_of(answers, "probabilities")
    entropy = 1 + (0.7 * np.log(0.7) + 0.3 * np.log(0.1)) / np.log(4)
    expected = [[0.5, 0, 0.5], [1, 1, 1], [0.25, 0, 0], [0.7, 0.6, entropy]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    logits = np.random.default_rng(3).normal(0, 3, (40, 5)).astype(np.float32)
    largest = statistics_of(logits, "logits")[:, 0]
    np.testing.assert_allclose(largest, confidence_of(logits, "logits"), rtol=1e-6)


def test_learned_weights_tell_who_agrees() -> None:
    rng = np.random.default_rng(4)
    statistics = statistics_of(rng.normal(0, 2, (4000, 6)).astype(np.float32), "logits")
    design = np.column_stack([log_odds(statistics), np.ones(4000)])
    true = np.array([0.5, 0.8, 0.0, 1.0])
    agrees = rng.random(4000) < 1 / (1 + np.exp(-design @ true))
    weights = fit_certainty(statistics, agrees)
    sure = sure_by(statistics, "learned", weights)
    # at the minimum, the penalty and the data pull alike
    pull = design.T @ (sure - agrees) + np.array(weights) - [1, 0, 0, 0]
    np.testing.assert_allclose(pull, 0, atol=0.05)
    plain = -np.log(np.where(agrees, statistics[:, 0], 1 - statistics[:, 0])).mean()
    assert -np.log(np.where(agrees, sure, 1 - sure)).mean() < plain
    kept = fit_certainty(statistics[:0], agrees[:0])
    assert kept == (1, 0, 0, 0)


def test_what_no_criterion_is() -> None:
    with pytest.raises(ValueError, match="is for classification, not for pose"):
        Answer(output="y", classes=3, form="values", task=AnswerTask(kind="pose"),
               criterion=Criterion(name="entropy"))  # fmt: skip
    with pytest.raises(ValueError, match="lower-case letters"):
        Criterion(name="../x")
    with pytest.raises(ValueError, match="patience: recorded that it does not depend"):
        Criterion(name="patience")
    with pytest.raises(ValueError, match="expected the criterion learned with 4"):
        sure_by(np.zeros((1, 3), np.float32), "learned", (1.0,))
