"""Graphs in every kind: near float32, in integer kernels, with the names of the source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.facts import facts
from tests.models import Builder, residual_cnn
from tests.sliced import slice_proto
from tests.unit.calibration.precision.graphs_to_quantise import (
    OF_TRANSFORMERS,
    RUN_HERE,
    SATURATES,
    constants,
    convolved_and_multiplied,
    dataset,
    inputs,
    kernels,
    linear,
    made,
    serialised,
    transformer,
)

from offramp.calibration.data.dataset import DataError
from offramp.calibration.measure.profiling import TimedGraph
from offramp.calibration.precision.kinds import CpuPrecision, quantise
from offramp.calibration.precision.quantised_graphs import CONTRIB, PREFIX, PrecisionError
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import split
from offramp.engine.answers.differences import relative_difference

NEAR = {
    CpuPrecision.STATIC: 0.1,
    CpuPrecision.SIGNED: 0.1,
    CpuPrecision.ROWS: 0.05,
    CpuPrecision.MIXED: 0.1,
    CpuPrecision.BLOCKS: 0.05,
    CpuPrecision.BLOCKS4: 0.3,
}
"""Tolerances relative to the answer's largest value: steps of 1/255 or 1/127 of the range, 1/15 for
int4."""
OF_PRODUCTS = (CpuPrecision.ROWS, CpuPrecision.BLOCKS, CpuPrecision.BLOCKS4)


@pytest.mark.parametrize("kind", RUN_HERE)
def test_every_kind_comes_near_float32(kind: CpuPrecision) -> None:
    graph = convolved_and_multiplied()
    found = made(graph, kind)
    onnx.checker.check_model(onnx.ModelProto.FromString(found))
    feeds = inputs(graph, 16, seed=2)
    wanted = TimedGraph(graph, 1).run(feeds)["y"]
    assert 0 < relative_difference(TimedGraph(found, 1).run(feeds)["y"], wanted) < NEAR[kind]


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_a_transformer_comes_near_float32(kind: CpuPrecision) -> None:
    graph = serialised(transformer().model.proto)
    found = made(graph, kind)
    feeds = inputs(graph, 64, seed=2)
    wanted = TimedGraph(graph, 1).run(feeds)["logits"]
    difference = np.abs(TimedGraph(found, 1).run(feeds)["logits"] - wanted).mean()
    # Attention with random weights is all but a maximum: near ties, small changes become large.
    assert 0 < difference < (1.0 if kind is CpuPrecision.BLOCKS4 else 0.25) * np.abs(wanted).mean()


@pytest.mark.parametrize("kind", CpuPrecision)
def test_the_same_graph_gives_the_same_bytes(kind: CpuPrecision) -> None:
    graph = convolved_and_multiplied()
    assert made(graph, kind) == made(graph, kind)


@pytest.mark.parametrize("kind", CpuPrecision)
def test_all_tensors_keep_their_names(kind: CpuPrecision) -> None:
    graph = convolved_and_multiplied()
    before = onnx.ModelProto.FromString(graph).graph
    after = onnx.ModelProto.FromString(made(graph, kind)).graph
    written = {name for node in after.node for name in node.output}
    assert {name for node in before.node for name in node.output} <= written
    added = written - {name for node in before.node for name in node.output}
    assert added
    assert all(name.startswith(PREFIX) for name in added)
    assert [i.name for i in after.input] == ["image"]
    assert after.output == before.output
    assert len({node.name for node in after.node if node.name}) == sum(
        bool(node.name) for node in after.node
    )


def test_convolutions_with_their_shortcuts_run_in_integers(tmp_path: Path) -> None:
    # Of int8 activations, ONNX Runtime makes integer kernels of all on ARM, and of some on x86.
    found = kernels(made(serialised(residual_cnn()), CpuPrecision.STATIC), tmp_path)
    assert found["QLinearConv"] == 8
    assert found["QLinearAdd"] == 3
    assert found["Conv"] == found["Relu"] == found["Add"] == 0


@pytest.mark.parametrize("kind", [CpuPrecision.STATIC, CpuPrecision.ROWS])
def test_products_run_in_integers(kind: CpuPrecision, tmp_path: Path) -> None:
    graph = serialised(transformer().model.proto)
    found = kernels(made(graph, kind), tmp_path)
    assert found["MatMulIntegerToFloat"] == 2 * 6 + 1  # projections, and the pooler
    assert found["DequantizeLinear"] == 0
    assert found["Gemm"] == 1  # the last layer, which is small


def test_a_residual_reads_float32_where_only_products_are_quantised() -> None:
    graph = made(serialised(transformer().model.proto), CpuPrecision.STATIC)
    proto = onnx.ModelProto.FromString(graph)
    sums = [node for node in proto.graph.node if node.op_type == "Add"]
    assert len(sums) > 4
    assert not any(name.endswith("/rounded") for node in sums for name in node.input)


@pytest.mark.parametrize("saturating", [True] if SATURATES else [False, True])
def test_rows_are_rounded_each_by_its_own_largest_magnitude(saturating: bool) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    x = rng.standard_normal((3, 64)).astype(np.float32) * np.array([[1], [1000], [0]], np.float32)
    graph = made(linear(weight), CpuPrecision.ROWS, saturating=saturating)
    found = TimedGraph(graph, 1).run({"x": x})["y"]
    step = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-12) / 127
    scale = np.abs(weight).max(axis=0) / (64 if saturating else 127)
    wanted = (np.rint(x / step) * step) @ (np.rint(weight / scale) * scale)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert found[2].tolist() == [0] * 64


@pytest.mark.parametrize(
    "kind", [CpuPrecision.STATIC, CpuPrecision.SIGNED, CpuPrecision.ROWS, CpuPrecision.MIXED]
)
def test_for_a_cpu_that_saturates_no_two_products_overflow_16_bits(kind: CpuPrecision) -> None:
    graph = convolved_and_multiplied()
    for saturating, most in ((False, 127), (True, 64)):
        values = constants(made(graph, kind, saturating=saturating))
        weights = [v for name, v in values.items() if name.endswith("/weight")]
        assert weights
        assert {int(np.abs(v.astype(int)).max()) for v in weights} == {most}
    assert 2 * 255 * most < 2**15


def test_where_all_is_at_its_largest_sums_are_those_of_float32() -> None:
    """Weights have 7 bits, on every CPU: otherwise sums of pairs in 16 bits would be half of it."""
    graph = linear(np.ones((64, 64), np.float32))
    found = made(graph, CpuPrecision.ROWS, saturating=True)
    y = TimedGraph(found, 1).run({"x": np.ones((2, 64), np.float32)})["y"]
    np.testing.assert_allclose(y, 64, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "middle"), [(CpuPrecision.BLOCKS, 128), (CpuPrecision.BLOCKS4, 8)]
)
def test_blocks_of_weights_have_scales_of_their_own(kind: CpuPrecision, middle: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((192, 32)).astype(np.float32)  # a block, and half of one
    weight[:128] *= 100
    values = constants(made(linear(weight), kind))
    steps, scales = values["y/weight"], values["y/scale"]
    if kind is CpuPrecision.BLOCKS4:
        steps = np.stack([steps & 15, steps >> 4], axis=3).reshape(32, 2, 128)
    restored = ((steps.astype(np.float32) - middle) * scales[:, :, None]).reshape(32, 256)
    largest = np.repeat(scales, 128, axis=1).T[:192]
    assert np.abs(restored.T[:192] - weight).max() > 0
    assert (np.abs(restored.T[:192] - weight) <= largest / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_is_multiplied_as_it_says(kind: CpuPrecision, transposed: bool) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((96, 64) if transposed else (64, 96)).astype(np.float32)
    b = Builder()
    x = b.input("x", ["batch", 64])
    bias = b.constant(rng.standard_normal(96), np.float32)
    attributes = {"transB": int(transposed), "alpha": 0.5, "beta": 2.0}
    b.node("Gemm", x, b.constant(weight), bias, out="y", **attributes)
    b.output("y", ["batch", 96])
    graph = serialised(b.build())
    feeds = inputs(graph, 8, seed=2)
    wanted = TimedGraph(graph, 1).run(feeds)["y"]
    found = TimedGraph(made(graph, kind), 1).run(feeds)["y"]
    assert 0 < relative_difference(found, wanted) < NEAR[kind]


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
def test_rows_of_every_opset_run(opset: int) -> None:
    b = Builder()
    b.node("MatMul", b.input("x", ["batch", 64]), b.weight(64, 64), out="y")
    b.output("y", ["batch", 64])
    graph = serialised(b.build(opset=opset))
    found = made(graph, CpuPrecision.ROWS)
    feeds = inputs(graph, 4)
    wanted = TimedGraph(graph, 1).run(feeds)["y"]
    assert relative_difference(TimedGraph(found, 1).run(feeds)["y"], wanted) < 0.05
    imported = {o.domain: o.version for o in onnx.ModelProto.FromString(found).opset_import}
    assert imported == {"": opset, CONTRIB: 1}


def test_an_older_opset_is_refused() -> None:
    proto = onnx.ModelProto.FromString(linear(np.ones((64, 64), np.float32)))
    proto.opset_import[0].version = 12
    with pytest.raises(PrecisionError, match="opset 12, and quantised operators need 13"):
        made(serialised(proto), CpuPrecision.ROWS)


@pytest.mark.parametrize("kind", OF_PRODUCTS)
def test_small_products_stay_float32(kind: CpuPrecision) -> None:
    with pytest.raises(PrecisionError, match=f"{kind.value} is for .*at least 4096"):
        made(linear(np.ones((64, 63), np.float32)), kind)


def test_the_mixed_kind_needs_convolutions_and_products() -> None:
    with pytest.raises(PrecisionError, match=facts("int8-static-rows", "Conv, Gemm, MatMul")):
        made(serialised(residual_cnn()), CpuPrecision.MIXED)


def test_scales_need_samples() -> None:
    graph = serialised(residual_cnn())
    none = dataset({"image": np.empty((0, 3, 16, 16), np.float32)})
    with pytest.raises(DataError, match="no samples to measure the ranges"):
        quantise(graph, none, CpuPrecision.STATIC, threads=1, saturating=False)


def test_a_tensor_without_finite_values_has_no_range() -> None:
    graph = serialised(residual_cnn())
    given = inputs(graph, 4)
    given["image"][2] = np.inf
    with pytest.raises(DataError, match=facts("'image'", "no range")):
        quantise(graph, dataset(given), CpuPrecision.STATIC, threads=1, saturating=False)


def test_a_bias_beyond_int32_widens_its_channels_steps() -> None:
    b = Builder()
    weight = np.full((2, 1, 1, 1), 1e-9, np.float32)
    weight[1] = 1
    x = b.input("x", ["batch", 1, 4, 4])
    bias = b.constant([1000.0, -2.0], np.float32)
    b.node("Relu", b.node("Conv", x, b.constant(weight), bias), out="y")
    b.output("y", ["batch", 2, 4, 4])
    graph = serialised(b.build())
    found = TimedGraph(made(graph, CpuPrecision.STATIC), 1).run(inputs(graph, 4, seed=1))["y"]
    np.testing.assert_allclose(found[:, 0], 1000, rtol=0.01)


def test_a_convolution_that_is_the_answer_stays_float32(tmp_path: Path) -> None:
    b = Builder()
    x = b.input("x", ["batch", 8, 4, 4])
    b.node("Conv", b.conv(x, (8, 8)), b.weight(8, 8, 1, 1), out="y")
    b.output("y", ["batch", 8, 4, 4])
    found = kernels(made(serialised(b.build()), CpuPrecision.STATIC), tmp_path)
    assert (found["QLinearConv"], found["Conv"], found["QuantizeLinear"]) == (1, 1, 1)


def test_what_is_pooled_has_the_scale_of_what_it_was() -> None:
    values = constants(made(convolved_and_multiplied(), CpuPrecision.STATIC))
    assert values["pooled/step"] == values["second/step"]
    assert values["pooled/zero"] == values["second/zero"]
    assert values["first/step"] != values["second/step"]


def test_what_is_pooled_in_float32_has_a_scale_of_its_own() -> None:
    """As in the stem of a ResNet, where a copy leaves the first segment in float32."""
    b = Builder()
    x = b.input("image", ["batch", 4, 8, 8])
    pooled = b.node("MaxPool", x, out="pooled", kernel_shape=[2, 2], strides=[2, 2])
    b.node("Relu", b.conv(pooled, (4, 8)), out="y")
    b.output("y", ["batch", 8, 4, 4])
    values = constants(made(serialised(b.build()), CpuPrecision.STATIC))
    assert "pooled/step" in values
    assert "image/step" not in values


@pytest.mark.parametrize(
    ("name", "kind"),
    [("residual", CpuPrecision.STATIC), *(("bert", kind) for kind in OF_TRANSFORMERS)],
)
def test_a_quantised_model_is_cut_where_the_source_is(name: str, kind: CpuPrecision) -> None:
    pieces = transformer() if name == "bert" else slice_proto(residual_cnn())
    model = pieces.model
    graph = made(serialised(model.proto), kind)
    cuts = find_cuts(model).cuts
    assert cuts
    segments = split(replace(model, proto=onnx.ModelProto.FromString(graph)), cuts)
    feeds = inputs(serialised(model.proto), 8, seed=2)
    wanted = TimedGraph(graph, 1).run(feeds)[model.answer.output]
    tensors = dict(feeds)
    for segment in segments:
        tensors |= TimedGraph(segment.proto.SerializeToString(), 1).run(tensors)
    assert relative_difference(tensors[model.answer.output], wanted) < 0.02


def test_weights_are_stored_as_integers() -> None:
    before = convolved_and_multiplied()
    values = constants(made(before, CpuPrecision.STATIC))
    assert values["summed/weight"].dtype == values["convolved/weight"].dtype == np.int8
    assert values["convolved/bias"].dtype == np.int32
    kept = {name for name in constants(before) if name in values}
    assert all(values[name].size < 4096 for name in kept)
