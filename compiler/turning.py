"""Turning: tensors at cut points get their batch in front.

Recurrent networks, and transformers as torch makes them by default, compute on [sequence, batch,
width]. Rows leave a batch along the first dimension, so that such a tensor cannot be carried from
one stage to the next. Where it could be but for that, it is transposed and back again, and the cut
is between the two; where no cut is made, they cancel, and ONNX Runtime drops both.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from offramp.compiler.cuts import GraphAnalysis, batch_first
from offramp.compiler.graph import bodies, copied, refill
from offramp.compiler.shapes import TensorType, annotate, declared_types

FRONT = "/batch_first"
"""What is added to the name of a tensor for that of it with the batch in front."""
_BACK = "/as_before"


def turn_batch_first(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Transpose the tensors that could be cut points if their batch were in front, and back.

    Of an annotated model with a single output, which is not changed and computes the same.
    """
    if not any(_is_behind(tensor) for tensor in declared_types(proto).values()):
        return proto
    analysis = GraphAnalysis.of(proto, turns=True)
    orders: dict[str, tuple[int, ...]] = {}
    for gate in analysis.best()[1]:
        order = batch_first(analysis.types[gate.tensor].shape or ())
        if order[0]:
            orders[gate.tensor] = order
    if not orders:
        return proto
    turned = copied(proto)
    _insert(turned.graph, orders)
    annotate(turned)
    return turned


def _is_behind(tensor: TensorType) -> bool:
    """Whether a tensor has its batch elsewhere than in front."""
    return bool(order := batch_first(tensor.shape or ())) and order[0] > 0


def _insert(graph: onnx.GraphProto, orders: Mapping[str, tuple[int, ...]]) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        _read_instead(node, {name: f"{name}{_BACK}" for name in orders})
        nodes.append(node)
        for name in node.output:
            if (order := orders.get(name)) is not None:
                nodes.append(_transpose(name, f"{name}{FRONT}", order))
                back = tuple(order.index(axis) for axis in range(len(order)))
                nodes.append(_transpose(f"{name}{FRONT}", f"{name}{_BACK}", back))
    refill(graph.node, nodes)


def _read_instead(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Have an operator, and the graphs that it runs, read tensors under other names."""
    node.input[:] = [renamed.get(name, name) for name in node.input]
    for body in bodies(node):
        for inner in body.node:
            _read_instead(inner, renamed)
        for output in body.output:
            output.name = renamed.get(output.name, output.name)


def _transpose(tensor: str, output: str, order: tuple[int, ...]) -> onnx.NodeProto:
    return helper.make_node("Transpose", [tensor], [output], name=output, perm=order)
