"""Shapes that ONNX's own inference does not know, inferred by ONNX Runtime.

Graphs that ONNX Runtime fused or quantised have many custom operators, and ONNX's inference does
not know the shapes after these. ONNX Runtime infers shapes when it loads a graph, and reports the
shapes of graph outputs. So the graph is copied without weights, and every tensor of unknown shape
is made an output of the copy. Bodies (inner graphs) of ``If``, ``Loop`` and ``Scan`` are handled as
separate models. ONNX's inference drops the shapes of a ``Loop``'s carried values (its loop
variables), because a body might change them, and infers nothing inside bodies. If the types of
outer tensors are known, a body becomes a model whose shapes can be inferred and whose operators can
be counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import (
    bodies,
    captured_by,
    constant_tensor,
    copied,
    is_standard,
    refill,
)
from offramp.compiler.graphs.shape_trace import ShapeTrace
from offramp.engine.backends.custom_ops import libraries, load_session, session_options

_ELEMENT_TYPES = {
    "float": onnx.TensorProto.FLOAT,
    "double": onnx.TensorProto.DOUBLE,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "bool": onnx.TensorProto.BOOL,
} | {
    f"{sign}int{bits}": onnx.TensorProto.DataType.Value(f"{sign}int{bits}".upper())
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_ROUNDS = 4
"""Largest number of rounds in which ONNX's inference and ONNX Runtime's continue from each other's
results."""


def infer_shapes(skeleton: onnx.ModelProto, empty: frozenset[str]) -> onnx.ModelProto:
    """Infer shapes for concrete sizes by ONNX's inference, and by ONNX Runtime's if needed.

    ``empty`` are the names of initializers of ``skeleton`` that have no content.
    """
    inferred: onnx.ModelProto = onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    nodes = skeleton.graph.node
    if all(is_standard(node) and node.op_type != "Loop" for node in nodes):
        return inferred
    for _ in range(_ROUNDS):
        found = (
            _shapes_of_loops(inferred)
            or _missing_shapes(inferred, empty)
            or _shapes_of_libraries(inferred, empty)
        )
        if not found:
            break
        names = {info.name for info in found}
        known = [info for info in inferred.graph.value_info if info.name not in names]
        refill(inferred.graph.value_info, [*known, *found])
        inferred = onnx.shape_inference.infer_shapes(inferred, data_prop=True)
    return inferred


def types_in(inferred: onnx.ModelProto) -> dict[str, SizedType]:
    """Return the types of all tensors whose element type is known."""
    graph = inferred.graph
    types: dict[str, SizedType] = {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        if tensor.elem_type:
            known = tensor.HasField("shape")
            dims = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
            types[info.name] = (tensor.elem_type, dims if known else None)
    return types


def _shapes_of_loops(inferred: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the types of carried values (loop variables) whose shape stays as it begins."""
    loops = [node for node in inferred.graph.node if node.op_type == "Loop"]
    types = types_in(inferred) if loops else {}
    scope = BodyScope.of(inferred, types)
    return [
        helper.make_tensor_value_info(name, *told)
        for node in loops
        if any(None in _sizes(types, name) for name in node.output if name)
        for name, told in scope.carried(node, _infer_body).items()
        if None in _sizes(types, name) and told[1] is not None and None not in told[1]
    ]


def _sizes(types: dict[str, SizedType], name: str) -> tuple[int | None, ...]:
    """Return a tensor's sizes; a single ``None`` if the rank is unknown."""
    shape = types.get(name, (0, None))[1]
    return (None,) if shape is None else shape


def _infer_body(model: onnx.ModelProto) -> dict[str, SizedType]:
    return types_in(infer_shapes(model, frozenset()))


def _missing_shapes(inferred: onnx.ModelProto, empty: frozenset[str]) -> list[onnx.ValueInfoProto]:
    """Return unknown shapes as ONNX Runtime infers them; empty if it cannot load the graph."""
    infos = (*inferred.graph.value_info, *inferred.graph.output)
    known = {info.name for info in infos if info.type.tensor_type.HasField("shape")}
    written = dict.fromkeys(t for node in inferred.graph.node for t in node.output if t)
    missing = [name for name in written if name not in known]
    if not missing:
        return []
    asked = copied(inferred)
    _as_inputs(asked.graph, empty)
    del asked.graph.output[:]
    for name in missing:
        asked.graph.output.add(name=name)
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = load_session(asked.SerializeToString(), options)
    except Exception:  # ONNX Runtime's own classes derive from Exception only
        return []
    return [
        helper.make_tensor_value_info(output.name, _ELEMENT_TYPES[kind], output.shape)
        for output in session.get_outputs()
        if (kind := output.type.removeprefix("tensor(").removesuffix(")")) in _ELEMENT_TYPES
        # Operators of libraries report no shape, which looks like the shape of a scalar.
        and (output.shape or not libraries())
        and all(isinstance(size, int) for size in output.shape)
    ]


def _shapes_of_libraries(
    inferred: onnx.ModelProto, empty: frozenset[str]
) -> list[onnx.ValueInfoProto]:
    """Return shapes after library operators, which are run on a few rows if needed."""
    if not libraries():
        return []
    graph = inferred.graph
    constants = onnx.GraphProto(initializer=[t for t in graph.initializer if t.name not in empty])
    known = {t.name: (t.data_type, list(t.dims)) for t in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        dims = info.type.tensor_type.shape.dim
        if info.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            known[info.name] = (info.type.tensor_type.elem_type, [d.dim_value for d in dims])
    trace = ShapeTrace(onnx.ModelProto(graph=constants, opset_import=inferred.opset_import), 1, {})
    for name, (kind, shape) in known.items():
        trace.assume(name, kind, shape)
    found: list[onnx.ValueInfoProto] = []
    for node in graph.node:
        with contextlib.suppress(ValueError):  # shapes that inference cannot follow stay unknown
            trace.follow(node)
        for name in filter(None, node.output):
            if name in known:
                trace.assume(name, *known[name])
            elif (told := trace.type_of(name)) is not None:
                found.append(onnx.helper.make_value_info(name, told))
    return found


def _as_inputs(graph: onnx.GraphProto, empty: frozenset[str]) -> None:
    """Turn initializers without content into inputs."""
    graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
        if tensor.name in empty
    )
    refill(graph.initializer, [t for t in graph.initializer if t.name not in empty])


SizedType: TypeAlias = "tuple[int, tuple[int | None, ...] | None]"
"""Element type of a tensor, and its sizes; ``None`` stands for an unknown size or rank."""
Infer: TypeAlias = "Callable[[onnx.ModelProto], Mapping[str, SizedType]]"
"""Function that infers the types of a model's tensors."""

_CARRIED = 2
"""Index of the first carried value among a ``Loop``'s inputs, after trip count and condition."""
_SMALL = 64
"""Largest number of elements of constants that are known to a body: they may be a trip count or a
shape."""


class BodyScope(NamedTuple):
    """Types and values that are known around an operator with bodies (inner graphs)."""

    types: Mapping[str, SizedType]
    values: Mapping[str, NDArray[Any]]
    """Values of small constants, by name."""
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    functions: tuple[onnx.FunctionProto, ...] = ()

    @classmethod
    def of(cls, proto: onnx.ModelProto, types: Mapping[str, SizedType]) -> BodyScope:
        """Create the scope for operators of a model, with its constants, opsets and functions."""
        tensors = [t for t in proto.graph.initializer if _is_small(t)]
        tensors += [t for node in proto.graph.node if (t := constant_tensor(node)) is not None]
        values = {
            t.name: array_of(t)
            for t in tensors
            if t.data_type != onnx.TensorProto.STRING and _is_small(t)
        }
        return cls(types, values, tuple(proto.opset_import), tuple(proto.functions))

    def models(self, node: onnx.NodeProto) -> list[onnx.ModelProto]:
        """Make a model of each body; the inputs include tensors that the body reads from outside.

        The result is empty if the type of an input is not known.
        """
        found = [self._model(node, body) for body in bodies(node)]
        return [model for model in found if model is not None] if all(found) else []

    def trips(self, node: onnx.NodeProto) -> int | None:
        """Return how often a body runs at most; ``None`` if the graph does not show it."""
        if node.op_type == "If":
            return 1
        if node.op_type == "Loop":
            told = self.values.get(node.input[0]) if node.input[0] else None
            most = None if told is None or told.size != 1 else int(told.reshape(-1)[0])
            return most if most is not None and 0 <= most < np.iinfo(np.int32).max else None
        if node.op_type == "Scan":
            states, axes = _scanned(node)
            _, shape = self.types.get(node.input[states], (0, None))
            return None if shape is None else shape[axes[0]]
        return None

    def flops(self, node: onnx.NodeProto, count: Callable[[onnx.ModelProto], float]) -> float:
        """Return an operator's FLOPs: those of its largest body, times the largest number of runs.

        The result is NaN if the graph does not show the number of runs. ``count`` returns the FLOPs
        of a body.
        """
        trips, models = self.trips(node), self.models(node)
        if trips is None or not models:
            return float("nan")
        return float(trips * np.max([count(model) for model in models]))

    def carried(self, node: onnx.NodeProto, infer: Infer) -> dict[str, SizedType]:
        """Return the types of a ``Loop``'s carried values that keep their initial type."""
        models = self.models(node) if node.op_type == "Loop" else []
        if not models:
            return {}
        types = infer(models[0])
        given = list(models[0].graph.output)[1:]
        found: dict[str, SizedType] = {}
        for begins, ends, output in zip(node.input[_CARRIED:], given, node.output, strict=False):
            first, after = self.types.get(begins), types.get(ends.name)
            if output and first is not None and first == after:
                found[output] = first
        return found

    def _model(self, node: onnx.NodeProto, body: onnx.GraphProto) -> onnx.ModelProto | None:
        names = [name for name in dict.fromkeys(captured_by(body)) if name]
        outside = [(name, self.types.get(name)) for name in names if name not in self.values]
        if any(told is None for _, told in outside):
            return None
        given = list(self._given(node))
        if len(given) != len(body.input) or any(told is None for told in given):
            return None
        graph = copied(body)
        for info, told in zip(graph.input, given, strict=True):
            if told is not None:
                info.CopyFrom(helper.make_tensor_value_info(info.name, *told))
        graph.input.extend(
            helper.make_tensor_value_info(name, *told) for name, told in outside if told is not None
        )
        graph.initializer.extend(
            numpy_helper.from_array(self.values[name], name)
            for name in names
            if name in self.values
        )
        return helper.make_model(
            graph, opset_imports=self.opsets, functions=self.functions, ir_version=10
        )

    def _given(self, node: onnx.NodeProto) -> Iterator[SizedType | None]:
        """Yield the types of a body's inputs in one iteration."""
        if node.op_type == "Loop":
            yield onnx.TensorProto.INT64, ()
            yield onnx.TensorProto.BOOL, ()
            yield from (self.types.get(name) for name in node.input[_CARRIED:])
        elif node.op_type == "Scan":
            states, axes = _scanned(node)
            yield from (self.types.get(name) for name in node.input[:states])
            for name, axis in zip(node.input[states:], axes, strict=True):
                kind, shape = self.types.get(name, (0, None))
                whole = list(shape or ())
                if not -len(whole) <= axis < len(whole):
                    yield None
                    continue
                del whole[axis]
                yield kind, tuple(whole)


def _scanned(node: onnx.NodeProto) -> tuple[int, list[int]]:
    """Return a ``Scan``'s number of states, and the axis along which each input is scanned."""
    told = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "body"}
    count = told["num_scan_inputs"]
    return len(node.input) - count, list(told.get("scan_input_axes", [0] * count))


def _is_small(tensor: onnx.TensorProto) -> bool:
    return int(np.prod(tensor.dims, dtype=np.int64)) <= _SMALL
