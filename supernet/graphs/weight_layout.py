"""Storage of a supernet in which the weights of subnets are the first bytes of its weights.

A subnet keeps whole rows or columns of a matrix, and only the first rows are contiguous. So a
matrix with elastic output channels is stored as [out, in], and one with elastic input channels as
[in, out]: ``Gemm`` accepts both. ``MatMul`` accepts only [in, out]; with elastic outputs it becomes
a ``Gemm`` between two reshapes, which also adds the bias. In convolutions, [out, in, …], the first
output channels are contiguous, but the first input channels are not: such weights are stored in
parts when graphs are written to a bundle (:mod:`~offramp.compiler.graphs.weight_parts`). A matrix
that is elastic on both sides is copied for each subnet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.graphs.graph import Dataflow, Operator, copied, refill, sort_operators
from offramp.compiler.graphs.shapes import TensorType, annotate, forget_shapes
from offramp.supernet.graphs.elastic_model import Supernet
from offramp.supernet.graphs.elastic_spec import SubnetChoice
from offramp.supernet.graphs.names import attributes_of

_FIRST_BYTES: Final = 0
"""Dimension whose first elements are stored as the first bytes."""


def laid_out(supernet: Supernet) -> Supernet:
    """Store a supernet's matrices so that subnets can use their first bytes, where possible.

    The model computes the same, except for the order of sums. Changed operators keep their names;
    so do weights whose shape changes, and the input and output tensors of blocks.
    """
    spec = supernet.spec
    least = SubnetChoice(skipped=spec.full.skipped, ratios=spec.smallest.ratios)
    cuts = supernet.plan(least).cuts
    proto = copied(supernet.model.proto)
    kept = {t for group in supernet.blocks for block in group for t in (block.start, block.end)}
    rewriter = _Rewriter(proto, Dataflow(proto.graph), supernet.types, frozenset(kept))
    for op in rewriter.flow.operators:
        sliced = set(cuts.get((op.name, 1), {}))
        if op.kind not in ("Gemm", "MatMul") or len(sliced) != 1 or sliced == {_FIRST_BYTES}:
            continue
        weight = supernet.types[op.proto.input[1]]
        if weight.is_floating and len(weight.shape or ()) == 2:  # as runtimes support in Gemm
            rewriter.turn(op)
    if not rewriter.turned:
        return supernet
    rewriter.finish()
    forget_shapes(proto.graph)
    annotate(proto)
    weights = tuple(
        tuple(replace(w, axis=1 - w.axis) if w.node in rewriter.turned else w for w in group)
        for group in supernet.weights
    )
    return replace(supernet, model=replace(supernet.model, proto=proto), weights=weights)


@dataclass(slots=True)
class _Rewriter:
    """Changes a graph: transposes matrices, and adapts the products that read them."""

    proto: onnx.ModelProto
    flow: Dataflow
    types: Mapping[str, TensorType]
    kept: frozenset[str]
    """Tensors that must not be removed."""
    turned: set[str] = field(default_factory=set)
    """Operators whose weight has been transposed."""
    _made: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    """Operators that replace an operator; empty if the operator became part of another operator."""
    _rows: set[str] = field(default_factory=set)
    """Tensors that have been reshaped to rows."""

    def turn(self, op: Operator) -> None:
        """Make an operator read its weight transposed."""
        self.turned.add(op.name)
        if op.kind == "MatMul":
            self._made[op.name] = self._as_gemm(op)
            return
        node = copied(op.proto)
        turned = 1 - attributes_of(op).get("transB", 0)
        refill(node.attribute, [copied(a) for a in node.attribute if a.name != "transB"])
        node.attribute.append(helper.make_attribute("transB", turned))
        self._made[op.name] = [node]

    def _as_gemm(self, op: Operator) -> list[onnx.NodeProto]:
        """Return operators that compute a product and add its bias; the weight is [out, in]."""
        read, weight = op.proto.input
        result = op.writes[0]
        inputs = [weight]
        if (add := self._following_bias(op)) is not None:
            inputs += [name for name in add.proto.input if name != result]
            result = add.writes[0]
            self._made[add.name] = []
        shape = self.types[read].shape or ()
        if len(shape) == 2:
            return [helper.make_node("Gemm", [read, *inputs], [result], name=op.name, transB=1)]
        rows, product = f"{read}/rows", f"{op.name}/product"
        nodes = [helper.make_node("Gemm", [rows, *inputs], [product], name=op.name, transB=1)]
        if rows not in self._rows:
            self._rows.add(rows)
            asked = self._constant(f"{rows}/shape", [-1, int(shape[-1])])
            nodes.append(helper.make_node("Reshape", [read, asked], [rows], name=rows))
        width = int((self.types[op.writes[0]].shape or ())[-1])
        nodes += self._back(op, read, product, result, width)
        return nodes

    def _back(
        self, op: Operator, read: str, product: str, result: str, width: int
    ) -> list[onnx.NodeProto]:
        """Return operators that reshape rows back to the leading dimensions of the input."""
        stem = f"{op.name}/back"
        leading = (self.types[read].shape or ())[:-1]
        free = [size for size in leading if not isinstance(size, int)]
        if len(free) <= 1:
            sizes = [size if isinstance(size, int) else -1 for size in leading]
            asked = self._constant(f"{stem}/shape", [*sizes, width])
            return [helper.make_node("Reshape", [product, asked], [result], name=stem)]
        zero, end = self._constant(f"{stem}/zero", [0]), self._constant(f"{stem}/end", [-1])
        last = self._constant(f"{stem}/width", [width])
        measured, first, shape = f"{stem}/measured", f"{stem}/leading", f"{stem}/shape"
        return [
            helper.make_node("Shape", [read], [measured], name=measured),
            helper.make_node("Slice", [measured, zero, end], [first], name=first),
            helper.make_node("Concat", [first, last], [shape], name=shape, axis=0),
            helper.make_node("Reshape", [product, shape], [result], name=stem),
        ]

    def _following_bias(self, op: Operator) -> Operator | None:
        """Return the operator that adds a vector, if it is the only reader of a product."""
        result = op.writes[0]
        readers = self.flow.consumers.get(result, [])
        if len(readers) != 1 or readers[0].kind != "Add":
            return None
        if result in self.kept or result in self.flow.outputs:
            return None
        other = next((name for name in readers[0].proto.input if name != result), "")
        vector = other in self.flow.constants and len(self.types[other].shape or ()) == 1
        return readers[0] if vector else None

    def _constant(self, name: str, values: list[int]) -> str:
        tensor = numpy_helper.from_array(np.array(values, np.int64), name)
        self.proto.graph.initializer.append(tensor)
        return name

    def finish(self) -> None:
        """Insert the new operators into the graph, and transpose their weights."""
        graph = self.proto.graph
        nodes = [made for node in graph.node for made in self._made.get(node.name, [node])]
        refill(graph.node, [copied(node) for node in nodes])
        weights = {tensor.name: tensor for tensor in graph.initializer}
        gemms = [node for node in graph.node if node.name in self.turned]
        for name in dict.fromkeys(node.input[1] for node in gemms):
            readers = [n for n in graph.node if name in n.input]
            turned = np.ascontiguousarray(numpy_helper.to_array(weights[name]).T)
            if all(n.name in self.turned for n in readers):
                weights[name].CopyFrom(numpy_helper.from_array(turned, name))
                continue
            graph.initializer.append(numpy_helper.from_array(turned, f"{name}/turned"))
            for node in gemms:
                if node.input[1] == name:
                    node.input[1] = f"{name}/turned"
        sort_operators(graph)
