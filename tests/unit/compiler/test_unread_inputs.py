"""Inputs that a file declares and nothing reads: part of the interface, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests import models
from tests.facts import facts

from offramp.bundle import TensorSpec
from offramp.bundle.onnx_wire import without_inputs
from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend.model import read_model

ROWS = 4
KINDS = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}
SHAPES: dict[tuple[int | str | None, ...], tuple[int | str, ...]] = {
    ("batch", 20): ("batch", 20),
    ("rows", "tokens"): ("batch", "tokens"),
    (None, None): ("batch", "{name}_1"),
    (1, 20): (1, 20),
    (): (),
    (7,): (7,),
}
"""Shapes as a file declares them, where the batch is open, and as they are served."""
READERS = ("nothing", "an operator of no use", "another output", "a size that folds")


def widened(
    shapes: list[tuple[int | str | None, ...]], places: list[int], readers: list[str]
) -> onnx.ModelProto:
    """An MLP that declares further inputs, each with a reader that the answer does not need."""
    model = models.mlp()
    graph = model.graph
    kinds = list(KINDS.values())
    for number, (shape, place, reader) in enumerate(zip(shapes, places, readers, strict=True)):
        name, kind = f"more{number}", kinds[number % len(kinds)]
        graph.input.insert(place, helper.make_tensor_value_info(name, kind, shape))
        if reader == "an operator of no use":
            graph.node.append(helper.make_node("Identity", [name], [f"{name}/same"]))
        if reader == "another output":
            graph.node.append(helper.make_node("Identity", [name], [f"{name}/out"]))
            graph.output.append(helper.make_tensor_value_info(f"{name}/out", kind, shape))
        if reader == "a size that folds" and shape[1:] == (20,):
            read_the_size(graph, name)
    return model


def read_the_size(graph: onnx.GraphProto, name: str) -> None:
    """Add to the answer what is nothing: a fixed size of the input, times zero."""
    one = numpy_helper.from_array(np.array(1), f"{name}/one")
    zero = numpy_helper.from_array(np.float32(0), f"{name}/zero")
    graph.initializer.extend([one, zero])
    (answer,) = [output for output in graph.output if output.name == "logits"]
    last = graph.node[[list(n.output) for n in graph.node].index([answer.name])]
    last.output[0] = f"{name}/before"
    chain = [
        ("Shape", [name], "shape"),
        ("Gather", [f"{name}/shape", f"{name}/one"], "size"),
        ("Cast", [f"{name}/size"], "float"),
        ("Mul", [f"{name}/float", f"{name}/zero"], "nothing"),
        ("Add", [f"{name}/before", f"{name}/nothing"], ""),
    ]
    for kind, read, written in chain:
        to = {"to": TensorProto.FLOAT} if kind == "Cast" else {}
        out = f"{name}/{written}" if written else answer.name
        graph.node.append(helper.make_node(kind, read, [out], **to))


def fed(spec: TensorSpec) -> np.ndarray[Any, Any]:
    sizes = [s if isinstance(s, int) else ROWS if s == "batch" else 5 for s in spec.shape]
    return np.random.default_rng(0).standard_normal(sizes).astype(spec.dtype)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), simplify=st.booleans())
def test_the_interface_is_the_file_s(
    data: st.DataObject, simplify: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shapes = data.draw(st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4))
    places = [data.draw(st.integers(0, number + 1)) for number in range(len(shapes))]
    readers = [data.draw(st.sampled_from(READERS)) for _ in shapes]
    proto = widened(shapes, places, readers)
    path = tmp_path_factory.mktemp("unread") / "model.onnx"
    onnx.save(proto, path)

    model = read_model(path, answer="logits", simplify=simplify)

    assert [spec.name for spec in model.declared] == [info.name for info in proto.graph.input]
    served = {spec.name: spec for spec in model.declared}
    freed = ((1, 20), "a size that folds") in zip(shapes, readers, strict=True)
    for number, shape in enumerate(shapes):
        name = f"more{number}"
        wanted = tuple(str(s).format(name=name) if isinstance(s, str) else s for s in SHAPES[shape])
        if shape == (1, 20) and freed:  # as for every input that is read
            wanted = ("batch", 20)
        assert served[name].shape == wanted
        assert served[name].dtype == list(KINDS)[number % len(KINDS)]
    if simplify:
        assert [spec.name for spec in model.inputs] == ["x"]
    feeds = {spec.name: fed(spec) for spec in model.declared}
    ones = {n: a[:1] if freed and served[n].shape == ("batch", 20) else a for n, a in feeds.items()}
    wanted = ort.InferenceSession(path).run(["logits"], ones)[0]
    declared = model.as_declared().SerializeToString()
    found = ort.InferenceSession(declared).run(["logits"], feeds)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    bare = without_inputs(declared, [each.spec.name for each in model.unread])
    assert bare == model.proto.SerializeToString()


@pytest.mark.parametrize(("fixed", "served"), [(8, ("batch", 20)), (1, (1, 20))])
def test_a_batch_that_was_fixed_for_all_is_freed_for_all(
    fixed: int, served: tuple[int | str, ...], tmp_path: Path
) -> None:
    proto = models.mlp()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    proto.graph.input.append(helper.make_tensor_value_info("more", TensorProto.INT64, [fixed, 20]))
    onnx.save(proto, tmp_path / "model.onnx")
    assert read_model(tmp_path / "model.onnx").declared[1].shape == served


def test_one_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    proto = models.mlp()
    proto.graph.input.append(helper.make_tensor_value_info("id", TensorProto.STRING, ["batch"]))
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=facts("'id'", "nothing reads", "numbers")):
        read_model(tmp_path / "model.onnx")


def test_a_constant_that_is_listed_as_an_input_is_none(tmp_path: Path) -> None:
    proto = models.mlp()
    weight = proto.graph.initializer[0]
    proto.graph.input.append(
        helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims))
    )
    onnx.save(proto, tmp_path / "model.onnx")
    assert [spec.name for spec in read_model(tmp_path / "model.onnx").declared] == ["x"]
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert [each.name for each in session.get_inputs()] == ["x"]
