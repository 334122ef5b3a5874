"""A model with an operator of a library: compiled, verified, exported and served with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.bundles import compile_tiny
from tests.facts import facts, tells
from tests.operators import build_library, squash_mlp

from offramp.bundle import Bundle
from offramp.calibration.measure import profiling
from offramp.compiler.commands.cli import main
from offramp.engine.backends.custom_ops import using_libraries
from offramp.engine.common.errors import BackendError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.onnx_files import OnnxFileError
from offramp.server.cli import main as serve
from offramp.tools.bench.cli import main as bench


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="module")
def compiled(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """Yield a bundle with exits in use on any machine; its data are next to it."""
    folder = tmp_path_factory.mktemp("squash")
    with pytest.MonkeyPatch.context() as patched, using_libraries([library]):
        patched.setattr(profiling.TimedGraph, "time_ms", lambda _self, _tensors: 1.0)
        patched.setattr(profiling, "_staged_ms", lambda *_: 1.0)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        bundle = compile_tiny(squash_mlp(batch=1), {"x": vectors(1400, 0)}, folder)
    yield bundle


def vectors(samples: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).standard_normal((8, 16)) * 3
    x = kinds[rng.integers(0, 8, samples)] + rng.standard_normal((samples, 16)) * 0.3
    return x.astype(np.float32)


def test_the_manifest_names_the_library(compiled: Bundle) -> None:
    (needed,) = compiled.manifest.custom_ops
    assert needed.file == "squash.so"
    assert needed.operators == ("tests.offramp:Squash",)
    assert compiled.policy.active


COMMANDS = {
    "verify": ["verify", "BUNDLE", "--data", "DATA"],
    "rehearse": ["rehearse", "BUNDLE", "--data", "OTHER", "--dry-run"],
    "profile": ["profile", "BUNDLE", "--dry-run"],
    "export": ["export", "BUNDLE", "--data", "DATA", "--output", "OUT"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_runs_graphs_takes_the_library(
    compiled: Bundle, library: Path, tmp_path: Path, capfd, name: str
) -> None:
    places = {
        "BUNDLE": compiled.path,
        "DATA": compiled.path.parent / "data.npz",
        "OTHER": tmp_path / "other.npz",
        "OUT": tmp_path / "exits.onnx",
    }
    np.savez(places["OTHER"], x=vectors(1400, 1))
    command = [str(places.get(word, word)) for word in COMMANDS[name]]
    assert main(command) == 1
    out, err = capfd.readouterr()
    assert out == ""
    tells(err, "library", "squash.so (sha256")
    assert "give it with --custom-ops LIB.so" in err
    assert main([*command, "--custom-ops", str(library)]) == 0


def test_the_exported_file_runs_with_the_library_anywhere(
    compiled: Bundle, library: Path, tmp_path: Path
) -> None:
    exported, data = tmp_path / "exits.onnx", compiled.path.parent / "data.npz"
    command = ["export", str(compiled.path), "--data", str(data), "--output", str(exported)]
    assert main([*command, "--custom-ops", str(library)]) == 0
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(str(exported), options, providers=["CPUExecutionProvider"])
    (answer,) = session.run(["logits"], {"x": vectors(5, 1)})
    assert answer.shape == (5, 8)


def test_building_engines_is_refused(compiled: Bundle, monkeypatch, capfd) -> None:
    monkeypatch.setattr("offramp.compiler.engines.build.check_device", lambda _device: None)
    assert main(["build", str(compiled.path), "--dry-run"]) == 1
    err = capfd.readouterr().err
    tells(err, "TensorRT", "squash.so")


def test_served_answers_are_those_of_the_source(compiled: Bundle, library: Path) -> None:
    x = vectors(64, 2)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    source = ort.InferenceSession(
        compiled.read("source.onnx"), options, providers=["CPUExecutionProvider"]
    )
    (wanted,) = source.run(["logits"], {"x": x})

    async def ask() -> tuple[np.ndarray, np.ndarray]:
        async with await Engine.open({"m": compiled.path}, EngineOptions(keep_state=False)) as e:
            found = await e.infer("m", {"x": x})
            return found.outputs["logits"], found.exits

    with pytest.raises(BackendError, match=r"not given: squash\.so"):
        asyncio.run(ask())
    with using_libraries([library]):
        answer, exits = asyncio.run(ask())
    ended = exits == -1
    assert (~ended).any()
    np.testing.assert_allclose(answer[ended], wanted[ended], rtol=1e-5, atol=1e-5)
    assert (answer.argmax(axis=1) == wanted.argmax(axis=1)).mean() > 0.9


def test_eeserve_and_eebench_say_what_is_missing(compiled: Bundle, library: Path, capfd) -> None:
    assert serve([str(compiled.path), "--self-check"]) == 1
    assert "squash.so (sha256 " in capfd.readouterr().err
    data = str(compiled.path.parent / "data.npz")
    assert bench(["compare", str(compiled.path), "--data", data]) == 1
    assert "give it with --custom-ops LIB.so" in capfd.readouterr().err


def test_a_server_checks_itself_with_the_library(compiled: Bundle, library: Path, capfd) -> None:
    assert serve([str(compiled.path), "--self-check", "--custom-ops", str(library)]) == 0
    out = capfd.readouterr().out
    assert "passed  load" in out
    assert "failed" not in out


def test_an_onnx_file_is_read_and_served_with_the_library(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "squash.onnx"
    onnx.save(squash_mlp(batch=1), path)

    async def exits() -> list[int]:
        async with await Engine.open({"m": path}, EngineOptions(backend="onnxruntime")) as engine:
            result = await engine.infer("m", {"x": vectors(3, 1)})
            return [int(exit_) for exit_ in result.exits]

    with pytest.raises(OnnxFileError, match=facts("Squash", "tests.offramp", "--custom-ops")):
        asyncio.run(exits())
    with using_libraries([library]):
        assert asyncio.run(exits()) == [-1, -1, -1]
