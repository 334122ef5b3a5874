"""Constant nodes as initializers: one kind of constant to look at instead of two."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

_PLAIN = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def folded(model: bytes) -> bytes:
    """Give a serialised model without ``Constant`` nodes; see :func:`fold_constants`."""
    proto = onnx.ModelProto.FromString(model)
    fold_constants(proto.graph)
    serialised: bytes = proto.SerializeToString(deterministic=True)
    return serialised


def fold_constants(graph: onnx.GraphProto) -> None:
    """Turn the ``Constant`` nodes of a graph, and of the bodies in it, into initializers.

    Those that give a graph output, and those of strings or sparse tensors, stay as they are.
    """
    outputs = {output.name for output in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        tensor = None if node.output[:1] and node.output[0] in outputs else constant_tensor(node)
        if tensor is None:
            kept.append(node)
        else:
            graph.initializer.append(tensor)
        for attribute in node.attribute:
            for body in bodies(attribute):
                fold_constants(body)
    del graph.node[:]
    graph.node.extend(kept)


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """What a ``Constant`` node gives, under the name of its output; ``None`` for other nodes."""
    if node.op_type != "Constant" or node.domain not in {"", "ai.onnx"}:
        return None
    attribute = node.attribute[0]
    tensor = onnx.TensorProto()
    if attribute.name == "value":
        tensor.CopyFrom(attribute.t)
    elif attribute.name in _PLAIN:
        value = onnx.helper.get_attribute_value(attribute)
        tensor = numpy_helper.from_array(np.asarray(value, _PLAIN[attribute.name]))
    else:
        return None
    tensor.name = node.output[0]
    return tensor


def bodies(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Graphs that an attribute holds, as those of ``If`` and ``Loop`` do."""
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
