"""The benchmark of Apparate's headline: orders of samples, optimal exits, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.adapt.sequence import Population
from benchmarks.apparate import OptimalExits, SampleStream, main, workloads_of
from benchmarks.orders import random_order, review_order, video_order

from offramp.calibration.data.dataset import Dataset
from offramp.certify import MODEL_END
from offramp.engine.control.costs import CostModel
from offramp.tools.bench.common.outcomes import Outcomes, Status

BUNDLE = Path(__file__).parents[2] / "golden" / "bundle"


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def dataset(array: Any) -> Dataset:
    return Dataset(inputs={"x": array}, labels=None, sha256="")


def test_every_order_sends_each_sample_once() -> None:
    images = rng().standard_normal((200, 1, 4, 4)).astype(np.float32)
    classes = np.arange(200) % 7
    for order in (
        random_order(200, rng()),
        video_order(images, rng()),
        review_order(classes, rng()),
    ):
        assert sorted(order.tolist()) == list(range(200))
        assert order.tolist() != list(range(200))


def test_consecutive_samples_of_a_video_are_alike_within_a_scene() -> None:
    """Samples on a line: their place is their value, and a scene walks along it."""
    line = np.arange(100, dtype=np.float32)[:, None] * np.ones((1, 8), np.float32)
    order = video_order(line, rng(), scene=10)
    steps = np.abs(np.diff(order))
    within = np.ones(99, np.bool_)
    within[9::10] = False
    assert np.median(steps[within]) == 1
    assert np.median(steps[~within]) > 5
    assert np.median(np.abs(np.diff(random_order(100, rng())))) > 5


def test_reviews_come_class_by_class() -> None:
    classes = np.array([2, 0, 1, 0, 2, 1, 2, 0])
    sent = classes[review_order(classes, rng())]
    assert np.count_nonzero(np.diff(sent)) == 2


def test_videos_are_of_images_alone() -> None:
    classes = np.arange(40) % 2
    images = dataset(np.zeros((40, 3, 8, 8), np.float32))
    names = [w.name for w in workloads_of(images, classes, 0)]
    assert names == ["poisson", "video", "reviews"]
    tokens = dataset(np.zeros((40, 8), np.int64))
    assert [w.name for w in workloads_of(tokens, classes, 0)] == ["poisson", "reviews"]
    evenly = {w.name: np.ptp(np.diff(w.trace(100.0, 1.0, 0).arrivals_s)) < 1e-9
              for w in workloads_of(images, classes, 0)}  # fmt: skip
    assert evenly == {"poisson": False, "video": True, "reviews": False}


def test_no_sample_is_sent_twice() -> None:
    data = dataset(np.arange(0, 30, 10, dtype=np.uint8)[:, None])
    stream = SampleStream(data, np.array([2, 0, 1]))
    first, first_rows = stream.take(2)
    second, second_rows = stream.take(4)
    assert [*first_rows, *second_rows] == [2, 0, 1, 2, 0, 1]
    sent = [int(inputs["x"][0, 0]) for inputs in (*first, *second)]
    assert sent == [20, 0, 10, 21, 1, 11]
    assert data.inputs["x"].ravel().tolist() == [0, 10, 20]


COSTS = CostModel(
    source_ms=10.0,
    segments_ms=(4.0, 5.5, 0.5),
    stages_ms=(0.0, 0.0),
    after_segment=(0, 1),
    exits_ms=(1.0, 1.0),
)
"""Leaving at exit 0 saves half of the time; at exit 1, which costs more than what follows, none."""


def population(right_at: Iterable[int]) -> Population:
    """Samples that are answered like the model from an exit on; 2 is the model's end."""
    prediction = np.array([[int(exit_ >= first) for first in right_at] for exit_ in range(2)])
    samples = prediction.shape[1]
    return Population(
        confidence=np.zeros((2, samples), np.float32),
        prediction=prediction.astype(np.int32),
        final=np.ones(samples, np.int32),
        labels=None,
    )


def test_optimal_exits_are_the_first_right_ones() -> None:
    found = OptimalExits.of(population([0, 1, 2]), COSTS)
    assert found.exit.tolist() == [0, MODEL_END, MODEL_END]
    np.testing.assert_allclose(found.saved, [0.5, 0.0, 0.0])


def test_optimal_latency_is_the_measured_one_less_what_is_avoided() -> None:
    found = OptimalExits.of(population([0, 2]), COSTS)
    outcomes = Outcomes(
        intended_s=np.zeros(3),
        latency_s=np.array([0.03, 0.03, np.nan]),
        status=np.array([Status.OK, Status.OK, Status.EXPIRED], np.uint8),
        exit=np.full(3, MODEL_END, np.int16),
        forced=np.zeros(3, np.bool_),
        agrees=np.array([1, 1, -1], np.int8),
        duration_s=1.0,
    )
    best = found.improve(outcomes, np.array([0, 1, 0]), lone_ms=20.0)
    np.testing.assert_allclose(best.latency_s, [0.02, 0.03, np.nan])
    assert best.exit.tolist() == [0, MODEL_END, MODEL_END]
    assert best.status.tolist() == outcomes.status.tolist()


@pytest.mark.slow
def test_what_is_written(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", sample=np.arange(1000)[:, None])
    given = [str(BUNDLE), "--data", str(tmp_path / "data.npz"), "--quick", "--seed", "3"]
    main([*given, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["off"]["label"] == "MEASURED"
    assert found["off"]["capacity_rps"] > 0
    assert found["environment"]["seed"] == 3
    systems = ["off", "optimal", "apparate", "release", "audit", "leave"]
    assert [(r["workload"], r["system"]) for r in found["latency"]] == [
        (workload, system) for workload in ("poisson", "reviews") for system in systems
    ]
    assert [r["system"] for r in found["slo"]] == systems
    assert found["slo"][0]["slo_ms"] == pytest.approx(8 * found["off"]["lone_ms"])
    budgets = [r["ramp_budget"] for r in found["ramp_budget"] if "ramp_budget" in r]
    assert budgets == [0.02, 0.02, 0.1, 0.1]
    assert [r["constraint"] for r in found["constraint"] if "constraint" in r] == [0.05, 0.05]
    for name in ("latency", "slo", "ramp_budget", "constraint"):
        for row in found[name]:
            assert row["label"] == ("SIMULATED" if row["system"] == "optimal" else "MEASURED")
            assert row["requests"] > 0
    off, best = found["latency"][:2]
    assert best["latency_ms"]["mean"] <= off["latency_ms"]["mean"]
