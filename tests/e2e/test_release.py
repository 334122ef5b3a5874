"""The wheel that users install: in an environment without this tree, from an empty folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.documents import ROOT, blocks_of
from tests.e2e.conftest import Launch
from tests.facts import tells
from tests.golden.make_fixture import BUNDLE
from tests.models import mlp
from tests.small import _vectors

import offramp

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_PYTHON = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
SERVING, COMPILING = "", "[compile]"
"""Extras of an installation."""
ASK = """
import pathlib, sys
import numpy as np
import offramp
from offramp.client import Client

assert pathlib.Path(sys.prefix) in pathlib.Path(offramp.__file__).parents, offramp.__file__
address, model = sys.argv[1:]
with Client(address) as client, np.load("asked.npz") as asked:
    result = client.infer(model, dict(asked))
np.savez("answers.npz", exits=result.exits, **result.outputs)
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # downloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment with the wheel; commands run in an empty folder."""

    folder: Path
    wheel: Path
    constraints: str

    def command(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def install(self, extras: str) -> None:
        limits = ROOT / self.constraints
        self.run("pip", "install", "-q", "--no-compile", "-c", limits, f"{self.wheel}{extras}")
        self.run("pip", "check")

    def run(self, name: str, *arguments: str | Path) -> str:
        """Run a command that must succeed; return what it printed."""
        done = self.tried(name, *arguments)
        assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [self.command(name), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files, built as README says."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the tracked files are not known")
    tree, target = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().split("\0")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", target, tree]
    subprocess.run(build, check=True)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(
    scope="module",
    params=[
        "constraints.txt",
        pytest.param(
            "constraints-oldest.txt",
            marks=pytest.mark.skipif(
                sys.version_info[:2] != OLDEST_PYTHON,
                reason="the oldest versions have no wheels for newer versions of Python",
            ),
        ),
    ],
)
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """An environment of the wheel and what it needs to serve bundles."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PYTHONPATH", raising=False)
        patched.chdir(tmp_path_factory.mktemp("empty"))
        environment = Installed(folder=folder, wheel=wheel, constraints=request.param)
        environment.install(SERVING)
        yield environment
    shutil.rmtree(folder)  # with torch a gigabyte


@pytest.fixture(scope="module")
def with_compiler(installed: Installed) -> Installed:
    """The same with torch and the rest of what compiling needs, a model, and data for it."""
    installed.install(COMPILING)
    onnx.save(mlp(layers=4, classes=3), "model.onnx")
    np.savez("data.npz", x=_vectors(1400, 0))
    return installed


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_every_command_has_help(installed: Installed, name: str) -> None:
    assert installed.run(name, "--help").startswith(f"usage: {name} ")


def test_bundles_are_served_without_torch(installed: Installed, launch: Launch) -> None:
    packages = installed.run("pip", "list", "--format=freeze")
    assert f"offramp=={PROJECT['version']}" in packages
    assert not {"torch", "onnx"} & {line.partition("==")[0] for line in packages.splitlines()}
    shutil.copytree(BUNDLE, "recorded.ee")
    np.savez("asked.npz", sample=np.arange(400)[:, None])
    server = launch("recorded.ee", "--mode=leave", program=[installed.command("eeserve")])
    installed.run("python", "-c", ASK, server.address, server.model)
    with offramp.load("recorded.ee", mode="leave") as model, np.load("answers.npz") as answers:
        expected = model.predict(sample=np.arange(400)[:, None])
        np.testing.assert_array_equal(answers["exits"], expected.exits)
        assert len(set(expected.exits.tolist())) > 2
        for name, array in expected.outputs.items():
            np.testing.assert_array_equal(answers[name], array)
    assert server.metric("offramp_requests_total") == 1
    assert "<svg" in server.get("/")


def test_commands_name_the_extra_that_they_need(installed: Installed) -> None:
    Path("some.npz").touch()
    done = installed.tried("eecompile", "model.onnx", "--data", "some.npz")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    tells(line, "eecompile", "onnx", "extra `compile`", "pip install '.[compile]'")


def test_a_model_is_compiled_and_served(with_compiler: Installed, launch: Launch) -> None:
    data, bundle = "--data=data.npz", "--output=compiled.ee"
    with_compiler.run("eecompile", "model.onnx", data, bundle, "--max-disagreement=0.05")
    assert "<svg" in Path("compiled.ee", "report.html").read_text()
    np.savez("asked.npz", x=(x := _vectors(400, 1)))
    server = launch("compiled.ee", "--mode=leave", program=[with_compiler.command("eeserve")])
    with_compiler.run("python", "-c", ASK, server.address, server.model)
    session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    with np.load("answers.npz") as answers:
        agreed = np.mean(answers["logits"].argmax(1) == expected.argmax(1))
    assert agreed > 0.85  # promised are 0.95 on average, to which 400 samples add chance


def test_the_page_of_the_python_api_compiles_loads_and_serves(with_compiler: Installed) -> None:
    """All of it runs in ``test_python_docs.py``."""
    first, *others = blocks_of(ROOT / "docs" / "python.md")
    serving = [block for block in others if "offramp.serve(" in block.code]
    assert len(serving) == 2
    Path("page.py").write_text("\n".join(block.code for block in (first, *serving)))
    printed = with_compiler.run("python", "page.py")
    assert re.search(r"^http://127.0.0.1:\d+$", printed, re.MULTILINE)
    assert re.search(r"^\[\d( \d){7}\] \[ *-?\d", printed, re.MULTILINE)
