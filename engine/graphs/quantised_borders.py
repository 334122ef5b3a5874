"""A rewrite that carries a quantised map from stage to stage as it is, in its steps.

ONNX Runtime's integer convolutions on CPUs read and write maps with the channels last, in a byte a
value. A float32 border in between costs a conversion and a transposition on either side, which for
a small CNN is more than the exit. So where a stage ends with ``DequantizeLinear`` and the next one
begins with a ``QuantizeLinear`` of the same constants, the bytes between the two are what is
carried, channels last: the transpositions cancel those that ONNX Runtime puts around its
convolutions. Values are the same to the bit.

Bundles hold float32 borders; in a cascade, which runs on CPUs alone, both sides of one are
rewritten when a stage is assembled (:mod:`offramp.engine.stages.plan`).
"""

from __future__ import annotations

from typing import Any, Final

from offramp.engine.graphs.onnx_subset import INT8, INTS, UINT8, ModelProto, NodeProto

_LAST: Final = (0, 2, 3, 1)
_FIRST: Final = (0, 3, 1, 2)
_BYTES: Final = frozenset({INT8, UINT8})


def carries_steps(before: bytes, after: bytes, tensor: str) -> bool:
    """Whether a map between two serialised graphs can be carried as integers.

    ``before`` gives ``tensor`` float32 [n, channels, height, width] out of ``DequantizeLinear``,
    with one scale for all of it, and whatever reads it in ``after`` quantises it by the same
    constants.
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
    """Give the integers of an output, channels last, under its name.

    Other readers in the graph, such as a head, go on to read its values.
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
    """Read an input as integers, channels last, in place of quantising its values."""
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
    """The constant third input, by which the integers' type is known."""
    return next(weight for weight in graph.initializer if weight.name == node.input[2])


def _scalars(graph: Any, node: Any) -> tuple[bytes, ...] | None:
    """Scale and zero point, but for their names; ``None`` unless both are constants of one value.

    Zero points of other types than a byte are none of ours.
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
    """State a map of integers with the channels last, where one of floats was stated."""
    tensor = described.type.tensor_type
    tensor.elem_type = dtype
    dims = [type(dim).FromString(dim.SerializeToString()) for dim in tensor.shape.dim]
    del tensor.shape.dim[:]
    tensor.shape.dim.extend(dims[axis] for axis in _LAST)
