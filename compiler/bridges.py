"""Bridges: what leads from a cut point to the model's own end, as PAME builds them (5.1).

A bridge begins as all of the model after the exit point. Blocks whose cut tensors have one shape
are a region; of every later region the first block is kept, which brings the tensor to the next
shape, and the others are dropped. Then comes the model's own head, so the answer has the model's
own form. Weights are copies of the model's (5.2, transfer), under names of the bridge's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx

from offramp.bundle import Answer, TensorSpec
from offramp.compiler.cut_points import CutPoint
from offramp.compiler.graph import Dataflow, Operator, bodies
from offramp.compiler.shapes import TensorType, declared_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """A way from a cut point to the model's answer; untrained."""

    candidate: int
    """The segment that it follows."""
    proto: onnx.ModelProto
    """Reads cut tensors, and graph inputs beside them; its outputs are the answer, under the
    bridge's prefix, and where that has the classes alone, the scores that they are picked from."""
    answer: str
    """Name of its answer."""
    scores: str
    """Name of what says how sure it is: the answer itself, or what its classes are picked from."""
    scores_of: str
    """Name of the model's own tensor that ``scores`` stand for."""
    scores_type: TensorType
    kept: int
    """Blocks of the model that it goes through, the head not counted."""
    dropped: int

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that it reads, cut tensors first."""
        return tuple(tensor.name for tensor in self.proto.graph.input)


def build_bridge(
    proto: onnx.ModelProto,
    answer: Answer,
    inputs: Sequence[TensorSpec],
    points: Sequence[CutPoint],
    place: int,
    *,
    candidate: int,
    prefix: str,
) -> Bridge:
    """Build the bridge from cut point ``place`` of all that a model has.

    ``proto`` has its weights; all names inside begin with ``prefix``, and graph inputs keep theirs.
    The answer is named ``{prefix}{answer.output}``.
    """
    flow = Dataflow(proto.graph)
    aliases, kept, dropped = _regions(points[place:])
    starts = frozenset(points[place].tensors)
    picked = _picked(flow, answer)
    operators = _behind(flow, aliases, [answer.output], starts)
    written = {tensor for op in operators for tensor in op.writes}
    types = declared_types(proto)
    graph_inputs = {spec.name for spec in inputs}
    kept_names = starts | graph_inputs

    def renamed(tensor: str) -> str:
        name = _resolved(aliases, tensor)
        if not name or name in kept_names:
            return name
        return prefix + (name if name == answer.output else f"bridge/{name}")

    nodes = []
    for op in operators:
        node = onnx.NodeProto()
        node.CopyFrom(op.proto)
        for names in (node.input, node.output):
            names[:] = [renamed(name) for name in names]
        for body in bodies(node):
            _rename_free(body, renamed, {*written, *flow.constants, *aliases})
        node.name = f"{prefix}bridge/{op.name}"
        nodes.append(node)
    read = {_resolved(aliases, tensor) for op in operators for tensor in op.reads}
    weights = []
    for tensor in proto.graph.initializer:
        if tensor.name in read:
            weight = onnx.TensorProto()
            weight.CopyFrom(tensor)
            weight.name = renamed(tensor.name)
            weights.append(weight)
    ordered = [*points[place].tensors, *(spec.name for spec in inputs)]
    wanted = [answer.output, *([picked] if picked else [])]
    graph = onnx.helper.make_graph(
        nodes,
        prefix.rstrip("/"),
        [_info(name, name, types) for name in ordered if name in read],
        [_info(renamed(name), name, types) for name in wanted],
        initializer=weights,
    )
    model = onnx.helper.make_model(
        graph,
        producer_name="offramp",
        opset_imports=list(proto.opset_import),
        ir_version=proto.ir_version,
        functions=list(proto.functions),
    )
    scores = picked or answer.output
    return Bridge(
        candidate=candidate,
        proto=model,
        answer=renamed(answer.output),
        scores=renamed(scores),
        scores_of=scores,
        scores_type=types[scores],
        kept=kept,
        dropped=dropped,
    )


def _regions(points: Sequence[CutPoint]) -> tuple[dict[str, str], int, int]:
    """Tell which tensors take the place of others, where blocks are dropped; and count blocks.

    The tensors that a block gives anew are those that it takes, where they are of the same shapes.
    What is behind the last cut point is the head, which is kept.
    """
    aliases: dict[str, str] = {}
    kept = 0
    for before, after in pairwise(points):
        old, new = _described(before), _described(after)
        gone = [name for name in old if name not in new]
        come = [name for name in new if name not in old]
        if [old[name] for name in gone] == [new[name] for name in come]:
            aliases |= dict(zip(come, gone, strict=True))
        else:
            kept += 1
    return aliases, kept, len(points) - 1 - kept


def _described(point: CutPoint) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    found = {point.tensor: (point.dtype, point.shape)}
    return found | {other.name: (other.dtype, other.shape) for other in point.beside}


def _resolved(aliases: Mapping[str, str], tensor: str) -> str:
    while tensor in aliases:
        tensor = aliases[tensor]
    return tensor


def _behind(
    flow: Dataflow, aliases: Mapping[str, str], ends: Sequence[str], stop: frozenset[str]
) -> list[Operator]:
    """Find the operators that some tensors need, with others in their places, in order."""
    needed: set[int] = set()
    pending = list(ends)
    while pending:
        tensor = _resolved(aliases, pending.pop())
        op = None if tensor in stop else flow.producers.get(tensor)
        if op is not None and op.index not in needed:
            needed.add(op.index)
            pending.extend(op.reads)
    return [flow.operators[i] for i in sorted(needed)]


def _picked(flow: Dataflow, answer: Answer) -> str:
    """Find the scores that an answer's classes are picked from; empty where it has scores."""
    if answer.form != "classes":
        return ""
    op = flow.producers[answer.output]
    while op.kind != "ArgMax":
        op = flow.producers[op.proto.input[0]]
    return op.proto.input[0]


def _rename_free(body: onnx.GraphProto, renamed: Callable[[str], str], outer: set[str]) -> None:
    """Rename what a body reads of the graph around it."""
    own = {o for node in body.node for o in node.output} | {i.name for i in body.input}
    for node in body.node:
        for position, name in enumerate(node.input):
            if name in outer and name not in own:
                node.input[position] = renamed(name)
        for inner in bodies(node):
            _rename_free(inner, renamed, outer - own)


def _info(name: str, described_as: str, types: Mapping[str, TensorType]) -> onnx.ValueInfoProto:
    tensor = types[described_as]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, list(tensor.shape or ()))
