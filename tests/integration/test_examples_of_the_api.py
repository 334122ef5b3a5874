"""The examples of the Python API run, in small versions."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.bundles import equal_times
from tests.facts import tells
from tests.small import compile_small

import offramp

WITHOUT = "the extra `examples` is not installed, which does not go with the oldest versions"
ROOT = Path(__file__).parents[2]
Small = tuple[Path, NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A bundle, inputs, and what a loaded model says of them."""
    bundle, inputs = compile_small(tmp_path_factory.mktemp("examples"))
    with np.load(inputs) as archive:
        x = archive["x"][:40]
    with offramp.load(bundle.path, mode="leave", state=False) as model:
        result = model.predict(x=x)
    return bundle.path, x, result.outputs["logits"], result.exits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads of torch would wait for each other where tests share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_resnet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import torch_resnet

    with equal_times():
        bundle = torch_resnet.main(
            tmp_path / "resnet.ee", images=2400, blocks=2, max_disagreement=0.1
        )
    assert bundle.path == tmp_path / "resnet.ee"
    assert [spec.describe() for spec in bundle.manifest.inputs] == [
        "input: float32 [batch, 1, 28, 28]"
    ]
    assert "classes [" in capsys.readouterr().out


@pytest.mark.slow
def test_the_text_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import text_classifier

    torch.manual_seed(0)  # so few reviews do not suffice whatever the weights begin as
    with equal_times():
        bundle = text_classifier.main(
            tmp_path / "reviews.ee", reviews=2400, layers=2, max_disagreement=0.1
        )
    assert [spec.name for spec in bundle.manifest.inputs] == ["input_ids", "attention_mask"]
    assert [spec.describe() for spec in bundle.manifest.outputs] == ["logits: float32 [batch, 2]"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("'a lovely film': likes it (")
    assert second.startswith("'the plot was not good and the cast was dull': ")


def test_the_fastapi_service(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason=WITHOUT)
    from examples.fastapi_service import app
    from fastapi.testclient import TestClient

    path, x, logits, exits = small
    monkeypatch.setenv("BUNDLE", str(path))
    with TestClient(app) as client:

        def ask(rows: NDArray[np.float32]) -> Any:
            return client.post("/predict", json={"x": rows.tolist()})

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, np.split(x, 8)))
        assert all(answer.status_code == 200 for answer in answers)
        found = np.concatenate([answer.json()["outputs"]["logits"] for answer in answers])
        assert np.allclose(found, logits, atol=1e-5)
        assert np.array_equal(np.concatenate([a.json()["exits"] for a in answers]), exits)
        shares = client.get("/exits").json()
        assert sum(shares.values()) == pytest.approx(1)
        wrong = client.post("/predict", json={"x": [[1.0, 2.0]]})
        assert wrong.status_code == 422
        tells(wrong.json()["detail"], "2 of dimension 1", "16")
        ragged = client.post("/predict", json={"x": [[1.0], [1.0, 2.0]]})
        assert ragged.status_code == 422
        tells(ragged.json()["detail"], "'x'", "float32")


def test_the_bentoml_service(small: Small, tmp_path: Path) -> None:
    """BentoML's own command is run; its libraries warn of each other."""
    if importlib.util.find_spec("bentoml") is None:
        pytest.skip(WITHOUT)
    path, x, logits, exits = small
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"BUNDLE": str(path), "BENTOML_HOME": str(tmp_path), "BENTOML_DO_NOT_TRACK": "1"}
    service = "examples.bentoml_service:MultiExitService"
    command = [sys.executable, "-m", "bentoml", "serve", service, "--port", str(port)]
    command += ["--host", "127.0.0.1"]
    log = tmp_path / "log"
    with (
        log.open("wb") as written,
        subprocess.Popen(
            command, cwd=ROOT, stdout=written, stderr=written, env={**os.environ, **environment}
        ) as process,
    ):
        try:
            answer = ask_once_ready(process, port, {"inputs": {"x": x.tolist()}}, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert np.array_equal(np.float32(answer["outputs"]["logits"]), logits)
    assert np.array_equal(answer["exits"], exits)


def ask_once_ready(
    process: subprocess.Popen[bytes], port: int, sent: dict[str, Any], log: Path
) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict",
        json.dumps(sent).encode(),
        {"Content-Type": "application/json"},
    )
    deadline_s = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.URLError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)


class FakeRequest:
    """A request as Starlette has it, as far as the deployment looks."""

    def __init__(self, sent: dict[str, Any]) -> None:
        self._sent = sent

    async def json(self) -> dict[str, Any]:
        return self._sent


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own
def test_the_deployment_of_ray_serve(small: Small) -> None:
    pytest.importorskip("fastapi", reason=WITHOUT)  # which Ray Serve takes
    from examples import ray_serve

    path, x, logits, exits = small
    deployment = ray_serve.MultiExitModel.func_or_class

    async def ask() -> dict[str, Any]:
        replica = deployment.__new__(deployment)
        await deployment.__init__(replica, str(path))
        try:
            return await replica(FakeRequest({"x": x.tolist()}))
        finally:
            await replica.model.close()

    answer = asyncio.run(ask())
    assert np.array_equal(np.float32(answer["outputs"]["logits"]), logits)
    assert np.array_equal(answer["exits"], exits)
