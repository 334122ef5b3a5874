"""Graphs of newer operator sets for TensorRT 8.6, which reads opset 17.

Most operators do not change between two operator sets, or only accept more element types. Other
changes are reversed if that is exact (the axes of reductions from an input to an attribute, new
attributes at their defaults). Any other change is refused with the operator's name, so that
TensorRT misreads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import (
    bodies,
    constant_tensor,
    default_opset,
    is_standard,
    read_names,
    refill,
    serialised,
)
from offramp.compiler.graphs.shapes import declared_types

OPSET = 17
"""Newest operator set (opset) that TensorRT 8.6 reads."""
IR_VERSION = 8
"""IR version of ONNX's file format at the time of opset 17."""

_REMEDY = (
    f"export the model again with opset_version={OPSET} and compile that, "
    "or build with TensorRT 10 or newer"
)
_CHANGED_SEMANTICS = frozenset({"GridSample", "DFT", "GroupNormalization"})
"""Operators whose modes or defaults changed after opset 17, although their signature did not."""
_NEW_VALUES = {
    ("ScatterElements", "reduction"): (b"max", b"min"),
    ("ScatterND", "reduction"): (b"max", b"min"),
    ("Resize", "coordinate_transformation_mode"): (b"half_pixel_symmetric",),
    ("Pad", "mode"): (b"wrap",),
}
"""Values of attributes that opset 17 does not know, by operator and attribute."""

_Constants = Mapping[str, "NDArray[np.generic]"]


def lower(graph: bytes) -> bytes:
    """Convert a model of any opset to opset 17, with initializers instead of ``Constant`` nodes.

    Defaults that TensorRT 8.6 misreads are written out. ModelError if an operator has a meaning
    that opset 17 lacks.
    """
    proto = onnx.ModelProto.FromString(graph)
    fold_constants(proto.graph)
    opset = default_opset(proto)
    if opset > OPSET:
        _Lowering(proto, opset).lower_graph(proto.graph, {})
        for entry in proto.opset_import:
            if entry.domain in {"", "ai.onnx"}:
                entry.version = OPSET
    _name_axes_of_slices(proto.graph, {})
    proto.ir_version = min(proto.ir_version, IR_VERSION)
    return serialised(proto)


class _Lowering:
    """Rewrites the operators of a model and of its bodies (inner graphs of If and Loop)."""

    def __init__(self, proto: onnx.ModelProto, opset: int) -> None:
        self._opset = opset
        self._types = declared_types(proto)

    def lower_graph(self, graph: onnx.GraphProto, outer: _Constants) -> None:
        integers = (t for t in graph.initializer if t.data_type == onnx.TensorProto.INT64)
        constants = {**outer, **{t.name: numpy_helper.to_array(t) for t in integers}}
        moved: set[str] = set()
        for node in graph.node:
            if is_standard(node):
                moved |= self._lower_node(node, constants)
            for body in bodies(node):
                self.lower_graph(body, constants)
        _drop_unread(graph, moved)

    def _lower_node(self, node: onnx.NodeProto, constants: _Constants) -> set[str]:
        """Rewrite one operator; returns the constants that it no longer reads."""
        new, old = self._schemas(node)
        if new.since_version == old.since_version:
            return set()
        if node.op_type in _CHANGED_SEMANTICS:
            raise _refused(node, "has another meaning")
        moved: set[str] = set()
        if node.op_type.startswith("Reduce") and "axes" in old.attributes:
            moved = _axes_as_attribute(node, constants)
        if node.op_type == "Split":
            self._equal_split(node)
        _drop_new_attributes(node, new, old)
        if len(node.input) > old.max_input:
            raise _refused(node, f"has {old.max_input} inputs at most, not {len(node.input)}")
        return moved

    def _schemas(self, node: onnx.NodeProto) -> tuple[onnx.defs.OpSchema, onnx.defs.OpSchema]:
        """Return an operator's schema in the model's opset, and that in opset 17."""
        new = onnx.defs.get_schema(node.op_type, self._opset)
        try:
            return new, onnx.defs.get_schema(node.op_type, OPSET)
        except onnx.defs.SchemaError:
            raise ModelError(
                f"{_named(node)}: {node.op_type} came with opset {new.since_version}, and "
                f"TensorRT 8.6 reads opset {OPSET}; {_REMEDY}"
            ) from None

    def _equal_split(self, node: onnx.NodeProto) -> None:
        """Remove a Split's number of parts, which opset 17 lacks; ModelError for unequal parts."""
        flags = {a.name: a.i for a in node.attribute}
        if "num_outputs" not in flags:
            return
        found = self._types.get(node.input[0])
        size = found.shape[flags.get("axis", 0)] if found and found.shape else "?"
        parts = len(node.output)
        if parts != flags["num_outputs"] or not isinstance(size, int) or size % parts:
            raise _refused(node, f"needs {parts} equal parts, here {size} elements are split")
        _remove_attribute(node, "num_outputs")


def node_of(graph: bytes, number: int) -> str:
    """Return the operator and name of a node: TensorRT 8.6's parser reports only its number."""
    nodes = onnx.load_from_string(graph).graph.node
    return _named(nodes[number]) if number < len(nodes) else "of a body"


def _name_axes_of_slices(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Write out the axes of a Slice that has none; by default they are the first ones.

    TensorRT 8.6's parser takes all axes as the default, and refuses slices of fewer axes (seen on
    an H100).
    """
    constants = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
    for node in graph.node:
        for body in bodies(node):
            _name_axes_of_slices(body, constants)
        has_axes = len(node.input) > 3 and node.input[3] != ""
        known = [constants[name] for name in node.input[1:3] if name in constants]
        if node.op_type != "Slice" or not is_standard(node) or has_axes or not known:
            continue
        like = numpy_helper.to_array(known[0])  # axes have the same type
        axes = numpy_helper.from_array(
            np.arange(len(like), dtype=like.dtype), f"{node.output[0]}/axes"
        )
        graph.initializer.append(axes)
        node.input[3:4] = [axes.name]


def _axes_as_attribute(node: onnx.NodeProto, constants: _Constants) -> set[str]:
    """Move the axes of reductions from an input (since opset 18) to an attribute."""
    name = node.input[1] if len(node.input) > 1 else ""
    if name and name not in constants:
        raise _refused(node, f"needs constant axes, here they are computed ({name})")
    axes = [int(axis) for axis in constants[name].reshape(-1)] if name else []
    flags = {a.name: a.i for a in node.attribute}
    if not axes and flags.get("noop_with_empty_axes", 0):
        raise _refused(node, "cannot leave its input unchanged without axes")
    _remove_attribute(node, "noop_with_empty_axes")
    del node.input[1:]
    if axes:
        node.attribute.append(helper.make_attribute("axes", axes))
    return {name} if name else set()


def _drop_new_attributes(
    node: onnx.NodeProto, new: onnx.defs.OpSchema, old: onnx.defs.OpSchema
) -> None:
    for attribute in list(node.attribute):
        value = helper.get_attribute_value(attribute)
        if attribute.name not in old.attributes:
            default = new.attributes[attribute.name].default_value
            if not default.name or helper.get_attribute_value(default) != value:
                raise _refused(node, f"has no attribute {attribute.name}, here it is {value}")
            _remove_attribute(node, attribute.name)
        elif value in _NEW_VALUES.get((node.op_type, attribute.name), ()):
            raise _refused(node, f"has no {attribute.name} {value.decode()!r}")


def _remove_attribute(node: onnx.NodeProto, name: str) -> None:
    refill(node.attribute, [kept for kept in node.attribute if kept.name != name])


def _drop_unread(graph: onnx.GraphProto, names: set[str]) -> None:
    gone = names - read_names(graph)
    refill(graph.initializer, [kept for kept in graph.initializer if kept.name not in gone])


def _refused(node: onnx.NodeProto, reason: str) -> ModelError:
    return ModelError(f"{_named(node)}: in opset {OPSET}, {node.op_type} {reason}; {_REMEDY}")


def _named(node: onnx.NodeProto) -> str:
    return f"operator {node.name or node.output[0]!r}"


def folded(model: bytes) -> bytes:
    """Return a serialised model without ``Constant`` nodes (:func:`fold_constants`)."""
    proto = onnx.ModelProto.FromString(model)
    fold_constants(proto.graph)
    return serialised(proto)


def fold_constants(graph: onnx.GraphProto) -> None:
    """Turn the ``Constant`` nodes of a graph, and of the bodies in it, into initializers.

    Then there is one kind of constant instead of two. Nodes that write a graph output stay, and so
    do constants that are strings or sparse tensors.
    """
    outputs = {output.name for output in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        tensor = None if node.output[:1] and node.output[0] in outputs else constant_tensor(node)
        if tensor is None:
            kept.append(node)
        else:
            graph.initializer.append(tensor)
        for body in bodies(node):
            fold_constants(body)
    refill(graph.node, kept)
