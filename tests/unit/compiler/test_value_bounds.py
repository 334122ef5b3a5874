"""Legal values of inputs: no value that the model takes is refused, and none that it fails on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto
from tests.facts import tells
from tests.models import Builder

from offramp.bundle import Answer, TensorSpec
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.shapes import annotate, declared_types
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.samples.value_bounds import find_value_bounds
from offramp.engine.requests.value_limits import ValueLimits

WIDTH = 3
COLUMNS = 4
ROWS = 7
"""Length of the tables that inputs index."""


@dataclass
class Model:
    """A graph whose input ``x`` [batch, COLUMNS] is changed, and then indexes a table."""

    dtype: int = TensorProto.INT64
    b: Builder = field(default_factory=Builder)
    rank: int = 2

    def __post_init__(self) -> None:
        self.x = self.b.input("x", ("batch", COLUMNS), self.dtype)

    def integer(self) -> str:
        if self.dtype in (TensorProto.INT64, TensorProto.INT32):
            return self.x
        return self.b.node("Cast", self.x, to=TensorProto.INT64)

    def constant(self, value: Any) -> str:
        kind = np.int32 if self.dtype == TensorProto.INT32 else np.int64
        return self.b.constant(value, kind)

    def indexed(self, indices: str, rows: int = ROWS) -> onnx.ModelProto:
        table = self.b.constant(np.ones((rows, WIDTH), np.float32))
        self.b.node("Gather", table, indices, out="y")
        return self.done()

    def done(self, out: str = "y") -> onnx.ModelProto:
        self.b.output(out, [])
        proto = self.b.build()
        del proto.graph.output[0].type.tensor_type.shape.dim[:]
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        proto.opset_import.add(domain="com.microsoft", version=1)
        annotate(proto)
        return proto


def source_of(proto: onnx.ModelProto) -> SourceModel:
    types = declared_types(proto)
    inputs = [
        TensorSpec(name=i.name, dtype=types[i.name].dtype, shape=types[i.name].shape or ())
        for i in proto.graph.input
    ]
    return SourceModel(
        proto=proto,
        name="m",
        inputs=tuple(inputs),
        outputs=(),
        original_sha256="",
        opset=17,
        answer=Answer(output="y", classes=2, form="logits"),
    )


def limits_of(proto: onnx.ModelProto) -> ValueLimits:
    return ValueLimits(find_value_bounds(source_of(proto), random_inputs(proto, 1)))


def plain() -> onnx.ModelProto:
    m = Model()
    return m.indexed(m.x)


def cast_of_floats() -> onnx.ModelProto:
    m = Model(TensorProto.FLOAT)
    return m.indexed(m.integer())


def narrow_integers() -> onnx.ModelProto:
    m = Model(TensorProto.INT32)
    return m.indexed(m.x)


def offsets_of_fields() -> onnx.ModelProto:
    """One table for all fields, of which each has its own part."""
    m = Model()
    return m.indexed(m.b.node("Add", m.x, m.constant([0, 2, 4, 5])))


def counted_from_one() -> onnx.ModelProto:
    m = Model(TensorProto.INT32)
    return m.indexed(m.b.node("Sub", m.x, m.constant(1)))


def clipped() -> onnx.ModelProto:
    m = Model()
    return m.indexed(m.b.node("Clip", m.x, m.constant(0)))


def unknown_words() -> onnx.ModelProto:
    m = Model()
    return m.indexed(m.b.node("Min", m.x, m.constant(ROWS - 1)))


def hashed() -> onnx.ModelProto:
    m = Model()
    return m.indexed(m.b.node("Mod", m.x, m.constant(ROWS)))


def chosen_by_a_condition() -> onnx.ModelProto:
    m = Model()
    less = m.b.node("Less", m.x, m.constant(ROWS))
    return m.indexed(m.b.node("Where", less, m.x, m.constant(0)))


def column_of_a_matrix() -> onnx.ModelProto:
    m = Model(TensorProto.FLOAT)
    column = m.b.node("Gather", m.x, m.b.constant(2, np.int64), axis=1)
    return m.indexed(m.b.node("Cast", column, to=TensorProto.INT64))


def last_columns() -> onnx.ModelProto:
    m = Model()
    ends = [m.b.constant([value], np.int64) for value in (-2, 2**62, 1)]
    return m.indexed(m.b.node("Slice", m.x, *ends))


def columns_with_their_own_tables() -> onnx.ModelProto:
    m = Model()
    parts = m.b.nodes("Split", m.x, outs=["p0", "p1"], axis=1)
    found = []
    for part, rows in zip(parts, (3, 5), strict=True):
        table = m.b.constant(np.ones((rows, WIDTH), np.float32))
        found.append(m.b.node("Gather", table, m.b.node("Transpose", part, perm=[1, 0])))
    m.b.node("Concat", *found, out="y", axis=0)
    return m.done()


def columns_in_another_shape() -> onnx.ModelProto:
    m = Model()
    shifted = m.b.node("Add", m.x, m.constant([0, 1, 2, 3]))
    return m.indexed(m.b.node("Reshape", shifted, m.b.constant([-1, 2, 2], np.int64)))


def joined_with_a_constant() -> onnx.ModelProto:
    m = Model()
    turned = m.b.node("Transpose", m.x, perm=[1, 0])
    first = m.b.node("Slice", turned, *[m.b.constant([v], np.int64) for v in (0, 1, 0)])
    return m.indexed(m.b.node("Concat", first, turned, axis=0))


def coordinates() -> onnx.ModelProto:
    m = Model()
    pairs = m.b.node("Reshape", m.x, m.b.constant([-1, 2, 2], np.int64))
    m.b.node("GatherND", m.b.constant(np.ones((3, 5), np.float32)), pairs, out="y")
    return m.done()


def elements() -> onnx.ModelProto:
    m = Model()
    floats = m.b.node("Cast", m.x, to=TensorProto.FLOAT)
    m.b.node("GatherElements", m.b.matmul(floats, COLUMNS, ROWS), m.x, out="y", axis=1)
    return m.done()


def fused_embedding() -> onnx.ModelProto:
    """Return the embedding as ONNX Runtime writes it; it accepts no negative index."""
    m = Model(TensorProto.INT32)
    words, places = (m.b.constant(np.ones((n, 8), np.float32)) for n in (ROWS, COLUMNS))
    scale, bias = (m.b.constant(np.ones(8, np.float32)) for _ in range(2))
    m.b.nodes(
        "EmbedLayerNormalization",
        *(m.x, "", words, places, "", scale, bias),
        outs=["y", "mask"],
        domain="com.microsoft",
    )
    return m.done()


def two_tables() -> onnx.ModelProto:
    m = Model()
    for rows, out in ((9, "a"), (5, "b")):
        m.b.node("Gather", m.b.constant(np.ones((rows, WIDTH), np.float32)), m.x, out=out)
    m.b.node("Add", "a", "b", out="y")
    return m.done()


def in_a_branch() -> onnx.ModelProto:
    """A branch that does not run requires nothing."""
    m = Model()
    table = m.b.constant(np.ones((ROWS, WIDTH), np.float32))
    flag = m.b.node("Greater", m.b.node("ReduceMin", m.x, keepdims=0), m.constant(10**6))
    branches = []
    for name, node in (
        ("then", onnx.helper.make_node("Gather", [table, m.x], ["t"])),
        ("else", onnx.helper.make_node("Identity", [table], ["e"])),
    ):
        out = onnx.ValueInfoProto(name=node.output[0])
        out.type.tensor_type.elem_type = TensorProto.FLOAT
        branches.append(onnx.helper.make_graph([node], name, [], [out]))
    m.b.node("If", flag, out="y", then_branch=branches[0], else_branch=branches[1])
    return m.done()


BOUNDED: list[Callable[[], onnx.ModelProto]] = [
    plain,
    cast_of_floats,
    narrow_integers,
    offsets_of_fields,
    counted_from_one,
    clipped,
    unknown_words,
    column_of_a_matrix,
    last_columns,
    columns_with_their_own_tables,
    columns_in_another_shape,
    joined_with_a_constant,
    coordinates,
    elements,
    fused_embedding,
    two_tables,
]
FREE: list[Callable[[], onnx.ModelProto]] = [hashed, chosen_by_a_condition, in_a_branch]


def fails(runner: GraphRunner, x: NDArray[Any]) -> bool:
    try:
        runner.run({"x": x})
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("make", [*BOUNDED, *FREE], ids=lambda make: make.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_refused_is_what_fails(
    make: Callable[[], onnx.ModelProto], data: st.DataObject
) -> None:
    """One value is anything, others are legal everywhere."""
    proto = make()
    limits, runner = limits_of(proto), GraphRunner(proto)
    floating = proto.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    value = data.draw(
        st.floats(-3 * ROWS, 3 * ROWS, width=32) if floating else st.integers(-3 * ROWS, 3 * ROWS)
    )
    x = np.ones((2, COLUMNS), np.float32 if floating else np.int64)
    x = x.astype(random_inputs(proto, 1)["x"].dtype)
    x[data.draw(st.integers(0, 1)), data.draw(st.integers(0, COLUMNS - 1))] = value
    failed = fails(runner, x)
    refused = limits.wrong({"x": x}) is not None
    assert refused <= failed, "the model takes a value that is refused"
    if make in BOUNDED:
        assert refused == failed, "the model fails on a value that is not refused"


def test_the_message_names_input_value_place_and_the_legal_values() -> None:
    limits = limits_of(plain())
    x = np.zeros((3, COLUMNS), np.int64)
    assert limits.wrong({"x": x}) is None
    x[2, 1] = 10**6
    told = limits.wrong({"x": x})
    assert told is not None
    tells(told, "'x' has 1000000 at [2, 1]", "-7 to 6", "Gather")


def test_the_message_names_the_place_of_a_column() -> None:
    limits = limits_of(column_of_a_matrix())
    x = np.full((3, COLUMNS), np.nan, np.float32)
    x[:, 2] = (1, 2, -8)
    told = limits.wrong({"x": x})
    assert told is not None
    tells(told, "'x' has -8 at [2, 2]", "-7.9999")
    x[2, 2] = np.nan
    assert "has nan at [2, 2]" in str(limits.wrong({"x": x}))


def test_bytes_that_index_all_of_a_table_have_no_bound() -> None:
    m = Model(TensorProto.UINT8)
    assert (
        find_value_bounds(source_of(proto := m.indexed(m.integer(), 256)), random_inputs(proto, 1))
        == ()
    )


def test_random_inputs_are_legal_at_every_place() -> None:
    for make in BOUNDED:
        proto = make()
        for seed in range(5):
            GraphRunner(proto).run(random_inputs(proto, 50, seed=seed))
