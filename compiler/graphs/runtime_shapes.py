"""Shapes of what ONNX's own inference does not know, from ONNX Runtime's operators.

Graphs that ONNX Runtime fused or quantised are full of operators of its own, behind which ONNX's
inference knows nothing. ONNX Runtime infers their shapes when it loads a graph, and tells those of
graph outputs: so all that is unknown is made an output of a copy that has no weights.
"""

from __future__ import annotations

import contextlib

import onnx
import onnxruntime as ort
from onnx import helper

from offramp.compiler.graphs.bodies import BodyScope, SizedType
from offramp.compiler.graphs.graph import is_standard, refill
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
"""ONNX's inference goes on where ONNX Runtime's ended, and the other way round; this often."""


def infer_shapes(skeleton: onnx.ModelProto, empty: frozenset[str]) -> onnx.ModelProto:
    """Infer shapes at concrete sizes, as ONNX does; with ONNX Runtime's help where that is needed.

    ``empty`` are the initializers of ``skeleton`` that are there without their content.
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
    """Read the types of all tensors whose element type is known."""
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
    """What loops carry, where the body keeps the shape that it begins with."""
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
    """Give a tensor's sizes; one that is unknown where its rank is."""
    shape = types.get(name, (0, None))[1]
    return (None,) if shape is None else shape


def _infer_body(model: onnx.ModelProto) -> dict[str, SizedType]:
    return types_in(infer_shapes(model, frozenset()))


def _missing_shapes(inferred: onnx.ModelProto, empty: frozenset[str]) -> list[onnx.ValueInfoProto]:
    """What ONNX Runtime knows of tensors without a shape; nothing if it cannot load the graph."""
    infos = (*inferred.graph.value_info, *inferred.graph.output)
    known = {info.name for info in infos if info.type.tensor_type.HasField("shape")}
    written = dict.fromkeys(t for node in inferred.graph.node for t in node.output if t)
    missing = [name for name in written if name not in known]
    if not missing:
        return []
    asked = onnx.ModelProto()
    asked.CopyFrom(inferred)
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
        # An operator of a library tells no shape, and that of a scalar then stands for it.
        and (output.shape or not libraries())
        and all(isinstance(size, int) for size in output.shape)
    ]


def _shapes_of_libraries(
    inferred: onnx.ModelProto, empty: frozenset[str]
) -> list[onnx.ValueInfoProto]:
    """What operators of libraries give, and what reads that, by running them where need be."""
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
        with contextlib.suppress(ValueError):  # what inference cannot follow stays unknown
            trace.follow(node)
        for name in filter(None, node.output):
            if name in known:
                trace.assume(name, *known[name])
            elif (told := trace.type_of(name)) is not None:
                found.append(onnx.helper.make_value_info(name, told))
    return found


def _as_inputs(graph: onnx.GraphProto, empty: frozenset[str]) -> None:
    """Make inputs of initializers without content."""
    graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
        if tensor.name in empty
    )
    refill(graph.initializer, [t for t in graph.initializer if t.name not in empty])
