"""Heads learn what can be learned, the same in every run, and keep their best epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.calibration.heads_to_try import CLASSES, Problem, objective, problem

from offramp.bundle import Head
from offramp.calibration.data.training_options import TrainingOptions
from offramp.calibration.heads.features import FULL_TENSOR
from offramp.calibration.heads.head_training import count_steps, train_heads
from offramp.calibration.heads.learners import Preconditioners


def truth(made: Problem) -> np.ndarray:
    return made.answers[len(made.answers) * 2 // 3 :].argmax(axis=1)


SLOW_MAP = pytest.param("map", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", [SLOW_MAP, "tokens", "masked tokens", "vector"])
def test_a_separable_problem_is_learned_by_every_head(kind: str) -> None:
    made = problem(kind, samples=600)
    for head in made.train(epochs=20, learning_rate=1e-2):
        agreement = (head.said == truth(made)).mean()
        # class centres lie several deviations apart, but less so in a global average; padding
        # hides most tokens of some samples
        least = 0.8 if head.head.grid == 1 or kind == "masked tokens" else 0.95
        if head.head.kind == "last" and kind == "masked tokens":
            least = 0.5  # the last that counts is another token each time, with other centres
        assert agreement >= least, (head.head, agreement)


@pytest.mark.slow
def test_attention_finds_the_token_that_means_something() -> None:
    """One token of eight, at any place, says the class; the mean drowns in noise."""
    rng = np.random.default_rng(1)
    samples, tokens, width = 1500, 8, 8
    made = problem("tokens", samples=samples)
    classes = made.answers.argmax(axis=1)
    values = rng.standard_normal((samples, tokens, width)) * 1.5
    values[..., CLASSES] = 0
    rows, places = np.arange(samples), rng.integers(0, tokens, samples)
    values[rows, places, :CLASSES] = 4 * np.eye(CLASSES)[classes] - 1
    values[rows, places, CLASSES] = 4  # marks it
    made.features[FULL_TENSOR] = values.astype(np.float16)
    agreement = {
        (head.head.kind, head.head.queries, head.head.hidden): (head.said == truth(made)).mean()
        for head in made.train(epochs=25, learning_rate=3e-2, batch_size=64)
    }
    assert agreement["attention", 1, 0] > 0.9
    assert agreement["attention", 1, 0] > agreement["mean", 0, 0] + 0.1


def test_the_same_seed_gives_the_same_heads_and_another_other_ones() -> None:
    made = problem("masked tokens")
    first, again, other = (made.train(seed=seed) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.confidence, b.confidence)
        assert a.weights.keys() == b.weights.keys()
        for name in a.weights:
            np.testing.assert_array_equal(a.weights[name], b.weights[name])
    assert any((a.confidence != c.confidence).any() for a, c in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", [SLOW_MAP, "masked tokens"])
def test_threads_change_nothing(kind: str) -> None:
    made = problem(kind)
    for one, two in zip(made.train(threads=1), made.train(threads=3), strict=True):
        assert one.head == two.head
        np.testing.assert_array_equal(one.confidence, two.confidence)
        for name in one.weights:
            np.testing.assert_array_equal(one.weights[name], two.weights[name])


def test_a_head_does_not_depend_on_what_else_is_trained() -> None:
    made = problem("map")
    together = {head.head: head for head in made.train()}
    wanted = Head(kind="grid", grid=7)
    alone = replace(made, heads=(wanted, Head(kind="grid", grid=7, hidden=5))).train()
    np.testing.assert_array_equal(alone[0].confidence, together[wanted].confidence)


def test_preconditioners_are_used_again() -> None:
    made = problem("map")
    known: Preconditioners = {}
    first = made.train(known=known)
    assert {view.grid for view in known} == {1, 2, 4, 7, 14}
    fitted = dict(known)
    second = made.train(known=known)
    assert all(known[view] is fitted[view] for view in fitted)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.confidence, b.confidence)


def test_a_diverging_head_keeps_its_best_epoch() -> None:
    """A learning rate that ruins the epochs at its peak does not ruin the result."""
    made = problem("vector", samples=600)
    for head in made.train(epochs=40, learning_rate=3.0):
        assert (head.said == truth(made)).mean() > 0.9, head.head


def test_shapes_and_types() -> None:
    made = problem("map", samples=60)
    for head in made.train(epochs=1):
        features = 4 * head.head.grid**2
        first = head.weights["hidden_weight" if head.head.hidden else "weight"]
        assert first.shape == (features, head.head.hidden or CLASSES)
        assert all(w.dtype == np.float32 for w in head.weights.values())
        assert head.confidence.shape == head.said.shape == (20,)
        assert head.confidence.dtype == np.float32
        assert head.said.dtype.kind == "i"
        assert ((head.confidence >= 1 / CLASSES - 1e-6) & (head.confidence <= 1)).all()


def test_features_that_never_vary_do_no_harm() -> None:
    made = problem("vector", samples=600)
    values = made.features[FULL_TENSOR].astype(np.float32)
    values[:, 0], values[:, 1] = 0, 1234.5
    made.features[FULL_TENSOR] = values.astype(np.float16)
    for head in made.train(epochs=12, learning_rate=1e-2):
        assert (head.said == truth(made)).mean() > 0.9
        assert all(np.isfinite(w).all() for w in head.weights.values())


def test_the_recording_s_rounding_does_not_become_a_signal() -> None:
    """A feature all but constant at 1000 is recorded in steps of 1/2 and served in float32."""
    made = problem("vector", samples=600)
    values = made.features[FULL_TENSOR].astype(np.float32)
    values[:, 0] = 1000.24
    made.features[FULL_TENSOR] = values.astype(np.float16)
    for head in made.train(epochs=6):
        part = len(values) * 2 // 3
        if head.head.hidden:
            continue
        served = values[part:] @ head.weights["weight"] + head.weights["bias"]
        recorded = made.features[FULL_TENSOR][part:].astype(np.float32) @ head.weights["weight"]
        recorded += head.weights["bias"]
        # a step of 1/4 over a scale of 1000/256 is 6 % of a deviation of one feature
        assert abs(served - recorded).max() < 0.1


@pytest.mark.parametrize("samples", [3, 4, 6])
def test_very_few_samples_still_train(samples: int) -> None:
    for head in problem("tokens", samples=samples).train(epochs=2):
        assert np.isfinite(head.confidence).all()


def test_no_heads_to_train() -> None:
    made = problem("vector", samples=30)
    recording = made.recording(slice(None))
    trained = train_heads(
        recording,
        recording,
        cuts=[made.cut],
        families=[()],
        objective=objective(made.answers),
        options=TrainingOptions(),
    )
    assert trained == []


@pytest.mark.parametrize("kind", ["map", "tokens", "vector"])
def test_progress_adds_up(kind: str) -> None:
    made = problem(kind, samples=30)
    recording = made.recording(slice(None))
    options = TrainingOptions(epochs=2)
    steps: list[int] = []
    train_heads(
        recording,
        recording,
        cuts=[made.cut],
        families=[made.heads],
        objective=objective(made.answers),
        options=options,
        progress=steps.append,
    )
    assert sum(steps) == count_steps([made.heads], options)
