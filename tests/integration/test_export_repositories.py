"""Model repositories that ``eecompile export`` writes, as Triton, OVMS and KServe read them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from numpy.typing import NDArray
from tests.exports import (
    Arrays,
    ExportOutputs,
    replayed_bundle,
    replayed_inputs,
    run_bundle,
    run_file,
    stock_session,
)
from tests.facts import Told, tells

from offramp.bundle import Bundle
from offramp.compiler.commands.cli import main
from offramp.compiler.export.repositories import dns_label
from offramp.proto.tensors import DATATYPES

OUTPUTS = {"residual": "logits", "bert": "logits"}


def sure(rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows).random((rows, 2), np.float32)


@pytest.fixture(scope="module", params=["residual", "bert"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def compiled(model: str, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundles")
    np.savez(folder / "data.npz", **replayed_inputs(model, sure(30)))
    return replayed_bundle(model, folder, exits_after=(0, 2))


@pytest.fixture(scope="module")
def exported(compiled: Bundle) -> Path:
    """A repository for Triton, OVMS and KServe in one folder."""
    root = compiled.path.parent / "models"
    arguments = ["--triton", str(root), "--ovms", str(root), "--kserve", "s3://bucket/models"]
    data = str(compiled.path.parent / "data.npz")
    arguments += ["--name", "Small_1", "--with-exits"]
    assert main(["export", str(compiled.path), "--data", data, *arguments]) == 0
    return root


def read_config(root: Path) -> Any:
    config = triton.model_config_pb2.ModelConfig()
    text_format.Parse((root / "Small_1" / "config.pbtxt").read_text(), config)
    return config


def declared_dims(tensor: Any) -> list[int]:
    """Return the dimensions that the file must have after the batch."""
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def test_nothing_else_is_written(exported: Path, compiled: Bundle) -> None:
    files = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    inputs = range(len(compiled.manifest.declared))
    assert files == {
        "config.json",
        "Small_1.kserve.yaml",
        "Small_1/1/model.onnx",
        "Small_1/README.md",
        "Small_1/config.pbtxt",
        *(f"Small_1/warmup/input_{number}" for number in inputs),
    }


def test_triton_reads_what_the_file_has(exported: Path) -> None:
    config = read_config(exported)
    assert (config.name, config.backend) == ("Small_1", "onnxruntime")
    session = stock_session(exported / "Small_1/1/model.onnx")
    for declared, had in (
        (config.input, session.get_inputs()),
        (config.output, session.get_outputs()),
    ):
        assert [d.name for d in declared] == [h.name for h in had]
        for tensor, info in zip(declared, had, strict=True):
            sizes = [s if isinstance(s, int) else -1 for s in info.shape[1:]]
            assert declared_dims(tensor) == sizes
            assert tensor.dims  # Triton refuses none
            assert not tensor.DESCRIPTOR.fields_by_name.get("optional") or not tensor.optional
            dtype = DATATYPES[triton.model_config_pb2.DataType.Name(tensor.data_type)[5:]]
            ours = {"tensor(float)": "float32", "tensor(double)": "float64"}.get(
                info.type, info.type.removeprefix("tensor(").removesuffix(")")
            )
            assert dtype == np.dtype(ours)
    assert [o.name for o in config.output][1:] == ["exit", "confidence"]


def test_triton_batches_as_the_profile_says(exported: Path, compiled: Bundle) -> None:
    config = read_config(exported)
    profile = compiled.profile()
    assert config.max_batch_size == profile.batch_sizes[-1]
    batching = config.dynamic_batching
    per_sample = dict(
        zip(
            profile.batch_sizes,
            np.divide(profile.source_ms, profile.batch_sizes).tolist(),
            strict=True,
        )
    )
    best = min(per_sample.values())
    assert list(batching.preferred_batch_size) == [
        size for size, ms in per_sample.items() if ms <= 1.1 * best
    ]
    assert batching.max_queue_delay_microseconds == round(100 * profile.source_ms[0])
    assert config.version_policy.latest.num_versions == 1
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, triton.model_config_pb2.ModelInstanceGroup.KIND_CPU)
    assert not config.HasField("optimization")
    promise = json.loads(config.parameters["offramp.promise"].string_value)
    assert promise == {"max_disagreement": 0.01, "confidence": 0.99}


def test_warm_up_requests_are_answered(exported: Path) -> None:
    config = read_config(exported)
    session = stock_session(exported / "Small_1/1/model.onnx")
    assert [w.batch_size for w in config.model_warmup] == [1, config.max_batch_size]
    for warmup in config.model_warmup:
        feeds = {}
        for tensor in config.input:
            sample = warmup.inputs[tensor.name]
            assert sample.data_type == tensor.data_type
            dtype = DATATYPES[triton.model_config_pb2.DataType.Name(sample.data_type)[5:]]
            content = (exported / "Small_1/warmup" / sample.input_data_file).read_bytes()
            one = np.frombuffer(content, dtype).reshape(1, *sample.dims)
            feeds[tensor.name] = np.repeat(one, warmup.batch_size, axis=0)
        answer, *_ = session.run(None, feeds)
        assert len(answer) == warmup.batch_size
        assert np.isfinite(answer).all()


def test_openvino_answers_as_onnx_runtime_does(exported: Path, model: str) -> None:
    openvino = pytest.importorskip("openvino", reason="needs OpenVINO: pip install openvino")
    (entry,) = json.loads((exported / "config.json").read_text())["model_config_list"]
    config = entry["config"]
    assert (config["name"], config["target_device"]) == ("Small_1", "CPU")
    file = exported / config["base_path"] / "1/model.onnx"
    compiled = openvino.Core().compile_model(str(file), "CPU", config["plugin_config"])
    inputs = replayed_inputs(model, sure(9))
    named = {i.any_name for i in compiled.inputs}
    outputs = compiled({name: a for name, a in inputs.items() if name in named})
    wanted = run_file(file, inputs)
    given = ExportOutputs(*(np.asarray(outputs[index]) for index in range(3)))
    assert given.exit.tolist() == wanted.exit.tolist()
    assert set(wanted.exit) == {0, 1, -1}
    scale = float(np.abs(wanted.answer).max())  # float32 sums in another order, of other kernels
    np.testing.assert_allclose(given.answer, wanted.answer, rtol=0, atol=1e-4 * scale)


def test_kserve_gets_an_inference_service(exported: Path) -> None:
    assert (exported / "Small_1.kserve.yaml").read_text() == (
        "apiVersion: serving.kserve.io/v1beta1\n"
        "kind: InferenceService\n"
        "metadata:\n"
        "  name: small-1\n"
        "spec:\n"
        "  predictor:\n"
        "    model:\n"
        "      modelFormat:\n"
        "        name: triton\n"
        "      runtime: kserve-tritonserver\n"
        "      protocolVersion: v2\n"
        '      storageUri: "s3://bucket/models"\n'
    )


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fashion", "fashion"),
        ("Res_Net.50", "res-net-50"),
        ("7b", "model-7b"),
        ("a__", "a"),
        ("a" * 62 + "_b", "a" * 62),
    ],
)
def test_names_for_kubernetes(name: str, label: str) -> None:
    assert dns_label(name) == label


def test_the_file_answers_as_the_bundle(exported: Path, compiled: Bundle, model: str) -> None:
    inputs = replayed_inputs(model, sure(20))
    given = run_file(exported / "Small_1/1/model.onnx", inputs)
    wanted = run_bundle(compiled, inputs)
    assert given.exit.tolist() == wanted.exit.tolist()
    np.testing.assert_array_equal(given.answer, wanted.answer)


def test_the_readme_says_what_is_lost(exported: Path) -> None:
    said = (exported / "Small_1/README.md").read_text()
    for part in ("Audits", "drift alarm", "Renewed certificates", "Scheduling of survivors"):
        assert part in said
    for command in ("--model-repository=/models", "--config_path /models", "Small_1.kserve.yaml"):
        assert command in said
    assert "at most 1.00% of the answers differ" in said


class Folder:
    """A folder to work in, with a bundle and its data."""

    def __init__(self, bundle: Bundle, data: Path) -> None:
        self.bundle = bundle
        self.data = data

    def export(self, *arguments: str) -> int:
        return main(["export", "small.ee", "--data", str(self.data), *arguments])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("small")
    np.savez(folder / "data.npz", **replayed_inputs("mlp", sure(4)))
    return Folder(replayed_bundle("mlp", folder, exits_after=(0, 1)), folder / "data.npz")


@pytest.fixture
def folder(small: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small.bundle.path, "small.ee")
    return small


def tree() -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(Path().rglob("*"))}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), ("--output FILE.onnx", "--triton DIR")),
        (("--kserve", "m", "--triton", "m"), ("--kserve 'm'", "expected the one where")),
        (("--kserve", 's3://"', "--triton", "m"), ("is not a URI", "expected the one where")),
        (("--triton", "m", "--name", "a/b"), ("'a/b'", "servers accept")),
        (("--triton", "m", "--name", ".."), ("'..'",)),
        (("--triton", "m", "--name", ""), ("''",)),
        (("--triton", "m", "--name", "é"), ("'é'",)),
        (("--triton", "m", "--name", "a" * 101), ("at most 100 letters", "--name")),
        (("--triton", "file"), ("file is not a folder", "--triton")),
        (("--ovms", "file/m"), ("file is not a folder", "--ovms")),
        (("--triton", "small.ee"), ("inside the bundle", "choose")),
        (("--triton", "."), ("small exists", "eecompile export", "choose")),
        (("--triton", ".", "--overwrite"), ("small exists", "eecompile export")),
        (("--triton", "linked"), ("small exists", "eecompile export")),
        (("--triton", "there"), ("there/small exists", "--name or --triton")),
        (("--ovms", "broken"), ("config.json", "list of models", "OpenVINO")),
        (("--ovms", "other"), ("config.json", '"model_config_list"', "OpenVINO")),
        (("--ovms", "listed"), ("config.json", "small", "choose")),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_in_one_line(
    folder: Folder, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: Told
) -> None:
    Path("file").write_text("mine")
    Path("small").mkdir()
    Path("small/README.md").write_text("mine")
    for name, content in {
        "broken": "{",
        "other": '{"models": []}',
        "listed": '{"model_config_list": [{"config": {"name": "small", "base_path": "/x"}}]}',
    }.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(content)
    assert folder.export("--triton", "there") == 0
    Path("linked").mkdir()
    Path("linked/small").symlink_to(Path("there/small").resolve())
    before = tree()
    capsys.readouterr()
    assert folder.export(*arguments) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eecompile:")]
    assert len(said) == 1
    tells(said[0], *message)
    assert tree() == before


def test_other_models_stay(folder: Folder) -> None:
    other = {"config": {"name": "other", "base_path": "/models/other", "batch_size": 4}}
    mine = {"config": {"name": "small", "base_path": "/elsewhere"}}
    Path("m/other").mkdir(parents=True)
    document = {"model_config_list": [mine, other, 3], "monitoring": {"metrics": {"enable": True}}}
    Path("m/config.json").write_text(json.dumps(document))
    assert folder.export("--ovms", "m", "--overwrite") == 0
    written = json.loads(Path("m/config.json").read_text())
    assert written["monitoring"] == document["monitoring"]
    *others, ours = written["model_config_list"]
    assert others == [other, 3]
    assert ours["config"]["base_path"] == "small"
    assert not Path("m/small/config.pbtxt").exists()
    assert Path("m/other").is_dir()


def test_an_export_replaces_an_export(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.export("--triton", "m", "--with-exits", "--output", "one.onnx") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("2 exits") == 2
    assert "For Triton. Features of eeserve that they lack: audits, the drift alarm" in said
    assert Path("one.onnx").read_bytes() == Path("m/small/1/model.onnx").read_bytes()
    assert folder.export("--triton", "m", "--overwrite") == 0
    outputs = ort.InferenceSession("m/small/1/model.onnx").get_outputs()
    assert [o.name for o in outputs] == ["logits"]
    config = triton.model_config_pb2.ModelConfig()
    text_format.Parse(Path("m/small/config.pbtxt").read_text(), config)
    assert [o.name for o in config.output] == ["logits"]
    assert [p.name for p in Path("m").iterdir()] == ["small"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_repository_is_whole_or_as_it_was(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overwrite: bool,
) -> None:
    if overwrite:
        assert folder.export("--triton", "m") == 0
    else:
        Path("m").mkdir()
    before = tree()
    open_ = Path.open

    def full(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == "config.pbtxt" and "wb" in arguments:
            raise OSError(28, "No space left on device")
        return open_(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", full)
    assert folder.export("--triton", "m", "--overwrite") == 1
    assert "m/small cannot be written: [Errno 28]" in capsys.readouterr().err
    assert tree() == before


def test_a_folder_that_may_not_be_written_is_named(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("offramp.bundle.files.tempfile.mkdtemp", refused)
    assert folder.export("--triton", "m") == 1
    said = capsys.readouterr().err
    tells(said, "m/small", "Permission denied", "make")
    assert "writable for you, or choose another --triton" in said
    assert not Path("m").exists()


@pytest.fixture
def served(exported: Path) -> Iterator[str]:
    """Triton itself with the repository, which it takes as it is written; yields its address."""
    server = shutil.which("tritonserver")
    if server is None:
        pytest.skip("needs tritonserver on the path, with its ONNX Runtime backend")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    host, _, port = address.partition(":")
    command = [server, f"--model-repository={exported}", "--disable-auto-complete-config"]
    command += [f"--grpc-address={host}", f"--grpc-port={port}", "--allow-http=false"]
    command += ["--allow-metrics=false"]
    log = exported.parent / "triton.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            while b"Started GRPCInferenceService" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def test_in_triton_itself(served: str, exported: Path, model: str) -> None:
    inputs: Arrays = replayed_inputs(model, sure(40))
    wanted = run_file(exported / "Small_1/1/model.onnx", inputs)
    config = read_config(exported)
    names = [output.name for output in config.output]
    with triton.InferenceServerClient(served) as client:
        for start, stop in ((0, 1), (1, 4), (4, 12), (12, 20)):
            tensors = []
            for tensor in config.input:
                array = inputs[tensor.name][start:stop]
                datatype = triton.model_config_pb2.DataType.Name(tensor.data_type)[5:]
                tensors.append(triton.InferInput(tensor.name, list(array.shape), datatype))
                tensors[-1].set_data_from_numpy(array)
            asked = [triton.InferRequestedOutput(name) for name in names]
            result = client.infer("Small_1", tensors, outputs=asked)
            answer, exit_, confidence = (result.as_numpy(name) for name in names)
            # Triton's ONNX Runtime may be another version than ours.
            np.testing.assert_allclose(answer, wanted.answer[start:stop], rtol=1e-4, atol=1e-5)
            assert exit_[:, 0].tolist() == wanted.exit[start:stop].tolist()
            np.testing.assert_allclose(confidence[:, 0], wanted.confidence[start:stop], rtol=1e-4)
        assert client.get_model_config("Small_1").config.model_warmup
