"""Exported files where there is no Offramp: in Node, and in another runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.exports import (
    Arrays,
    ExportOutputs,
    exported,
    replayed_bundle,
    replayed_inputs,
    run_file,
)

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "run_export.mjs"
PACKAGE = "onnxruntime-web@^1.20"
TOLERANCE = 1e-4
"""Float32 sums in another order, of other kernels, relative to the largest answer."""


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, where Node finds ONNX Runtime."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true}')
    shutil.copy(SCRIPT, folder)
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    command += ["--fetch-retries=0", "--fetch-timeout=20000", PACKAGE]
    try:
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {PACKAGE} within a minute")
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def run_in_node(folder: Path, file: Path, inputs: Arrays) -> ExportOutputs:
    feeds = {
        name: {"type": str(a.dtype), "dims": a.shape, "values": a.ravel().tolist()}
        for name, a in inputs.items()
    }
    (folder / "feeds.json").write_text(json.dumps(feeds))
    command = ["node", SCRIPT.name, str(file), "feeds.json"]
    done = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    answer, exit_, confidence = said.values()
    assert (exit_["type"], confidence["type"]) == ("int32", "float32")
    return ExportOutputs(
        np.array(answer["values"]).reshape(answer["dims"]),
        np.array(exit_["values"]),
        np.array(confidence["values"]),
    )


def sure(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).random((rows, 2), np.float32)


def assert_same(given: ExportOutputs, wanted: ExportOutputs) -> None:
    assert given.exit.tolist() == wanted.exit.tolist()
    scale = float(np.abs(wanted.answer).max())
    np.testing.assert_allclose(given.answer, wanted.answer, rtol=0, atol=TOLERANCE * scale)
    np.testing.assert_allclose(given.confidence, wanted.confidence, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=["residual", "bert"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def file(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    bundle = replayed_bundle(model, folder, exits_after=(0, 2))
    return exported(bundle, folder, replayed_inputs(model, sure(30)))


@pytest.mark.parametrize("rows", [1, 9])
def test_in_node(node_folder: Path, model: str, file: Path, rows: int) -> None:
    inputs = replayed_inputs(model, sure(rows))
    wanted = run_file(file, inputs)
    assert_same(run_in_node(node_folder, file, inputs), wanted)
    if rows > 1:
        assert set(wanted.exit) == {0, 1, -1}


@pytest.mark.parametrize("rows", [1, 9])
def test_in_openvino(model: str, file: Path, rows: int) -> None:
    openvino = pytest.importorskip("openvino", reason="needs OpenVINO: pip install openvino")
    float32 = {"INFERENCE_PRECISION_HINT": "f32"}  # it takes bfloat16 where the CPU has it
    compiled = openvino.Core().compile_model(str(file), "CPU", float32)
    inputs = replayed_inputs(model, sure(rows))
    named = {i.any_name for i in compiled.inputs}
    outputs = compiled({name: a for name, a in inputs.items() if name in named})
    given = ExportOutputs(*(np.asarray(outputs[index]) for index in range(3)))
    assert_same(given, run_file(file, inputs))
