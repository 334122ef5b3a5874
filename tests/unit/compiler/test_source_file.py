"""A model file refers only to weights next to it, and each run of it ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests import models
from tests.facts import Told, facts, tells

from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend import source_file
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs import runtime
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weights import weight_file

Read = Callable[..., SourceModel]


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """Return a model with its weights in ``weights.bin`` next to it."""
    path = tmp_path / "m" / "model.onnx"
    path.parent.mkdir()
    onnx.save(
        models.mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    return path


def rename(path: Path, **entries: str) -> None:
    """Change the external data of a model's tensors."""
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        told = {entry.key: entry.value for entry in tensor.external_data} | entries
        del tensor.external_data[:]
        for key, value in told.items():
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())


def refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the message for a model whose external data may not be opened."""
    opened = source_file.open_regular

    def only_the_model(file: Path) -> Any:
        assert file == path, f"{file} was opened"
        return opened(file)

    monkeypatch.setattr(source_file, "open_regular", only_the_model)
    with pytest.raises(ModelError) as caught:
        read_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "location",
    [
        *(
            "../secret",
            "a/../../secret",
            "/etc/hostname",
            "C:\\secret",
            "..\\secret",
            "C:x",
            "x\0y",
        ),
        *(".", "./"),
    ],
)
def test_external_data_elsewhere_are_refused_unread(
    external: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (external.parents[1] / "secret").write_bytes(bytes(10_000))
    rename(external, location=location)
    tells(refused(external, monkeypatch), "outside of its folder", "next to it")


def test_external_data_of_an_inner_tensor_elsewhere_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = models.conditional()
    node = next(n for n in proto.graph.node if n.op_type == "If")
    constant = node.attribute[0].g.initializer.add(name="w", data_type=1, dims=[1])
    constant.data_location = TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="/etc/hostname")
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert "'/etc/hostname' are outside of its folder" in refused(path, monkeypatch)


def test_links_are_refused_unread(external: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, secret = external.with_name("weights.bin"), external.parents[1] / "secret"
    weights.rename(secret)
    weights.symlink_to(secret)
    tells(refused(external, monkeypatch), "weights.bin", "link")
    weights.unlink()
    os.link(secret, weights)
    tells(refused(external, monkeypatch), "2 names", "hard links", "copy")


def test_a_linked_folder_is_refused_unread(external: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (external.parent / "inner").symlink_to("/etc")
    rename(external, location="inner/hostname")
    tells(refused(external, monkeypatch), "inner", "link")


def test_a_pipe_as_external_data_is_refused(
    external: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    external.with_name("weights.bin").unlink()
    os.mkfifo(external.with_name("weights.bin"))
    assert "weights.bin are not a regular file" in refused(external, monkeypatch)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "-1"}, ("location", "offset", "length")),
        ({"length": "many"}, ("location", "offset", "length")),
        ({"location": ""}, ("location", "offset", "length")),
        ({"length": str(2**62)}, ("byte 4,611,686,018,427,", "external data")),
    ],
)
def test_claims_that_cannot_be_are_refused_unread(
    external: Path, entries: dict[str, str], message: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(external, **entries)
    tells(refused(external, monkeypatch), *message)


def test_a_pipe_as_model_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=facts("model.onnx", "pipe", "device")):
        read_model(tmp_path / "model.onnx")


def test_a_folder_as_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_model(tmp_path)


def test_a_model_beyond_the_limit_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_file, "MOST_BYTES", 10)
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=facts("one message", "external data")):
        read_model(tmp_path / "model.onnx")


def outside(proto: onnx.ModelProto, path: Path) -> Path:
    """Save a model with all tensors in a file that is called as our own is."""
    onnx.save(
        proto,
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    return path


@pytest.mark.parametrize(
    "proto",
    [models.mlp(width=64), models.vgg_chain(opset=11), models.conditional(), models.bert_like()],
    ids=["mlp", "old opset", "bodies", "transformer"],
)
def test_a_model_is_the_same_whether_it_names_its_weights_or_holds_them(
    tmp_path: Path, proto: onnx.ModelProto
) -> None:
    path = outside(proto, tmp_path / "model.onnx")
    whole = read_model(path)
    with weight_file(ScratchSpace(tmp_path)) as weights:
        light = read_model(path, weights=weights)
        assert weights.whole(light.proto) == whole.proto
        named = [t for t in light.proto.graph.initializer if t.external_data]
        held = [t for t in light.proto.graph.initializer if not t.external_data]
        assert all(len(t.raw_data) < 4096 for t in held)
        sizes = [len(t.raw_data) for t in whole.proto.graph.initializer]
        assert len(named) == sum(size >= 4096 for size in sizes)
    assert light.original_sha256 == whole.original_sha256


def test_what_one_message_must_hold_beside_named_weights_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = models.mlp(width=64)
    constant = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32))
    node = helper.make_node("Constant", [], ["unused"], value=constant)
    proto.graph.node.append(node)
    path = outside(proto, tmp_path / "model.onnx")
    size = path.stat().st_size + 4 * 64 * 64
    with weight_file(ScratchSpace(tmp_path)) as weights:
        monkeypatch.setattr(source_file, "MOST_BYTES", size + 4096)
        read_model(path, weights=weights)
        monkeypatch.setattr(source_file, "MOST_BYTES", size - 1)
        with pytest.raises(ModelError, match=facts("one message", "initializers")):
            read_model(path, weights=weights)


def test_rules_of_onnx_are_checked_of_models_that_name_their_weights(tmp_path: Path) -> None:
    proto = models.mlp(width=64)
    proto.graph.node[0].attribute.append(helper.make_attribute("no_such", 1))
    attribute = outside(proto, tmp_path / "attribute.onnx")
    length = outside(models.mlp(width=64), tmp_path / "length.onnx")
    rename(length, length="8192", offset="0")
    for path, rule in (
        (attribute, "breaks a rule of ONNX.*no_such"),
        # onnx 1.17 does not check the size; reading the weight fails then
        (length, r"raw_data size \(8192 bytes\) is too small|contradicts itself.*2048"),
    ):
        with (
            weight_file(ScratchSpace(tmp_path)) as weights,
            pytest.raises(ModelError, match=rule),
        ):
            read_model(path, weights=weights)


def test_a_model_without_outputs_or_inputs_is_refused(read: Read) -> None:
    proto = models.mlp()
    del proto.graph.output[:]
    with pytest.raises(ModelError, match="no outputs, so there is no answer"):
        read(proto)
    b = models.Builder()
    b.node("Softmax", b.constant(np.ones((2, 3)), np.float32), out="logits")
    b.output("logits", ["batch", 3])
    with pytest.raises(ModelError, match="no inputs that the answer depends on"):
        read(b.build())


@pytest.mark.parametrize(
    ("dims", "kind", "message"),
    [
        (["batch", 2**40], TensorProto.FLOAT, ("more than 1 GiB per sample",)),
        (["batch", *"abcdefgh"], TensorProto.FLOAT, ("9 dimensions", "at most 8")),
        (["batch", 3], 99, ("number 99", "number type")),
        (["batch", 3], TensorProto.COMPLEX64, ("complex64", "number")),
    ],
)
def test_inputs_that_no_classifier_has_are_refused(
    read: Read, dims: list[Any], kind: int, message: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx.checker.check_model", lambda _: None)
    b = models.Builder()
    b.node("Relu", b.input("x", dims, kind), out="y")
    b.output("y", ["batch", 3])
    with pytest.raises(ModelError, match=facts(*message)):
        read(b.build())


def endless(batch: int | str) -> onnx.ModelProto:
    """A loop of 2⁶² trips."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go on"], ["goes on"]),
            helper.make_node("Neg", ["state"], ["next state"]),
        ],
        "body",
        [
            value("trip", TensorProto.INT64, []),
            value("go on", TensorProto.BOOL, []),
            value("state", TensorProto.FLOAT, None),
        ],
        [value("goes on", TensorProto.BOOL, []), value("next state", TensorProto.FLOAT, None)],
    )
    b = models.Builder()
    x = b.input("x", [batch, 4])
    trips, yes = b.constant(2**62, np.int64), b.constant(True, np.bool_)
    x = b.node("Loop", trips, yes, x, body=body)
    b.linear(x, 4, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


@pytest.mark.parametrize("batch", [1, "batch"])
def test_a_run_that_does_not_end_is_given_up(
    read: Read, batch: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "LIMIT_S", 0.25)
    monkeypatch.setattr(runtime, "LIMIT_PER_ROW_S", 0.25)
    with pytest.raises(ModelError, match=facts("1 samples", "0.5 s", "if it is no")):
        GraphRunner(endless(batch)).run({"x": np.ones((1, 4), np.float32)})
    with pytest.raises(ModelError, match=facts("model.onnx", "1 samples", "did not")):
        read(endless(batch))


def test_what_the_onnx_checker_lets_pass_is_one_line(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    def annotate(_: onnx.ModelProto) -> None:
        raise ValueError("cannot reshape array\nof size 2")

    monkeypatch.setattr("offramp.compiler.frontend.passes.annotate", annotate)
    with pytest.raises(ModelError, match=r"contradicts itself \(ValueError: cannot .* of size 2\)"):
        read(models.mlp())


def test_a_run_that_fails_by_itself_keeps_its_reason() -> None:
    runner = GraphRunner(models.mlp())
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
        runner.run({"x": np.ones((1, 5), np.float32)})
