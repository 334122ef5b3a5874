"""Anchoring: shapes that cross a cut point are read off the graph inputs instead.

An export often measures a tensor once, ``Shape(hidden)``, and reshapes by that vector in every
layer. Carried across a cut it would go stale, because the batch shrinks there. Where each size
is a constant or a size of a graph input, the vector is computed from that input, which every
later segment takes along, shrunk like the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS, GraphAnalysis
from offramp.compiler.cuts.flow import SHAPE_KINDS, Flow
from offramp.compiler.cuts.gates import Gate
from offramp.compiler.graphs.graph import Operator, copied, refill
from offramp.compiler.graphs.shapes import annotate

_Source = tuple[str, int]
"""A graph input and one of its axes."""


def anchor_shapes(proto: onnx.ModelProto, *, max_tensors: int = MAX_CUT_TENSORS) -> onnx.ModelProto:
    """Express shapes that cross a cut point by those of graph inputs.

    Of an annotated model with a single output, which is not changed. Shapes that cannot be
    expressed so stay, and :func:`~.cuts.cuts.find_cuts` rejects the places they cross.
    """
    analysis = GraphAnalysis.of(proto, turns=True, max_tensors=max_tensors)
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
    """Sizes that a ``Shape`` measures, if the graph inputs tell them all."""
    tensor = analysis.types.get(op.reads[0])
    if tensor is None or tensor.shape is None:
        return None
    ends = {a.name: a.i for a in op.proto.attribute}
    sizes = tensor.shape[ends.get("start", 0) : ends.get("end", len(tensor.shape))]
    known = _sizes_of_inputs(analysis, analysis.graph.inputs)
    return sizes if all(isinstance(size, int) or size in known for size in sizes) else None


def _sizes_of_inputs(analysis: GraphAnalysis, inputs: Sequence[str]) -> dict[str, _Source]:
    """Symbolic sizes of graph inputs, and the first place where each is found."""
    found: dict[str, _Source] = {}
    for name in inputs:
        for axis, size in enumerate(analysis.types[name].shape or ()):
            if isinstance(size, str):
                found.setdefault(size, (name, axis))
    return found


def _carried(analysis: GraphAnalysis, flow: Flow, first_cut: int) -> list[str]:
    """Graph inputs that segments after the first need anyway, for more than their sizes."""
    side = [analysis.graph.operators[i] for i, use in flow.side_use.items() if use > first_cut]
    readers = [op for op in side if op.kind not in SHAPE_KINDS]
    read = {t for op in (*readers, *flow.steps[first_cut + 1 :]) for t in op.reads}
    return [name for name in analysis.graph.inputs if name in read]


def _spares(
    op: Operator, sizes: Sequence[int | str], sources: Mapping[str, _Source], carried: Sequence[str]
) -> bool:
    """Whether measuring other inputs saves later segments from taking this one along."""
    used = {sources[size][0] for size in sizes if isinstance(size, str)}
    return op.reads[0] not in carried and used <= set(carried)


def _crossing(
    analysis: GraphAnalysis, flow: Flow, kept: Sequence[Gate], vectors: Mapping[int, object]
) -> list[Operator]:
    """Return the ``Shape`` operators whose value is used beyond a cut after their tensor."""
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
    """Where in the flow main tensors are written, those too of which only sizes are used."""
    written = {t: i for i, op in enumerate(flow.steps) for t in op.writes}
    for op in analysis.graph.operators:
        if op.kind not in SHAPE_KINDS and not written.keys() & op.writes:
            behind = [written[t] for t in op.reads if t in written]
            written.update(dict.fromkeys(op.writes if behind else (), max(behind, default=0)))
    return written | dict.fromkeys(analysis.graph.inputs, -1)


def _from_inputs(
    output: str, sizes: Sequence[int | str], sources: Mapping[str, _Source]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes and constants that compute ``output``: pick from input shapes and constants."""
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
