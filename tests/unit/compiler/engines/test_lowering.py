"""Newer operator sets brought to 17 exactly, or refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.facts import Told, facts
from tests.models import Builder, vgg_chain
from tests.sliced import BUILDERS, sliced

from offramp.compiler.common.errors import ModelError
from offramp.compiler.engines.lowering import IR_VERSION, OPSET, lower
from offramp.compiler.graphs.runtime import GraphRunner, runs_opset

X = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)


def lowered(proto: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto.FromString(lower(proto.SerializeToString()))
    onnx.checker.check_model(result, full_check=True)
    assert {o.domain: o.version for o in result.opset_import}[""] == OPSET
    assert result.ir_version <= IR_VERSION
    return result


def one(kind: str, *more: str, opset: int, b: Builder | None = None, **flags: object) -> Builder:
    """A graph of one operator between ``x`` and ``y``, floats of the shape of X."""
    b = b or Builder()
    b.node(kind, b.input("x", ["batch", 6, 4]), *more, out="y", **flags)
    b.output("y", ["batch", "a", "b"])
    return b


def attributes(proto: onnx.ModelProto, kind: str) -> dict[str, object]:
    (node,) = (n for n in proto.graph.node if n.op_type == kind)
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.parametrize(
    "kind",
    ["ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
     "ReduceLogSumExp", "ReduceSumSquare"],
)  # fmt: skip
@pytest.mark.parametrize("opset", [18, 20, 22])
def test_axes_of_reductions_become_attributes(kind: str, opset: int) -> None:
    b = Builder()
    proto = one(kind, b.constant([1, -1], np.int64), opset=opset, b=b).build(opset=opset)
    low = lowered(proto)
    assert attributes(low, kind)["axes"] == [1, -1]
    assert list(low.graph.initializer) == []
    feeds = {"x": np.abs(X)}
    np.testing.assert_array_equal(
        GraphRunner(low).run(feeds)["y"], GraphRunner(proto).run(feeds)["y"]
    )


def test_axes_may_be_a_constant_node() -> None:
    b = Builder()
    axes = b.node("Constant", value_ints=[2])
    proto = one("ReduceMean", axes, opset=18, b=b, keepdims=1).build(opset=18)
    low = lowered(proto)
    assert [n.op_type for n in low.graph.node] == ["ReduceMean"]
    assert attributes(low, "ReduceMean") == {"keepdims": 1, "axes": [2]}
    np.testing.assert_array_equal(
        GraphRunner(low).run({"x": X})["y"], GraphRunner(proto).run({"x": X})["y"]
    )


def test_without_axes_everything_is_reduced_before_and_after() -> None:
    proto = one("ReduceMax", opset=20).build(opset=20)
    low = lowered(proto)
    assert "axes" not in attributes(low, "ReduceMax")
    assert GraphRunner(low).run({"x": X})["y"].item() == X.max()


def test_reduce_sum_keeps_its_axes_as_an_input() -> None:
    """Axes are an input since opset 13."""
    b = Builder()
    proto = one("ReduceSum", b.constant([1], np.int64), opset=18, b=b).build(opset=18)
    low = lowered(proto)
    assert [list(n.input) for n in low.graph.node] == [["x", "w0"]]
    np.testing.assert_array_equal(
        GraphRunner(low).run({"x": X})["y"], GraphRunner(proto).run({"x": X})["y"]
    )


def test_new_attributes_at_their_defaults_are_dropped() -> None:
    b = Builder()
    x = b.input("x", ["batch", 6, 4])
    x = b.node("Cast", x, to=TensorProto.FLOAT16, saturate=1)
    b.node("Cast", x, to=TensorProto.FLOAT, saturate=1, out="y")
    b.output("y", ["batch", 6, 4])
    low = lowered(b.build(opset=19))
    assert [a.name for n in low.graph.node for a in n.attribute] == ["to", "to"]


@pytest.mark.parametrize("opset", [18, 19, 20, 21, 22, 23])
def test_a_network_of_any_opset_computes_the_same(opset: int) -> None:
    if not runs_opset(opset):
        pytest.skip(f"the ONNX Runtime that is installed has no opset {opset}")
    proto = vgg_chain(opset=opset)
    low = lowered(proto)
    feeds = {"image": np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)}
    np.testing.assert_allclose(
        GraphRunner(low).run(feeds)["logits"], GraphRunner(proto).run(feeds)["logits"], rtol=1e-5
    )


@pytest.mark.parametrize("name", list(BUILDERS))
def test_what_is_old_enough_stays_as_it_is(name: str) -> None:
    proto = sliced(name).model.proto
    low = onnx.ModelProto.FromString(lower(proto.SerializeToString()))
    for node in low.graph.node:
        if node.op_type == "Slice":
            del node.input[3:]  # its axes, which are named
    assert [n.SerializeToString() for n in low.graph.node] == [
        n.SerializeToString() for n in proto.graph.node
    ]


def test_an_equal_split_loses_only_its_number() -> None:
    b = Builder()
    x = b.input("x", ["batch", 6, 4])
    split = helper.make_node("Split", [x], ["y", "z"], axis=1, num_outputs=2)
    b._nodes.append(split)
    b.output("y", ["batch", 3, 4])
    b.output("z", ["batch", 3, 4])
    low = lowered(b.build(opset=18))
    assert attributes(low, "Split") == {"axis": 1}
    np.testing.assert_array_equal(GraphRunner(low).run({"x": X})["z"], X[:, 3:])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("steps", [False, True])
def test_a_slice_names_its_axes(dtype: type, steps: bool) -> None:
    """TensorRT 8.6 takes all axes for the default."""
    b = Builder()
    bounds = [b.constant([1, 1], dtype), b.constant([2, 6], dtype)]
    more = ["", b.constant([1, 2], dtype)] if steps else []
    proto = one("Slice", *bounds, *more, opset=17, b=b).build(opset=17)
    low = lowered(proto)
    (node,) = low.graph.node
    (axes,) = (numpy_helper.to_array(t) for t in low.graph.initializer if t.name == node.input[3])
    assert axes.tolist() == [0, 1]
    assert axes.dtype == dtype
    assert len(node.input) == (5 if steps else 4)
    np.testing.assert_array_equal(
        GraphRunner(low).run({"x": X})["y"], GraphRunner(proto).run({"x": X})["y"]
    )


def test_a_slice_that_names_its_axes_stays() -> None:
    b = Builder()
    bounds = [b.constant([value], np.int64) for value in (1, 3, 1)]
    proto = one("Slice", *bounds, opset=17, b=b).build(opset=17)
    (before,), (after,) = proto.graph.node, lowered(proto).graph.node
    assert list(after.input) == list(before.input)


def test_bodies_are_lowered_too() -> None:
    b = Builder()
    x = b.input("x", ["batch", 6, 4])
    axes = b.constant([1], np.int64)
    deep = b.node("Greater", b.node("Size", x), b.constant(10, np.int64))
    bodies = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, [x, axes], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["batch", 1, 4])],
        )
        for name, kind in (("then", "ReduceMax"), ("else", "ReduceMin"))
    }
    b.node("If", deep, out="y", **bodies)
    b.output("y", ["batch", 1, 4])
    low = lowered(b.build(opset=18))
    np.testing.assert_array_equal(GraphRunner(low).run({"x": X})["y"], X.max(axis=1, keepdims=True))


def test_the_same_graph_gives_the_same_bytes() -> None:
    graph = vgg_chain(opset=22).SerializeToString()
    assert lower(graph) == lower(graph)


def uneven_split() -> onnx.ModelProto:
    b = Builder()
    b._nodes.append(helper.make_node("Split", [b.input("x", ["batch", 5])], ["y", "z"], axis=1,
                                     num_outputs=2))  # fmt: skip
    b.output("y", ["batch", 3])
    return b.build(opset=18)


def computed_axes() -> onnx.ModelProto:
    b = Builder()
    return one("ReduceMax", b.input("axes", [1], TensorProto.INT64), opset=18, b=b).build(opset=18)


def scattered_maximum() -> onnx.ModelProto:
    b = Builder()
    where, what = b.constant(np.zeros((1, 1, 1)), np.int64), b.constant(np.ones((1, 1, 1)))
    b._weights[-1].CopyFrom(numpy_helper.from_array(np.ones((1, 1, 1), np.float32), what))
    scattered = one("ScatterElements", where, what, opset=18, b=b, axis=0, reduction="max")
    return scattered.build(opset=18)


def padded_by_axes() -> onnx.ModelProto:
    b = Builder()
    pads, axes = b.constant([1, 1], np.int64), b.constant([2], np.int64)
    return one("Pad", pads, "", axes, opset=18, b=b).build(opset=18)


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (one("Gelu", opset=20).build(opset=20), ("Gelu", "opset 20")),
        (computed_axes(), ("ReduceMax", "constant axes", "(axes)")),
        (one("ReduceMax", opset=18, noop_with_empty_axes=1).build(opset=18), ("leave its input",)),
        (uneven_split(), ("2 equal parts", "5 elements")),
        (scattered_maximum(), ("ScatterElements", "'max'")),
        (padded_by_axes(), ("Pad", "3 inputs", "4")),
    ],
    ids=["Gelu", "computed axes", "noop", "uneven split", "scatter", "pad"],
)
def test_what_opset_17_cannot_say_is_refused_with_name_and_remedy(
    proto: onnx.ModelProto, reason: Told
) -> None:
    with pytest.raises(ModelError, match=facts(*reason)) as refused:
        lower(proto.SerializeToString())
    assert "operator '" in str(refused.value)
    assert "opset_version=17" in str(refused.value)
