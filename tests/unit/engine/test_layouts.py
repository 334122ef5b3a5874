"""Stages lose no fusion to the plain layout that their input comes in."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from tests import models
from tests.models import Builder

from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.graphs.blocked_layout import enter_blocked


def block(*, channels: int = 16, dtype: int = TensorProto.FLOAT, join: str = "Add") -> bytes:
    """A residual block whose input is a graph input."""
    b = Builder()
    x = b.input("x", ["batch", channels, 8, 8], dtype)
    inner = b.node("Relu", b.conv(x, (channels, channels)))
    y = b.node(join, b.conv(inner, (channels, channels)), x)
    b.node("Relu", y, out="y")
    b.output("y", ["batch", channels, 8, 8], dtype)
    return b.build().SerializeToString()


def nodes(model: bytes) -> list[tuple[str, list[str], list[str]]]:
    graph = onnx.load_from_string(model).graph
    return [(node.op_type, list(node.input), list(node.output)) for node in graph.node]


def test_an_input_that_a_skip_connection_reads_is_pooled_before_all_of_its_readers() -> None:
    plain = block()
    entered = enter_blocked(plain)
    onnx.checker.check_model(entered, full_check=True)
    first, *rest = nodes(entered)
    assert first == ("MaxPool", ["x"], ["x/blocked"])
    assert rest == [
        (op, ["x/blocked" if name == "x" else name for name in inputs], outputs)
        for op, inputs, outputs in nodes(plain)
    ]
    assert sum("x/blocked" in inputs for _, inputs, _ in rest) == 2


def test_inputs_and_outputs_and_weights_stay() -> None:
    plain = onnx.load_from_string(block())
    entered = onnx.load_from_string(enter_blocked(block()))
    assert list(entered.graph.input) == list(plain.graph.input)
    assert list(entered.graph.output) == list(plain.graph.output)
    assert list(entered.graph.initializer) == list(plain.graph.initializer)
    assert list(entered.opset_import) == list(plain.opset_import)


def test_a_second_pass_adds_nothing() -> None:
    once = enter_blocked(block())
    assert enter_blocked(once) == once


def test_a_name_that_is_taken_is_not_taken_again() -> None:
    model = onnx.load_from_string(block())
    for node in model.graph.node:
        node.input[:] = ["x/blocked" if name == "t0" else name for name in node.input]
        node.output[:] = ["x/blocked" if name == "t0" else name for name in node.output]
    entered = enter_blocked(model.SerializeToString())
    onnx.checker.check_model(entered)
    assert nodes(entered)[0] == ("MaxPool", ["x"], ["x/blocked_"])


@pytest.mark.parametrize("join", ["Add", "Sum", "Mul"])
def test_every_join_counts(join: str) -> None:
    assert nodes(enter_blocked(block(join=join)))[0][0] == "MaxPool"


def test_channels_that_fill_no_block_are_left_alone() -> None:
    assert enter_blocked(block(channels=12)) == block(channels=12)
    assert enter_blocked(block(channels=24)) != block(channels=24)
    assert enter_blocked(block(channels=24), block=16) == block(channels=24)


def test_float16_is_left_alone() -> None:
    half = block(dtype=TensorProto.FLOAT16)
    assert enter_blocked(half) == half


def convnext_block() -> onnx.ModelProto:
    """Return a block whose skip connection adds a tensor in plain layout in any case."""
    b = Builder()
    x = b.input("x", ["batch", 16, 8, 8])
    last = b.node("Transpose", b.conv(x, (16, 16), kernel=7), perm=[0, 2, 3, 1])
    inner = b.node("Transpose", b.matmul(last, 16, 16), perm=[0, 3, 1, 2])
    b.node("Add", inner, x, out="y")
    b.output("y", ["batch", 16, 8, 8])
    return b.build()


def quantised_block() -> onnx.ModelProto:
    """Explicitly quantised, so nothing is computed in float32 blocks."""
    b = Builder()
    x = b.input("x", ["batch", 16, 8, 8])
    scale, zero = b.constant(0.1, np.float32), b.constant(0, np.int8)

    def quantised(tensor: str) -> str:
        return b.node(
            "DequantizeLinear", b.node("QuantizeLinear", tensor, scale, zero), scale, zero
        )

    x = quantised(x)
    b.node("Add", quantised(b.conv(x, (16, 16))), x, out="y")
    b.output("y", ["batch", 16, 8, 8])
    return b.build()


UNTOUCHED = {
    "first stage": models.residual_cnn,
    "chain": models.vgg_chain,
    "transformer": models.bert_like,
    "dense layers": models.mlp,
    "subgraphs": models.conditional,
    "plain join": convnext_block,
    "quantised": quantised_block,
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_where_nothing_is_gained_the_bytes_stay(name: str) -> None:
    model = UNTOUCHED[name]().SerializeToString()
    assert enter_blocked(model) == model


def plain_session(model: bytes) -> ort.InferenceSession:
    """Runs the graph as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("join", ["Add", "Sum", "Mul"])
def test_values_stay(join: str, rows: int) -> None:
    """Up to the order of sums; a row that is not a number stays none, and stays alone."""
    x = np.random.default_rng(0).standard_normal((rows, 16, 8, 8)).astype(np.float32)
    x[:1] = np.nan
    model = block(join=join)
    (expected,) = plain_session(model).run(None, {"x": x})
    (found,) = make_session(model, 1).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(found).any(axis=(1, 2, 3)).tolist() == [True, False, False][:rows]
