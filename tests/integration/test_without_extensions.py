"""The core imports, type-checks and passes its unit tests where no extension is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offramp.tools.layers import imports_of, is_within, read_modules

ROOT = Path(__file__).parents[2]
EXTENSIONS = ("baselines", "cluster", "generation", "supernet")
USERS = ("benchmarks", "testing", "tests", "tools")
"""Folders outside the core with parts for extensions."""
TESTED = (
    *("bundle", "certify", "client", "commands", "control", "engine", "learning", "scheduling"),
    "server",
)
"""Folders of unit tests that run here; those of the others, which take longer, are imported."""
LIMIT_S = 900


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree without the extensions and their users."""
    copy = tmp_path_factory.mktemp("core")
    links = (each for each in (ROOT / "src/offramp").iterdir() if each.is_symlink())
    packages = {each.name for each in links}
    folders = {"src", "docs", "deploy", "examples", *packages, *USERS} - set(EXTENSIONS)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for folder in folders:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for name in EXTENSIONS:
        (copy / "src" / "offramp" / name).unlink()
    for path in uses_of_extensions(copy):
        path.unlink()
    return copy


def uses_of_extensions(root: Path) -> set[Path]:
    """Return files outside the core of an extension, or that import one, or import such a file."""
    names = {
        path: name_of(path.relative_to(root))
        for folder in USERS
        for path in (root / folder).rglob("*.py")
    }
    imported = {
        path: tuple(imports_of(path.read_text(), name, is_package=path.name == "__init__.py"))
        for path, name in names.items()
    }
    gone = {f"{package}.{name}" for package in ("offramp", "tests") for name in EXTENSIONS}
    left: set[Path] = set()
    while True:
        more = {
            path
            for path, name in names.items()
            if path not in left and any(is_within(each, *gone) for each in (name, *imported[path]))
        }
        if not more:
            return left
        left |= more
        gone |= {names[path] for path in more}


def name_of(path: Path) -> str:
    """The dotted name that a file is imported by."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return name if path.parts[0] in ("benchmarks", "tests") else f"offramp.{name}"


def run(core: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core / "src")}
    environment.pop("THOROUGH", None)  # they ran like that where the extensions are
    return subprocess.run(
        [sys.executable, *command], cwd=core, env=environment, capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.mark.slow
def test_all_modules_are_imported(core: Path) -> None:
    needs_more = (".tensorrt", ".tools.")  # than pyproject.toml's extras for development
    modules = [name for name in read_modules(core) if not any(word in name for word in needs_more)]
    assert len(modules) > 400
    code = (
        "import importlib, pkgutil, sys\n"
        f"for name in {modules}:\n"
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
@pytest.mark.timeout(900)  # three thousand tests in one process
def test_unit_tests_pass(core: Path) -> None:
    unit = core / "tests" / "unit"
    folders = [str(each) for each in unit.iterdir() if each.name not in (*USERS, "__pycache__")]
    folders = [each for each in folders if Path(each).is_dir()]
    assert len([path for each in folders for path in Path(each).rglob("test_*.py")]) > 250
    done = run(core, "-m", "pytest", "-q", "--collect-only", *folders)
    assert done.returncode == 0, done.stdout[-2000:]
    folders = [f"tests/unit/{name}" for name in TESTED]
    done = run(core, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *folders)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_the_commands_say_nothing_of_them(core: Path) -> None:
    done = run(core, "-c", "from offramp.start import eeserve; eeserve()", "--help-all")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--cluster" not in done.stdout and "--slo-ms" in done.stdout
    assert "apparate" not in done.stdout and "--controller" in done.stdout
    done = run(core, "-c", "from offramp.start import eecompile; eecompile()", "--help")
    assert "supernet" not in done.stdout and "--max-disagreement" in done.stdout
