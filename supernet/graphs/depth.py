"""LayerSelect: blocks that a subnet omits (SuperServe, sections 3 and 4.1).

The paper wraps each layer in an operator that runs it or passes its input on, depending on booleans
derived from the depth. In a static graph, readers of the block's output read its input instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from offramp.compiler.frontend.preparation import remove_unused
from offramp.compiler.graphs.graph import Dataflow, Operator, bodies, refill
from offramp.compiler.graphs.shapes import UNKNOWN, TensorType
from offramp.supernet.graphs.elastic_spec import Skip
from offramp.supernet.graphs.errors import ElasticSpecError, NotElasticError
from offramp.supernet.graphs.names import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthBlock:
    """A block that can be skipped: readers of ``end`` read ``start`` instead."""

    start: str
    end: str


def find_block(
    skip: Skip, source: str, flow: Dataflow, types: Mapping[str, TensorType]
) -> DepthBlock:
    """Return the block that an entry of a spec names.

    Raises:
        ElasticSpecError: No operator, or no tensor, has such a name.
        NotElasticError: The block does not have exactly one main input and one output, or their
        types differ.
    """
    if skip.scope:
        return _of_scope(skip.scope, source, flow, types)
    for name in (skip.start, skip.end):
        if name not in flow.variable:
            raise ElasticSpecError(
                f"{source}: depth.skip names the tensor {name!r}, which is not in the model as it "
                f"is read; {nearest(name, sorted(flow.variable))}"
            )
    inside = _between(skip.start, skip.end, flow)
    place = f"between {skip.start!r} and {skip.end!r}"
    if not inside:
        raise NotElasticError(
            f"depth.skip: no operator is {place}: the second tensor is not computed from the "
            "first; swap them"
        )
    _check_leaving(inside, skip.end, place, flow)
    _check_alike(skip.start, skip.end, place, types)
    return DepthBlock(start=skip.start, end=skip.end)


def _of_scope(
    scope: str, source: str, flow: Dataflow, types: Mapping[str, TensorType]
) -> DepthBlock:
    """Return the block of a scope: its operators, and the tensors that enter and leave it."""
    inside = [op for op in flow.operators if in_scope(op.name, scope) and not flow.is_constant(op)]
    if not inside:
        raise ElasticSpecError(
            f"{source}: depth.skip names {scope!r}, but no operator's name begins with it, up to a "
            f"slash or a dot; {_no_scope(scope, flow)}"
        )
    place = f"of {scope!r}"
    leaving = _leaving(inside, flow)
    if len(leaving) != 1:
        told = ", ".join(map(repr, leaving)) or "none"
        raise NotElasticError(
            f"depth.skip: {len(leaving)} tensors {place} are read outside of it ({told}), expected "
            "1; name a scope that one tensor leaves, as a residual block does"
        )
    (end,) = leaving
    written = {t for op in inside for t in op.writes}
    entering = dict.fromkeys(
        t for op in inside for t in op.reads if t in flow.variable and t not in written
    )
    alike = [t for t in entering if _alike(types.get(t), types.get(end))]
    if len(alike) > 1:  # tensors that other blocks read, too, are side tensors
        members = {op.index for op in inside}
        own = [t for t in alike if {op.index for op in flow.consumers[t]} <= members]
        alike = own if len(own) == 1 else alike
    if len(alike) != 1:
        told = ", ".join(_described(t, types) for t in entering)
        raise NotElasticError(
            f"depth.skip: {len(alike)} tensors that enter {scope!r} ({told}) have the type of "
            f"{_described(end, types)}, which leaves it, expected 1; skip blocks that keep their "
            "tensor's shape, or use { from = TENSOR, to = TENSOR }"
        )
    _check_alike(alike[0], end, place, types)
    return DepthBlock(start=alike[0], end=end)


def in_scope(name: str, scope: str) -> bool:
    """Return whether an operator's name begins with a scope, up to a slash or a dot."""
    return name == scope or name.startswith((scope + "/", scope + "."))


def _no_scope(scope: str, flow: Dataflow) -> str:
    scopes = {
        op.name[:end]
        for op in flow.operators
        for end in range(1, len(op.name))
        if op.name[end] in "/."
    }
    if not scopes:
        return (
            "names of this model have no scopes (torch's exporter with dynamo=True writes none): "
            "use { from = TENSOR, to = TENSOR } with tensors that `eecompile inspect` shows"
        )
    return nearest(scope, sorted(scopes))


def _between(start: str, end: str, flow: Dataflow) -> list[Operator]:
    """Return the operators on paths from one tensor to another."""
    reached, inside = {start}, []
    for op in flow.upstream([end], stop=frozenset({start})):
        if not reached.isdisjoint(op.reads):
            reached.update(op.writes)
            inside.append(op)
    return inside if end in reached and end != start else []


def _leaving(inside: Sequence[Operator], flow: Dataflow) -> list[str]:
    """Return the tensors written inside and read outside."""
    members = {op.index for op in inside}
    return [
        t
        for op in inside
        for t in op.writes
        if t in flow.outputs or any(c.index not in members for c in flow.consumers.get(t, ()))
    ]


def _check_leaving(inside: Sequence[Operator], end: str, place: str, flow: Dataflow) -> None:
    others = [t for t in _leaving(inside, flow) if t != end]
    if others:
        raise NotElasticError(
            f"depth.skip: {others[0]!r}, computed {place}, is read outside, too; end the block "
            "where one tensor leaves it"
        )


def _check_alike(start: str, end: str, place: str, types: Mapping[str, TensorType]) -> None:
    if not _alike(types.get(start), types.get(end)):
        raise NotElasticError(
            f"depth.skip: the tensors that enter and leave the block {place} differ: "
            f"{_described(start, types)} and {_described(end, types)}; only blocks that keep shape "
            "and type can be skipped"
        )


def _alike(a: TensorType | None, b: TensorType | None) -> bool:
    return (
        a is not None
        and b is not None
        and a == b
        and a.shape is not None
        and UNKNOWN not in a.shape
    )


def _described(tensor: str, types: Mapping[str, TensorType]) -> str:
    kind = types.get(tensor)
    if kind is None or kind.shape is None:
        return f"{tensor!r} of unknown shape"
    return f"{tensor!r} {kind.dtype} [{', '.join(map(str, kind.shape))}]"


def skip_blocks(proto: onnx.ModelProto, blocks: Sequence[DepthBlock]) -> None:
    """Remove blocks from a graph, in place, and the operators that only they need."""
    if not blocks:
        return
    instead = {block.end: block.start for block in blocks}
    graph = proto.graph

    def source_of(tensor: str) -> str:
        while tensor in instead:
            tensor = instead[tensor]
        return tensor

    outputs = [o.name for o in graph.output if o.name in instead]
    if outputs:  # outputs keep their names
        kept = [n for n in graph.node if set(n.output).isdisjoint(outputs)]
        made = [
            onnx.helper.make_node("Identity", [source_of(t)], [t], name=f"{t}/skipped")
            for t in outputs
        ]
        refill(graph.node, [*kept, *made])
    _reread(graph, source_of)
    remove_unused(proto)


def _reread(graph: onnx.GraphProto, source_of: Callable[[str], str]) -> None:
    """Make all nodes read other tensors, also the nodes of subgraphs.

    Names need not be distinguished by subgraph, because ONNX does not allow shadowing.
    """
    for node in graph.node:
        node.input[:] = [source_of(t) for t in node.input]
        for body in bodies(node):
            _reread(body, source_of)
            for output in body.output:
                output.name = source_of(output.name)
