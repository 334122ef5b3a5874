"""Scenarios: which samples are drawn how often, and what the data must be like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.adapt.scenarios import (
    SCENARIOS,
    ScenarioData,
    ScenarioSettings,
    is_easy,
    scenarios_of,
)
from benchmarks.adapt.sequence import Population
from tests.facts import facts

from offramp.calibration.data.dataset import Dataset

EXITS = 4
SAMPLES = 200


class Recorded:
    """Answers at random, but the first 120 samples surely and rightly at exit 1."""

    def __init__(self) -> None:
        self.asked: list[Dataset] = []

    def record(self, dataset: Dataset) -> Population:
        self.asked.append(dataset)
        count = len(dataset)
        final = np.arange(count, dtype=np.int32) % 6
        confidence = np.full((EXITS, count), 0.5, np.float32)
        confidence[1, :120] = 0.95
        confidence[2:] = 0.99  # of the second half: makes none easy
        prediction = np.tile(final, (EXITS, 1))
        confidence[0, 150:151] = 1.0  # sure, but wrong
        prediction[0, 150:151] += 1
        return Population(
            confidence=confidence, prediction=prediction, final=final, labels=dataset.labels
        )


def material(
    *, names: tuple[str, ...] = ("test",), shape: tuple[int, ...] = (1, 8, 8), **changed: Any
) -> tuple[ScenarioData, Recorded]:
    settings = {"samples": 50, "corruption": "noise", "severity": 2, "seed": 3, **changed}
    recorder = Recorded()
    images = np.full((SAMPLES, *shape), 100, np.uint8)
    datasets = {
        name: Dataset(inputs={"x": images}, labels=np.arange(SAMPLES) % 10, sha256="")
        for name in names
    }
    return ScenarioData(datasets, recorder.record, ScenarioSettings(**settings)), recorder


def test_easy_are_those_answered_surely_and_rightly_in_the_first_half() -> None:
    """A fifth is hard: 40 of 200. Sample 150 is surest at exit 0, but wrong; the second half says
    nothing; of those alike the first in the data are taken to be harder."""
    subject, _ = material()
    hard = np.flatnonzero(~is_easy(subject.population())).tolist()
    assert hard == [*range(120, 160)]
    population = subject.population()
    population.confidence[0, 0] = 0.0  # exit 1 is sure of it
    population.confidence[1, 7] = 0.1  # exit 0 is half sure of it
    population.prediction[0, 199] += 1  # no exit of the first half is right
    population.prediction[1, 199] += 1
    hard = np.flatnonzero(~is_easy(population)).tolist()
    assert hard == [7, *range(120, 158), 199]


def test_difficulty_mixes_as_the_names_say() -> None:
    subject, recorder = material()
    segments = SCENARIOS["difficulty"].segments(subject)
    assert [s.name for s in segments] == ["80:20", "50:50", "20:80"]
    assert [s.samples for s in segments] == [50, 50, 50]
    easy = is_easy(subject.population())
    for segment, part in zip(segments, (0.8, 0.5, 0.2), strict=True):
        assert segment.weights[easy].sum() == pytest.approx(part)
        assert len(set(segment.weights[easy].round(12))) == 1
        assert len(set(segment.weights[~easy].round(12))) == 1
    assert len(recorder.asked) == 1


def test_classes_by_label_else_by_the_models_answer() -> None:
    subject, _ = material()
    every, lower, upper = SCENARIOS["classes"].segments(subject)
    assert [s.name for s in (every, lower, upper)] == ["all classes", "mostly 0–4", "mostly 5–9"]
    low = np.arange(SAMPLES) % 10 < 5
    assert every.weights[low].sum() == pytest.approx(0.5)
    assert lower.weights[low].sum() == pytest.approx(0.9)
    assert upper.weights[low].sum() == pytest.approx(0.1)
    unlabelled = Dataset(
        inputs={"x": np.zeros((SAMPLES, 1, 8, 8), np.uint8)}, labels=None, sha256=""
    )
    settings = ScenarioSettings(samples=5, corruption="blur", severity=1, seed=0)
    segments = SCENARIOS["classes"].segments(
        ScenarioData({"a": unlabelled}, Recorded().record, settings)
    )
    assert [s.name for s in segments] == ["all classes", "mostly 0–2", "mostly 3–5"]


def test_corruption_grows_and_abrupt_comes_back() -> None:
    subject, recorder = material()
    names = [s.name for s in SCENARIOS["corruption"].segments(subject)]
    assert names == ["clean", "noise 1", "noise 2"]
    clean, worse, again = SCENARIOS["abrupt"].segments(subject)
    assert [s.name for s in (clean, worse, again)] == ["clean", "noise 2", "clean again"]
    assert clean.population is again.population
    # each variant is recorded once: clean, 1 and 2
    spread = [float(d.inputs["x"].std()) for d in recorder.asked]
    assert spread[0] == 0
    assert spread[0] < spread[1] < spread[2]
    assert all(d.inputs["x"].dtype == np.uint8 for d in recorder.asked)


def test_domains_are_the_data_sets_in_turn() -> None:
    subject, recorder = material(names=("films", "books"))
    segments = SCENARIOS["domain"].segments(subject)
    assert [s.name for s in segments] == ["films", "books"]
    assert len(recorder.asked) == 2
    for segment in segments:
        np.testing.assert_allclose(segment.weights, 1 / SAMPLES)


def test_all_are_those_that_the_data_allows() -> None:
    both, _ = material(names=("a", "b"))
    assert set(scenarios_of(["all"], both)) == set(SCENARIOS)
    one, _ = material()
    assert set(scenarios_of(["all"], one)) == set(SCENARIOS) - {"domain"}
    text, _ = material(shape=(16,))
    assert set(scenarios_of(["all"], text)) == {"difficulty", "classes"}
    assert list(scenarios_of(["classes", "difficulty"], one)) == ["classes", "difficulty"]


def test_mistakes_are_explained() -> None:
    text, _ = material(shape=(16,))
    with pytest.raises(ValueError, match="unknown scenario 'corrupion'; did you mean 'corruption'"):
        scenarios_of(["corrupion"], text)
    with pytest.raises(ValueError, match=facts("'abrupt'", "model with")):
        scenarios_of(["abrupt"], text)
    with pytest.raises(ValueError, match=facts("'domain'", "--data twice")):
        scenarios_of(["domain"], text)
    with pytest.raises(ValueError, match=facts("corruptions", "one input of images")):
        text.population(severity=1)


def test_groups_that_are_too_small_are_refused() -> None:
    few = Dataset(inputs={"x": np.zeros((90, 1, 8, 8), np.uint8)}, labels=None, sha256="")
    settings = ScenarioSettings(samples=5, corruption="noise", severity=1, seed=0)
    with pytest.raises(ValueError, match=facts("18 hard samples", "too few")):
        SCENARIOS["difficulty"].segments(ScenarioData({"few": few}, Recorded().record, settings))
