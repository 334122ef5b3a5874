"""Choices for a whole batch by the data of its samples are refused; those of each row are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests.facts import facts
from tests.models import Builder

from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend.batch import check_conditions, free_batch
from offramp.compiler.graphs.row_mixing import check_rows
from offramp.compiler.graphs.shapes import annotate

WIDTH = 4
NEVER = 1e6
"""A value that a few random rows do not reach."""

Made = Callable[[Builder, str], str]


def constant(b: Builder, value: object, dtype: type = np.int64) -> str:
    return b.constant(value, dtype)


# Scalars, or vectors of one, that are made of several rows [batch, WIDTH].
MIXED: dict[str, Made] = {
    "the largest of all": lambda b, x: b.node("ReduceMax", x, keepdims=0),
    "features, then rows": lambda b, x: b.node(
        "ReduceSum", b.node("ReduceMax", x, axes=[1], keepdims=0), keepdims=0
    ),
    "rows, then features": lambda b, x: b.node(
        "ReduceMin", b.node("ReduceMean", x, axes=[0], keepdims=1), keepdims=0
    ),
    "the first row": lambda b, x: b.node(
        "ReduceMax", b.node("Gather", x, constant(b, 0)), keepdims=0
    ),
    "a slice of rows": lambda b, x: b.node(
        "ReduceMax",
        b.node("Slice", x, constant(b, [0]), constant(b, [1]), constant(b, [0])),
        keepdims=0,
    ),
    "all in a row": lambda b, x: b.node(
        "ReduceMax", b.node("Reshape", x, constant(b, [-1])), axes=[0], keepdims=0
    ),
    "products of rows": lambda b, x: b.node(
        "ReduceMax", b.node("MatMul", b.node("Transpose", x, perm=[1, 0]), x), keepdims=0
    ),
}
# The same for each row: [batch, 1].
BY_ROW: dict[str, Made] = {
    "the largest": lambda b, x: b.node("ReduceMax", x, axes=[1], keepdims=1),
    "the first": lambda b, x: b.node("Gather", x, constant(b, [0]), axis=1),
    "a share": lambda b, x: b.node("ReduceMax", b.node("Softmax", x, axis=1), axes=[1], keepdims=1),
    "a running sum": lambda b, x: b.node(
        "ReduceMin", b.node("CumSum", x, constant(b, 1)), axes=[1], keepdims=1
    ),
    "what is missing": lambda b, x: b.node(
        "ReduceSum",
        b.node("Cast", b.node("IsNaN", x), to=TensorProto.FLOAT),
        constant(b, [1]),
        keepdims=1,
    ),
}
# Neither: scalars that no sample has a say in.
FIXED: dict[str, Made] = {
    "features": lambda b, x: b.node(
        "Cast", b.node("Gather", b.node("Shape", x), constant(b, 1)), to=TensorProto.FLOAT
    ),
    "elements": lambda b, x: b.node("Cast", b.node("Size", x), to=TensorProto.FLOAT),
    "a weight": lambda b, _: b.node("ReduceMax", b.weight(3), keepdims=0),
}


def branch(name: str, tensor: str) -> onnx.GraphProto:
    given = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node("Relu", [tensor], [name])], name, [], [given])


def over(b: Builder, value: str) -> str:
    return b.node("Greater", value, constant(b, NEVER, np.float32))


def number(b: Builder, value: str) -> str:
    """0 where the value is small, as a vector of one."""
    small = b.node("Cast", b.node("Floor", b.node("Div", value, constant(b, NEVER, np.float32))),
                   to=TensorProto.INT64)  # fmt: skip
    return b.node("Reshape", b.node("Abs", small), constant(b, [1]))


def looped(b: Builder, value: str, x: str, *, goes_on: bool) -> str:
    """A layer applied once, or as often as a value says; or while it is small."""
    nodes = [helper.make_node("Tanh", ["h"], ["next"])]
    flag = "go" if goes_on else "on"
    if goes_on:
        nodes.append(helper.make_node("Less", [value, constant(b, NEVER, np.float32)], ["go"]))
    else:
        nodes.append(helper.make_node("Identity", ["on"], ["again"]))
        flag = "again"
    kinds = [("i", TensorProto.INT64, []), ("on", TensorProto.BOOL, [])]
    inputs = [helper.make_tensor_value_info(*told) for told in kinds]
    inputs.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [None, WIDTH]))
    outputs = [
        helper.make_tensor_value_info(flag, TensorProto.BOOL, []),
        helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
    ]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    one = b.node("Reshape", number(b, value), constant(b, [], np.int64))
    trips = constant(b, 2) if goes_on else b.node("Add", one, constant(b, 1))
    return b.node("Loop", trips, constant(b, True, np.bool_), x, body=body)


def conditional(b: Builder, value: str, x: str) -> str:
    early, late = b.matmul(x, WIDTH, WIDTH), b.matmul(x, WIDTH, WIDTH)
    return b.node("If", over(b, value), then_branch=branch("a", early),
                  else_branch=branch("z", late))  # fmt: skip


def selected(b: Builder, value: str, x: str) -> str:
    return b.node("Where", over(b, value), b.matmul(x, WIDTH, WIDTH), x)


def weighted(b: Builder, value: str, x: str) -> str:
    early = b.node("Cast", over(b, value), to=TensorProto.FLOAT)
    return b.node("Add", x, b.node("Mul", early, b.matmul(x, WIDTH, WIDTH)))


def sliced(b: Builder, value: str, x: str) -> str:
    end = constant(b, [WIDTH])
    part = b.node("Slice", b.node("Concat", x, x, axis=1), number(b, value),
                  b.node("Add", number(b, value), end), constant(b, [1]))  # fmt: skip
    return b.node("Reshape", part, constant(b, [-1, WIDTH]))


def picked(b: Builder, value: str, x: str) -> str:
    return b.node("Mul", x, b.node("Gather", b.weight(2, WIDTH), number(b, value)))


def gated(b: Builder, value: str, x: str) -> str:
    beyond = b.node("Relu", b.node("Sub", value, constant(b, NEVER, np.float32)))
    return b.node("Add", x, b.node("Mul", beyond, b.matmul(x, WIDTH, WIDTH)))


def risen(b: Builder, value: str, x: str) -> str:
    far = b.node("Sub", value, constant(b, NEVER, np.float32))
    beyond = b.node("Exp", b.node("Mul", far, constant(b, 100, np.float32)))
    return b.node("Add", x, b.node("Mul", beyond, b.matmul(x, WIDTH, WIDTH)))


SCALAR_USES = {
    "Relu": gated,
    "Exp": risen,
    "If": conditional,
    "Where": selected,
    "product": weighted,
    "Slice": sliced,
    "Gather": picked,
    "trips": lambda b, value, x: looped(b, value, x, goes_on=False),
    "while": lambda b, value, x: looped(b, value, x, goes_on=True),
}
ROW_USES = {"Relu": gated, "Exp": risen, "Where": selected, "product": weighted}


def model(make: Made, use: Callable[[Builder, str, str], str], *, mixed: bool) -> onnx.ModelProto:
    b = Builder()
    x = b.node("Tanh", b.matmul(b.input("x", ["batch", 8]), 8, WIDTH))
    value = make(b, x)
    if mixed:
        value = b.node("Reshape", value, constant(b, [], np.int64))
    b.linear(use(b, value, x), WIDTH, 3, out="logits")
    b.output("logits", ["batch", 3])
    proto = b.build()
    annotate(proto)
    onnx.checker.check_model(proto)
    return proto


@settings(deadline=None, max_examples=56)
@given(st.sampled_from(sorted(MIXED)), st.sampled_from(sorted(SCALAR_USES)))
def test_choices_by_several_rows_are_refused(made: str, use: str) -> None:
    proto = model(MIXED[made], SCALAR_USES[use], mixed=True)
    check_rows(proto)  # a few rows show nothing
    with pytest.raises(ModelError, match=facts("whole batch", "data of its samples")):
        check_conditions(proto)


@settings(deadline=None, max_examples=40)
@given(
    st.one_of(
        st.tuples(st.just(BY_ROW), st.sampled_from(sorted(BY_ROW)), st.just(ROW_USES),
                  st.sampled_from(sorted(ROW_USES))),
        st.tuples(st.just(FIXED), st.sampled_from(sorted(FIXED)), st.just(SCALAR_USES),
                  st.sampled_from(sorted(SCALAR_USES))),
    )
)  # fmt: skip
def test_choices_of_each_row_and_by_sizes_are_not(drawn: tuple) -> None:
    values, made, uses, use = drawn
    check_conditions(model(values[made], uses[use], mixed=values is FIXED))


@pytest.mark.parametrize(
    "mix",
    [
        lambda b, x: b.node("CumSum", x, constant(b, 0)),
        lambda b, x: b.node("Softmax", x, axis=0),
        lambda b, x: b.node(
            "Slice", x, constant(b, [-1]), constant(b, [-(2**31)]), constant(b, [0]),
            constant(b, [-1]),
        ),
        lambda b, x: b.node("Sub", x, b.node("ReduceMean", x, axes=[0], keepdims=1)),
    ],
    ids=["CumSum", "Softmax", "reversed", "centred"],
)  # fmt: skip
def test_rows_that_choose_by_other_rows_are_refused(mix: Made) -> None:
    with pytest.raises(ModelError, match="chooses for a whole batch"):
        check_conditions(
            model(lambda b, x: BY_ROW["the largest"](b, mix(b, x)), selected, mixed=False)
        )


@pytest.mark.parametrize("batch", [1, "batch"])
def test_a_branchynet_is_refused_however_it_was_exported(batch: int | str) -> None:
    b = Builder()
    x = b.node("Tanh", b.matmul(b.input("x", [batch, 8]), 8, WIDTH))
    early, late = b.linear(x, WIDTH, 3), b.linear(x, WIDTH, 3)
    sure = b.node("ReduceMax", b.node("Softmax", early, axis=1), keepdims=0, out="sure")
    large = b.node("Greater", sure, constant(b, 0.999999, np.float32), out="large")
    b.node("If", large, then_branch=branch("a", early), else_branch=branch("z", late), out="logits")
    b.output("logits", [batch, 3])
    proto = b.build()
    proto.graph.node[-1].name = "exit"
    told = facts("'large' (Greater)", "'sure' (ReduceMax)", "'exit' (If)", "torch.where", "export")
    with pytest.raises(ModelError, match=told):
        free_batch(proto)


def test_rows_that_are_picked_and_put_back_are_their_own() -> None:
    """A mixture of experts: how many rows an expert gets is counted, and sizes follow it."""
    b = Builder()
    x = b.node("Tanh", b.matmul(b.input("x", ["batch", 8]), 8, WIDTH))
    first = b.node("Gather", x, constant(b, 0), axis=1)
    chosen = b.node("Greater", first, constant(b, 0, np.float32))
    rows = b.node("Reshape", b.node("NonZero", chosen), constant(b, [-1, 1]))
    theirs = b.node("GatherND", x, rows)
    worked = b.node("Tanh", b.matmul(theirs, WIDTH, WIDTH))
    again = b.node("Expand", worked, b.node("Shape", theirs))
    b.linear(b.node("ScatterND", x, rows, again), WIDTH, 3, out="logits")
    b.output("logits", ["batch", 3])
    proto = b.build()
    annotate(proto)
    check_conditions(proto)
    check_rows(proto)


@pytest.mark.parametrize("use", ["a size", "a choice"])
def test_a_count_of_chosen_elements_may_be_a_size_and_no_choice(use: str) -> None:
    """``y[y < 0] = 0`` as torch's exporter writes it, and the count used for something else."""
    b = Builder()
    x = b.node("Tanh", b.matmul(b.input("x", ["batch", 8]), 8, WIDTH))
    zero, one = constant(b, 0, np.float32), constant(b, [1])
    chosen = b.node("Less", x, zero)
    ones = b.node("Cast", chosen, to=TensorProto.INT64)
    size = b.node("Reshape", b.node("ReduceSum", ones, keepdims=0), one)
    places = b.node("Transpose", b.node("NonZero", chosen), perm=[1, 0])
    put = b.node("ScatterND", x, places, b.node("Expand", zero, size))
    if use == "a choice":
        put = b.node("Where", b.node("Greater", size, one), put, x)
    b.linear(put, WIDTH, 3, out="logits")
    b.output("logits", ["batch", 3])
    proto = b.build()
    annotate(proto)
    if use == "a size":
        check_conditions(proto)
        return
    with pytest.raises(ModelError, match="chooses for a whole batch"):
        check_conditions(proto)
