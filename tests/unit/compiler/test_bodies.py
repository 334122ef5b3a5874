"""Models with ``If``, ``Loop`` and ``Scan``: carried whole, cut around, and their work counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.models import Builder

from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import slice_model, verify
from offramp.compiler.cuts.work import count_flops
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.runtime_shapes import BodyScope
from offramp.compiler.graphs.shapes import concrete_shapes, declared_types

WIDTH = 16
PRODUCT = 2 * WIDTH * WIDTH
"""FLOPs of a row times a square matrix."""


def info(name: str, kind: int = TensorProto.FLOAT, shape: list[int | None] | None = None):
    return helper.make_tensor_value_info(name, kind, shape)


def finished(b: Builder, x: str) -> onnx.ModelProto:
    """A layer after the operator with a body, and the answer."""
    hidden = b.node("Relu", b.matmul(x, WIDTH, WIDTH), out="after")
    b.node("MatMul", hidden, b.weight(WIDTH, 4), out="logits")
    b.output("logits", ["batch", 4])
    return b.build()


def begun(batch: int | str = "batch") -> tuple[Builder, str]:
    b = Builder()
    return b, b.node("Relu", b.matmul(b.input("x", [batch, WIDTH]), WIDTH, WIDTH), out="before")


def looped(trips: int | None, *, batch: int | str = "batch") -> onnx.ModelProto:
    """A matrix from outside is applied so often, or as long as a count is below three."""
    b, x = begun(batch)
    weight = b.weight(WIDTH, WIDTH)
    nodes = [
        helper.make_node("MatMul", ["h", weight], ["product"]),
        helper.make_node("Tanh", ["product"], ["next"]),
        helper.make_node(
            "Identity" if trips else "Less", ["on"] if trips else ["i", "two"], ["go"]
        ),
    ]
    inputs = [
        info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []),
        info("h", shape=[batch if isinstance(batch, int) else None, WIDTH]),
    ]  # fmt: skip
    outputs = [info("go", TensorProto.BOOL, []), info("next")]
    two = onnx.numpy_helper.from_array(np.array(2, np.int64), "two")
    body = helper.make_graph(nodes, "body", inputs, outputs, [] if trips else [two])
    most = b.constant(trips, np.int64) if trips else ""
    return finished(b, b.node("Loop", most, b.constant(True, np.bool_), x, body=body, out="loop"))


def conditional() -> onnx.ModelProto:
    """One branch has two products, the other one; which is taken an input's size tells."""
    b, x = begun()
    one, two = b.weight(WIDTH, WIDTH), b.weight(WIDTH, WIDTH)
    short = helper.make_graph([helper.make_node("MatMul", [x, one], ["s"])], "s", [], [info("s")])
    nodes = [helper.make_node("MatMul", [x, two], ["m"]),
             helper.make_node("MatMul", ["m", one], ["l"])]  # fmt: skip
    long = helper.make_graph(nodes, "l", [], [info("l")])
    weights = b.node("ReduceSum", b.node("Relu", b.weight(3)), keepdims=0)
    positive = b.node("Greater", weights, b.constant(1e9, np.float32))
    return finished(b, b.node("If", positive, then_branch=long, else_branch=short, out="if"))


def scanned() -> onnx.ModelProto:
    """A recurrence over seven steps, whose state begins as what the first layer gives."""
    b, x = begun()
    steps = b.node("Tile", b.node("Unsqueeze", x, b.constant([0])), b.constant([7, 1, 1]))
    weight = b.weight(WIDTH, WIDTH)
    nodes = [helper.make_node("MatMul", ["h", weight], ["p"]),
             helper.make_node("Add", ["p", "step"], ["next"])]  # fmt: skip
    body = helper.make_graph(nodes, "step", [info("h"), info("step")], [info("next")])
    return finished(b, b.node("Scan", x, steps, body=body, num_scan_inputs=1, out="scan"))


def work_of_body(model: onnx.ModelProto) -> float:
    graph = Dataflow(model.graph)
    costs = count_flops(model, graph)
    return next(costs[op.index] for op in graph.operators if op.has_body)


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        (looped(5), 5 * (PRODUCT + WIDTH)),
        (looped(None), 0.0),
        (conditional(), 2 * PRODUCT),
        (scanned(), 7 * (PRODUCT + WIDTH)),
    ],
    ids=["loop", "while", "if", "scan"],
)
def test_work_of_a_body_is_counted_as_often_as_it_runs(read, model, flops: float) -> None:
    found = work_of_body(read(model, simplify=False).proto)
    # the condition of a loop is one operation a turn, whatever the batch
    assert found == pytest.approx(flops, abs=10)


def test_a_loop_with_unknown_operation_count_is_measured(read) -> None:
    analysis = find_cuts(read(looped(None), simplify=False))
    assert analysis.unknown_work == ("Loop",)
    assert analysis.total_s is not None


def test_shapes_from_outside_of_a_body_are_read_there(read) -> None:
    """Exporters and optimisers put constants next to the other weights."""
    b, x = begun()
    apart, back = b.constant([-1, 4, WIDTH // 4], np.int64), b.constant([-1, WIDTH], np.int64)
    nodes = [
        helper.make_node("Reshape", ["h", apart], ["heads"]),
        helper.make_node("MatMul", ["heads", b.weight(WIDTH // 4, WIDTH // 4)], ["product"]),
        helper.make_node("Reshape", ["product", back], ["next"]),
        helper.make_node("Identity", ["on"], ["go"]),
    ]
    inputs = [info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []),
              info("h", shape=[None, WIDTH])]  # fmt: skip
    outputs = [info("go", TensorProto.BOOL, []), info("next")]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    trips, go = b.constant(5, np.int64), b.constant(True, np.bool_)
    proto = finished(b, b.node("Loop", trips, go, x, body=body, out="loop"))
    model = read(proto, simplify=False).proto
    # two reshapes write a row each; the condition is one operation a turn
    assert work_of_body(model) == pytest.approx(5 * (PRODUCT / 4 + 2 * WIDTH), abs=10)
    assert declared_types(model)["loop"].shape == ("batch", WIDTH)


def test_bodies_that_only_give_constants_are_known_to_do_no_work(read) -> None:
    b, x = begun()
    samples = b.node("Size", b.input("dose", ["batch", 1]))
    large = b.node("Greater", samples, b.constant(10**9, np.int64))
    scale = b.node("If", large, then_branch=giving("one", 1), else_branch=giving("two", 2))
    analysis = find_cuts(read(finished(b, b.node("Mul", x, scale, out="scaled")), simplify=False))
    assert analysis.unknown_work == ()
    assert analysis.total_flops > 0


def giving(name: str, value: float) -> onnx.GraphProto:
    constant = onnx.numpy_helper.from_array(np.array(value, np.float32))
    nodes = [helper.make_node("Constant", [], [name], value=constant)]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, 1, [])])


def test_what_a_body_reads_of_outside_counts_as_read() -> None:
    graph = Dataflow(looped(5).graph)
    (loop,) = [op for op in graph.operators if op.kind == "Loop"]
    inside = loop.proto.attribute[0].g.node[0].input[1]
    assert inside in loop.reads
    assert graph.constants >= {inside}


MODELS = {
    "loop": looped(5),
    "loop, batch fixed": looped(5, batch=1),
    "while": looped(None),
    "if": conditional(),
    "scan": scanned(),
}


@pytest.mark.parametrize("simplify", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_operators_with_bodies_are_cut_around_and_compute_the_same(
    read, name: str, simplify: bool
) -> None:
    model = read(MODELS[name], simplify=simplify)
    cuts = find_cuts(model).cuts
    assert len(cuts) >= 2
    assert {cut.shape for cut in cuts} == {("batch", WIDTH)}
    options = CompileOptions.of(model=Path(), data=Path(), output=Path())
    x = np.random.default_rng(0).standard_normal((7, WIDTH)).astype(np.float32)
    assert verify(model, slice_model(model, options).segments, {"x": x}) <= 1e-5


@pytest.mark.parametrize("grows", [False, True])
def test_only_a_shape_that_the_body_keeps_is_that_of_what_is_carried(grows: bool) -> None:
    reads = ["h", "h"] if grows else ["h"]
    nodes = [helper.make_node("Concat", reads, ["next"], axis=1),
             helper.make_node("Identity", ["on"], ["go"])]  # fmt: skip
    inputs = [info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []), info("h")]
    body = helper.make_graph(nodes, "b", inputs, [info("go", TensorProto.BOOL, []), info("next")])
    loop = helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)
    scope = BodyScope(
        types={"x": (TensorProto.FLOAT, (7, WIDTH))},
        values={"trips": np.array(1)},
        opsets=(helper.make_opsetid("", 17),),
    )
    types = {"y": (TensorProto.FLOAT, (7, WIDTH))}
    assert scope.carried(loop, lambda m: concrete_shapes(m, {})) == ({} if grows else types)
