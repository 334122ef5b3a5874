"""The dataflow view: order, captured tensors, what a tensor is computed from."""

from __future__ import annotations

import onnx
import pytest
from tests import models

from offramp.compiler.graphs.graph import Dataflow, captured_names, weight_bytes


def test_order_is_topological_even_if_the_file_is_not():
    proto = models.residual_cnn()
    nodes = list(reversed(proto.graph.node))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)

    graph = Dataflow(proto.graph)

    known = {*graph.inputs, *graph.constants}
    for op in graph.operators:
        assert known.issuperset(op.reads)
        known.update(op.writes)
    assert len(graph.operators) == len(nodes)


def test_what_bodies_capture_counts_as_read():
    graph = Dataflow(models.conditional().graph)
    (branch,) = [op for op in graph.operators if op.kind == "If"]

    captured = list(captured_names(branch.proto))
    assert captured == ["hidden0", "w2", "hidden0", "w2"]
    assert branch.reads == (*branch.proto.input, "hidden0", "w2")
    assert branch.has_body


def test_looking_at_bodies_does_not_change_the_model():
    proto = models.conditional()
    before = proto.SerializeToString(deterministic=True)
    Dataflow(proto.graph)
    assert proto.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("stop", "kinds"),
    [
        (frozenset(), ["Gemm", "Relu", "Gemm", "Relu"]),
        (frozenset({"hidden0"}), ["Gemm", "Relu"]),
        (frozenset({"hidden1"}), []),
    ],
)
def test_upstream_stops_at_given_tensors(stop, kinds):
    graph = Dataflow(models.mlp().graph)
    assert [op.kind for op in graph.upstream(["hidden1"], stop=stop)] == kinds


def test_constants_depend_on_no_input():
    b = models.Builder()
    folded = b.node("Exp", b.weight(4, 4), out="folded")
    b.node("MatMul", b.input("x", ["batch", 4]), folded, out="y")
    b.output("y", ["batch", 4])
    graph = Dataflow(b.build().graph)

    assert graph.variable == {"x", "y"}
    assert [graph.is_constant(op) for op in graph.operators] == [True, False]
    assert graph.producers["folded"].proto == onnx.helper.make_node("Exp", ["w0"], ["folded"])


def test_weights_are_counted_without_being_copied():
    proto = models.residual_cnn()
    counted = sum(onnx.numpy_helper.to_array(t).nbytes for t in proto.graph.initializer)
    assert weight_bytes(proto) == counted > 1000
