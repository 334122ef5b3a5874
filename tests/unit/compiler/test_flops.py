"""FLOPs of single operators, worked out by hand."""

from __future__ import annotations

import pytest
from onnx import TensorProto
from tests import models

from offramp.compiler.cuts.work import SYMBOLIC_SIZE, count_flops
from offramp.compiler.graphs.graph import Dataflow


def costs(b: models.Builder) -> list[float]:
    proto = b.build()
    return list(count_flops(proto, Dataflow(proto.graph)))


def test_conv_counts_its_window_once_per_output_element():
    b = models.Builder()
    b.conv(b.input("x", ["batch", 3, 16, 16]), (3, 8), stride=2)
    b.output("t0", ["batch", 8, 8, 8])
    assert costs(b) == [2 * (8 * 8 * 8) * (3 * 3 * 3)]


def test_grouped_conv_sums_over_its_own_channels():
    b = models.Builder()
    x = b.input("x", ["batch", 8, 4, 4])
    b.node("Conv", x, b.weight(8, 1, 3, 3), group=8, pads=[1] * 4, out="y")
    b.output("y", ["batch", 8, 4, 4])
    assert costs(b) == [2 * (8 * 4 * 4) * 9]


def test_transposed_conv_spreads_each_input_element():
    b = models.Builder()
    x = b.input("x", ["batch", 4, 5, 5])
    b.node("ConvTranspose", x, b.weight(4, 2, 2, 2), strides=[2, 2], out="y")
    b.output("y", ["batch", 2, 10, 10])
    assert costs(b) == [2 * (4 * 5 * 5) * (2 * 2 * 2)]


@pytest.mark.parametrize("trans_a", [0, 1])
def test_gemm(trans_a):
    b = models.Builder()
    x = b.input("x", [6, 4] if trans_a else [4, 6])
    b.node("Gemm", x, b.weight(6, 5), transA=trans_a, out="y")
    b.output("y", [4, 5])
    assert costs(b) == [2 * 4 * 5 * 6]


def test_matmul_takes_a_symbolic_sequence_at_the_stated_size():
    b = models.Builder()
    b.node("MatMul", b.input("x", ["batch", "sequence", 16]), b.weight(16, 8), out="y")
    b.output("y", ["batch", "sequence", 8])
    assert costs(b) == [2 * SYMBOLIC_SIZE * 8 * 16]


def test_einsum_counts_all_its_letters():
    b = models.Builder()
    x = b.input("x", ["batch", 3, 4])
    b.node("Einsum", x, b.weight(4, 5), equation="bij,jk->bik", out="y")
    b.output("y", ["batch", 3, 5])
    assert costs(b) == [2 * 3 * 4 * 5]


def test_lstm_counts_both_weights_at_each_step():
    b = models.Builder()
    x = b.input("x", [7, "batch", 4])
    b.node("LSTM", x, b.weight(1, 24, 4), b.weight(1, 24, 6), hidden_size=6, out="y")
    b.output("y", [7, 1, "batch", 6])
    assert costs(b) == [2 * 7 * (24 * 4 + 24 * 6)]


def test_others_count_their_output_and_constants_nothing():
    b = models.Builder()
    x = b.input("x", ["batch", 10])
    folded = b.node("Exp", b.weight(10, 1))
    b.node(
        "Relu", b.node("Add", x, b.node("Reshape", folded, b.constant([10])), out="sum"), out="y"
    )
    b.output("y", ["batch", 10], TensorProto.FLOAT)
    assert costs(b) == [0, 0, 10, 10]
