"""The model in pieces: candidates for exits, the mask, and one model for each segment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from offramp.bundle import Segment, TensorSpec
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.cuts.cut_points import CutAnalysis, CutPoint
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.placement import choose_candidates
from offramp.compiler.graphs.graph import Dataflow, Operator
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weights import WeightFile

_log = logging.getLogger(__name__)


CopyKind: TypeAlias = Literal["quantised", "trained", "subnet"]
"""What a cascade has before its source model: the model in int8, with weights that were trained
together with its exits, or a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """The model in pieces, as the later steps need them."""

    model: SourceModel
    cuts: tuple[CutTensor, ...]
    """What the exit after segment i would read; one less than there are segments."""
    segments: tuple[SegmentModel, ...]
    graphs: tuple[bytes, ...]
    """The segments, serialised."""
    analysis: CutAnalysis
    """All places where ``model`` could be cut."""
    front: SourceModel | None = None
    """In a cascade the copy, which all segments but the last are of."""
    copy: CopyKind | None = None
    """What it is."""
    weights: WeightFile | None = None
    """Where ``model``, ``segments`` and ``graphs`` have their weights, if not in themselves."""

    def stored(self, weights: WeightFile) -> Sliced:
        """Give the same, with all large weights in a file."""
        model = replace(self.model, proto=weights.light(self.model.proto))
        segments = tuple(replace(s, proto=weights.light(s.proto)) for s in self.segments)
        graphs = tuple(s.proto.SerializeToString() for s in segments)
        return replace(self, model=model, segments=segments, graphs=graphs, weights=weights)

    def whole_model(self) -> SourceModel:
        """Give the source model with its weights."""
        if self.weights is None:
            return self.model
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model.proto)
        self.weights.fill(proto)
        return replace(self.model, proto=proto)

    @property
    def versions(self) -> dict[str, int]:
        """Of operators and file format, of the segments that exits follow."""
        return (self.front or self.model).versions

    def without_weights(self) -> Sliced:
        """Give the same, with the weights of segments in ``graphs`` alone."""
        return replace(self, segments=tuple(s.without_weights() for s in self.segments))

    def tolerance(self, options: CompileOptions) -> float:
        """Give the relative difference allowed between chained segments and what was cut."""
        asked = options.tolerance or rounding_of(self.model.proto).chained
        return max(asked, INT8_TOLERANCE) if self.copy == "quantised" else asked


def slice_model(model: SourceModel, options: CompileOptions) -> Sliced:
    """Cut the model at its candidates.

    CompileError if there are no cut points, or the user named one or a mask that does not exist.
    """
    analysis = before_scores(find_cuts(model, max_tensors=options.reading.max_cut_tensors), model)
    if analysis.unknown_work:
        kinds = ", ".join(analysis.unknown_work)
        how = "measured as time" if analysis.total_s is not None else "what is known without them"
        _log.warning("The work of %s is not known: shares of the work are %s.", kinds, how)
    points = choose_candidates(
        analysis, limit=options.building.candidates, exits=options.building.exits or None
    )
    cuts = cut_tensors(model, analysis, points, options)
    segments = split(model, points)
    graphs = tuple(s.proto.SerializeToString() for s in segments)
    return Sliced(model=model, cuts=cuts, segments=segments, graphs=graphs, analysis=analysis)


def before_scores(analysis: CutAnalysis, model: SourceModel) -> CutAnalysis:
    """Drop the cut points that are in the model's tail, where exits would save nothing."""
    if model.tail is None:
        return analysis
    flow, scores = Dataflow(model.proto.graph), model.taught.output
    before = flow.behind([scores], stop=frozenset())
    known = {name for op in before for name in op.writes} - {scores}
    cuts = tuple(cut for cut in analysis.cuts if known.issuperset(cut.tensors))
    end = analysis.end if analysis.end and known.issuperset(analysis.end.tensors) else None
    return replace(analysis, cuts=cuts, end=end)


def cut_tensors(
    model: SourceModel, analysis: CutAnalysis, points: Sequence[CutPoint], options: CompileOptions
) -> tuple[CutTensor, ...]:
    """Describe what exits at some cut points read; ModelError if ``--mask`` fits none of them."""
    flows = () if analysis.rereads else analysis.main_inputs  # else all that may be read again
    mask = options.building.mask
    masks = find_masks(model.inputs, flows, mask)
    last = bool(model.answer.tokens)
    cuts = tuple(_cut_tensor(point, masks, answers_last=last) for point in points)
    if mask is not None and not any(tensor.mask for cut in cuts for tensor in cut.tensors):
        read = [tensor for cut in cuts for tensor in cut.tensors]
        shapes = "; ".join(f"{cut.name}: [{', '.join(map(str, cut.shape))}]" for cut in read)
        raise ModelError(
            f"--mask {mask!r} fits no exit: none reads [batch, tokens, width] with as "
            f"many tokens as the mask; they read {shapes}"
        )
    return cuts


def _cut_tensor(
    point: CutPoint, masks: Mapping[int | str, TensorSpec], *, answers_last: bool
) -> CutTensor:
    cut = point.as_heads_see_it()
    beside = tuple(
        replace(_masked(other, masks), answers_last=answers_last) for other in cut.beside
    )
    return replace(_masked(cut, masks), answers_last=answers_last, beside=beside)


def _masked(cut: CutTensor, masks: Mapping[int | str, TensorSpec]) -> CutTensor:
    mask = masks.get(cut.shape[1]) if cut.own_form == "tokens" else None
    return cut if mask is None else replace(cut, mask=mask.name, mask_dtype=mask.dtype)


def find_masks(
    inputs: Sequence[TensorSpec], main_inputs: Sequence[str], named: str | None
) -> dict[int | str, TensorSpec]:
    """Find masks [batch, tokens] by their number of tokens: at most one for each.

    It is the one that the user named, and no other, or the one side input called so that has the
    size. A mask is 1 where a token counts and 0 where it pads. ModelError if the input that was
    named is not there, or is not [batch, tokens].
    """
    shaped = {spec.name: spec for spec in inputs if len(spec.shape) == 2}
    if named is not None:
        if named not in shaped:
            known = "; ".join(spec.describe() for spec in inputs)
            raise ModelError(
                f"--mask {named!r} is not an input of shape [batch, tokens]; inputs are {known}"
            )
        return {shaped[named].shape[1]: shaped[named]}
    called = [s for n, s in shaped.items() if "mask" in n.lower() and n not in main_inputs]
    sizes = [spec.shape[1] for spec in called]
    return {spec.shape[1]: spec for spec in called if sizes.count(spec.shape[1]) == 1}


SOURCE = "source.onnx"
"""The unmodified model's file in a bundle."""
INT8_TOLERANCE = 0.05
"""The same for segments of a quantised model: where sums in another order round to another of 255
steps, the answer moves by a step too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentModel:
    """The blocks between two neighbouring cut points, as a model of its own."""

    index: int
    proto: onnx.ModelProto
    """With its weights, as long as it is not :meth:`without_weights`."""
    inputs: tuple[str, ...]
    """Tensors read: cut tensors, then the graph inputs needed beside them. The first segment reads
    its main graph inputs, then those that others need too."""
    output: str
    """The cut tensor, or the model's answer in the last segment."""
    also: tuple[str, ...] = ()
    """Further tensors that it gives, where the cut is a set; those given before are carried on."""
    flops_share: float
    """Share of the model's FLOPs, 0 to 1; they add up to 1."""
    is_source: bool = False
    """Whether it is the whole source model, the last of a cascade."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """All tensors that it gives."""
        return (self.output, *self.also)

    def without_weights(self) -> SegmentModel:
        """Give the segment with its nodes alone, as long as it is not the whole source model."""
        if self.is_source:
            return self
        light = onnx.ModelProto(ir_version=self.proto.ir_version)
        light.opset_import.extend(self.proto.opset_import)
        light.graph.name = self.proto.graph.name
        light.graph.node.extend(self.proto.graph.node)
        return replace(self, proto=light)

    def described(self) -> Segment:
        """Describe the segment as a bundle does."""
        return Segment(
            index=self.index,
            file=SOURCE if self.is_source else f"segments/{self.index:02d}.onnx",
            inputs=self.inputs,
            output=self.output,
            also=self.also,
            flops_share=self.flops_share,
        )


def split(model: SourceModel, cuts: Sequence[CutPoint]) -> tuple[SegmentModel, ...]:
    """Slice the model at ``cuts``, which are in the order of the data flow.

    Gives one segment more than there are cut points. Chained they compute what the model does,
    each taking the side inputs at its own, possibly shrunk, batch.
    """
    ends = [*(cut.tensors for cut in cuts), (model.answer.output,)]
    shares = np.diff([0.0, *(cut.flops_share_before for cut in cuts), 1.0])
    shared = {name for cut in cuts for name in cut.side_inputs}
    source = _Source.of(model.proto)
    segments: list[SegmentModel] = []
    starts: tuple[str, ...] = ()
    for index, (end, share) in enumerate(zip(ends, shares.tolist(), strict=True)):
        given = tuple(tensor for tensor in end if tensor not in starts)
        operators, inputs = _extent(source.flow, starts, given, shared)
        proto = source.extract(operators, inputs, given, f"{model.name}/{index}")
        output, *also = given
        segments.append(
            SegmentModel(
                index=index,
                proto=proto,
                inputs=inputs,
                output=output,
                also=tuple(also),
                flops_share=share,
            )
        )
        starts = end
    return tuple(segments)


def _extent(
    graph: Dataflow, starts: Sequence[str], ends: Sequence[str], shared: set[str]
) -> tuple[tuple[Operator, ...], tuple[str, ...]]:
    """Find the operators from some tensors to others, and the tensors they read first."""
    operators = graph.behind(ends, stop=frozenset(starts))
    read = {t for op in operators for t in op.reads}
    needed = [name for name in graph.inputs if name in read]
    side = [name for name in needed if starts or name in shared]
    main = [name for name in starts or needed if name in read and name not in side]
    return operators, (*main, *side)


class _Source(NamedTuple):
    """A model to take segments from, and where in it everything is."""

    surgeon: gs.Graph
    flow: Dataflow
    nodes: Mapping[str, gs.Node]
    tensors: Mapping[str, gs.Tensor]

    @classmethod
    def of(cls, proto: onnx.ModelProto) -> _Source:
        surgeon = gs.import_onnx(proto)
        nodes = {node.name: node for node in surgeon.nodes}
        return cls(surgeon, Dataflow(proto.graph), nodes, surgeon.tensors())

    def extract(
        self,
        operators: Sequence[Operator],
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
    ) -> onnx.ModelProto:
        """Make a model of some operators, which graphsurgeon exports exactly as they are.

        Not ``Graph.cleanup``: it edits the graph that all segments are taken from.
        """
        surgeon = self.surgeon
        graph = gs.Graph(
            nodes=[self.nodes[op.name] for op in operators],
            inputs=[self.tensors[tensor] for tensor in inputs],
            outputs=[self.tensors[tensor] for tensor in outputs],
            name=name,
            opset=surgeon.opset,
            import_domains=surgeon.import_domains,
            functions=surgeon.functions,
            ir_version=surgeon.ir_version,
        )
        proto: onnx.ModelProto = gs.export_onnx(graph)
        written = {t for op in operators for t in op.writes}
        free = {t for op in operators for t in op.reads} - {*written, *inputs} - self.flow.constants
        if free:
            raise VerificationError(
                f"{name} reads {sorted(free)}, which nothing provides; this is a defect, report it "
                "with the model"
            )
        onnx.checker.check_model(proto)
        return proto
