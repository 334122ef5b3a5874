"""Slicing a model at cut points, and proof that the slices compute the same.

Names are never changed: the runtime unites neighbouring segments into one graph by name, and a
side operator that several segments recompute is the same operator in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from offramp.bundle import Segment
from offramp.compiler.cuts import CutPoint
from offramp.compiler.errors import VerificationError
from offramp.compiler.graph import Dataflow, copied
from offramp.compiler.model import SourceModel
from offramp.compiler.runtime import GraphRunner, relative_difference

TOLERANCE = 1e-5
"""Relative difference allowed between chained segments and source: float32 sums in another
order, as layouts and fusions differ at the borders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentModel:
    """The blocks between two neighbouring cut points, as a model of its own."""

    index: int
    proto: onnx.ModelProto
    inputs: tuple[str, ...]
    """Tensors read: the previous cut tensor, then the graph inputs needed beside it. The first
    segment reads its main graph inputs, then those that others need too."""
    output: str
    """The cut tensor, or the model's answer in the last segment."""
    flops_share: float
    """Share of the model's FLOPs, 0 to 1; they add up to 1."""

    def described(self) -> Segment:
        """As a bundle describes it."""
        return Segment(
            index=self.index,
            file=f"segments/{self.index:02d}.onnx",
            inputs=self.inputs,
            output=self.output,
            flops_share=self.flops_share,
        )


def split(model: SourceModel, cuts: Sequence[CutPoint]) -> tuple[SegmentModel, ...]:
    """Slice the model at ``cuts``, which are in the order of the data flow.

    Returns:
        One segment more than there are cut points. Chained they compute what the model does,
        each taking the side inputs at its own, possibly shrunk, batch.
    """
    ends = [cut.tensor for cut in cuts] + [model.answer.output]
    shares = np.diff([0.0, *(cut.flops_share_before for cut in cuts), 1.0])
    shared = {name for cut in cuts for name in cut.side_inputs}
    graph = Dataflow(model.proto.graph)
    surgeon = gs.import_onnx(model.proto)
    segments: list[SegmentModel] = []
    for index, (end, share) in enumerate(zip(ends, shares, strict=True)):
        start = ends[index - 1] if index else None
        names, inputs = _extent(graph, start, end, shared)
        proto = _extract(surgeon, names, inputs, end, f"{model.name}/{index}")
        segments.append(
            SegmentModel(
                index=index, proto=proto, inputs=inputs, output=end, flops_share=float(share)
            )
        )
    return tuple(segments)


def _extent(
    graph: Dataflow, start: str | None, end: str, shared: set[str]
) -> tuple[set[str], tuple[str, ...]]:
    """Names of the operators from ``start`` to ``end``, and the tensors they read first."""
    operators = graph.behind([end], stop=frozenset([start] if start else []))
    read = {t for op in operators for t in op.reads}
    needed = [name for name in graph.inputs if name in read]
    side = [name for name in needed if start or name in shared]
    main = [start] if start else [name for name in needed if name not in shared]
    return {op.name for op in operators}, (*main, *side)


def _extract(
    surgeon: gs.Graph, names: set[str], inputs: tuple[str, ...], output: str, name: str
) -> onnx.ModelProto:
    """Make a model of the named operators, which graphsurgeon exports exactly as they are.

    Not ``Graph.cleanup``: it edits the graph that all segments are taken from.
    """
    tensors = surgeon.tensors()
    graph = gs.Graph(
        nodes=[node for node in surgeon.nodes if node.name in names],
        inputs=[tensors[tensor] for tensor in inputs],
        outputs=[tensors[output]],
        name=name,
        opset=surgeon.opset,
        import_domains=surgeon.import_domains,
        functions=surgeon.functions,
        ir_version=surgeon.ir_version,
    )
    proto: onnx.ModelProto = gs.export_onnx(graph)
    _check_closed(proto)
    onnx.checker.check_model(proto)
    return proto


def _check_closed(proto: onnx.ModelProto) -> None:
    """Every tensor that is read has to be written, constant, or a declared input."""
    flow = Dataflow(proto.graph)
    known = {*flow.producers, *flow.constants, *flow.inputs}
    free = {t for op in flow.operators for t in op.reads} - known
    if free:
        raise AssertionError(f"{proto.graph.name} reads {sorted(free)}, which nothing provides")


def verify(
    model: SourceModel,
    segments: Sequence[SegmentModel],
    samples: Mapping[str, NDArray[np.generic]],
    *,
    tolerance: float = TOLERANCE,
    batch_sizes: Sequence[int] = (1, 7),
) -> float:
    """Run the segments in a chain at some batch sizes, and compare with the source model.

    ``samples`` are arrays by graph input, repeated where they are fewer than a batch;
    ``tolerance`` is relative to the largest value of the source's answer.

    Returns:
        The largest relative difference found.

    Raises:
        VerificationError: A difference beyond ``tolerance``, or a value that is no number;
            names the first segment that diverges.
    """
    source = GraphRunner(model.proto)
    runners = [GraphRunner(segment.proto) for segment in segments]
    answer = model.answer.output
    worst = 0.0
    for size in batch_sizes:
        feeds = {k: v[np.arange(size) % len(v)] for k, v in samples.items()}
        wanted = source.run(feeds)[answer]
        chained = _chain(runners, feeds)
        difference = relative_difference(chained[answer], wanted)
        if not difference <= tolerance:
            raise VerificationError(
                f"chained segments differ from the source model by {difference:.1e} of its "
                f"largest value at batch {size}, allowed are {tolerance:.1e}; "
                + _diagnosis(model, segments, feeds, chained, tolerance)
            )
        worst = max(worst, difference)
    return worst


def _chain(
    runners: Sequence[GraphRunner], feeds: Mapping[str, NDArray[np.generic]]
) -> dict[str, NDArray[np.generic]]:
    """Run one segment after the other; return what each of them wrote."""
    values = dict(feeds)
    for runner in runners:
        values |= runner.run(values)
    return values


def _diagnosis(
    model: SourceModel,
    segments: Sequence[SegmentModel],
    feeds: Mapping[str, NDArray[np.generic]],
    chained: Mapping[str, NDArray[np.generic]],
    tolerance: float,
) -> str:
    """Name the first segment whose output differs from the same tensor in the source."""
    exposed = copied(model.proto)
    known = {info.name: info for info in model.proto.graph.value_info}
    inner = [s.output for s in segments if s.output in known]
    exposed.graph.output.extend(known[name] for name in inner)
    wanted = GraphRunner(exposed).run(feeds)
    if not np.isfinite(wanted[model.answer.output]).all():
        return "the source model itself answers with values that are no numbers"
    for segment in segments:
        if not relative_difference(chained[segment.output], wanted[segment.output]) <= tolerance:
            return f"the first that diverges is segment {segment.index}, at `{segment.output}`"
    return "each segment is within tolerance alone, the differences add up"
