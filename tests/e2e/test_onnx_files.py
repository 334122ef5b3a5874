"""Real ``eeserve`` processes with ONNX files: served unmodified, next to a bundle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton
from tests.facts import tells
from tests.models import crossing_size, mlp, residual_cnn

from offramp.client import Client

PATIENCE_S = 120.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the servers' folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def answers(path: Path, inputs: dict[str, Any], rows: int) -> Any:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    count = len(next(iter(inputs.values())))
    parts = [
        session.run(None, {name: array[i : i + rows] for name, array in inputs.items()})[0]
        for i in range(0, count, rows)
    ]
    return np.concatenate(parts)


@LINUX
def test_files_and_bundles_are_served_by_one_process(
    launch: Any, bundle_path: Path, tmp_path: Path, temporary: Path
) -> None:
    image, alone = tmp_path / "image.onnx", tmp_path / "alone.onnx"
    onnx.save(residual_cnn(), image)
    onnx.save(crossing_size(), alone)
    server = launch(image, bundle_path, f"--model=one-by-one={alone}", "--mode=audit")
    assert set(server.models) == {"image", bundle_path.stem, "one-by-one"}
    rng = np.random.default_rng(3)
    x = {"image": rng.standard_normal((5, 3, 16, 16)).astype(np.float32)}
    rows = {"x": rng.standard_normal((5, 16)).astype(np.float32)}
    with Client(server.address) as client:
        result = client.infer("image", x)
        np.testing.assert_array_equal(result.outputs["probabilities"], answers(image, x, 5))
        assert result.exits.tolist() == [-1] * 5
        each = client.infer("one-by-one", rows).outputs["logits"]
        np.testing.assert_array_equal(each, answers(alone, rows, 1))
    with triton.InferenceServerClient(server.address) as client:
        tensor = triton.InferInput("image", [5, 3, 16, 16], "FP32")
        tensor.set_data_from_numpy(x["image"])
        found = client.infer("image", [tensor]).as_numpy("probabilities")
        np.testing.assert_array_equal(found, answers(image, x, 5))
        assert client.get_model_config("one-by-one", as_json=True)["config"]["max_batch_size"] == 1
    assert server.metric("offramp_model_info", model="image", mode="off") == 1
    assert server.metric("offramp_model_info", model=bundle_path.stem, mode="audit") == 1
    page = server.get("/")
    assert "The unmodified model is served, in mode off: exits come with --learn" in page
    assert "Every sample runs in a batch of its own: samples change each other" in page
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "onnxruntime" in mapped
    assert not re.search(r"libtorch|onnx_cpp2py_export", mapped)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE_S) == 0
    assert list(temporary.iterdir()) == []
    assert "one-by-one: every sample runs in a batch of its own" in server.log.read_text()


def test_errors_are_one_line(refused: Any, tmp_path: Path) -> None:
    two = tmp_path / "two.onnx"
    model = mlp()
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("hidden1", onnx.TensorProto.FLOAT, ["batch", 16])
    )
    onnx.save(model, two)
    for arguments, expected in (
        ([two], (str(two), "2 outputs (logits (float32), hidden1 (float32))")),
        ([two, "--answer=other"], (str(two), "no output 'other'", "the model has")),
        ([tmp_path / "none.onnx"], (str(tmp_path / "none.onnx"), "no such file")),
    ):
        status, said = refused(*arguments)
        assert status == 1
        tells(said.splitlines()[-1], "eeserve: ", *expected)
        assert "Traceback" not in said


def test_the_configuration_file_names_files_and_outputs(launch: Any, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    config = tmp_path / "serve.toml"
    config.write_text('[models.m]\npath = "model.onnx"\nanswer = "logits"\n')
    server = launch("--config", config, "--no-state")
    assert server.models == ("m",)
    assert server.metadata().outputs.keys() == {"logits"}


@LINUX
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_while_it_reads_leaves_no_process(
    end: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    command = [sys.executable, "-m", "offramp.server.cli", "--grpc-port=0", "--http-port=0"]
    with subprocess.Popen([*command, tmp_path / "model.onnx"], stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        while b"reading" not in server.stderr.readline():
            assert server.poll() is None
        child = _child_of(server.pid)
        server.send_signal(end)
        server.wait(PATIENCE_S)
    _wait_for_end(child)
    left = sorted(path.suffix for path in temporary.iterdir())
    assert left == (["", ".lock"] if end is signal.SIGKILL else [])


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task")
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for task in children.iterdir():
            for child in (task / "children").read_text().split():
                if (
                    b"offramp.engine.common.build_worker"
                    in Path(f"/proc/{child}/cmdline").read_bytes()
                ):
                    return int(child)
        time.sleep(0.005)
    raise AssertionError("no process was started")


def _wait_for_end(pid: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} goes on")
