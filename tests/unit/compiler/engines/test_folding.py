"""Batch normalisations go into convolutions, where that computes the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from tests.models import Builder

from offramp.compiler.engines.halving import fold_normalisations, halve
from offramp.compiler.graphs.runtime import GraphRunner


def normalised(b: Builder, x: str, channels: int, **attributes: float) -> str:
    rng = np.random.default_rng(1)
    scale, shift, mean, variance = (
        b.constant(rng.uniform(0.5, 2, channels), np.float32) for _ in range(4)
    )
    return b.node("BatchNormalization", x, scale, shift, mean, variance, **attributes)  # type: ignore[arg-type]


def plain(b: Builder, x: str) -> str:
    return normalised(b, b.conv(x, (2, 3)), 3)


def with_bias(b: Builder, x: str) -> str:
    bias = b.constant([0.5, -1, 2], np.float32)
    convolved = b.node("Conv", x, b.weight(3, 2, 3, 3), bias, pads=[1, 1, 1, 1])
    return normalised(b, convolved, 3, epsilon=0.3)


def grouped(b: Builder, x: str) -> str:
    return normalised(b, b.node("Conv", x, b.weight(4, 1, 1, 1), group=2), 4)


def twice(b: Builder, x: str) -> str:
    """Two convolutions that share their weight, normalised differently."""
    weight = b.weight(2, 2, 1, 1)
    x = normalised(b, b.node("Conv", x, weight), 2)
    return normalised(b, b.node("Conv", x, weight), 2, epsilon=0.5)


def read_elsewhere(b: Builder, x: str) -> str:
    convolved = b.conv(x, (2, 3))
    return b.node("Add", normalised(b, convolved, 3), convolved)


def weight_of_an_input(b: Builder, x: str) -> str:
    weight = b.node("ReduceMean", x, axes=[0])
    weight = b.node("Reshape", weight, b.constant([4, 2, 2, 2], np.int64))
    return normalised(b, b.node("Conv", x, weight), 4)


def after_something_else(b: Builder, x: str) -> str:
    return normalised(b, b.node("Relu", x), 2)


@pytest.mark.parametrize(
    ("layers", "left"),
    [
        (plain, 0),
        (with_bias, 0),
        (grouped, 0),
        (twice, 0),
        (read_elsewhere, 1),
        (weight_of_an_input, 1),
        (after_something_else, 1),
    ],
)
def test_what_is_folded_computes_the_same(layers: Callable[[Builder, str], str], left: int) -> None:
    b = Builder()
    b.node("Relu", layers(b, b.input("x", ["batch", 2, 4, 4])), out="y")
    b.output("y", ["batch", "channels", "rows", "columns"])
    proto = b.build()
    folded = onnx.ModelProto.FromString(proto.SerializeToString())
    fold_normalisations(folded.graph)
    onnx.checker.check_model(folded, full_check=True)
    kinds = [node.op_type for node in folded.graph.node]
    assert kinds.count("BatchNormalization") == left
    x = np.random.default_rng(0).standard_normal((3, 2, 4, 4)).astype(np.float32)
    wanted, found = (GraphRunner(p).run({"x": x})["y"] for p in (proto, folded))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_output_of_the_graph_is_not_folded_away() -> None:
    b = Builder()
    convolved = b.conv(b.input("x", ["batch", 2, 4, 4]), (2, 3))
    b.output(convolved, ["batch", 3, 4, 4])
    b.output(normalised(b, convolved, 3), ["batch", 3, 4, 4])
    proto = b.build()
    before = proto.SerializeToString()
    fold_normalisations(proto.graph)
    assert proto.SerializeToString() == before


def test_half_precision_has_no_casts_around_a_normalisation() -> None:
    b = Builder()
    b.node("Relu", plain(b, b.input("x", ["batch", 2, 4, 4])), out="y")
    b.output("y", ["batch", 3, 4, 4])
    proto = onnx.shape_inference.infer_shapes(b.build())
    half = onnx.ModelProto.FromString(halve(proto.SerializeToString()))
    written = {name for node in half.graph.node for name in node.output}
    assert {info.name for info in half.graph.value_info} <= written
    assert [node.op_type for node in half.graph.node] == ["Cast", "Conv", "Relu", "Cast"]
    assert {t.data_type for t in half.graph.initializer} == {onnx.TensorProto.FLOAT16}
