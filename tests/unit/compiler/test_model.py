"""Reading: what is accepted, what is repaired, and what the errors teach."""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests import models
from tests.facts import facts, tells

from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.common.errors import ModelError, NoCutPointError
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.exit_placement import choose_candidates
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.runtime import GraphRunner, runs_opset
from offramp.compiler.graphs.weights import weight_file
from offramp.engine.answers.differences import relative_difference


def test_facts(tmp_path):
    path = tmp_path / "resnet.onnx"
    onnx.save(models.residual_cnn(), path)

    model = read_model(path)

    assert model.name == "resnet"
    assert model.original_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [spec.describe() for spec in model.inputs] == ["image: float32 [batch, 3, 16, 16]"]
    assert [spec.describe() for spec in model.outputs] == ["probabilities: float32 [batch, 5]"]
    assert (model.answer.output, model.answer.classes) == ("probabilities", 5)
    assert (model.answer.form, model.opset) == ("probabilities", 17)


def test_logits_are_told_from_probabilities(read):
    assert read(models.mlp()).answer.form == "logits"


@pytest.mark.parametrize("simplify", [True, False])
@pytest.mark.parametrize(
    "proto",
    [models.vgg_chain(batch=1), models.vgg_chain(batch=2), models.vgg_chain(batch=1, opset=9)],
)
def test_fixed_batch_is_freed(read, proto, simplify):
    """Every row gets the same answer at another batch size as from the original at its own."""
    size = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    original = GraphRunner(proto)
    model = read(proto, simplify=simplify)
    images = np.random.default_rng(1).standard_normal((6, 3, 16, 16)).astype(np.float32)

    wanted = [original.run({"image": images[i : i + size]}) for i in range(0, 6, size)]
    actual = GraphRunner(model.proto).run({"image": images})["logits"]

    assert relative_difference(actual, np.concatenate([w["logits"] for w in wanted])) <= 1e-5
    assert model.inputs[0].shape == ("batch", 3, 16, 16)
    assert model.opset >= 13


def merged_rows(*, batch: int) -> onnx.ModelProto:
    """[batch, 4, 8] is flattened to [4 * batch, 8] and back, with constant targets."""
    b = models.Builder()
    x = b.input("x", [batch, 4, 8])
    x = b.node("Reshape", x, b.constant([batch * 4, 8], np.int64))
    x = b.node("Relu", b.linear(x, 8, 8))
    x = b.node("Reshape", x, b.constant([batch, -1, 8], np.int64), out="back")
    x = b.node("Flatten", x, axis=1)
    b.linear(x, 32, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


@pytest.mark.parametrize("batch", [1, 2])
def test_batch_merged_into_rows_is_freed(read, batch):
    model = read(merged_rows(batch=batch), simplify=False)

    x = np.random.default_rng(0).standard_normal((2 * batch, 4, 8)).astype(np.float32)
    original = GraphRunner(merged_rows(batch=batch))
    wanted = [original.run({"x": part})["logits"] for part in np.split(x, 2)]

    actual = GraphRunner(model.proto).run({"x": x})["logits"]
    assert relative_difference(actual, np.concatenate(wanted)) <= 1e-5


def class_token() -> onnx.ModelProto:
    """A constant row is joined to the rows of each sample, as in a vision transformer."""
    b = models.Builder()
    x = b.node("Relu", b.matmul(b.input("x", [1, 4, 8]), 8, 8))
    x = b.node("Concat", b.weight(1, 1, 8), x, axis=1)
    b.linear(b.node("Flatten", x, axis=1), 40, 3, out="logits")
    b.output("logits", [1, 3])
    return b.build()


@pytest.mark.parametrize("simplify", [True, False])
def test_constant_joined_to_a_fixed_batch_is_repeated(read, simplify):
    model = read(class_token(), simplify=simplify)

    x = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32)
    original = GraphRunner(class_token())
    wanted = [original.run({"x": row[None]})["logits"] for row in x]

    actual = GraphRunner(model.proto).run({"x": x})["logits"]
    assert relative_difference(actual, np.concatenate(wanted)) <= 1e-5


def test_batch_that_cannot_be_freed(read):
    """Samples are mixed: the sum over dimension 0 is no sample's own."""
    b = models.Builder()
    x = b.node("ReduceSum", b.input("x", [1, 8]), b.constant([0], np.int64), keepdims=1)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", [1, 3])

    with pytest.raises(ModelError, match=facts("fixed at 1", "dynamic", "export", "ReduceSum")):
        read(b.build())


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + bytes(range(64)), b"hello"])
def test_not_an_onnx_file(tmp_path, content):
    for name in ("model.onnx", "model.pt", "model.py"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(
            ModelError,
            match=facts(f"{name}: not an ONNX file", "torch.onnx.export", "offramp.compile(module"),
        ):
            read_model(path)


def test_missing_file(tmp_path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_model(tmp_path / "absent.onnx")


def test_file_that_the_checker_refuses(read):
    proto = models.mlp()
    proto.graph.node[0].input[0] = "nowhere"

    with pytest.raises(ModelError, match=facts("'nowhere'", "not an input")):
        read(proto)


@pytest.mark.parametrize("beyond", [1, 10**9])
def test_an_opset_that_onnx_runtime_does_not_take_yet_is_told_with_the_newest(read, beyond):
    newest = max(n for n in range(13, 60) if runs_opset(n))
    proto = models.mlp()
    for version in proto.opset_import:
        version.version = newest + beyond
    with pytest.raises(ModelError) as caught:
        read(proto)
    tells(str(caught.value), f"opset {newest + beyond}", "ONNX Runtime")
    assert f"export the model with opset_version={newest}, or" in str(caught.value)


def test_opset_too_old_to_convert(read):
    """Statistics per position instead of per channel went away with opset 9."""
    b = models.Builder()
    x = b.input("x", [1, 3, 4, 4])
    statistics = [b.constant(np.ones(3), np.float32) for _ in range(4)]
    x = b.node("BatchNormalization", x, *statistics, spatial=0)
    b.linear(b.node("Flatten", x), 48, 3, out="logits")
    b.output("logits", [1, 3])

    with pytest.raises(ModelError, match=facts("opset 8", "13 or newer", "opset_version=13")):
        read(b.build(opset=8))


def two_outputs() -> onnx.ModelProto:
    proto = models.mlp()
    hidden = helper.make_tensor_value_info("hidden1", TensorProto.FLOAT, ["batch", 16])
    proto.graph.output.append(hidden)
    return proto


def test_several_outputs_need_a_choice(read):
    with pytest.raises(ModelError, match=r"2 outputs \(logits, hidden1\).*answer='logits'"):
        read(two_outputs())
    with pytest.raises(ModelError, match=facts("'logit'", "'logits', 'hidden1'")):
        read(two_outputs(), answer="logit")


def test_the_chosen_output_is_the_only_one_kept(read):
    model = read(two_outputs(), answer="hidden1")

    assert [spec.name for spec in model.outputs] == ["hidden1"]
    assert (model.answer.classes, model.answer.form) == (16, "logits")
    assert "logits" not in {t for node in model.proto.graph.node for t in node.output}


@pytest.mark.parametrize("dims", [["batch", 1], ["batch", 4, 4, 4, 4]])
def test_an_answer_that_is_of_no_task(read, dims):
    b = models.Builder()
    b.node("Relu", b.input("x", dims), out="y")
    b.output("y", dims)

    with pytest.raises(ModelError, match=facts("'y'", "shape", "floating-point [batch, classes]")):
        read(b.build())


def test_fully_convolutional_answer_is_flattened(read):
    b = models.Builder()
    x = b.conv(b.input("image", ["batch", 3, 8, 8]), (3, 4))
    b.node("Softmax", b.node("GlobalAveragePool", x), out="p", axis=1)
    b.output("p", ["batch", 4, 1, 1])

    model = read(b.build())

    assert model.outputs[0].shape == ("batch", 4)
    assert model.answer.form == "probabilities"


def test_shapes_that_inference_loses_are_taken_from_the_file(read):
    """Data propagation does not follow ``Max``, so the target of the Reshape is unknown."""
    b = models.Builder()
    x = b.input("x", ["n", 4])
    target = b.node("Max", b.node("Shape", x), b.constant([0, 0], np.int64))
    b.linear(b.node("Reshape", x, target), 4, 3, out="logits")
    b.output("logits", ["n", 3])

    assert read(b.build(), simplify=False).outputs[0].shape == ("batch", 3)


def test_scalar_input(read):
    b = models.Builder()
    b.node("Mul", b.input("x", ["batch", 4]), b.input("gain", []), out="logits")
    b.output("logits", ["batch", 4])

    with pytest.raises(ModelError, match="input 'gain' has no dimensions"):
        read(b.build())


def test_initializers_listed_as_inputs_are_no_inputs(read):
    proto = models.mlp()
    for tensor in proto.graph.initializer:
        info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        proto.graph.input.append(info)

    assert [spec.name for spec in read(proto).inputs] == ["x"]


def test_no_cut_point(read):
    b = models.Builder()
    b.linear(b.input("x", ["batch", 4]), 4, 3, out="logits")
    b.output("logits", ["batch", 3])

    analysis = find_cuts(read(b.build()))

    assert analysis.cuts == ()
    with pytest.raises(NoCutPointError, match=facts("no cut point", "0.5%")):
        choose_candidates(analysis)


def test_external_data(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(
        models.mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    inline = tmp_path / "inline.onnx"
    onnx.save(models.mlp(), inline)
    x = {"x": np.ones((2, 16), np.float32)}

    outside, inside = read_model(path), read_model(inline)

    assert np.array_equal(
        GraphRunner(outside.proto).run(x)["logits"], GraphRunner(inside.proto).run(x)["logits"]
    )
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"external data .*weights\.bin are missing"):
        read_model(path)


def test_simplification_that_changes_outputs_is_dropped(read, monkeypatch, caplog):
    def spoil(proto: onnx.ModelProto, **_: object) -> onnx.ModelProto:
        for tensor in proto.graph.initializer:
            tensor.raw_data = bytes(len(tensor.raw_data))
        return proto

    monkeypatch.setattr("onnxslim.slim", spoil)
    with caplog.at_level(logging.WARNING):
        model = read(models.mlp())

    assert "not simplified: onnxslim changes the outputs" in caplog.text
    assert any(any(t.raw_data) for t in model.proto.graph.initializer)


def test_more_operators_than_onnxslim_can_take_are_left_as_they_are(
    read, monkeypatch, caplog
) -> None:
    proto = models.residual_cnn()
    limit = len(proto.graph.node) - 1
    monkeypatch.setattr("offramp.compiler.frontend.preparation.MOST_SIMPLIFIED", limit)
    monkeypatch.setattr("onnxslim.slim", lambda *_, **__: pytest.fail("was run"))
    model = read(proto)
    assert len(model.proto.graph.node) == limit + 1
    tells(caplog.text, f"{limit + 1} operators", "onnxslim", f"{limit}")
    tells(caplog.text, "onnxslim MODEL.onnx SIMPLER.onnx --skip-optimizations weight_tying")


def test_operators_get_names_of_their_own(read):
    names = [node.name for node in read(models.bert_like()).proto.graph.node]

    assert all(names)
    assert len(set(names)) == len(names)


SLOW = (sys.executable, "-c", "import time; time.sleep(1e6)")
"""Replacement of onnxslim's process."""


def test_a_simplifier_that_does_not_end_is_stopped_and_done_without(
    read, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("offramp.compiler.frontend.simplifier._SMALL_OPERATORS", 0)
    monkeypatch.setattr("offramp.compiler.frontend.simplifier.COMMAND", SLOW)
    before = read(models.residual_cnn(), simplify=False)
    monkeypatch.setattr("offramp.compiler.frontend.preparation._SMALL_BYTES", 0)
    scratch = ScratchSpace(tmp_path / "scratch")
    scratch.place.mkdir()
    with weight_file(scratch) as weights:
        model = read(models.residual_cnn(), simplify_limit=0.25, weights=weights)
        assert weights.whole(model.proto) == before.proto != model.proto
    tells(caplog.text, "not simplified", "0.25 s", "--simplify-limit")
    assert scratch.peak_bytes > 0
    assert list(scratch.place.iterdir()) == []
    places = Path("/proc").glob("[0-9]*")
    assert [p for p in places if _command(p)[: len(SLOW)] == list(SLOW)] == []


def _command(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []


def test_a_simplifier_that_ends_badly_is_done_without(read, monkeypatch, caplog) -> None:
    monkeypatch.setattr("offramp.compiler.frontend.simplifier._SMALL_OPERATORS", 0)
    fails = (sys.executable, "-c", "import sys; sys.exit('a wheel came off')")
    monkeypatch.setattr("offramp.compiler.frontend.simplifier.COMMAND", fails)
    read(models.mlp())
    tells(caplog.text, "not simplified", "a wheel came off")


def test_a_simplifier_imports_nothing_of_the_folder_that_it_is_run_in(
    read, tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "onnx.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offramp.compiler.frontend.simplifier._SMALL_OPERATORS", 0)
    read(models.mlp())
    assert caplog.text == ""


def test_a_model_is_simplified_the_same_in_a_process_of_its_own(
    read, monkeypatch, caplog, tmp_path
) -> None:
    proto = models.mlp(width=64)
    for node in proto.graph.node:
        node.input[:] = ["again" if name == "x" else name for name in node.input]
    proto.graph.node.insert(0, helper.make_node("Identity", ["x"], ["again"]))
    here = read(proto)
    assert "Identity" not in {node.op_type for node in here.proto.graph.node}
    monkeypatch.setattr("offramp.compiler.frontend.simplifier._SMALL_OPERATORS", 0)
    assert read(proto).proto == here.proto
    monkeypatch.setattr("offramp.compiler.frontend.preparation._SMALL_BYTES", 0)
    monkeypatch.chdir(tmp_path)
    with weight_file(ScratchSpace(Path())) as weights:
        light = read(proto, weights=weights).proto
        assert weights.whole(light) == here.proto != light
    assert caplog.text == ""
