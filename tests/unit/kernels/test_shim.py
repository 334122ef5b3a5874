"""The CPU build finds faults: kernels that are broken on purpose fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.kernels.shim import SOURCES, Cpu, build, find_compiler
from tests.unit.kernels.try_out import FOUND, try_out

_ROOT = Path(__file__).parents[3]
SYNC = "    __syncthreads();"
FAULTS = {
    "sums read before they are there": (
        "reduction.cuh",
        "= value;\n" + SYNC,
        "= value;",
    ),
    "sums overwritten before they are read": (
        "reduction.cuh",
        SYNC + "  // before the next call writes of_warps",
        "",
    ),
    "NaN is passed over": ("reduction.cuh", "is_nan(left.largest) || ", ""),
    "sums are not rescaled": ("reduction.cuh", "right.sum * scale", "right.sum"),
    "infinity is sure": ("exit_check.cuh", "return finite ?", "return finite || true ?"),
    "NaN is sure": (
        "scores.cuh",
        "fminf(fmaxf(probability, 0.0f), 1.0f)",
        "fmaxf(fminf(probability, 1.0f), 0.0f)",
    ),
    "counts read before they are there": (
        "survivors.cuh",
        "__popc(of_warp);\n    " + SYNC,
        "__popc(of_warp);",
    ),
    "counts overwritten before they are read": (
        "survivors.cuh",
        SYNC + "  // before counts is written again",
        "",
    ),
    "survivors in another order": (
        "survivors.cuh",
        "of_warp & ((1u << lane_number()) - 1)",
        "of_warp & ~((2u << lane_number()) - 1)",
    ),
    "a word too many": (
        "row_copy.cuh",
        "if (32 * step < left) target",
        "if (32 * step <= left) target",
    ),
    "a piece left out": ("row_copy.cuh", "return piece - pieces;", "return piece;"),
    "tickets read before they are there": ("stage_end.cu", "1u);\n" + SYNC, "1u);"),
    "roles by blockIdx": ("stage_end.cu", "= take_ticket(scratch, shared)", "= blockIdx.x"),
    "nobody waits for the survivors": (
        "stage_end.cu",
        "fresh(scratch.published)) == 0)",
        "fresh(scratch.published)) == 7)",
    ),
    "counters left over": ("stage_end.cu", "scratch.checked = 0;", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler here: CXX, g++, c++, clang++")
    name, right, wrong = FAULTS[fault]
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in [*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")]:
        shutil.copy(path, folder)
    text = (folder / name).read_text()
    assert text.count(right) >= 1, f"{name} has changed: {right!r} is not in it"
    (folder / name).write_text(text.replace(right, wrong))
    command = [sys.executable, "-m", "tests.unit.kernels.try_out", build(tmp_path, folder)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    crashed = done.returncode < 0
    assert crashed or done.returncode == FOUND, done.stdout + done.stderr


def test_what_is_whole_passes_the_same(cpu: Cpu) -> None:
    try_out(cpu)
