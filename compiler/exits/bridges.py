"""Bridges: what leads from a cut point to the model's own end, as PAME builds them (5.1).

A bridge begins as all of the model after the exit point. Blocks whose cut tensors have one shape
are a region; of every later region the first block is kept, which brings the tensor to the next
shape, and the others are dropped. Then comes the model's own head, so the answer has the model's
own form. Weights are copies of the model's (5.2, transfer), under names of the bridge's own.

What the head is can be seen in two ways: all that is behind the last cut point, or what is behind
the last block, where hardly any work is left. The latter makes short bridges: cheaper, and able to
learn less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from offramp.bundle import Answer, TensorSpec
from offramp.compiler.cuts.cut_points import CutPoint
from offramp.compiler.graphs.graph import Dataflow, rename_graph
from offramp.compiler.graphs.shapes import TensorType, declared_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """A way from a cut point to the model's answer; untrained."""

    candidate: int
    """The segment that it follows."""
    proto: onnx.ModelProto
    """Reads cut tensors, and graph inputs with them; its output is the scores, under the bridge's
    prefix. The model's tail comes after it."""
    scores: str
    """Name of its output: the scores that the model makes its answer of, or the answer itself."""
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
    taught: Answer,
    inputs: Sequence[TensorSpec],
    points: Sequence[CutPoint],
    *,
    candidate: int,
    prefix: str,
) -> Bridge:
    """Build the bridge from the first of some cut points, the last of which is its head's begin.

    ``proto`` has its weights; all names inside begin with ``prefix``, and graph inputs keep theirs.
    It ends with the scores ``taught``, which are named ``{prefix}{taught.output}``.
    """
    flow, types = Dataflow(proto.graph), declared_types(proto)
    aliases, kept, dropped = _regions(points)
    starts = points[0].tensors
    operators = flow.behind([taught.output], stop=frozenset(starts), instead_of=aliases)
    read = {aliases.get(tensor, tensor) for op in operators for tensor in op.reads}
    ordered = [*starts, *(spec.name for spec in inputs)]
    model = onnx.ModelProto(ir_version=proto.ir_version, producer_name="offramp")
    model.opset_import.extend(proto.opset_import)
    model.functions.extend(proto.functions)
    graph = model.graph
    graph.name = prefix.rstrip("/")
    graph.node.extend(op.proto for op in operators)
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in read)
    graph.input.extend(_info(name, types) for name in ordered if name in read)
    graph.output.append(_info(taught.output, types))

    def renamed(tensor: str) -> str:
        name = aliases.get(tensor, tensor)
        if name in ordered:
            return name
        return prefix + (name if name == taught.output else f"bridge/{name}")

    rename_graph(graph, renamed)
    return Bridge(
        candidate=candidate,
        proto=model,
        scores=renamed(taught.output),
        scores_type=types[taught.output],
        kept=kept,
        dropped=dropped,
    )


def _regions(points: Sequence[CutPoint]) -> tuple[dict[str, str], int, int]:
    """Tell which tensors take the place of others, where blocks are dropped; and count blocks.

    A way leads from the first point to the last: on to the last one of the same shapes, whose
    tensors are those that there are; through the block behind it; and so on. What is behind the
    last point is the head, which is kept.
    """
    aliases: dict[str, str] = {}
    place = kept = 0
    while True:
        ways = ((far, _alike(points[place], points[far])) for far in range(len(points) - 1, 0, -1))
        place, same = next(((far, same) for far, same in ways if far > place and same), (place, {}))
        aliases |= {come: aliases.get(gone, gone) for come, gone in same.items()}
        if place == len(points) - 1:
            return aliases, kept, place - kept
        place, kept = place + 1, kept + 1


def _alike(before: CutPoint, after: CutPoint) -> dict[str, str]:
    """Map tensors that only a later point has to the earlier one's; empty if shapes differ."""
    old, new = _described(before), _described(after)
    gone = [name for name in old if name not in new]
    come = [name for name in new if name not in old]
    alike = [old[name] for name in gone] == [new[name] for name in come]
    return dict(zip(come, gone, strict=True)) if alike else {}


def _described(point: CutPoint) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    found = {point.tensor: (point.dtype, point.shape)}
    return found | {other.name: (other.dtype, other.shape) for other in point.beside}


def _info(name: str, types: Mapping[str, TensorType]) -> onnx.ValueInfoProto:
    tensor = types[name]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, list(tensor.shape or ()))
