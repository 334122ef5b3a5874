"""Half precision: the choice of float32 operators to compute in float16, and the new graph.

:func:`halve` rewrites a graph for TensorRT, with float32 inputs and outputs; :func:`rounded` makes
a float32 graph that rounds where float16 would, to run on a CPU. :func:`halved_operators` decides
which operators become float16.

Precision is a property of the graph: TensorRT builds strongly typed networks, where every tensor
has the type in the graph. So this module decides, not a builder's flag.

Two existing converters are not used (both tried with onnx 1.23 and numpy 2.4).
``onnxconverter-common`` 1.16 makes graphs that ONNX Runtime refuses if the model has casts, such as
the shipped example or a BERT with a mask. ``onnxruntime.transformers.float16`` 1.31 makes graphs
that are not in topological order. It makes two casts of the same name if two float32 operators read
one tensor, and wrong answers if a layer norm is written as single operators and its sums stay in
float32. Both raise tiny constants to float16's smallest number, and neither converter distinguishes
tensor sizes from activations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.engines.lowering import fold_constants
from offramp.compiler.graphs.graph import (
    Dataflow,
    Operator,
    copied,
    default_opset,
    is_standard,
    refill,
    serialised,
)
from offramp.compiler.graphs.shapes import concrete_shapes, declared_types

_log = logging.getLogger(__name__)

SUFFIX = "/offramp_fp16"
"""Suffix of the name of a tensor's float16 form; no name of a model or an exit ends with it."""

SINGLE = "/offramp_fp32"
"""Suffix of the name of a float16 tensor's float32 form."""
_UNROUNDED = "/offramp_unrounded"
_CLIPPED, _AT_LEAST = "/offramp_clipped", "/offramp_at_least"
_BOUND = "offramp_bound/{:g}"

_LARGEST = float(np.finfo(np.float16).max)
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Sum"})
_SMALL = 16
"""Number of elements up to which a constant may be an epsilon or a bound of values."""


def halve(graph: bytes) -> bytes:
    """Compute a graph in float16 where :mod:`~.halving` considers it sound.

    The graph's inputs and outputs keep their names and types. Constants beyond float16's range are
    clipped, with a warning that names them. Numbers that count things (such as positions), and
    masks made of such numbers, are clipped where they are converted to float16. The result is
    deterministic.
    """
    proto = onnx.ModelProto.FromString(graph)
    fold_constants(proto.graph)
    _Halving(proto).rewrite()
    return serialised(proto)


class _Halving:
    """Rewrites one graph; a float32 tensor gets a float16 form if a float16 operator reads it."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._graph = proto.graph
        self._flow = Dataflow(proto.graph)
        self._weights = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._types = element_types(proto)
        small = {
            name: numpy_helper.to_array(tensor)
            for name, tensor in self._weights.items()
            if np.prod(tensor.dims, dtype=np.int64) <= _SMALL
        }
        choice = halved_operators(self._flow, self._types, small, default_opset(proto))
        self._halved, self._numbers = choice.halved, choice.numbers
        self._nodes: list[onnx.NodeProto] = []
        self._single = {*self._weights, *self._flow.inputs}
        """Tensors that exist in their original type."""
        self._half: set[str] = set()
        """Tensors that exist in float16."""
        self._half_weights: list[onnx.TensorProto] = []
        self._bounds: dict[float, str] = {}
        """Names of the scalar constants that tensors are clipped to, by value."""
        self._clipped: list[str] = []

    def rewrite(self) -> None:
        for op in self._flow.operators:
            slots = self._halved.get(op.index)
            if slots is None:
                self._need_single(op.reads)
                self._nodes.append(op.proto)
                self._single.update(op.writes)
            else:
                self._nodes.append(self._in_half(op, slots))
        self._need_single(self._flow.outputs)
        self._store()
        if self._clipped:
            names = ", ".join(self._clipped)
            _log.warning("beyond the range of float16 (65,504) and clipped: %s", names)

    def _in_half(self, op: Operator, slots: Slots) -> onnx.NodeProto:
        node = copied(op.proto)
        for place, name in enumerate(op.proto.input):
            if place in slots.inputs:
                self._need_half(name)
                node.input[place] = name + SUFFIX
            elif name:
                self._need_single([name])
        for place, name in enumerate(op.proto.output):
            if place in slots.outputs:
                self._half.add(name)
                node.output[place] = name + SUFFIX
            elif name:
                self._single.add(name)
        if op.kind == "Cast":
            next(a for a in node.attribute if a.name == "to").i = FLOAT16
        return node

    def _need_single(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._single and name in self._half:
                self._nodes.append(_cast(name + SUFFIX, name, FLOAT))
                self._single.add(name)

    def _need_half(self, name: str) -> None:
        if name in self._half:
            return
        self._half.add(name)
        if name in self._weights:
            self._half_weights.append(self._half_weight(self._weights[name]))
        elif name in self._numbers:
            self._nodes.extend(self._clip(name))
            self._nodes.append(_cast(name + _CLIPPED, name + SUFFIX, FLOAT16))
        else:
            self._nodes.append(_cast(name, name + SUFFIX, FLOAT16))

    def _clip(self, name: str) -> Iterable[onnx.NodeProto]:
        """Clip a float32 tensor in the same way as constants; it may be a mask's bias."""
        limit, between = self._limit(name), name + _AT_LEAST
        for kind, source, bound, target in (
            ("Max", name, -limit, between),
            ("Min", between, limit, name + _CLIPPED),
        ):
            self._bounds[bound] = _BOUND.format(bound)
            yield helper.make_node(
                kind, [source, self._bounds[bound]], [target], name=f"offramp_bound:{target}"
            )

    def _limit(self, name: str) -> float:
        """Return the magnitude that a tensor is clipped to.

        It is half of float16's range if the tensor is added to others: the sum of scores and a
        mask's bias of −1e9 then stays finite, and a row that is masked completely does not become
        NaN.
        """
        kinds = {op.kind for op in self._flow.consumers[name]}
        return _LARGEST / 2 if kinds & _ARITHMETIC else _LARGEST

    def _half_weight(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        values: NDArray[np.float32] = numpy_helper.to_array(tensor)
        beyond = np.isfinite(values) & (np.abs(values) > _LARGEST)
        if beyond.any():
            limit = self._limit(tensor.name)
            values = np.where(beyond, np.clip(values, -limit, limit), values)
            self._clipped.append(tensor.name)
        with np.errstate(over="ignore"):  # infinities stay infinite
            return numpy_helper.from_array(values.astype(np.float16), tensor.name + SUFFIX)

    def _store(self) -> None:
        graph = self._graph
        read = {name for op in self._flow.operators for name in self._read_single(op)}
        read |= set(self._flow.outputs)
        kept = [t for name, t in self._weights.items() if name in read]
        there = self._single | self._half
        known = [self._described(info) for info in graph.value_info if info.name in there]
        refill(graph.node, self._nodes)
        scalars = {name: np.asarray(bound, np.float32) for bound, name in self._bounds.items()}
        bounds = [numpy_helper.from_array(scalar, name) for name, scalar in scalars.items()]
        refill(graph.initializer, [*kept, *self._half_weights, *bounds])
        refill(graph.value_info, known)

    def _read_single(self, op: Operator) -> Iterable[str]:
        slots = self._halved.get(op.index)
        if slots is None:
            return op.reads
        return [name for place, name in enumerate(op.proto.input) if place not in slots.inputs]

    def _described(self, info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        described = copied(info)
        if info.name in self._half and info.name not in self._single:
            described.name += SUFFIX
            described.type.tensor_type.elem_type = FLOAT16
        return described


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"offramp_cast:{target}", to=kind)


def element_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return element types by tensor: those that the graph states, and inferred ones."""
    stated = {name: tensor.elem_type for name, tensor in declared_types(proto).items()}
    return stated | {name: kind for name, (kind, _) in concrete_shapes(proto, {}).items()}


def rounded(graph: bytes) -> bytes:
    """Write the roundings of a graph's float16 operators into it, to run it on a CPU.

    ONNX Runtime has few float16 kernels for CPUs. It puts casts around each operator and then
    removes pairs of opposite casts, at every optimisation level: a float16 graph runs in float32
    with rounded weights, and nothing overflows. ONNX Runtime keeps casts that are in the graph
    itself, so a pair is added after each operator. Then every result is rounded as the graph says.
    TensorRT also sums in float32, and rounds less often where it fuses operators. Operators of
    other domains, operators whose types are unknown, and operators with bodies stay unchanged. The
    graph's inputs and outputs keep their names and types. A graph without float16 is returned
    unchanged.
    """
    proto = onnx.ModelProto.FromString(graph)
    types = element_types(proto)
    if FLOAT16 not in types.values():
        return graph
    _Rounding(proto.graph, types).rewrite()
    return serialised(proto)


class _Rounding:
    """Rewrites one graph; every float16 tensor keeps its name and gets a float32 form."""

    def __init__(self, graph: onnx.GraphProto, types: Mapping[str, int]) -> None:
        self._graph = graph
        self._types = types
        self._half = {name for name, kind in types.items() if kind == FLOAT16}
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        self._single: set[str] = set()
        """Float16 tensors that have a float32 form."""

    def rewrite(self) -> None:
        flow = Dataflow(self._graph)
        read = set(flow.outputs)
        for op in flow.operators:
            if self._computes_in_half(op):
                self._round(op.proto)
            else:
                self._nodes.append(op.proto)
                read.update(op.reads)
        # Unread float16 weights would cost ONNX Runtime its optimisations.
        weights = [t for name, t in self._weights.items() if name in read or name not in self._half]
        weights += [_as_single(self._weights[n]) for n in self._single if n in self._weights]
        weights.sort(key=lambda tensor: tensor.name)
        refill(self._graph.node, self._nodes)
        refill(self._graph.initializer, weights)
        refill(self._graph.value_info, ())

    def _computes_in_half(self, op: Operator) -> bool:
        if not is_standard(op.proto) or op.has_body or op.kind == "Cast":
            return False
        known = self._types.keys() >= {*op.reads, *op.writes}
        return known and not self._half.isdisjoint(op.reads)

    def _round(self, half: onnx.NodeProto) -> None:
        node = copied(half)
        for place, name in enumerate(half.input):
            if name in self._half:
                self._need_single(name)
                node.input[place] = name + SINGLE
        self._nodes.append(node)
        for place, name in enumerate(half.output):
            if name in self._half:
                node.output[place] = name + _UNROUNDED
                cast = helper.make_node("Cast", [name + _UNROUNDED], [name], to=FLOAT16)
                self._nodes.append(cast)

    def _need_single(self, name: str) -> None:
        if name not in self._single and name not in self._weights:
            self._nodes.append(helper.make_node("Cast", [name], [name + SINGLE], to=FLOAT))
        self._single.add(name)


def _as_single(tensor: onnx.TensorProto) -> onnx.TensorProto:
    values = numpy_helper.to_array(tensor).astype(np.float32)
    return numpy_helper.from_array(values, tensor.name + SINGLE)


FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16

VANISHES_BELOW = 2.0**-25
"""Half of float16's smallest positive number; numbers below it are rounded to 0."""

_SUMS = frozenset({
    "Pow", "Exp", "Log", "CumSum", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "BatchNormalization",
    "InstanceNormalization", "GroupNormalization", "LpNormalization", "MeanVarianceNormalization",
    "LRN"
})  # fmt: skip
"""Operators that square, exponentiate or add up many values. ``LayerNormalization`` and ``Softmax``
are not in the list: TensorRT computes their insides in float32 for every input type, and its fused
attention needs them as float16 operators."""
_FOLLOWING = frozenset({
    "Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Clip", "Max", "Min", "Neg", "Abs", "Exp",
    "Log", "Pow", "Sum", "Mean"
})  # fmt: skip
"""Operators that stay in float32 if their variable inputs are all in float32. For instance, the
steps from a variance to a standard deviation belong together, and a cast between them would cost
more."""
_COUNTING = _FOLLOWING | {
    "Concat", "Cos", "Einsum", "Expand", "Flatten", "Gather", "Identity", "MatMul", "ReduceMax",
    "ReduceMin", "Reshape", "Sign", "Sin", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    "Where"
}  # fmt: skip
"""Operators whose result counts things if their inputs do, such as positions. Float16 represents
all integers only up to 2,048. ``Sin`` and ``Cos`` are included because rotary embeddings apply them
to positions times frequencies."""
_DECIDING = frozenset({
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Mod", "Round", "TopK"
})  # fmt: skip
"""Operators that stay in float32 if one of their inputs counts things (:data:`_COUNTING`)."""
_WIDE = frozenset({
    onnx.TensorProto.INT16, onnx.TensorProto.UINT16, onnx.TensorProto.INT32,
    onnx.TensorProto.UINT32, onnx.TensorProto.INT64, onnx.TensorProto.UINT64
})  # fmt: skip
"""Types of integers that float16 cannot represent; 8-bit pixels are not among them."""
_EPSILONS = frozenset({"Add", "Sub", "Max", "Clip", "Div", "Sum"})
"""Operators that use a tiny constant to keep a value away from zero."""
_ANSWERS = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
"""Operators that stay in float32 if they compute the model's output, for argmax and confidence:
float16 has steps of 0.0005 below 1."""


class Slots(NamedTuple):
    """Positions of an operator's inputs and outputs that become float16."""

    inputs: frozenset[int]
    outputs: frozenset[int]


class Choice(NamedTuple):
    """The operators and tensors of a graph that are computed in half precision."""

    halved: dict[int, Slots]
    """Operators to compute in half precision, by index, with their float16 inputs and outputs."""
    numbers: frozenset[str]
    """Float32 tensors with numbers that count things. Such a tensor, for instance a mask, may have
    values beyond float16's range."""


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
    """Outputs of operators that are kept in float32."""
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
    """Return the tensors that depend only on the shapes of the graph inputs."""
    sizes: set[str] = set()
    for op in flow.operators:
        variable = [t for t in op.reads if t in flow.variable]
        if op.kind in {"Shape", "Size"} or (variable and sizes.issuperset(variable)):
            sizes.update(op.writes)
    return sizes


def _vanishes(op: Operator, constants: Mapping[str, NDArray[np.generic]]) -> bool:
    """Return whether a scalar constant that the operator reads would become 0 in float16."""
    scalars = (constants[t] for t in op.reads if t in constants and constants[t].size == 1)
    return any(
        0 < abs(float(s.reshape(()))) < VANISHES_BELOW for s in scalars if s.dtype.kind == "f"
    )


def _slots(
    node: onnx.NodeProto, opset: int, floats: set[str], types: Mapping[str, int]
) -> Slots | None:
    """Return the inputs and outputs that become float16; ``None`` if float16 is not supported."""
    if any(name and name not in types for name in (*node.input, *node.output)):
        return None  # unknown operators stay unchanged
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
    """Return the type variables of inputs and outputs, and whether each variable may be float16."""
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
