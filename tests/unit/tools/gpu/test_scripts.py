"""The scripts for a GPU machine, as far as any machine goes with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.facts import Told, tells

SCRIPTS = Path(__file__).parents[4] / "tools" / "gpu"
NAMES = sorted(path.name for path in SCRIPTS.glob("*.sh"))

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / name), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_all_scripts_are_looked_at() -> None:
    others = ["everything.sh", "pycuda.sh", "run_tests.sh", "setup.sh"]
    assert ["benchmark.sh", "collect.sh", *others] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_help_says_how_to_call(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: tools/gpu/{name} ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("collect.sh", ["--tensorrt", "9"], ("FOLDER",)),
        ("collect.sh", ["folder", "--tensorrt", "9"], ("--tensorrt", "8.6.0", "9")),
        ("collect.sh", ["folder", "--tensorrrt"], ("there is no option --tensorrrt",)),
        ("collect.sh", ["folder", "--wheel"], ("--wheel needs a value",)),
        ("setup.sh", [], ("give a FOLDER",)),
        ("setup.sh", ["/nowhere"], ("/nowhere/part-00", "collect.sh")),
        ("run_tests.sh", ["--place", "/nowhere"], ("there is no environment at /nowhere",)),
        ("collect.sh", ["f", "--tensorrt", "8.6.0", "--provider", "1"], ("is for Python 3.12",)),
        ("everything.sh", ["--place", "/nowhere"], ("there is no environment at /nowhere",)),
        ("run_tests.sh", ["--limit", "soon"], ("--limit soon", "seconds")),
        ("benchmark.sh", ["--place", "/nowhere"], ("there is no environment at /nowhere",)),
    ],
)
def test_what_makes_no_sense_is_said(name: str, arguments: list[str], message: Told) -> None:
    done = run(name, *arguments)
    assert done.returncode in (1, 2)
    tells(done.stderr, *message)
