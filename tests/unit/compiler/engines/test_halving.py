"""Float16 where it is sound: types, names, and values against float32."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.facts import tells
from tests.models import Builder
from tests.sliced import BUILDERS, inputs_of, sliced

from offramp.compiler.engines.halving import SUFFIX, halve, rounded
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.differences import relative_difference

TOLERANCE = 1e-2
"""Float16 has 11 bits (5e-4); a dozen layers add up, and small answers are relative to more."""


def halved(proto: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto.FromString(halve(proto.SerializeToString()))
    onnx.checker.check_model(result, full_check=True)
    return result


def run(half: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Compute in float16, which plain ONNX Runtime does not."""
    return GraphRunner(onnx.ModelProto.FromString(rounded(half.SerializeToString()))).run(feeds)


def node_giving(proto: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    found = [node for node in proto.graph.node if tensor in node.output]
    assert len(found) == 1, [node.output for node in proto.graph.node]
    return found[0]


def in_half(proto: onnx.ModelProto, tensor: str) -> bool:
    """Return True if the operator of a tensor computes it in float16."""
    names = {name for node in proto.graph.node if node.op_type != "Cast" for name in node.output}
    assert (tensor in names) != (tensor + SUFFIX in names)
    return tensor + SUFFIX in names


@pytest.mark.parametrize("name", list(BUILDERS))
def test_models_compute_the_same_within_float16(name: str) -> None:
    pieces = sliced(name)
    half, feeds = halved(pieces.model.proto), inputs_of(pieces, 5)
    answer = pieces.model.answer.output
    wanted, found = GraphRunner(pieces.model.proto).run(feeds)[answer], run(half, feeds)[answer]
    assert found.dtype == np.float32
    assert 0 < relative_difference(found, wanted) < TOLERANCE


@pytest.mark.parametrize("name", list(BUILDERS))
def test_inputs_and_outputs_keep_names_and_types_and_weights_are_half(name: str) -> None:
    proto = sliced(name).model.proto
    half = halved(proto)
    assert [i.SerializeToString() for i in half.graph.input] == [
        i.SerializeToString() for i in proto.graph.input
    ]
    assert [(o.name, o.type.tensor_type.elem_type) for o in half.graph.output] == [
        (o.name, o.type.tensor_type.elem_type) for o in proto.graph.output
    ]
    kinds = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    products = [n for n in half.graph.node if n.op_type in {"Conv", "Gemm", "MatMul"}]
    assert products
    weights = [name for node in products for name in node.input if name in kinds]
    whole = {TensorProto.FLOAT} if name == "rotary" else set()  # times positions: wide integers
    assert {kinds[name] for name in weights} == {TensorProto.FLOAT16} | whole


def test_the_same_graph_gives_the_same_bytes() -> None:
    graph = sliced("bert").model.proto.SerializeToString()
    assert halve(graph) == halve(graph)


def test_it_is_cast_only_at_the_borders_of_a_plain_network() -> None:
    half = halved(sliced("vgg").model.proto)
    casts = [list(node.output) for node in half.graph.node if node.op_type == "Cast"]
    assert casts == [["image" + SUFFIX], ["logits"]]


def layer_norm_in_steps(epsilon: float, scale: float) -> onnx.ModelProto:
    b = Builder()
    x = b.node("Mul", b.input("x", ["batch", 8]), b.constant(scale, np.float32), out="scaled")
    mean = b.node("ReduceMean", x, out="mean", axes=[-1])
    off = b.node("Sub", x, mean, out="off")
    square = b.node("Pow", off, b.constant(2.0, np.float32), out="square")
    variance = b.node("ReduceMean", square, out="variance", axes=[-1])
    padded = b.node("Add", variance, b.constant(epsilon, np.float32), out="padded")
    b.node("Div", off, b.node("Sqrt", padded, out="deviation"), out="normal")
    b.output("normal", ["batch", 8])
    return b.build()


def test_a_variance_beyond_float16_stays_in_float32() -> None:
    proto = layer_norm_in_steps(1e-12, scale=300.0)
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    x[0] *= 3  # (3 · 300)² is beyond 65,504
    half = halved(proto)
    kept = ["mean", "square", "variance", "padded", "deviation", "normal"]
    assert [in_half(half, name) for name in kept] == [False] * len(kept)
    assert in_half(half, "off")
    wanted, found = GraphRunner(proto).run({"x": x})["normal"], run(half, {"x": x})["normal"]
    np.testing.assert_allclose(found, wanted, atol=5e-3)


@pytest.mark.parametrize("centred", [True, False])
def test_a_square_that_is_a_product_stays_in_float32_too(centred: bool) -> None:
    """Layer norms and RMS norms are also exported so; 300² is beyond 65,504."""
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 8]), out="inner")
    if centred:
        x = b.node("Sub", x, b.node("ReduceMean", x, axes=[-1]), out="off")
    variance = b.node("ReduceMean", b.node("Mul", x, x, out="square"), axes=[-1])
    deviation = b.node("Sqrt", b.node("Add", variance, b.constant(1e-6, np.float32)))
    b.node("Div", x, deviation, out="normal")
    b.output("normal", ["batch", 8])
    proto = b.build()
    half = halved(proto)
    assert not in_half(half, "square")
    x = np.float32([[1, 2, 3, 600, 5, 6, 7, 8]])
    wanted = GraphRunner(proto).run({"x": x})["normal"]
    np.testing.assert_allclose(run(half, {"x": x})["normal"], wanted, atol=5e-3)


def test_a_product_of_two_tensors_is_no_square() -> None:
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 3]))
    b.node("Relu", b.node("Mul", x, b.node("Abs", x), out="product"), out="y")
    b.output("y", ["batch", 3])
    assert in_half(halved(b.build()), "product")


def test_an_epsilon_that_float16_cannot_hold_still_keeps_from_zero() -> None:
    half = halved(layer_norm_in_steps(1e-12, scale=1.0))
    flat = np.full((2, 8), 0.7, np.float32)
    assert np.isfinite(run(half, {"x": flat})["normal"]).all()


def test_a_tiny_bound_under_a_division_still_keeps_from_zero() -> None:
    """An L2 normalisation has it: ``x / max(|x|, 1e-9)``."""
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 3]), out="positive")
    least = b.node("Max", x, b.constant(1e-9, np.float32), out="least")
    b.node("Div", x, least, out="y")
    b.output("y", ["batch", 3])
    half = halved(b.build())
    assert [in_half(half, name) for name in ("positive", "least", "y")] == [True, False, False]
    found = run(half, {"x": np.array([[0, 2, -1]], np.float32)})["y"]
    assert found.tolist() == [[0, 1, 0]]


def masked_softmax(bias: float, kind: int) -> onnx.ModelProto:
    b = Builder()
    scores = b.input("scores", ["batch", 4])
    mask = b.node("Cast", b.input("mask", ["batch", 4], kind), to=TensorProto.FLOAT)
    hidden = b.node("Sub", b.constant(1.0, np.float32), mask)
    hidden = b.node("Mul", hidden, b.constant(bias, np.float32))
    x = b.node("Softmax", b.node("Add", scores, hidden), axis=-1)
    b.node("Relu", x, out="weights")
    b.output("weights", ["batch", 4])
    return b.build()


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.BOOL])
@pytest.mark.parametrize("bias", [-1e9, float(np.finfo(np.float32).min), -10000.0])
def test_a_mask_hides_and_a_row_masked_wholly_is_no_nan(bias: float, kind: int) -> None:
    half = halved(masked_softmax(bias, kind))
    scores = np.array([[1, 2, 3, 4], [-40, -50, -60, -70]], np.float32)
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0]], helper.tensor_dtype_to_np_dtype(kind))
    found = run(half, {"scores": scores, "mask": mask})["weights"]
    np.testing.assert_allclose(found[0], [0.26894, 0.73106, 0, 0], atol=1e-3)
    assert np.isfinite(found[1]).all()
    assert found[1].sum() == pytest.approx(1, abs=1e-2)


def test_constants_beyond_float16_are_clipped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        half = halved(masked_softmax(-1e9, TensorProto.BOOL))
    [said] = [record.getMessage() for record in caplog.records]
    tells(said, "float16", "65,504", "clipped", "w1")
    values = {t.name: numpy_helper.to_array(t) for t in half.graph.initializer}
    assert values["w1" + SUFFIX] == np.float16(-32752)


def test_numbers_that_meet_half_precision_are_clipped_like_constants() -> None:
    """Without a sum that reads them there is no margin, and fitting values stay unchanged."""
    b = Builder()
    count = b.node("Cast", b.input("count", ["batch", 1], TensorProto.INT64), to=TensorProto.FLOAT)
    b.node("Relu", count, out="y")
    b.output("y", ["batch", 1])
    found = run(halved(b.build()), {"count": np.array([[7], [60000], [10**6], [-(10**6)]])})["y"]
    assert found.tolist() == [[7], [60000], [65504], [0]]


def test_infinity_stays_infinity() -> None:
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 3]))
    b.node("Where", b.constant([True, False, True]), x, b.constant(-np.inf, np.float32), out="y")
    b.output("y", ["batch", 3])
    found = run(halved(b.build()), {"x": np.ones((1, 3), np.float32)})["y"]
    assert found.tolist() == [[1, -np.inf, 1]]


def test_sizes_are_counted_exactly() -> None:
    """2,049 columns: float16 would count 2,048."""
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", "columns"]), out="positive")
    columns = b.node("Gather", b.node("Shape", x), b.constant([1], np.int64))
    scaled = b.node("Cast", columns, to=TensorProto.FLOAT)
    scaled = b.node("Mul", scaled, b.constant(1.0, np.float32), out="scaled")
    end = b.node("Cast", scaled, to=TensorProto.INT64)
    axis = b.constant([1], np.int64)
    b.node("Slice", x, b.constant([0], np.int64), end, axis, out="y")
    b.output("y", ["batch", "columns"])
    half = halved(b.build())
    assert in_half(half, "positive")
    assert not in_half(half, "scaled")
    found = run(half, {"x": np.ones((1, 2049), np.float32)})["y"]
    assert found.shape == (1, 2049)


def test_indices_that_come_as_floats_are_not_rounded() -> None:
    b = Builder()
    ids = b.node("Cast", b.input("ids", ["batch"]), to=TensorProto.INT64)
    table = b.constant(np.arange(4096) % 7, np.float32)
    b.node("Relu", b.node("Gather", table, ids, out="row"), out="y")
    b.output("y", ["batch"])
    half = halved(b.build())
    assert in_half(half, "row")
    assert run(half, {"ids": np.array([2049, 4095], np.float32)})["y"].tolist() == [5, 0]


def identifiers(kind: int = TensorProto.INT64) -> tuple[Builder, str]:
    b = Builder()
    ids = b.input("ids", ["batch", "sequence"], kind)
    return b, b.node("Cast", ids, to=TensorProto.FLOAT, out="numbers")


@pytest.mark.parametrize(
    ("kind", "half"),
    [
        (TensorProto.INT16, False),
        (TensorProto.INT32, False),
        (TensorProto.UINT32, False),
        (TensorProto.INT64, False),
        (TensorProto.UINT8, True),  # pixels
        (TensorProto.BOOL, True),
    ],
)
def test_wide_integers_become_float32(kind: int, half: bool) -> None:
    b, numbers = identifiers(kind)
    b.node("Relu", b.node("Add", numbers, b.constant(1.0, np.float32), out="next"), out="y")
    b.output("y", ["batch", "sequence"])
    found = halved(b.build())
    assert in_half(found, "next") == half
    assert in_half(found, "y")


@pytest.mark.parametrize(
    ("compare", "wanted"),
    [
        (("Equal",), [0, 1, 0]),
        (("Greater",), [0, 0, 1]),
        (("LessOrEqual",), [1, 1, 0]),
    ],
)
def test_identifiers_are_compared_exactly(compare: tuple[str], wanted: list[float]) -> None:
    """30,000, 30,001 and 30,002 are one number in float16."""
    b, numbers = identifiers()
    numbers = b.node("Unsqueeze", numbers, b.constant([2], np.int64))
    found = b.node(*compare, numbers, b.constant(30001, np.float32))
    b.node("Cast", b.node("Squeeze", found, b.constant([2], np.int64)), out="y", to=1)
    b.output("y", ["batch", "sequence"])
    result = run(halved(b.build()), {"ids": np.array([[30000, 30001, 30002]])})["y"]
    assert result.tolist() == [wanted]


def test_the_place_of_the_largest_identifier_is_found() -> None:
    """An end-of-text token marks the answer's row in this way."""
    b, numbers = identifiers()
    b.node("Cast", b.node("ArgMax", numbers, axis=1, keepdims=0), to=1, out="y")
    b.output("y", ["batch"])
    assert run(halved(b.build()), {"ids": np.array([[49405, 49406, 49407]])})["y"].tolist() == [2]


def test_a_number_that_is_compared_with_an_activation_stays_exact() -> None:
    b, numbers = identifiers()
    other = b.node("Relu", b.input("x", ["batch", "sequence"]))
    b.node("Cast", b.node("Equal", numbers, other), to=1, out="y")
    b.output("y", ["batch", "sequence"])
    feeds = {"ids": np.array([[2048, 2049]]), "x": np.array([[2048, 2048]], np.float32)}
    assert run(halved(b.build()), feeds)["y"].tolist() == [[1, 0]]


def test_remainders_of_numbers_are_exact() -> None:
    b, numbers = identifiers()
    b.node("Mod", b.node("Floor", numbers), b.constant(7, np.float32), out="y", fmod=1)
    b.output("y", ["batch", "sequence"])
    assert run(halved(b.build()), {"ids": np.array([[2049, 30001]])})["y"].tolist() == [[5, 6]]


@pytest.mark.parametrize("product", ["Mul", "MatMul", "Einsum"])
@pytest.mark.parametrize("given", ["constant", "expanded"])
def test_rotary_angles_of_positions_stay_exact(product: str, given: str) -> None:
    b = Builder()
    positions = b.input("positions", ["batch", "sequence"], TensorProto.INT64)
    x = b.input("x", ["batch", "sequence", 8])
    counted = b.node("Cast", positions, to=TensorProto.FLOAT)
    inverse = (1 / 100 ** (np.arange(4) / 4)).astype(np.float32)
    if product == "Einsum":
        angles = b.node("Einsum", counted, b.constant(inverse), equation="bs,d->bsd")
    else:
        frequencies = b.constant(inverse.reshape(1, 1, 4))
        if given == "expanded":  # by the shape of the positions, as transformers does it
            batch = b.node("Gather", b.node("Shape", positions), b.constant([0], np.int64))
            shape = b.node("Concat", batch, b.constant([1, 4], np.int64), axis=0)
            frequencies = b.node("Expand", frequencies, shape)
        counted = b.node("Unsqueeze", counted, b.constant([2], np.int64))
        angles = b.node(product, counted, frequencies)
    angles = b.node("Concat", angles, angles, axis=-1)
    angles = b.node("Transpose", b.node("Transpose", angles, perm=[0, 2, 1]), perm=[0, 2, 1])
    turned = b.node("Mul", b.node("Sin", angles, out="sine"), b.node("Relu", x), out="turned")
    b.node("Add", turned, b.node("Cos", angles, out="cosine"), out="y")
    b.output("y", ["batch", "sequence", 8])
    proto = b.build()
    half = halved(proto)
    places = {name: in_half(half, name) for name in ("sine", "cosine", "turned")}
    assert places == {"sine": False, "cosine": False, "turned": True}
    feeds = {"positions": np.arange(4096)[None], "x": np.ones((1, 4096, 8), np.float32)}
    wanted = GraphRunner(proto).run(feeds)["y"]
    np.testing.assert_allclose(run(half, feeds)["y"], wanted, atol=3e-3)


def test_what_must_be_float32_is_given_float32() -> None:
    """The scales of Resize, and the type that an attribute of ConstantOfShape says."""
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 1, 2, 2]))
    x = b.node("Resize", x, "", b.constant([1, 1, 2, 2], np.float32), out="larger")
    zero = numpy_helper.from_array(np.array([0.5], np.float32))
    halves = b.node("ConstantOfShape", b.node("Shape", x), out="filled", value=zero)
    b.node("Add", x, halves, out="y")
    b.output("y", ["batch", 1, 4, 4])
    half = halved(b.build())
    assert in_half(half, "larger")
    assert not in_half(half, "filled")
    found = run(half, {"x": np.full((1, 1, 2, 2), 3, np.float32)})["y"]
    assert found.shape == (1, 1, 4, 4)
    assert (found == 3.5).all()


def test_probabilities_are_answered_in_full_precision() -> None:
    assert not in_half(halved(sliced("residual").model.proto), "probabilities")


def test_one_float32_tensor_is_cast_once_for_all_its_readers() -> None:
    """Casts with equal names for each reader would break the graph."""
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 4]), out="inner")
    total = b.node("ReduceSum", x, b.constant([1], np.int64))
    largest = b.node("ReduceL2", x, axes=[1])
    b.node("Add", total, largest, out="y")
    b.output("y", ["batch", 1])
    half = halved(b.build())
    assert node_giving(half, "inner").op_type == "Cast"
    found = run(half, {"x": np.array([[3, 4, 0, 0]], np.float32)})["y"]
    assert found.tolist() == [[12]]


def test_constant_nodes_count_as_weights() -> None:
    b = Builder()
    weight = numpy_helper.from_array(np.eye(3, dtype=np.float32) * 2)
    b.node("MatMul", b.input("x", ["batch", 3]), b.node("Constant", value=weight), out="y")
    b.output("y", ["batch", 3])
    half = halved(b.build())
    assert {n.op_type for n in half.graph.node} == {"Cast", "MatMul"}
    assert [t.data_type for t in half.graph.initializer] == [TensorProto.FLOAT16]
    found = run(half, {"x": np.ones((1, 3), np.float32)})["y"]
    assert found.tolist() == [[2, 2, 2]]


def test_an_operator_of_another_domain_stays_in_float32() -> None:
    b = Builder()
    x = b.node("Relu", b.input("x", ["batch", 4]), out="inner")
    b.node("Gelu", x, out="y", domain="com.microsoft")
    b.output("y", ["batch", 4])
    proto = b.build()
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    half = onnx.ModelProto.FromString(halve(proto.SerializeToString()))
    assert node_giving(half, "y").input[0] == "inner"
    assert node_giving(half, "inner").op_type == "Cast"
