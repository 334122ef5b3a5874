"""Ranges from data, and Q/DQ pairs as TensorRT wants them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from tests.facts import facts
from tests.models import Builder
from tests.sliced import BUILDERS, Sliced, dataset_of, inputs_of, sliced

from offramp.calibration.data import activations
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.precision.quantization import PREFIX, Ranges, measure_ranges, quantize
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.graphs.assembly import assemble

TOLERANCE = 0.15
"""Tolerance relative to the answer's largest value: 127 steps, random weights, a dozen layers."""


def source_of(pieces: Sliced) -> bytes:
    serialised: bytes = pieces.model.proto.SerializeToString()
    return serialised


def ranges_of(pieces: Sliced, samples: int = 64) -> Ranges:
    return measure_ranges(source_of(pieces), dataset_of(pieces, samples), threads=1)


def constants(proto: onnx.ModelProto) -> dict[str, NDArray[np.generic]]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def pairs(proto: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """QuantizeLinear by what reads its pair: ``OUTPUT/PLACE`` of the reader."""
    return {
        node.name.removeprefix(PREFIX).removesuffix("/quantized"): node
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear"
    }


def linear(weight: NDArray[np.float32]) -> onnx.ModelProto:
    b = Builder()
    b.node("MatMul", b.input("x", ["batch", weight.shape[0]]), b.constant(weight), out="y")
    b.output("y", ["batch", weight.shape[1]])
    return b.build()


def dataset(x: NDArray[np.float32]) -> Dataset:
    return Dataset(inputs={"x": x}, labels=None, sha256="0")


@pytest.mark.parametrize("name", list(BUILDERS))
def test_int8_comes_near_float32(name: str) -> None:
    pieces = sliced(name)
    graph = quantize(source_of(pieces), ranges_of(pieces))
    quantized = onnx.ModelProto.FromString(graph)
    onnx.checker.check_model(quantized, full_check=True)
    feeds, answer = inputs_of(pieces, 16, seed=1), pieces.model.answer.output
    wanted = GraphRunner(pieces.model.proto).run(feeds)[answer]
    found = GraphRunner(quantized).run(feeds)[answer]
    apart = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    # random weights: a sample now and then is at a brink, and goes over it
    assert 0 < np.median(apart) < TOLERANCE / 2
    assert apart.max() < 1


def test_a_product_is_computed_as_int8_arithmetic_says() -> None:
    weight = np.array([[0.5, -2.0], [0.25, 1.0]], np.float32)
    graph = quantize(linear(weight).SerializeToString(), {"x": 12.7})
    x = np.array([[1.04, -0.26], [100.0, -3.0]], np.float32)
    found = GraphRunner(onnx.ModelProto.FromString(graph)).run({"x": x})["y"]
    rounded = np.array([[10, -3], [127, -30]]) * 0.1  # 100 is clipped to the limit
    scales = np.array([0.5, 2.0]) / 127
    np.testing.assert_allclose(found, rounded @ (np.round(weight / scales) * scales), rtol=1e-5)


def test_pairs_are_symmetric_int8_with_weights_per_output_channel() -> None:
    pieces = sliced("residual")
    quantized = onnx.ModelProto.FromString(quantize(source_of(pieces), ranges_of(pieces)))
    values = constants(quantized)
    weights = {t.name: t for t in pieces.model.proto.graph.initializer}
    seen = Counter[str]()
    for node in pairs(quantized).values():
        scale, zero = (values[name] for name in node.input[1:])
        axis = [a.i for a in node.attribute if a.name == "axis"]
        assert scale.dtype == np.float32
        assert (scale > 0).all()
        assert zero.dtype == np.int8
        assert not zero.any()
        assert zero.shape == scale.shape
        if node.input[0] in weights:
            assert scale.shape == (weights[node.input[0]].dims[axis[0]],)
            seen["weight"] += 1
        else:
            assert scale.shape == ()
            assert axis == []
            seen["activation"] += 1
    products = [n for n in quantized.graph.node if n.op_type in {"Conv", "Gemm"}]
    additions = [n for n in quantized.graph.node if n.op_type == "Add"]
    assert len(additions) == 3
    assert seen == {"weight": len(products), "activation": len(products) + len(additions)}


def test_biases_stay_float32() -> None:
    pieces = sliced("mlp")
    quantized = onnx.ModelProto.FromString(quantize(source_of(pieces), ranges_of(pieces)))
    gemms = [n for n in quantized.graph.node if n.op_type == "Gemm"]
    values = constants(quantized)
    assert [values[n.input[2]].dtype for n in gemms] == [np.float32] * 4
    assert all(n.input[0].startswith(PREFIX) and n.input[1].startswith(PREFIX) for n in gemms)


def test_the_channels_of_gemm_follow_its_transposition() -> None:
    b = Builder()
    x = b.input("x", ["batch", 2])
    weight = np.array([[1, 2], [3, 4], [5, 60]], np.float32)
    b.node("Gemm", x, b.constant(weight), out="wide", transB=1)
    b.node("Gemm", "wide", b.constant(weight), out="y")
    b.output("y", ["batch", 2])
    ranges = {"x": 1.0, "wide": 1.0}
    quantized = onnx.ModelProto.FromString(quantize(b.build().SerializeToString(), ranges))
    found = constants(quantized)
    np.testing.assert_allclose(found[f"{PREFIX}wide/1/scale"] * 127, [2, 4, 60], rtol=1e-6)
    np.testing.assert_allclose(found[f"{PREFIX}y/1/scale"] * 127, [5, 60], rtol=1e-6)


def test_at_a_residual_sum_the_shortcut_is_quantised() -> None:
    """The convolution's own output is not: sum and convolution become one kernel."""
    pieces = sliced("residual")
    quantized = onnx.ModelProto.FromString(quantize(source_of(pieces), ranges_of(pieces)))
    made_by = {name: n.op_type for n in quantized.graph.node for name in n.output}
    sums = [n for n in quantized.graph.node if n.op_type == "Add"]
    assert [sorted(made_by[name] for name in n.input) for n in sums] == [
        ["Conv", "DequantizeLinear"]
    ] * 3


def test_a_sum_whose_convolution_is_read_elsewhere_is_left_alone() -> None:
    """Sum and convolution cannot become one kernel then."""
    b = Builder()
    x = b.input("x", ["batch", 2, 4, 4])
    convolved = b.conv(x, (2, 2))
    b.node("Add", b.node("Sigmoid", convolved), convolved, out="y")
    b.output("y", ["batch", 2, 4, 4])
    ranges = dict.fromkeys(["x", "t0", "t1"], 1.0)
    quantized = onnx.ModelProto.FromString(quantize(b.build().SerializeToString(), ranges))
    assert set(pairs(quantized)) == {f"{convolved}/0", f"{convolved}/1"}
    (addition,) = (n for n in quantized.graph.node if n.op_type == "Add")
    assert list(addition.input) == ["t1", convolved]


def test_products_of_two_activations_are_left_alone() -> None:
    """Products of attention are the case."""
    pieces = sliced("bert")
    quantized = onnx.ModelProto.FromString(quantize(source_of(pieces), ranges_of(pieces)))
    weights = constants(quantized)
    before = {name: n for n in quantized.graph.node for name in n.output}
    for node in quantized.graph.node:
        if node.op_type == "MatMul":
            both = [before.get(name) for name in node.input]
            kinds = {n.op_type == "DequantizeLinear" for n in both if n is not None}
            assert len(kinds) == 1
            if kinds == {True}:
                source = before[both[1].input[0]].input[0]  # type: ignore[union-attr]
                assert source in weights


@pytest.mark.parametrize("name", ["residual", "bert", "dense", "mlp"])
def test_a_tensor_has_the_same_scale_in_every_unit(name: str) -> None:
    pieces = sliced(name)
    ranges = ranges_of(pieces)
    whole = onnx.ModelProto.FromString(quantize(source_of(pieces), ranges))
    middle = len(pieces.segments) // 2
    spans = [
        assemble(pieces.graphs[:middle], [pieces.segments[middle - 1].output]),
        assemble(pieces.graphs[middle:], [pieces.segments[-1].output]),
        *pieces.graphs,
    ]
    everywhere = constants(whole)
    found: set[str] = set()
    for span in spans:
        part = onnx.ModelProto.FromString(quantize(span, ranges))
        for place, node in pairs(part).items():
            scale = constants(part)[node.input[1]]
            np.testing.assert_array_equal(scale, everywhere[f"{PREFIX}{place}/scale"])
            found.add(place)
    assert found == set(pairs(whole))


def test_the_same_data_and_graph_give_the_same_bytes() -> None:
    pieces = sliced("residual")
    graph = source_of(pieces)
    assert ranges_of(pieces) == ranges_of(pieces)
    assert quantize(graph, ranges_of(pieces)) == quantize(graph, ranges_of(pieces))


def test_a_limit_is_the_largest_magnitude_where_values_are_spread_evenly() -> None:
    x = np.linspace(-3, 4, 4000, dtype=np.float32).reshape(-1, 2)
    ranges = measure_ranges(linear(np.eye(2, dtype=np.float32)).SerializeToString(), dataset(x),
                            threads=1)  # fmt: skip
    assert ranges == {"x": pytest.approx(4, rel=1e-2)}


def test_an_outlier_is_clipped_where_that_helps_all_others() -> None:
    x = np.random.default_rng(0).standard_normal((150_000, 2)).astype(np.float32)
    x[7, 0] = 20
    ranges = measure_ranges(linear(np.eye(2, dtype=np.float32)).SerializeToString(), dataset(x),
                            threads=1)  # fmt: skip
    limit = ranges["x"]
    assert 4 < limit < 10
    kept = np.clip(np.round(x / limit * 127), -127, 127) * limit / 127
    coarse = np.round(x / 20 * 127) * 20 / 127
    assert ((kept - x) ** 2).mean() < ((coarse - x) ** 2).mean()


def test_zeros_have_a_positive_scale() -> None:
    x, weight = np.zeros((4, 2), np.float32), np.array([[0, 1], [0, 2]], np.float32)
    graph = linear(weight).SerializeToString()
    ranges = measure_ranges(graph, dataset(x), threads=1)
    quantized = onnx.ModelProto.FromString(quantize(graph, ranges))
    assert all((v > 0).all() for k, v in constants(quantized).items() if k.endswith("/scale"))
    assert GraphRunner(quantized).run({"x": x})["y"].tolist() == [[0, 0]] * 4


def test_batches_are_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = sliced("residual")
    wanted = ranges_of(pieces, samples=11)
    monkeypatch.setattr(activations, "BATCH_BYTES", 1)  # one sample at a time
    single = ranges_of(pieces, samples=11)
    assert single.keys() == wanted.keys()
    for name, limit in wanted.items():
        assert single[name] == pytest.approx(limit, rel=1e-3)


def test_ranges_of_another_model_are_refused() -> None:
    ranges = ranges_of(sliced("mlp"))
    with pytest.raises(ValueError, match=facts("no range for 'image'", "measure")):
        quantize(source_of(sliced("vgg")), ranges)


def test_without_samples_there_are_no_ranges() -> None:
    graph = linear(np.eye(2, dtype=np.float32)).SerializeToString()
    with pytest.raises(DataError, match="no samples to measure"):
        measure_ranges(graph, dataset(np.empty((0, 2), np.float32)), threads=1)


def test_a_model_with_nothing_to_quantise_is_refused() -> None:
    b = Builder()
    b.node("Relu", b.input("x", ["batch", 2]), out="y")
    b.output("y", ["batch", 2])
    with pytest.raises(DataError, match=facts("nothing to compute in int8", "--precision")):
        measure_ranges(b.build().SerializeToString(), dataset(np.ones((1, 2), np.float32)),
                       threads=1)  # fmt: skip


def test_a_sample_that_the_model_fails_on_is_named() -> None:
    b = Builder()
    ids = b.input("x", ["batch"], TensorProto.INT64)
    b.linear(b.node("Gather", b.weight(4, 4), ids), 4, 2, out="y")
    b.output("y", ["batch", 2])
    ids_given = Dataset(inputs={"x": np.array([0, 3, 9])}, labels=None, sha256="0")
    with pytest.raises(DataError, match=facts("fails", "samples 1 to 2")):
        measure_ranges(b.build().SerializeToString(), ids_given, threads=1)


@pytest.mark.parametrize(("outlier", "held"), [(200.0, "inf"), (-200.0, "nan")])
def test_what_is_not_finite_has_no_range(outlier: float, held: str) -> None:
    """One overflow would stretch the range of all others; NaN would hide in the maximum."""
    b = Builder()
    x = b.input("x", ["batch", 2])
    grown = b.node("Exp", x)  # of 200: infinite
    if held == "nan":
        grown = b.node("Log", b.node("Sub", x, b.constant(-100.0, np.float32)), out="grown")
    b.node("MatMul", grown, b.weight(2, 2), out="y")
    b.output("y", ["batch", 2])
    values = np.ones((200, 2), np.float32)
    values[70, 1] = outlier
    with pytest.raises(DataError, match=facts(f"'{grown}'", held, "samples 65 to")):
        measure_ranges(b.build().SerializeToString(), dataset(values), threads=1)
