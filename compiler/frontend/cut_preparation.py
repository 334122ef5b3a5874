"""Preparation of a model for cuts: shapes are computed from inputs, and batches put in front.

*Anchoring.* An export often measures a tensor once, ``Shape(hidden)``, and reshapes by that vector
in every layer. After a cut the vector would be outdated, because the batch shrinks there. If each
size is a constant or a size of a graph input, the vector is computed from that input instead. Later
segments read the input, from which samples that left are removed, too.

*Turning.* Recurrent networks, and by default torch's transformers, compute on [sequence, batch,
width]. Samples leave a batch along the first dimension, so such a tensor cannot be passed from one
stage to the next. If that is the only obstacle, the tensor is transposed and transposed back, and
the model may be cut between the two operators. If it is not cut there, ONNX Runtime removes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS, GraphAnalysis
from offramp.compiler.cuts.flow import SHAPE_KINDS, Flow, Gate
from offramp.compiler.cuts.gate_fitness import batch_first
from offramp.compiler.graphs.graph import Operator, bodies, captured_names, copied, refill
from offramp.compiler.graphs.shapes import TensorType, annotate, declared_types, shape_of

_Source = tuple[str, int]
"""A graph input and one of its axes."""


def anchor_shapes(proto: onnx.ModelProto, *, max_tensors: int = MAX_CUT_TENSORS) -> onnx.ModelProto:
    """Compute shapes that are used across a cut point from graph inputs instead.

    ``proto`` is annotated and has a single output; it is not changed. Shapes that cannot be
    computed in this way stay, and :func:`~.cuts.cuts.find_cuts` rejects the cuts that they cross.
    """
    analysis = GraphAnalysis.of(proto, transpose=True, max_tensors=max_tensors)
    vectors = {
        op.index: sizes
        for op in analysis.graph.operators
        if op.kind == "Shape" and (sizes := _measured(analysis, op)) is not None
    }
    flow, kept, _ = analysis.best(free_shapes=frozenset(vectors))
    if not kept:
        return proto
    carried = _carried(analysis, flow, kept[0].step)
    sources = _sizes_of_inputs(analysis, [*carried, *analysis.graph.inputs])
    replaced = {
        op.writes[0]: _from_inputs(op.writes[0], vectors[op.index], sources)
        for op in _crossing(analysis, flow, kept, vectors)
        if op.reads[0] not in analysis.graph.inputs
        or _spares(op, vectors[op.index], sources, carried)
    }
    if not replaced:
        return proto
    anchored = copied(proto)
    _replace(anchored.graph, replaced)
    annotate(anchored)
    return anchored


def _measured(analysis: GraphAnalysis, op: Operator) -> tuple[int | str, ...] | None:
    """Return the sizes that a ``Shape`` measures, if all of them are sizes of graph inputs."""
    shape = shape_of(analysis.types, op.reads[0])
    if shape is None:
        return None
    ends = {a.name: a.i for a in op.proto.attribute}
    sizes = shape[ends.get("start", 0) : ends.get("end", len(shape))]
    known = _sizes_of_inputs(analysis, analysis.graph.inputs)
    return sizes if all(isinstance(size, int) or size in known for size in sizes) else None


def _sizes_of_inputs(analysis: GraphAnalysis, inputs: Sequence[str]) -> dict[str, _Source]:
    """Return the symbolic sizes of graph inputs, each with the first input and axis it has."""
    found: dict[str, _Source] = {}
    for name in inputs:
        for axis, size in enumerate(analysis.types[name].shape or ()):
            if isinstance(size, str):
                found.setdefault(size, (name, axis))
    return found


def _carried(analysis: GraphAnalysis, flow: Flow, first_cut: int) -> list[str]:
    """Return graph inputs whose values, not only sizes, are needed after the first cut."""
    side = [analysis.graph.operators[i] for i, use in flow.side_use.items() if use > first_cut]
    readers = [op for op in side if op.kind not in SHAPE_KINDS]
    read = {t for op in (*readers, *flow.steps[first_cut + 1 :]) for t in op.reads}
    return [name for name in analysis.graph.inputs if name in read]


def _spares(
    op: Operator, sizes: Sequence[int | str], sources: Mapping[str, _Source], carried: Sequence[str]
) -> bool:
    """Return whether later segments then no longer need the tensor that an operator measures.

    They need ``carried`` inputs in any case.
    """
    used = {sources[size][0] for size in sizes if isinstance(size, str)}
    return op.reads[0] not in carried and used <= set(carried)


def _crossing(
    analysis: GraphAnalysis, flow: Flow, kept: Sequence[Gate], vectors: Mapping[int, object]
) -> list[Operator]:
    """Return ``Shape`` operators of tensors before a cut, whose results are used after the cut."""
    written = _places(analysis, flow)
    crossing: list[Operator] = []
    for index in vectors:
        op = analysis.graph.operators[index]
        if index in flow.side_use and op.reads[0] in written:
            cuts = [gate.step for gate in kept if gate.step > written[op.reads[0]]]
            if cuts and flow.side_use[index] > cuts[0]:
                crossing.append(op)
    return crossing


def _places(analysis: GraphAnalysis, flow: Flow) -> dict[str, int]:
    """Return the index of the step that writes each main tensor.

    Tensors of which only the sizes are read are included.
    """
    written = {t: i for i, op in enumerate(flow.steps) for t in op.writes}
    for op in analysis.graph.operators:
        if op.kind not in SHAPE_KINDS and not written.keys() & op.writes:
            behind = [written[t] for t in op.reads if t in written]
            written.update(dict.fromkeys(op.writes if behind else (), max(behind, default=0)))
    return written | dict.fromkeys(analysis.graph.inputs, -1)


def _from_inputs(
    output: str, sizes: Sequence[int | str], sources: Mapping[str, _Source]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return nodes and constants that compute ``output`` from input shapes and constants."""
    symbols = [size for size in dict.fromkeys(sizes) if isinstance(size, str)]
    nodes: list[onnx.NodeProto] = []
    parts: list[str] = []
    for i, symbol in enumerate(symbols):
        name, _ = sources[symbol]
        shape, part = f"{output}/anchor/shape{i}", f"{output}/anchor/size{i}"
        nodes.append(helper.make_node("Shape", [name], [shape], name=shape))
        nodes.append(helper.make_node("Gather", [shape, f"{part}/axis"], [part], name=part))
        parts.append(part)
    constants = [
        _vector(f"{part}/axis", [sources[symbol][1]])
        for part, symbol in zip(parts, symbols, strict=True)
    ]
    by_symbol: dict[int | str, str] = dict(zip(symbols, parts, strict=True))
    row = [by_symbol.get(s, f"{output}/anchor/constant{i}") for i, s in enumerate(sizes)]
    constants += [_vector(n, [s]) for n, s in zip(row, sizes, strict=True) if isinstance(s, int)]
    concat = helper.make_node("Concat", row, [output], name=f"{output}/anchor", axis=0)
    return [*nodes, concat], constants


def _vector(name: str, values: Sequence[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def _replace(
    graph: onnx.GraphProto,
    replaced: Mapping[str, tuple[list[onnx.NodeProto], list[onnx.TensorProto]]],
) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.output and node.output[0] in replaced:
            added, constants = replaced[node.output[0]]
            nodes.extend(added)
            graph.initializer.extend(constants)
        else:
            nodes.append(node)
    refill(graph.node, nodes)


FRONT = "/batch_first"
"""Suffix for the name of a tensor that has its batch in front."""
_BACK = "/as_before"


def turn_batch_first(
    proto: onnx.ModelProto, *, max_tensors: int = MAX_CUT_TENSORS
) -> onnx.ModelProto:
    """Transpose tensors, and back, that could be cut points if their batch were in front.

    ``proto`` is annotated and has a single output. It is not changed; the returned model computes
    the same.
    """
    if not any(_is_behind(tensor) for tensor in declared_types(proto).values()):
        return proto
    analysis = GraphAnalysis.of(proto, transpose=True, max_tensors=max_tensors)
    transpositions: dict[str, _Transposition] = {}
    for gate in analysis.best().kept:
        for name in gate.tensors:
            order = batch_first(analysis.types[name].shape or ())
            if order[0]:
                earlier = transpositions.get(name, _Transposition(order, often=False))
                transpositions[name] = earlier._replace(often=earlier.often or not gate.alone)
    if not transpositions:
        return proto
    transposed = copied(proto)
    _insert(transposed.graph, transpositions)
    annotate(transposed)
    return transposed


class _Transposition(NamedTuple):
    """How a tensor is transposed to have its batch in front."""

    order: tuple[int, ...]
    """Dimensions of the tensor, the batch first."""
    often: bool
    """True if each reader has its own transposition back. Then the tensor with the batch in front
    can be passed on to readers in later segments."""


def _is_behind(tensor: TensorType) -> bool:
    """Return whether a tensor has a batch dimension that is not the first."""
    return bool(order := batch_first(tensor.shape or ())) and order[0] > 0


def _insert(graph: onnx.GraphProto, transpositions: Mapping[str, _Transposition]) -> None:
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(graph.node):
        read = dict.fromkeys(t for t in (*node.input, *captured_names(node)) if t in transpositions)
        again = {name: f"{name}{_BACK}{number}" for name in read if transpositions[name].often}
        nodes += [_back(name, output, transpositions[name]) for name, output in again.items()]
        _read_instead(node, {name: again.get(name, f"{name}{_BACK}") for name in read})
        nodes.append(node)
        for name in node.output:
            if (transposition := transpositions.get(name)) is not None:
                nodes.append(_transpose(name, f"{name}{FRONT}", transposition.order))
                if not transposition.often:
                    nodes.append(_back(name, f"{name}{_BACK}", transposition))
    refill(graph.node, nodes)


def _back(name: str, output: str, transposition: _Transposition) -> onnx.NodeProto:
    back = tuple(transposition.order.index(axis) for axis in range(len(transposition.order)))
    return _transpose(f"{name}{FRONT}", output, back)


def _read_instead(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Make an operator, and the graphs inside it, read tensors under other names."""
    node.input[:] = [renamed.get(name, name) for name in node.input]
    for body in bodies(node):
        for inner in body.node:
            _read_instead(inner, renamed)
        for output in body.output:
            output.name = renamed.get(output.name, output.name)


def _transpose(tensor: str, output: str, order: tuple[int, ...]) -> onnx.NodeProto:
    return helper.make_node("Transpose", [tensor], [output], name=output, perm=order)
