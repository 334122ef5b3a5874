"""Assembly of segments and an exit into the single graph of a stage.

Every segment and exit names its tensors as the source model does (an exit's own tensors have a
prefix), so a stage is the union of its parts: nodes and initializers that several parts recompute,
such as a mask bias, are identical and are kept once. One graph is faster than a chain: a border (a
cut between two stages) costs layout changes and lost fusion (6 to 10 % on CNNs).

*Quantised borders.* ONNX Runtime's integer convolutions on CPUs read and write maps with the
channels last, one byte a value. A float32 border between them costs a conversion and a
transposition on both sides, which for a small CNN is more than the exit. So where a stage ends with
``DequantizeLinear`` and the next one begins with a ``QuantizeLinear`` of the same constants, the
bytes between the two are carried, channels last: the transpositions cancel those that ONNX Runtime
adds around its convolutions. Values are bit-identical.

*Schema.* Serving must not need the ``onnx`` package. Protobuf keeps fields that a schema does not
know, so a subset of ONNX's schema in a private descriptor pool (field numbers of onnx.proto3,
stable since IR version 3) suffices to split and join graphs and to add operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from offramp.bundle import Exit, Segment


def assemble(parts: Sequence[bytes], outputs: Sequence[str]) -> bytes:
    """Join serialised ONNX models whose tensors share one namespace, in the order of execution.

    They share IR version and opset (the first model's are kept). The outputs of the joined model
    are ``outputs``, in this order; its inputs are the tensors that no part computes. ValueError if
    no part computes an output.
    """
    models = [ModelProto.FromString(part) for part in parts]
    joined = models[0]
    nodes, produced = _union_of_nodes(models)
    initializers = _by_name(model.graph.initializer for model in models)
    inputs = _by_name(model.graph.input for model in models)
    described = _by_name(model.graph.output for model in models)
    known = _by_name(model.graph.value_info for model in models)
    missing = [name for name in outputs if name not in described]
    if missing:
        raise ValueError(f"no part computes {missing}; their outputs are {sorted(described)}")

    graph = joined.graph
    _replace(graph.node, nodes)
    _replace(graph.initializer, initializers.values())
    _replace(graph.input, [v for k, v in inputs.items() if k not in produced])
    _replace(graph.output, [described[name] for name in outputs])
    inner = {**{k: v for k, v in described.items() if k not in outputs}, **known}
    _replace(graph.value_info, [v for k, v in inner.items() if k not in outputs])
    result: bytes = joined.SerializeToString(deterministic=True)
    return result


CONFIDENCE = "offramp/confidence"
"""Name of the output that :func:`with_confidence` adds."""


def with_confidence(model: bytes, logits: str) -> bytes | None:
    """Add the largest probability of logits to a graph's outputs, as :data:`CONFIDENCE`.

    Two operators in the graph cost less than the seven numpy calls outside of it
    (:func:`.answers.exit_check.confidence_of`). The output is NaN where that function returns 0:
    where a logit is NaN or plus infinity. Returns ``None`` if the logits are not known to be a
    float32 matrix, or the opset is older than 13 (which is not compiled).
    """
    proto = ModelProto.FromString(model)
    graph = proto.graph
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    given = {output.name: output.type.tensor_type for output in graph.output}[logits]
    if opset < 13 or given.elem_type != FLOAT32 or len(given.shape.dim) != 2:
        return None
    probabilities = f"{CONFIDENCE}/probabilities"  # along the last axis by default
    graph.node.add(op_type="Softmax", input=[logits], output=[probabilities])
    largest = graph.node.add(op_type="ReduceMax", input=[probabilities], output=[CONFIDENCE])
    largest.attribute.add(name="keepdims", i=0, type=INT)
    if opset >= 18:  # axes became an input
        axes = graph.initializer.add(name=f"{CONFIDENCE}/axes", data_type=INT64)
        axes.dims.append(1)
        axes.int64_data.append(1)
        largest.input.append(axes.name)
    else:
        largest.attribute.add(name="axes", ints=[1], type=INTS)
    added = graph.output.add(name=CONFIDENCE)
    added.type.tensor_type.elem_type = FLOAT32
    added.type.tensor_type.shape.dim.add().CopyFrom(given.shape.dim[0])
    result: bytes = proto.SerializeToString(deterministic=True)
    return result


def _union_of_nodes(models: Sequence[Any]) -> tuple[list[Any], set[str]]:
    nodes: list[Any] = []
    produced: set[str] = set()
    for model in models:
        for node in model.graph.node:
            made = {name for name in node.output if name}
            if not made <= produced:
                nodes.append(node)
                produced |= made
    return nodes, produced


def _by_name(groups: Any) -> dict[str, Any]:
    return {item.name: item for group in groups for item in group}


def _replace(field: Any, items: Any) -> None:
    kept = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(kept)


_PACKAGE = "offramp.onnx_subset"

FLOAT32, UINT8, INT8, INT64, FLOAT16 = 1, 2, 3, 7, 10
"""Values of ``TensorProto.DataType``."""
INT, INTS = 2, 7
"""Values of ``AttributeProto.AttributeType`` for an integer, and a list of integers."""

_FIELDS = {
    # message: name, number and type of each field; a star marks a repeated field
    "TensorProto": "dims 1 int64*, data_type 2 int32, int64_data 7 int64*, name 8 string",
    "DimensionProto": "dim_value 1 int64",
    "ShapeProto": "dim 1 DimensionProto*",
    "TensorTypeProto": "elem_type 1 int32, shape 2 ShapeProto",
    "TypeProto": "tensor_type 1 TensorTypeProto",
    "ValueInfoProto": "name 1 string, type 2 TypeProto",
    "AttributeProto": "name 1 string, i 3 int64, ints 8 int64*, type 20 int32",
    "NodeProto": "input 1 string*, output 2 string*, name 3 string, op_type 4 string, "
    "attribute 5 AttributeProto*, domain 7 string",
    "GraphProto": "node 1 NodeProto*, name 2 string, initializer 5 TensorProto*, "
    "input 11 ValueInfoProto*, output 12 ValueInfoProto*, value_info 13 ValueInfoProto*",
    "OperatorSetIdProto": "domain 1 string, version 2 int64",
    "ModelProto": "graph 7 GraphProto, opset_import 8 OperatorSetIdProto*",
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _Field.TYPE_STRING, "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="offramp/onnx_subset.proto", package=_PACKAGE, syntax="proto2"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind in (field.split() for field in fields.split(", ")):
            field = described.field.add(name=name, number=int(number))
            field.label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
            type_name = kind.removesuffix("*")
            if type_name in _SCALARS:
                field.type = _SCALARS[type_name]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{message}")
        )
        for message in ("ModelProto", "NodeProto")
    }


_MESSAGES = _messages()
NodeProto: Any = _MESSAGES["NodeProto"]
"""Message class of an operator."""
ModelProto: Any = _MESSAGES["ModelProto"]
"""Message class: ``ModelProto.FromString(bytes)``, ``.SerializeToString()``."""


def has_half_precision(model: bytes) -> bool:
    """Return whether any weight of a serialised model is float16."""
    weights = ModelProto.FromString(model).graph.initializer
    return any(weight.data_type == FLOAT16 for weight in weights)


_LAST: Final = (0, 2, 3, 1)
_FIRST: Final = (0, 3, 1, 2)
_BYTES: Final = frozenset({INT8, UINT8})


def carries_steps(before: bytes, after: bytes, tensor: str) -> bool:
    """Return whether a map between two serialised graphs can be carried as integers.

    In ``before``, ``tensor`` (float32 [n, channels, height, width]) must be the output of
    ``DequantizeLinear`` with one scale; in ``after``, all its readers must quantise it with the
    same constants.
    """
    giving, taking = ModelProto.FromString(before).graph, ModelProto.FromString(after).graph
    given = {output.name: output.type.tensor_type for output in giving.output}.get(tensor)
    writers = [node for node in giving.node if tensor in node.output]
    readers = _readers(taking, tensor)
    if given is None or len(given.shape.dim) != 4 or not readers:
        return False
    if [node.op_type for node in writers] != ["DequantizeLinear"]:
        return False
    if any(node.op_type != "QuantizeLinear" for node in readers):
        return False
    constants = _scalars(giving, writers[0])
    return constants is not None and all(_scalars(taking, node) == constants for node in readers)


def give_steps(model: bytes, tensor: str) -> bytes:
    """Replace an output by its quantised integers, channels last, under the same name.

    Other readers in the graph, such as a head, still read the float values.
    """
    proto = ModelProto.FromString(model)
    graph = proto.graph
    values = f"{tensor}/values"
    for node in graph.node:
        _rename(node.input, tensor, values)
        _rename(node.output, tensor, values)
    (writer,) = (node for node in graph.node if values in node.output)
    _transpose(graph.node.add(), writer.input[0], tensor, _LAST)
    dtype = _zero_point(graph, writer).data_type
    for described in (*graph.output, *graph.value_info):
        if described.name == tensor:
            _describe(described, dtype)
    result: bytes = proto.SerializeToString(deterministic=True)
    return result


def take_steps(model: bytes, tensor: str) -> bytes:
    """Replace an input by its quantised integers, channels last; the graph stops quantising it."""
    proto = ModelProto.FromString(model)
    graph = proto.graph
    readers = _readers(graph, tensor)
    steps = readers[0].output[0]
    dtype = _zero_point(graph, readers[0]).data_type
    for reader in readers:
        for node in graph.node:
            _rename(node.input, reader.output[0], steps)
    kept = [node for node in graph.node if tensor not in node.input]
    first = NodeProto()
    _transpose(first, tensor, steps, _FIRST)
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in (first, *kept)]
    del graph.node[:]
    graph.node.extend(nodes)
    for described in graph.input:
        if described.name == tensor:
            _describe(described, dtype)
    result: bytes = proto.SerializeToString(deterministic=True)
    return result


def _readers(graph: Any, tensor: str) -> list[Any]:
    return [node for node in graph.node if tensor in node.input]


def _zero_point(graph: Any, node: Any) -> Any:
    """Return the constant third input, whose type is that of the integers."""
    return next(weight for weight in graph.initializer if weight.name == node.input[2])


def _scalars(graph: Any, node: Any) -> tuple[bytes, ...] | None:
    """Return scale and zero point without names; ``None`` unless both are scalar constants.

    Zero points of types other than a byte are not supported: ``None``.
    """
    constants = {weight.name: weight for weight in graph.initializer}
    found = [constants[name] for name in node.input[1:] if name in constants]
    if len(found) != 2 or len(node.input) != 3 or found[1].data_type not in _BYTES:
        return None
    if any(size != 1 for weight in found for size in weight.dims):
        return None
    return tuple(_without_name(weight) for weight in found)


def _without_name(weight: Any) -> bytes:
    bare = type(weight).FromString(weight.SerializeToString())
    bare.ClearField("name")
    serialised: bytes = bare.SerializeToString(deterministic=True)
    return serialised


def _rename(names: Any, old: str, new: str) -> None:
    for position, name in enumerate(names):
        if name == old:
            names[position] = new


def _transpose(node: Any, read: str, made: str, order: tuple[int, ...]) -> None:
    node.op_type, node.name = "Transpose", f"{made}:Transpose"
    node.input.append(read)
    node.output.append(made)
    node.attribute.add(name="perm", ints=order, type=INTS)


def _describe(described: Any, dtype: int) -> None:
    """Change the declared type of a float map to integers with the channels last."""
    tensor = described.type.tensor_type
    tensor.elem_type = dtype
    dims = [type(dim).FromString(dim.SerializeToString()) for dim in tensor.shape.dim]
    del tensor.shape.dim[:]
    tensor.shape.dim.extend(dims[axis] for axis in _LAST)


ReadPart: TypeAlias = Callable[[str], bytes]
"""Function that returns the graph of a part, given its file; the graph contains its weights, or
names their file."""


def assemble_stage(
    around: Sequence[Segment],
    exit_: Exit | None,
    given: Sequence[str],
    inner: slice,
    read: ReadPart,
) -> bytes:
    """Join some segments with an exit, and carry integers at the borders where possible.

    In a cascade, ``around`` also has the segments that a cut tensor comes from or goes to;
    ``inner`` selects the segments to join.
    """
    files = [read(segment.file) for segment in around]
    parts, outputs = files[inner], list(given)
    if exit_ is not None:
        parts.append(read(exit_.file))
        outputs = [exit_.output, exit_.confidence, *outputs]
    graph = assemble(parts, outputs)
    first, end = inner.start, inner.stop
    if first and carries_steps(files[first - 1], files[first], tensor := around[first - 1].output):
        graph = take_steps(graph, tensor)
    if end < len(files) and carries_steps(files[end - 1], files[end], around[end - 1].output):
        graph = give_steps(graph, around[end - 1].output)
    return graph
