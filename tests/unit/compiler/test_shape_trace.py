"""Sizes that ONNX's inference loses are found by computing what they depend on."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from tests.models import Builder

from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.graphs import shape_trace
from offramp.compiler.graphs.shape_trace import ShapeTrace
from offramp.compiler.graphs.shapes import concrete_shapes, infer_types

TOKENS, WIDTH = 4, 16
ONE = numpy_helper.from_array(np.array([1], np.int64))


def masked_by_range(layers: int = 3) -> onnx.ModelProto:
    """An encoder as ``transformers`` has it: token types are expanded to a shape that is chosen by
    ``Where``, and the mask of every layer is picked by a ``Range`` over the rows of the tokens."""
    b = Builder()
    ids = b.input("ids", ["batch", TOKENS], TensorProto.INT64)
    mask = b.input("mask", ["batch", TOKENS], TensorProto.INT64)
    shape = b.node("Shape", ids)
    as_it_is = b.node("Equal", shape, b.constant([-1, -1], np.int64))
    ones = b.node("ConstantOfShape", b.constant([2], np.int64), value=ONE)
    chosen = b.node("Where", as_it_is, ones, shape)
    kinds = b.node("Expand", b.constant([[0] * TOKENS], np.int64), chosen, out="kinds")
    x = b.node("Gather", b.weight(50, WIDTH), ids)
    x = b.node("Add", x, b.node("Gather", b.weight(2, WIDTH), kinds), out="embedded")
    rows = b.node("Gather", b.node("Shape", x), b.constant(0, np.int64), axis=0)
    numbers = b.node("Range", b.constant(0, np.int64), rows, b.constant(1, np.int64), out="rows")
    kept = b.node("Cast", b.node("Gather", mask, numbers, axis=0), to=TensorProto.BOOL)
    hidden = b.node("Unsqueeze", kept, b.constant([1], np.int64))
    zero, far = b.constant(0, np.float32), b.constant(-1e4, np.float32)
    bias = b.node("Where", hidden, zero, far, out="bias")
    for i in range(layers):
        turned = b.node("Transpose", x, perm=[0, 2, 1])
        scores = b.node("Add", b.node("MatMul", b.matmul(x, WIDTH, WIDTH), turned), bias)
        mixed = b.node("MatMul", b.node("Softmax", scores, axis=-1), b.matmul(x, WIDTH, WIDTH))
        x = b.node("Add", x, mixed, out=f"layer{i}")
    b.linear(b.node("Flatten", x), TOKENS * WIDTH, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def test_sizes_behind_range_and_expand_are_the_batch():
    types = infer_types(masked_by_range())

    assert types["kinds"].shape == ("batch", TOKENS)
    assert types["rows"].shape == ("batch",)
    assert types["bias"].shape == ("batch", 1, TOKENS)


def test_a_mask_sliced_by_range_allows_a_cut_after_every_layer(read):
    cuts = find_cuts(read(masked_by_range())).cuts

    assert [cut.tensor for cut in cuts] == ["layer0", "layer1", "layer2"]
    assert "mask" in cuts[0].side_inputs


def test_a_scalar_that_inference_has_lost_is_known():
    """The axes are computed; it has no dimension, which differs from having no shape."""
    b = Builder()
    x = b.input("x", ["batch", 4, 8])
    axes = b.node("Range", *(b.constant(number, np.int64) for number in (0, 3, 1)))
    most = b.node("ReduceSum", x, axes, keepdims=0, out="most")
    y = b.node("Div", b.node("ReduceMean", x, axes=[1], keepdims=0), most, out="scaled")
    b.linear(y, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    found = concrete_shapes(b.build(), {"batch": 3})
    assert (found["most"][1], found["scaled"][1]) == ((), (3, 8))


def test_what_would_be_large_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    """All rows of a mask at the size that is probed would not fit into memory."""
    b = Builder()
    x = b.input("x", [2003, 3])
    b.node("Expand", b.constant([[1]], np.int64), b.constant([2003, 10**7], np.int64), out="wide")
    b.node("Identity", x, out="y")
    b.output("y", [2003, 3])
    model = b.build()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it is computed")

    monkeypatch.setattr(shape_trace, "ReferenceEvaluator", refuse)
    trace = ShapeTrace(model)
    for node in model.graph.node:
        trace.follow(node)

    assert trace.shape("wide") == (2003, 10**7)
    assert trace.value("wide") is None


def test_an_operator_that_contradicts_its_types_is_a_value_error():
    b = Builder()
    x = b.input("x", [2, 3])
    b.node("Where", b.constant([True]), b.constant([1], np.int64), x, out="y")
    b.output("y", [2, 3])
    model = b.build()

    with pytest.raises(ValueError, match="inconsistent type"):
        ShapeTrace(model).follow(model.graph.node[0])


def test_a_table_whose_content_is_left_out_is_known_by_its_shape():
    """GPT-2's causal mask is such: shape inference over a skeleton lacks its values."""
    table = onnx.TensorProto(name="causal", data_type=TensorProto.BOOL, dims=[1, 1, 64, 64])
    b = Builder()
    b.node("Identity", b.input("x", [2, 3]), out="y")
    b.output("y", [2, 3])
    model = b.build()
    model.graph.initializer.append(table)

    trace = ShapeTrace(model)

    assert trace.shape("causal") == (1, 1, 64, 64)
    assert trace.value("causal") is None
