"""Reports of measurements, and the messages without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests import small_bert
from tests.unit.tools.gpu.fake_machine import FakeMachine

from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import probe
from offramp.tools.gpu import benchmark, environment
from offramp.tools.gpu.runtime import held

UNIT = {
    "precision": "fp16",
    "measured_build_s": 12.0,
    "measured_load_s": 0.5,
    "measured_difference_by_profile": [1e-4, 2e-4],
    "agrees": True,
    "measured_ms_by_batch": {"32": 2.0},
}
CONTENT = {
    "kernels": {
        "stage_ends": [
            {"stage": "resnet50 stage1", "rows": 32, "survivors": 16, "measured_ms": 0.02},
            {"stage": "resnet50 stage1", "rows": 8, "survivors": 4, "measured_ms": 0.01},
            {"stage": "no tensors", "rows": 32, "survivors": 16, "measured_ms": 0.003},
        ],
        "compaction": [
            {
                "rows": 32,
                "row_bytes": 1 << 22,
                "gb_per_s": {"copy": 4000, "stage_end": 3000},
                "share_of_copy": {"stage_end": 0.75},
            }
        ],
    },
    "engines": {"units": {"resnet50/stage1/fp16": UNIT}},
}


def test_stage_ends_are_set_beside_the_stages_that_they_end() -> None:
    assert benchmark.shares(CONTENT) == [
        {
            "stage": "resnet50 stage1",
            "precision": "fp16",
            "rows": 32,
            "survivors": 16,
            "share_of_stage": 0.01,
        }
    ]


def test_the_table_says_what_counts() -> None:
    lines = list(benchmark.table({**CONTENT, "share_of_stage": benchmark.shares(CONTENT)}))
    assert "built   12.0 s, loaded  0.50 s, agrees (2e-04); ms by batch 32: 2.000" in lines[0]
    assert "128.00 MiB: GB/s copy 4000, stage_end 3000" in lines[1]
    assert "fp16: 1.00% of the stage (goal: 2%)" in lines[2]
    assert "75% of a copy's rate at least (goal: 70%)" in lines[3]


def test_an_engine_that_failed_is_in_the_table() -> None:
    units = {"resnet50/stage0/fp32": {"failed": "out of memory"}}
    (line,) = benchmark.table({"engines": {"units": units}})
    assert "FAILED: out of memory" in line


def test_every_part_is_kept_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.json"
    benchmark.Document(path).save(kernels={"a": 1})
    benchmark.Document(path).save(engines={"b": 2})
    assert json.loads(path.read_text()) == {"kernels": {"a": 1}, "engines": {"b": 2}}
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"]


def test_without_a_gpu_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def absent(*_: object) -> None:
        raise BackendError("there is no NVIDIA driver here")

    monkeypatch.setattr(probe, "require", absent)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--output", str(tmp_path / "gpu.json")])
    assert benchmark.main() == 1
    assert capsys.readouterr().err == "benchmark: there is no NVIDIA driver here\n"
    assert not (tmp_path / "gpu.json").exists()


def test_the_environment_says_why_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise BackendError("there is no NVIDIA driver here")

    monkeypatch.setattr(probe, "find_device", absent)
    monkeypatch.setenv("PATH", "")
    found = environment.facts()
    assert found["driver"] == "missing: there is no NVIDIA driver here"
    assert found["gpu"] == "missing: see driver"
    assert found["nvcc"] == "missing: no nvcc on PATH"
    assert not found["numpy"].startswith("missing")


@pytest.mark.slow
def test_the_runtime_is_measured_into_an_entry_for_each_part_and_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "MODELS", {"bert-small": small_bert.MODEL})
    monkeypatch.setattr(sys, "argv", ["benchmark", "--only", "pame"])
    arguments = ["--backend", "cuda", "--models", "bert-small", "--sizes", "4,16", "--rounds", "1"]
    arguments += ["--plans", str(tmp_path), "--go-on", "0.5", "--soak-s", "0.5"]
    arguments += ["--requests", "4", "--no-graphs"]
    options = benchmark._parser().parse_args(arguments)
    document = benchmark.Document(tmp_path / "gpu.json")
    machine = FakeMachine()
    for part in ("models", "pame", "parallel", "soak"):
        benchmark.measure_runtime(part, options, document, machine)
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert list(content) == [f"{p}_cuda_fp32" for p in ("models", "pame", "parallel", "soak")]
    for entry in content.values():
        assert {"hardware", "command", "seed", "measured_utc"} <= entry.keys()
        assert list(entry["models"]) == ["bert-small"]
    made = content["models_cuda_fp32"]["models"]["bert-small"]
    assert made["exits_after"] == ["layer0.out", "layer1.out"]
    assert made["measured_build_s"] == {"00-01": 1.5}
    measured = content["pame_cuda_fp32"]["models"]["bert-small"]
    assert {row["batch_size"] for row in measured["latencies"]} == {16}
    assert measured["breakdown"][-1]["case"] == "source model"
    assert content["soak_cuda_fp32"]["models"]["bert-small"]["lost"] == 0
    said = capsys.readouterr().out
    assert "batch 16, 50% go on: ms source" in said
    assert "(goal +5%)" in said
    assert "stage end" in said
    assert "τ_b 16, no graphs" in said
    assert "0 lost; device memory flat" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "resnet18"], "resnet18 is not a model; choose from resnet50"),
        (["--go-on", "1.5"], "shares are from 0 to 1"),
        (["--sizes", "8,4"], "sizes must increase"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark._parser().parse_args(arguments)
    assert complaint in capsys.readouterr().err


def test_a_long_run_that_lost_something_is_no_success() -> None:
    good = {"flat": True, "sent": 5, "answered": 5, "drained": True}
    assert held({"a": good})
    assert held({})
    for worse in ({"flat": False}, {"answered": 4}, {"drained": False}):
        assert not held({"a": good, "b": {**good, **worse}})
