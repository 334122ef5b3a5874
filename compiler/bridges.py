"""Bridges: what leads from a cut point to the model's own end, as PAME builds them (5.1).

A bridge begins as all of the model after the exit point. Blocks whose cut tensors have one shape
are a region; of every later region the first block is kept, which brings the tensor to the next
shape, and the others are dropped. Then comes the model's own head, so the answer has the model's
own form. Weights are copies of the model's (5.2, transfer), under names of the bridge's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx

from offramp.bundle import Answer, TensorSpec
from offramp.compiler.cut_points import CutPoint
from offramp.compiler.graph import Dataflow, rename_graph
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
    flow, types = Dataflow(proto.graph), declared_types(proto)
    aliases, kept, dropped = _regions(points[place:])
    starts = points[place].tensors
    operators = flow.behind([answer.output], stop=frozenset(starts), instead_of=aliases)
    read = {aliases.get(tensor, tensor) for op in operators for tensor in op.reads}
    ordered = [*starts, *(spec.name for spec in inputs)]
    picked = _picked(flow, answer)
    model = onnx.ModelProto(ir_version=proto.ir_version, producer_name="offramp")
    model.opset_import.extend(proto.opset_import)
    model.functions.extend(proto.functions)
    graph = model.graph
    graph.name = prefix.rstrip("/")
    graph.node.extend(op.proto for op in operators)
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in read)
    graph.input.extend(_info(name, types) for name in ordered if name in read)
    graph.output.extend(_info(name, types) for name in [answer.output, *picked])

    def renamed(tensor: str) -> str:
        name = aliases.get(tensor, tensor)
        if name in ordered:
            return name
        return prefix + (name if name == answer.output else f"bridge/{name}")

    rename_graph(graph, renamed)
    scores = picked[0] if picked else answer.output
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
            aliases |= {c: aliases.get(g, g) for c, g in zip(come, gone, strict=True)}
        else:
            kept += 1
    return aliases, kept, len(points) - 1 - kept


def _described(point: CutPoint) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    found = {point.tensor: (point.dtype, point.shape)}
    return found | {other.name: (other.dtype, other.shape) for other in point.beside}


def _picked(flow: Dataflow, answer: Answer) -> list[str]:
    """Find the scores that an answer's classes are picked from; none where it has scores."""
    if answer.form != "classes":
        return []
    op = flow.producers[answer.output]
    while op.kind != "ArgMax":
        op = flow.producers[op.proto.input[0]]
    return [op.proto.input[0]]


def _info(name: str, types: Mapping[str, TensorType]) -> onnx.ValueInfoProto:
    tensor = types[name]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, list(tensor.shape or ()))
