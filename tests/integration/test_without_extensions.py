"""The core imports, type-checks and passes its unit tests where no extension is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offramp.tools.layers import read_modules

ROOT = Path(__file__).parents[2]
EXTENSIONS = ("baselines", "cluster", "supernet")
USERS = ("testing", "tools")
"""Folders beside the core that have fakes of extensions, and commands for them."""
LIMIT_S = 900


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without the extensions, and without what is of them beside the core."""
    copy = tmp_path_factory.mktemp("core")
    left = (*EXTENSIONS, *USERS)
    for entry in (
        "pyproject.toml",
        "src",
        *(each.name for each in (ROOT / "src/offramp").iterdir()),
    ):
        if entry in left or entry in ("__init__.py", "start.py", "py.typed", "__pycache__"):
            continue
        source = ROOT / entry
        if source.is_dir():
            shutil.copytree(source, copy / entry, symlinks=True, ignore=_caches)
        else:
            shutil.copy(source, copy / entry)
    for name in left:
        (copy / "src" / "offramp" / name).unlink()
    return copy


def _caches(_folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__"}


def run(core: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core / "src")}
    return subprocess.run(
        [sys.executable, *command], cwd=core, env=environment, capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.mark.slow
def test_all_modules_are_imported(core: Path) -> None:
    modules = sorted(read_modules(core))
    assert len(modules) > 300
    code = (
        "import importlib, pkgutil, sys\n"
        f"for name in {[m for m in modules if '.tensorrt' not in m]}:\n"
        "    importlib.import_module(name)\n"
        f"here = {tuple(f'offramp.{name}' for name in EXTENSIONS)}\n"
        "assert not [m for m in sys.modules if m.startswith(here)]"
    )
    done = run(core, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_types_are_right(core: Path) -> None:
    done = run(core, "-m", "mypy", "--cache-dir", str(core / ".mypy_cache"))
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_the_commands_say_nothing_of_them(core: Path) -> None:
    done = run(core, "-c", "from offramp.start import eeserve; eeserve()", "--help-all")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--cluster" not in done.stdout and "--slo-ms" in done.stdout
    assert "apparate" not in done.stdout and "--controller" in done.stdout
    done = run(core, "-c", "from offramp.start import eecompile; eecompile()", "--help")
    assert "supernet" not in done.stdout and "--max-disagreement" in done.stdout
