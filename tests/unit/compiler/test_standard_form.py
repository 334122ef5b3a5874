"""Files that ONNX Runtime runs are read, even if the ONNX checker rejects their form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from tests import models
from tests.facts import Told, facts
from tests.models import Builder

from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend.model import read_model

Deviation = Callable[[onnx.ModelProto], None]


def output_without_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def output_without_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].ClearField("type")


def output_of_wrong_rank(model: onnx.ModelProto) -> None:
    if model.graph.output[0].HasField("type"):
        del model.graph.output[0].type.tensor_type.shape.dim[:]


def inner_tensor_without_type(model: onnx.ModelProto) -> None:
    model.graph.value_info.add(name="hidden0")


def operators_of_ai_onnx(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.domain = "ai.onnx"


def import_of_ai_onnx(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "ai.onnx"


def both_imports(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("ai.onnx", model.opset_import[0].version))


def sizes_of_minus_one(model: onnx.ModelProto) -> None:
    for info in (model.graph.input[0], model.graph.output[0]):
        for dim in info.type.tensor_type.shape.dim[:1]:
            dim.dim_value = -1


def sizes_of_zero(model: onnx.ModelProto) -> None:
    for info in (model.graph.input[0], model.graph.output[0]):
        for dim in info.type.tensor_type.shape.dim[:1]:
            dim.dim_value = 0


def graph_without_name(model: onnx.ModelProto) -> None:
    model.graph.name = ""


def initializer_twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def operators_backwards(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def domain_that_is_not_imported(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Relu")
    node.op_type, node.domain = "Gelu", "com.microsoft"


DEVIATIONS: list[Deviation] = [
    output_without_shape,
    output_without_type,
    output_of_wrong_rank,
    inner_tensor_without_type,
    operators_of_ai_onnx,
    import_of_ai_onnx,
    both_imports,
    sizes_of_minus_one,
    sizes_of_zero,
    graph_without_name,
    initializer_twice,
    operators_backwards,
    domain_that_is_not_imported,
]


def check_read(proto: onnx.ModelProto, path: Path) -> None:
    """The model is read as what it computes, [batch, 16] in and 3 classes out."""
    onnx.save(proto, path)
    model = read_model(path)
    assert [spec.describe() for spec in model.inputs] == ["x: float32 [batch, 16]"]
    assert [spec.describe() for spec in model.outputs] == ["logits: float32 [batch, 3]"]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    graph = proto.graph
    for info in (graph.input[0], graph.output[0]):  # ONNX Runtime holds a size of 0 to be one
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value == 0:
                dim.ClearField("dim_value")
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    wanted = ort.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})[0]
    found = ort.InferenceSession(model.proto.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deviate", DEVIATIONS)
def test_what_onnx_runtime_runs_is_read(deviate: Deviation, tmp_path: Path) -> None:
    proto = models.mlp()
    deviate(proto)
    check_read(proto, tmp_path / "model.onnx")


@settings(max_examples=25, deadline=None)
@given(chosen=st.lists(st.sampled_from(DEVIATIONS), min_size=2, max_size=6, unique=True))
def test_so_are_several_deviations_at_once(
    chosen: list[Deviation], tmp_path_factory: pytest.TempPathFactory
) -> None:
    proto = models.mlp()
    for deviate in sorted(chosen, key=DEVIATIONS.index):
        deviate(proto)
    check_read(proto, tmp_path_factory.mktemp("form") / "model.onnx")


def test_an_output_that_inference_does_not_find_is_found_by_a_run(tmp_path: Path) -> None:
    proto = models.mlp()
    graph = proto.graph
    last = next(node for node in graph.node if "logits" in node.output)
    last.output[0] = "before"
    graph.node.append(helper.make_node("BiasAdd", ["before", "b"], ["logits"]))
    graph.node[-1].op_type, graph.node[-1].domain = "Gelu", "com.microsoft"
    del graph.node[-1].input[1:]
    graph.output[0].ClearField("type")
    check_read(proto, tmp_path / "model.onnx")


def without_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def of_a_newer_ir(model: onnx.ModelProto) -> None:
    model.ir_version = onnx.IR_VERSION + 1


def input_without_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def unknown_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("no_such", 1))


@pytest.mark.parametrize(
    ("deviate", "said"),
    [
        (without_opset, ("opset_import", "version")),
        (of_a_newer_ir, (f"IR version {onnx.IR_VERSION + 1}", "onnx package")),
        (input_without_shape, ("'x'", "rank", "type or shape is missing")),
        (unknown_attribute, ("rule of ONNX", "export the model again", "no_such")),
    ],
)
def test_what_cannot_be_taken_is_told_with_the_remedy(
    deviate: Deviation, said: Told, tmp_path: Path
) -> None:
    proto = models.mlp()
    deviate(proto)
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=facts(*said)):
        read_model(tmp_path / "model.onnx")


def with_dropout(ratio: float, training: bool | None) -> onnx.ModelProto:
    model = models.mlp()
    graph = model.graph
    last = next(node for node in graph.node if "logits" in node.output)
    last.output[0] = "before"
    graph.initializer.append(numpy_helper.from_array(np.float32(ratio), "ratio"))
    reads = ["before", "ratio"]
    if training is not None:
        graph.initializer.append(numpy_helper.from_array(np.array(training), "training"))
        reads.append("training")
    graph.node.append(helper.make_node("Dropout", reads, ["logits"]))
    return model


@pytest.mark.parametrize(("ratio", "training"), [(0.5, None), (0.5, False), (0.0, True)])
def test_a_dropout_that_drops_nothing_is_taken(
    ratio: float, training: bool | None, tmp_path: Path
) -> None:
    check_read(with_dropout(ratio, training), tmp_path / "model.onnx")


@pytest.mark.parametrize("ratio", [1e-6, 0.5])
def test_a_dropout_in_training_mode_is_named_with_the_remedy(ratio: float, tmp_path: Path) -> None:
    onnx.save(with_dropout(ratio, True), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=facts("'logits'", "Dropout", "model.eval()")):
        read_model(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("shape", "answer", "axis"),
    [
        (["time", "batch", 8], "batch", 1),
        (["seq", "batch_size", 8], "out", 1),
        (["T", "B", 8], "B", 1),
        ([4, "B", 8], "B", 1),
        (["h", "w", "BS"], "n", 2),
    ],
)
def test_a_batch_that_is_not_in_front_is_named(
    shape: list[int | str], answer: str, axis: int, tmp_path: Path
) -> None:
    b = Builder()
    x = b.input("x", shape)
    axes = b.constant([0 if axis == 1 else 1])
    b.node("ReduceMean", x, axes, keepdims=0, out="y")
    b.output("y", [answer, 8])
    onnx.save(b.build(opset=18), tmp_path / "model.onnx")
    wanted = rf"input 'x' is \[.*\]: its batch is dimension {axis}, '.*batch_first=True"
    with pytest.raises(ModelError, match=wanted):
        read_model(tmp_path / "model.onnx")


@pytest.mark.parametrize("shape", [["N", 3, "N", "N"], ["batch", 3, "batch", "w"], ["n", 3, 8, 8]])
def test_a_name_that_stands_in_front_too_is_no_other_batch(
    shape: list[int | str], tmp_path: Path
) -> None:
    b = Builder()
    x = b.input("x", shape)
    b.node("Relu", b.node("Conv", x, b.weight(4, 3, 1, 1)), out="y")
    b.output("y", [shape[0], 4, *shape[2:]])
    onnx.save(b.build(opset=18), tmp_path / "model.onnx")
    assert read_model(tmp_path / "model.onnx").inputs[0].shape[0] == "batch"


def test_outputs_of_bodies_need_no_type(tmp_path: Path) -> None:
    proto = models.conditional()
    for node in proto.graph.node:
        for attribute in node.attribute:
            for output in attribute.g.output:
                output.ClearField("type")
    onnx.save(proto, tmp_path / "model.onnx")
    ort.InferenceSession(tmp_path / "model.onnx")
    assert read_model(tmp_path / "model.onnx").answer.classes >= 2
