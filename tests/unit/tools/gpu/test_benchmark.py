"""What is written about measurements, and what is said where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from offramp.engine.errors import BackendError
from offramp.engine.tensorrt import probe
from offramp.tools.gpu import benchmark, environment

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
