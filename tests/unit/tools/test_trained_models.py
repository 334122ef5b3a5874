"""The benchmark of models that are trained for minutes: its figures, on rows and on a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.trained_models import compile_by_default, exits_of, measure, summarise
from tests.small import compile_small

from offramp.calibration.data.dataset import read_dataset
from offramp.certify import upper_bound
from offramp.tools.bench.common.compare import NO_EXIT, OFFRAMP, SOURCE, Row


def run_of(*, source: float, offramp: float, no_exit: float) -> dict[str, Row]:
    busy = {SOURCE: source, OFFRAMP: offramp, NO_EXIT: no_exit}
    return {
        name: Row(
            system=name,
            batch_size=16,
            mean_ms=ms / 2,
            median_ms=1.0,
            p95_ms=1.0,
            p99_ms=1.0,
            busy_ms_per_sample=ms,
            agreement=0.99 if name == OFFRAMP else 1.0,
            accuracy=0.9,
            exit_shares={"exit 0": 0.5, "final": 0.5},
        )
        for name, ms in busy.items()
    }


def test_ratios_are_of_one_run_each_and_then_medians() -> None:
    runs = [
        run_of(source=1.0, offramp=0.5, no_exit=1.1),
        run_of(source=2.0, offramp=0.8, no_exit=2.0),  # a slow run: its ratio alone counts
        run_of(source=1.0, offramp=0.7, no_exit=1.2),
    ]
    found = summarise({"wall": runs, "cpu": runs[:1]}, 400)
    assert found["wall"]["busy"] == {"median": 0.5, "least": 0.4, "most": 0.7}
    assert found["wall"]["busy_nothing_exits"]["median"] == 1.1
    assert found["wall"]["mean_latency"] == {"median": 0.5, "least": 0.4, "most": 0.7}
    assert found["wall"]["source_ms"] == 16.0
    assert found["cpu"]["busy"]["most"] == 0.5
    assert found["disagreement_at_most"] == upper_bound(4, 400)


def test_a_bundle_is_measured_and_described(tmp_path: Path) -> None:
    bundle, inputs = compile_small(tmp_path)
    dataset = read_dataset(inputs, bundle.manifest.inputs)

    figures = measure(bundle, dataset, 2, (1, 16))["batches"]

    assert {*figures} == {"1", "16"}
    assert figures["16"]["samples"] == 400
    assert figures["16"]["wall"]["source_ms"] > 0 < figures["16"]["cpu"]["source_ms"]
    assert sum(figures["16"]["exit_shares"].values()) == pytest.approx(1.0)
    assert figures["16"]["exit_shares"] == figures["1"]["exit_shares"]
    told = exits_of(bundle)
    assert {*told["in_use"]} == {*figures["1"]["exit_shares"]} - {"final"}
    assert told["certify_samples"] == bundle.manifest.calibration.certify_samples


def test_a_failed_compilation_names_model_and_exit_status(tmp_path: Path) -> None:
    missing = tmp_path / "missing.onnx"
    with pytest.raises(SystemExit, match=r"missing\.onnx ended with 1"):
        compile_by_default(missing, tmp_path / "data.npz", tmp_path / "made.ee")
