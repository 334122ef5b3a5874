"""Turning: tensors at cut points get their batch in front.

Recurrent networks, and transformers as torch makes them by default, compute on [sequence, batch,
width]. Rows leave a batch along the first dimension, so that such a tensor cannot be carried from
one stage to the next. Where it could be but for that, it is transposed and back again, and the cut
is between the two; where no cut is made, they cancel, and ONNX Runtime drops both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import onnx
from onnx import helper

from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS, GraphAnalysis
from offramp.compiler.cuts.gate_fitness import batch_first
from offramp.compiler.graphs.graph import bodies, captured_names, copied, refill
from offramp.compiler.graphs.shapes import TensorType, annotate, declared_types

FRONT = "/batch_first"
"""What is added to the name of a tensor for that of it with the batch in front."""
_BACK = "/as_before"


def turn_batch_first(
    proto: onnx.ModelProto, *, max_tensors: int = MAX_CUT_TENSORS
) -> onnx.ModelProto:
    """Transpose the tensors that could be cut points if their batch were in front, and back.

    Of an annotated model with a single output, which is not changed and computes the same.
    """
    if not any(_is_behind(tensor) for tensor in declared_types(proto).values()):
        return proto
    analysis = GraphAnalysis.of(proto, turns=True, max_tensors=max_tensors)
    turns: dict[str, _Turn] = {}
    for gate in analysis.best().kept:
        for name in gate.tensors:
            order = batch_first(analysis.types[name].shape or ())
            if order[0]:
                earlier = turns.get(name, _Turn(order, often=False))
                turns[name] = earlier._replace(often=earlier.often or not gate.alone)
    if not turns:
        return proto
    turned = copied(proto)
    _insert(turned.graph, turns)
    annotate(turned)
    return turned


class _Turn(NamedTuple):
    """How a tensor is turned."""

    order: tuple[int, ...]
    """Its dimensions, the batch first."""
    often: bool
    """Whether every reader turns it back for itself: then it can be carried past other readers."""


def _is_behind(tensor: TensorType) -> bool:
    """Whether a tensor has its batch elsewhere than in front."""
    return bool(order := batch_first(tensor.shape or ())) and order[0] > 0


def _insert(graph: onnx.GraphProto, turns: Mapping[str, _Turn]) -> None:
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(graph.node):
        read = dict.fromkeys(t for t in (*node.input, *captured_names(node)) if t in turns)
        again = {name: f"{name}{_BACK}{number}" for name in read if turns[name].often}
        nodes += [_back(name, output, turns[name]) for name, output in again.items()]
        _read_instead(node, {name: again.get(name, f"{name}{_BACK}") for name in read})
        nodes.append(node)
        for name in node.output:
            if (turn := turns.get(name)) is not None:
                nodes.append(_transpose(name, f"{name}{FRONT}", turn.order))
                if not turn.often:
                    nodes.append(_back(name, f"{name}{_BACK}", turn))
    refill(graph.node, nodes)


def _back(name: str, output: str, turn: _Turn) -> onnx.NodeProto:
    back = tuple(turn.order.index(axis) for axis in range(len(turn.order)))
    return _transpose(f"{name}{FRONT}", output, back)


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
