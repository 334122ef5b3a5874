"""Which operators of a graph can be computed in half precision, and which better are not.

What *can* is read off ONNX's operator schemas. What *should not* is a short list with reasons:
sums and powers that leave float16's range (65,504) or lose small terms, constants that vanish in
it, and numbers that count (sizes, positions, token ids) rather than being activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.compiler.graphs.graph import Dataflow, Operator

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16

VANISHES_BELOW = 2.0**-25
"""Half of float16's smallest number: what is smaller becomes 0."""

_SUMS = frozenset({
    "Pow", "Exp", "Log", "CumSum", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "BatchNormalization",
    "InstanceNormalization", "GroupNormalization", "LpNormalization", "MeanVarianceNormalization",
    "LRN"
})  # fmt: skip
"""They square, exponentiate or add up many values. ``LayerNormalization`` and ``Softmax`` are
not among them: TensorRT computes their insides in float32 whatever they read, and its fused
attention wants them in half."""
_FOLLOWING = frozenset({
    "Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Clip", "Max", "Min", "Neg", "Abs", "Exp",
    "Log", "Pow", "Sum", "Mean"
})  # fmt: skip
"""Where all that such an operator reads is kept in float32, so is what it gives: the steps from
a variance to a standard deviation belong together, and a cast between would cost more."""
_COUNTING = _FOLLOWING | {
    "Concat", "Cos", "Einsum", "Expand", "Flatten", "Gather", "Identity", "MatMul", "ReduceMax",
    "ReduceMin", "Reshape", "Sign", "Sin", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    "Where"
}  # fmt: skip
"""They pass on that a number counts: float16 has whole numbers up to 2,048 only. With ``Sin`` and
``Cos`` of positions times frequencies that is how rotary embeddings are computed."""
_DECIDING = frozenset({
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Mod", "Round", "TopK"
})  # fmt: skip
"""Where one number that such an operator reads counts, all of it stays float32."""
_WIDE = frozenset({
    onnx.TensorProto.INT16, onnx.TensorProto.UINT16, onnx.TensorProto.INT32,
    onnx.TensorProto.UINT32, onnx.TensorProto.INT64, onnx.TensorProto.UINT64
})  # fmt: skip
"""Integers beyond what float16 can count; pixels of 8 bits are not."""
_EPSILONS = frozenset({"Add", "Sub", "Max", "Clip", "Div", "Sum"})
"""A tiny constant keeps these away from zero."""
_ANSWERS = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
"""As the last operator they give the probabilities, which argmax and confidence are read off:
float16 has steps of 0.0005 below 1."""


class Slots(NamedTuple):
    """Which inputs and outputs of an operator become float16, by position."""

    inputs: frozenset[int]
    outputs: frozenset[int]


class Choice(NamedTuple):
    """The choice of what in a graph is computed in half precision."""

    halved: dict[int, Slots]
    """Operators by their index."""
    numbers: frozenset[str]
    """Tensors that count, hence stay float32. As masks they may be beyond float16's range."""


def halved_operators(
    flow: Dataflow,
    types: Mapping[str, int],
    constants: Mapping[str, NDArray[np.generic]],
    opset: int,
) -> Choice:
    """Choose the operators that are computed in half precision.

    ``types`` are the element types of tensors, ``constants`` the small initializers, ``opset`` is
    the version of the standard operators.
    """
    floats = {name for name, kind in types.items() if kind == FLOAT}
    numbers = _sizes(flow)
    halved: dict[int, Slots] = {}
    single: set[str] = set()
    """Tensors that an operator kept in float32 gives."""
    for op in flow.operators:
        slots = _slots(op.proto, opset, floats, types)
        variable = [t for t in op.reads if t in floats and t in flow.variable]
        if _counts(op, variable, numbers, types):
            numbers.update(op.writes)
        if (
            slots is None
            or op.has_body
            or op.kind in _SUMS
            or (op.kind == "Mul" and len(set(op.proto.input)) == 1)  # a square
            or numbers.issuperset(op.writes)
            or (op.kind in _EPSILONS and _vanishes(op, constants))
            or (op.kind in _ANSWERS and not set(flow.outputs).isdisjoint(op.writes))
            or (op.kind in _FOLLOWING and variable and single.issuperset(variable))
            or (op.kind == "Div" and op.proto.input[1] in single)
        ):
            single.update(op.writes)
        elif slots.inputs or slots.outputs:
            halved[op.index] = slots
    return Choice(halved, frozenset(numbers & floats))


def _counts(op: Operator, variable: list[str], numbers: set[str], types: Mapping[str, int]) -> bool:
    if op.kind == "Cast":
        return types.get(op.proto.input[0]) in _WIDE
    if op.kind in _DECIDING:
        return not numbers.isdisjoint(variable)
    return op.kind in _COUNTING and bool(variable) and numbers.issuperset(variable)


def _sizes(flow: Dataflow) -> set[str]:
    """Tensors that depend on the graph inputs by their shapes alone; float16 counts to 2,048."""
    sizes: set[str] = set()
    for op in flow.operators:
        variable = [t for t in op.reads if t in flow.variable]
        if op.kind in {"Shape", "Size"} or (variable and sizes.issuperset(variable)):
            sizes.update(op.writes)
    return sizes


def _vanishes(op: Operator, constants: Mapping[str, NDArray[np.generic]]) -> bool:
    """Whether a scalar that the operator reads would become 0."""
    scalars = (constants[t] for t in op.reads if t in constants and constants[t].size == 1)
    return any(
        0 < abs(float(s.reshape(()))) < VANISHES_BELOW for s in scalars if s.dtype.kind == "f"
    )


def _slots(
    node: onnx.NodeProto, opset: int, floats: set[str], types: Mapping[str, int]
) -> Slots | None:
    """Which positions become float16; ``None`` if the operator cannot be computed in it."""
    if any(name and name not in types for name in (*node.input, *node.output)):
        return None  # what is not understood is left alone
    is_cast = node.op_type == "Cast" and node.domain == ""
    if is_cast and node.input[0] not in floats:
        return Slots(frozenset(), frozenset({0} if node.output[0] in floats else ()))
    variables = _type_variables(node.op_type, node.domain, opset)
    if variables is None or is_cast:  # indices that were floats must not be rounded
        return None
    reads, writes, takes_half = variables
    inputs, bound = set(), set()
    for place, name in enumerate(node.input):
        kind = reads[min(place, len(reads) - 1)]
        if name not in floats or kind == "tensor(float)":
            continue  # an input that has to be float32, such as the scales of Resize
        if not takes_half.get(kind):
            return None
        inputs.add(place)
        bound.add(kind)
    outputs = {place for place, name in enumerate(node.output) if name in floats}
    if any(writes[min(place, len(writes) - 1)] not in bound for place in outputs):
        return None  # the type follows from an attribute, such as that of ConstantOfShape
    return Slots(frozenset(inputs), frozenset(outputs))


@cache
def _type_variables(
    kind: str, domain: str, opset: int
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, bool]] | None:
    """Type variables of inputs and outputs, and whether each may be float16."""
    if domain not in {"", "ai.onnx"}:
        return None
    try:
        schema = onnx.defs.get_schema(kind, opset)
    except onnx.defs.SchemaError:  # not one of that opset
        return None
    both = {"tensor(float)", "tensor(float16)"}
    takes_half = {c.type_param_str: both <= {*c.allowed_type_strs} for c in schema.type_constraints}
    reads = tuple(formal.type_str for formal in schema.inputs)
    return reads, tuple(formal.type_str for formal in schema.outputs), takes_half
