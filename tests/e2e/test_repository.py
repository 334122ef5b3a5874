"""Real ``eeserve`` processes over a model repository, and over a file that SIGHUP reads again."""

from __future__ import annotations

import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tests.e2e.conftest import wait_until
from tests.models import mlp
from tritonclient.utils import InferenceServerException

RELOADS = 12


def add_version(repository: Path, version: int, bias: float) -> None:
    """Add a version of ``mlp`` whose answers tell it from the others."""
    model = mlp()
    folder = repository / "mlp" / str(version)
    folder.mkdir(parents=True)
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if name == output else name for name in node.output]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(bias), "bias"))
    model.graph.node.append(onnx.helper.make_node("Add", ["before", "bias"], [output]))
    onnx.save(model, folder / "model.onnx")


def asked(server: Any, model: str = "mlp") -> list[Any]:
    """Return inputs of a model as Triton's client sends them."""
    with triton.InferenceServerClient(server.address) as client:
        (spec,) = client.get_model_metadata(model).inputs
    array = np.ones([1, *spec.shape[1:]], np.float32)
    tensor = triton.InferInput(spec.name, list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def first_value(result: Any) -> float:
    (output,) = result.get_response().outputs
    return float(result.as_numpy(output.name).flat[0])


@pytest.mark.slow
def test_reloads_under_load_lose_nothing_and_mix_nothing_up(launch: Any, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_version(repository, 1, bias=1000.0)
    server = launch(
        f"--model-repository={repository}", "--model-control=explicit", "--load-model=mlp",
        "--mode=off",
    )  # fmt: skip
    inputs, ended, wrong = asked(server), threading.Event(), list[str]()
    answers = []

    def ask() -> None:
        with triton.InferenceServerClient(server.address) as client:
            while not ended.wait(0.002):
                try:
                    result = client.infer("mlp", inputs)
                except InferenceServerException as error:
                    wrong.append(str(error))
                    return
                version = int(result.get_response().model_version)
                answers.append((version, round(first_value(result) / 1000)))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    with triton.InferenceServerClient(server.address) as client:
        for version in range(2, 2 + RELOADS):
            add_version(repository, version, bias=1000.0 * version)
            client.load_model("mlp")
            shutil.rmtree(repository / "mlp" / str(version - 1))
        wait_until(lambda: answers[-1][0] == 1 + RELOADS or wrong)
        ended.set()
        for asker in askers:
            asker.join(60)
        index = client.get_model_repository_index().models
        assert [(m.version, m.state) for m in index] == [(str(1 + RELOADS), "READY")]
    assert wrong == []
    assert all(version == told for version, told in answers)
    assert {version for version, _ in answers} >= {1, 1 + RELOADS}


def test_where_a_reload_fails_the_old_version_serves_on(launch: Any, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_version(repository, 1, bias=1000.0)
    server = launch(f"--model-repository={repository}", "--model-control=explicit", "--mode=off",
                    "--load-model=mlp")  # fmt: skip
    broken = repository / "mlp" / "2" / "model.onnx"
    broken.parent.mkdir()
    broken.write_bytes(b"no model")
    with triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException, match=r"'mlp', version 2, cannot be loaded"):
            client.load_model("mlp")
        assert first_value(client.infer("mlp", asked(server))) > 900
        index = {m.version: m for m in client.get_model_repository_index().models}
        assert (index["1"].state, index["2"].state) == ("READY", "UNAVAILABLE")
        assert "model.onnx" in index["2"].reason


def test_sighup_reads_the_configuration_file_again(launch: Any, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "small.onnx")
    file = tmp_path / "eeserve.toml"
    file.write_text('[engine]\nmode = "off"\n[models.one]\npath = "small.onnx"\n')
    server = launch("--config", file)
    with triton.InferenceServerClient(server.address) as client:
        file.write_text(
            '[engine]\nmode = "off"\n[models.two]\npath = "small.onnx"\nmax_batch_size = 3\n'
        )
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: client.is_model_ready("two"))
        assert client.get_model_config("two").config.max_batch_size == 3
        assert not client.is_model_ready("one")
        file.write_text("[models.two\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration file is not reloaded" in server.log.read_text())
        assert client.is_model_ready("two")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
