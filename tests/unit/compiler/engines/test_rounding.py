"""Float16 that is float16 on a CPU: against numpy's arithmetic and ONNX's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.models import Builder
from tests.sliced import BUILDERS, inputs_of, sliced

from offramp.compiler.engines.halving import halve, rounded
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.differences import relative_difference
from offramp.engine.graphs.assembly import has_half_precision

Tensors = Mapping[str, NDArray[Any]]


def run(graph: bytes, feeds: Tensors) -> dict[str, NDArray[Any]]:
    proto = onnx.ModelProto.FromString(rounded(graph))
    onnx.checker.check_model(proto, full_check=True)
    return GraphRunner(proto).run(feeds)


def steps(*operators: tuple[str, float]) -> bytes:
    """Arithmetic of one number with constants, one after another."""
    b = Builder()
    x = b.input("x", ["batch"])
    for kind, value in operators:
        x = b.node(kind, x, b.constant(value, np.float32))
    b.node("Relu", x, out="y")
    b.output("y", ["batch"])
    return halve(b.build().SerializeToString())


def test_every_step_is_rounded() -> None:
    x = np.linspace(0, 3, 1000, dtype=np.float32)
    found = run(steps(("Add", 100.0), ("Sub", 100.0), ("Mul", 1.1)), {"x": x})["y"]
    half = x.astype(np.float16)
    wanted = ((half + np.float16(100)) - np.float16(100)) * np.float16(1.1)
    assert wanted.dtype == np.float16
    np.testing.assert_array_equal(found, wanted.astype(np.float32))
    assert len(np.unique(found)) < 60  # steps of 1/16 at 100


def test_what_leaves_the_range_of_float16_is_infinite() -> None:
    """Plain ONNX Runtime answers 30,000, as if there had been no overflow."""
    graph = steps(("Mul", 8.0), ("Mul", 0.125))
    x = np.array([30000, 2], np.float32)
    assert run(graph, {"x": x})["y"].tolist() == [np.inf, 2]


def test_what_is_small_has_fewer_digits_and_vanishes() -> None:
    x = np.array([1e-3, 1e-4, 1e-5], np.float32)
    found = run(steps(("Mul", 1e-3), ("Mul", 1000.0)), {"x": x})["y"]
    half = x.astype(np.float16) * np.float16(1e-3) * np.float16(1000)
    np.testing.assert_array_equal(found, half.astype(np.float32))
    assert found[2] == 0


@pytest.mark.parametrize("name", list(BUILDERS))
def test_models_compute_what_the_reference_of_onnx_does(name: str) -> None:
    """The reference adds in float16 where numpy does, so there is a tolerance."""
    pieces = sliced(name)
    graph, feeds = halve(pieces.model.proto.SerializeToString()), inputs_of(pieces, 5)
    answer = pieces.model.answer.output
    reference = ReferenceEvaluator(onnx.ModelProto.FromString(graph))
    (wanted,) = reference.run([answer], feeds)
    found = run(graph, feeds)[answer]
    assert found.dtype == np.float32
    assert relative_difference(found, wanted) < 1e-2


def test_names_and_types_of_borders_stay_and_weights_are_float32() -> None:
    proto = sliced("bert").model.proto
    graph = halve(proto.SerializeToString())
    made = onnx.ModelProto.FromString(rounded(graph))
    for side in ("input", "output"):
        borders = [[(i.name, i.type.tensor_type.elem_type) for i in getattr(p.graph, side)]
                   for p in (proto, made)]  # fmt: skip
        assert borders[0] == borders[1]
    assert has_half_precision(graph)
    assert not has_half_precision(rounded(graph))
    assert rounded(graph) == rounded(graph)


def test_a_graph_without_float16_stays_the_same() -> None:
    graph = sliced("residual").model.proto.SerializeToString()
    assert rounded(graph) == graph


def test_float16_borders_bodies_and_other_domains_keep_their_float16() -> None:
    """A source model may have them if it is float16 itself."""
    half, value = TensorProto.FLOAT16, helper.make_tensor_value_info
    third = np.float16(1 / 3)
    body = helper.make_graph(
        [helper.make_node("Add", ["state", "w"], ["grown"]),
         helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [value("step", TensorProto.INT64, []), value("go", TensorProto.BOOL, []),
         value("state", half, ["batch"])],
        [value("on", TensorProto.BOOL, []), value("grown", half, ["batch"])],
    )  # fmt: skip
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["inner"]),
        helper.make_node("Loop", ["steps", "", "inner"], ["looped"], body=body),
        helper.make_node("Add", ["looped", "w"], ["y"]),
        helper.make_node("QuickGelu", ["inner"], ["gelu"], domain="com.microsoft", alpha=0.0),
        helper.make_node("Mul", ["gelu", "w"], ["other"]),  # reads a type that nobody knows
        helper.make_node("QuickGelu", ["inner"], ["last"], domain="com.microsoft", alpha=0.0),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("x", half, ["batch"])],
        [value(name, half, ["batch"]) for name in ("y", "other", "last")],
        [numpy_helper.from_array(np.array([third]), "w"),
         numpy_helper.from_array(np.array(2), "steps")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    made = onnx.ModelProto.FromString(rounded(model.SerializeToString()))
    x = np.array([0.3, 2000], np.float16)
    found = GraphRunner(made).run({"x": x})
    assert {array.dtype for array in found.values()} == {x.dtype}
    reads = {node.output[0]: list(node.input) for node in made.graph.node}
    assert reads["last"] == ["inner"]
    np.testing.assert_array_equal(found["y"], x * third + third + third + third)
    np.testing.assert_allclose(found["other"], x * third / 2 * third, rtol=2e-3)
