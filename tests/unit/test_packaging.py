"""Builds from a tree: the whole of it, or nothing and one line with the reason."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facts import tells

from offramp.compiler.commands.cli import main as eecompile

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "demo",
    "*.ee*",
)
LINKS = sorted(path.name for path in (ROOT / "src/offramp").iterdir() if path.is_dir())
LINKS = [name for name in LINKS if name != "__pycache__"]
TOOLS_IN_THE_WHEEL = ("tools/__init__.py", "tools/bench/")
HOOK = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(*sys.argv[2:]))"


def build(tree: Path, hook: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a hook of the build backend on a tree, as pip does."""
    command = [sys.executable, "-W", "ignore", "-c", HOOK, hook, *map(str, arguments)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def built(tree: Path, hook: str, target: Path) -> Path:
    done = build(tree, hook, target)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def files_of(tree: Path) -> set[str]:
    """Return files of a tree by their real path; linked files once, and the links too."""

    def walk(folder: Path) -> Iterator[Path]:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                yield from walk(path)
            else:
                yield path

    return {path.relative_to(tree).as_posix() for path in walk(tree)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree as it was cloned: nothing built in it, links as links."""
    return shutil.copytree(
        ROOT, tmp_path_factory.mktemp("tree") / "offramp", symlinks=True, ignore=IGNORED
    )


@pytest.fixture(scope="module")
def unpacked(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(tree, "build_sdist", target)) as archive:
        archive.extractall(target, filter="data")
    (root,) = (path for path in target.iterdir() if path.is_dir())
    return root


def test_the_source_archive_is_the_tree(tree: Path, unpacked: Path) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    ours = {f for f in files_of(tree) if ".egg-info/" not in f}
    assert {f for f in files_of(unpacked) if ".egg-info/" not in f} == ours | made
    for name in LINKS:
        assert (unpacked / "src/offramp" / name).readlink() == Path("../..", name)


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that is built out of the source archive."""
    with zipfile.ZipFile(built(unpacked, "build_wheel", tmp_path_factory.mktemp("wheel"))) as made:
        yield made


def test_the_wheel_has_each_package_and_no_script_of_ours(
    tree: Path, wheel: zipfile.ZipFile
) -> None:
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        f"offramp/{file}"
        for file in files_of(tree)
        if file.split("/")[0] in LINKS
        and (not file.startswith("tools/") or file.startswith(TOOLS_IN_THE_WHEEL))
    }
    assert found == wanted | {"offramp/__init__.py", "offramp/py.typed", "offramp/start.py"}
    assert "offramp/tools/bench/cli.py" in found


def test_the_wheel_has_the_licence_the_notice_and_what_it_needs(
    tree: Path, wheel: zipfile.ZipFile
) -> None:
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    told = f"offramp-{project['version']}.dist-info"
    for name in ("LICENSE", "NOTICE"):
        assert wheel.read(f"{told}/licenses/{name}") == (tree / name).read_bytes()
    metadata = email.message_from_bytes(wheel.read(f"{told}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == project["requires-python"]
    required = [text.partition(" extra ") for text in metadata.get_all("Requires-Dist")]
    assert floors([text for text, extra, _ in required if not extra]) == floors(
        project["dependencies"]
    )
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])


def spoil(link: Path, how: str) -> None:
    target = link.readlink()
    link.unlink()
    if how == "a text file":  # git with core.symlinks=false
        link.write_text(target.as_posix())
    elif how == "an empty folder":  # a tar unpacked where links cannot be made
        link.mkdir()


@pytest.mark.parametrize(
    ("how", "hook"),
    [
        ("a text file", "get_requires_for_build_wheel"),
        ("a text file", "build_editable"),
        ("an empty folder", "build_wheel"),
        ("nothing", "build_sdist"),
    ],
)
def test_a_tree_without_links_builds_nothing_and_says_what_to_do(
    tmp_path: Path, how: str, hook: str
) -> None:
    tree, target = tmp_path / "tree", tmp_path / "target"
    ignored = ("examples", "benchmarks", "docs", "tests")
    shutil.copytree(
        ROOT, tree, symlinks=True, ignore=lambda f, n: {*IGNORED(f, n), *(set(n) & set(ignored))}
    )
    target.mkdir()
    for name in ("engine", "server"):
        spoil(tree / "src/offramp" / name, how)
    done = build(tree, hook, *([target] if hook.startswith("build") else []))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    tells(line, "src/offramp", "engine, server")
    assert "git clone -c core.symlinks=true" in line
    assert "Developer Mode" in line
    assert not list(target.iterdir())


def test_a_missing_extra_is_named_with_a_command_that_needs_no_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "offramp.compiler.cuts.cuts", None)
    assert eecompile(["inspect", "model.onnx"]) == 1
    line = capsys.readouterr().err
    assert "pip install '.[compile]' (for the dot: Offramp's source folder or wheel)" in line


def floors(requirements: list[str]) -> dict[str, str]:
    """Lower bounds by name, as they are written; each requirement has one."""
    found = {}
    for requirement in requirements:
        text = requirement.partition(";")[0]
        match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?\s*>=\s*([\w.]+)", text)
        if match is not None:
            found[normal(match[1])] = match[2]
        else:
            assert text.startswith("offramp["), f"{requirement!r} has no lower bound"
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    split = (line.partition("==") for line in lines if line)
    return {normal(package): version for package, _, version in split}


def test_the_oldest_versions_that_are_tested_are_those_declared() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = floors(project["dependencies"] + extras["onnx"] + extras["compile"] + extras["dev"])
    oldest = pins("constraints-oldest.txt")
    assert {name: oldest.get(name) for name in declared} == declared
    assert declared.keys() <= pins("constraints.txt").keys()
