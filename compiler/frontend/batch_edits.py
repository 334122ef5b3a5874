"""Edits of a graph that is followed at two batch sizes while it is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.shape_trace import ShapeTrace
from offramp.compiler.graphs.shapes import BATCH, probe_sizes


class BatchEdits:
    """A graph at its fixed batch size and at another, and the nodes and constants that are added.

    ``fixed`` and ``freed`` tell shapes and small values at ``old`` and ``rows`` samples; ``nodes``
    are those of the new graph as far as it is done.
    """

    def __init__(self, proto: onnx.ModelProto, batch: int) -> None:
        sizes, _ = probe_sizes(proto)
        self.graph = proto.graph
        self.flow = Dataflow(proto.graph)
        self.old, self.rows = batch, sizes[BATCH]
        self.fixed = ShapeTrace(proto, batch, sizes)
        self.freed = ShapeTrace(proto, self.rows, sizes)
        self.nodes: list[onnx.NodeProto] = []
        self.weights = {tensor.name: tensor for tensor in proto.graph.initializer}

    def with_entries(
        self,
        node: onnx.NodeProto,
        vector: str,
        values: Mapping[int, int],
        length: int,
        computed: str = "",
    ) -> str:
        """Give a vector with some entries replaced, whether it is constant or computed.

        By ``values``, or by the one of the tensor ``computed``.
        """
        name, told = f"{node.output[0]}/freed", self.fixed.value(vector)
        if vector not in self.flow.variable and told is not None and not computed:
            changed = told.astype(np.int64).copy()
            for i, value in values.items():
                changed[i] = value
            return self.constant(name, changed)
        at, new = np.zeros(length, np.bool_), np.zeros(length, np.int64)
        for i, value in values.items():
            at[i], new[i] = True, value
        replaced = computed or self.constant(f"{name}/new", new)
        return self.add("Where", [self.constant(f"{name}/at", at), replaced, vector], name)

    def numbers(self, size: str, name: str) -> str:
        """Count up to a size, which is a vector of one: 0, 1, 2 and so on."""
        ends = [self.constant(f"{name}/{k}", np.array(v)) for k, v in (("0", 0), ("1", 1))]
        scalar = self.add("Squeeze", [size], f"{name}/scalar")
        return self.add("Range", [ends[0], scalar, ends[1]], f"{name}/count")

    def size_of(self, tensor: str, axis: int, name: str) -> str:
        """Measure an axis of a tensor; a vector of one."""
        shape = self.add("Shape", [tensor], f"{name}/shape")
        at = self.constant(f"{name}/axis", np.array([axis], np.int64))
        return self.add("Gather", [shape, at], f"{name}/size")

    def first_row(self, tensor: str, axis: int, name: str) -> str:
        """Take one row of what has the old number of them, as they are equal."""
        if self.old == 1:
            return tensor
        weights = self.weights.get(tensor)
        if weights is not None:
            value = numpy_helper.to_array(weights)
            row = value.take([0], axis)
            if not np.array_equal(value, np.broadcast_to(row, value.shape)):
                raise ValueError(f"its input {tensor!r} holds other values for every row")
            return self.constant(f"{name}/first", row)
        ends = [self.constant(f"{name}/{k}", np.array([v])) for k, v in (("a", 0), ("b", 1))]
        axes = self.constant(f"{name}/along", np.array([axis], np.int64))
        return self.add("Slice", [tensor, *ends, axes], f"{name}/first")

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """Add an initializer; gives its name."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        self.graph.initializer.append(tensor)
        self.fixed.give(tensor)
        self.freed.give(tensor)
        return name

    def add(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node before the one that is being repaired."""
        node = helper.make_node(kind, inputs, [name], name=name, **attributes)
        self.nodes.append(node)
        self.freed.follow(node)
        return name
