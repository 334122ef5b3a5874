"""The model in pieces: tensors that exits may read, the mask, and one model for each segment.

:func:`slice_model` cuts the model. :func:`verify` runs the segments in a chain, with all samples
and with only some of them after a cut, and compares the answers with those of the source model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from offramp.bundle import Answer, Segment, TensorSpec
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint, find_cuts
from offramp.compiler.cuts.exit_placement import choose_candidates
from offramp.compiler.graphs.graph import Dataflow, Operator, copied, emptied
from offramp.compiler.graphs.row_mixing import compare_batches, middle, scaled_by_batch
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weights import WeightFile, check_standard
from offramp.engine.answers.differences import Difference, Scales, compare, relative_difference

_log = logging.getLogger(__name__)


CopyKind: TypeAlias = Literal["quantised", "trained", "subnet"]
"""Kind of copy in front of a cascade's source model: the model in int8, the model with weights that
were trained together with the exits, or a part of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """The model in pieces, as the later steps need them."""

    model: SourceModel
    cuts: tuple[CutTensor, ...]
    """Tensor that the exit after segment i would read, for each segment i except the last."""
    segments: tuple[SegmentModel, ...]
    graphs: tuple[bytes, ...]
    """Serialised graph of each segment."""
    analysis: CutAnalysis
    """All places where ``model`` could be cut."""
    weights: WeightFile | None = None
    """File with the weights of ``model``, ``segments`` and ``graphs``, if the weights are not
    inside these."""

    def stored(self, weights: WeightFile) -> Sliced:
        """Return the same pieces, with all large weights in a file."""
        model = replace(self.model, proto=weights.light(self.model.proto))
        segments = tuple(replace(s, proto=weights.light(s.proto)) for s in self.segments)
        graphs = tuple(s.proto.SerializeToString() for s in segments)
        return replace(self, model=model, segments=segments, graphs=graphs, weights=weights)

    def whole_model(self) -> SourceModel:
        """Return the source model with its weights."""
        if self.weights is None:
            return self.model
        return replace(self.model, proto=self.weights.whole(self.model.proto))

    @property
    def front(self) -> SourceModel:
        """The model whose segments exits follow: the source model, or the copy in a cascade."""
        return self.model

    @property
    def versions(self) -> dict[str, int]:
        """Versions of opset and file format of the model that exits follow."""
        return self.front.versions

    def without_weights(self) -> Self:
        """Return the same pieces; only ``graphs`` then contain the weights of segments."""
        return replace(self, segments=tuple(s.without_weights() for s in self.segments))

    @property
    def is_quantised(self) -> bool:
        """True if exits follow a copy in int8."""
        return False

    def tolerance(self, options: CompileOptions) -> float:
        """Return the relative difference allowed between chained segments and the whole model."""
        asked = options.tolerance or rounding_of(self.model.proto).chained
        return max(asked, INT8_TOLERANCE) if self.is_quantised else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade(Sliced):
    """A copy of the source model in pieces, and the source model as the last segment."""

    copy: SourceModel
    kind: CopyKind

    @property
    def front(self) -> SourceModel:
        """The copy, whose segments exits follow."""
        return self.copy

    @property
    def is_quantised(self) -> bool:
        """True if the copy is in int8."""
        return self.kind == "quantised"


def slice_model(model: SourceModel, options: CompileOptions) -> Sliced:
    """Cut the model at its candidates.

    CompileError if there are no cut points, or the user named a cut point or mask that does not
    exist.
    """
    analysis = before_scores(find_cuts(model, max_tensors=options.reading.max_cut_tensors), model)
    if analysis.unknown_work:
        kinds = ", ".join(analysis.unknown_work)
        how = "measured as time" if analysis.total_s is not None else "of known work without them"
        _log.warning("The work of %s is not known: shares of the work are %s.", kinds, how)
    points = choose_candidates(
        analysis, limit=options.building.candidates, exits=options.building.exits or None
    )
    cuts = cut_tensors(model, analysis, points, options)
    segments = split(model, points)
    graphs = tuple(s.proto.SerializeToString() for s in segments)
    return Sliced(model=model, cuts=cuts, segments=segments, graphs=graphs, analysis=analysis)


def before_scores(analysis: CutAnalysis, model: SourceModel) -> CutAnalysis:
    """Drop the cut points in the model's tail, where exits would save nothing."""
    if model.tail is None:
        return analysis
    scores = model.taught.output
    before = model.flow.upstream([scores], stop=frozenset())
    known = {name for op in before for name in op.writes} - {scores}
    cuts = tuple(cut for cut in analysis.cuts if known.issuperset(cut.tensors))
    end = analysis.end if analysis.end and known.issuperset(analysis.end.tensors) else None
    return replace(analysis, cuts=cuts, end=end)


def cut_tensors(
    model: SourceModel, analysis: CutAnalysis, points: Sequence[CutPoint], options: CompileOptions
) -> tuple[CutTensor, ...]:
    """Return the inputs of exits at some cut points; ModelError if ``--mask`` fits no input."""
    flows = (
        () if analysis.rereads else analysis.main_inputs
    )  # if main inputs may be read again, all inputs may be masks
    mask = options.building.mask
    masks = find_masks(model.inputs, flows, mask)
    last = bool(model.answer.tokens)
    cuts = tuple(_cut_tensor(point, masks, answers_last=last) for point in points)
    if mask is not None and not any(tensor.mask for cut in cuts for tensor in cut.tensors):
        read = [tensor for cut in cuts for tensor in cut.tensors]
        shapes = "; ".join(f"{cut.name}: [{', '.join(map(str, cut.shape))}]" for cut in read)
        raise ModelError(
            f"--mask {mask!r} fits no exit: no exit reads [batch, tokens, width] with as many "
            f"tokens as the mask; exits read {shapes}"
        )
    return cuts


def _cut_tensor(
    point: CutPoint, masks: Mapping[int | str, TensorSpec], *, answers_last: bool
) -> CutTensor:
    cut = point.head_input()
    others = tuple(
        replace(_masked(other, masks), answers_last=answers_last) for other in cut.beside
    )
    return replace(_masked(cut, masks), answers_last=answers_last, beside=others)


def _masked(cut: CutTensor, masks: Mapping[int | str, TensorSpec]) -> CutTensor:
    mask = masks.get(cut.shape[1]) if cut.own_form == "tokens" else None
    return cut if mask is None else replace(cut, mask=mask.name, mask_dtype=mask.dtype)


def find_masks(
    inputs: Sequence[TensorSpec], main_inputs: Sequence[str], named: str | None
) -> dict[int | str, TensorSpec]:
    """Find masks [batch, tokens], at most one for each number of tokens.

    If the user named an input, only that input is a mask. Otherwise a side input with "mask" in its
    name is, if no other one has the same number of tokens. A mask is 1 where a token counts and 0
    where it pads. ModelError if the named input does not exist, or is not [batch, tokens].
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
"""File of the unmodified model in a bundle."""
INT8_TOLERANCE = 0.05
"""Relative difference allowed for segments of a quantised model. Sums in another order may be
rounded to a neighbouring one of 255 steps, which moves the answer by a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentModel:
    """The blocks between two neighbouring cut points, as a separate model."""

    index: int
    proto: onnx.ModelProto
    """Graph of the segment; it contains its weights unless :meth:`without_weights` removed them."""
    inputs: tuple[str, ...]
    """Tensors that the segment reads: cut tensors, then the graph inputs needed in addition. The
    first segment reads its main graph inputs, then graph inputs that other segments need."""
    output: str
    """Cut tensor that the segment writes; for the last segment, the model's answer."""
    also: tuple[str, ...] = ()
    """Further outputs, if the cut is a set of tensors. Some of them may be written by earlier
    segments and only passed on."""
    flops_share: float
    """Share of the model's FLOPs, from 0 to 1; the shares of all segments add up to 1."""
    is_source: bool = False
    """True if the segment is the whole source model, as the last segment of a cascade is."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all output tensors; the first is ``output``."""
        return (self.output, *self.also)

    def without_weights(self) -> SegmentModel:
        """Return the segment's nodes without weights; the whole source model is unchanged."""
        if self.is_source:
            return self
        light = emptied(self.proto, self.proto.graph.name)
        light.graph.node.extend(self.proto.graph.node)
        return replace(self, proto=light)

    def described(self) -> Segment:
        """Return the manifest's description of the segment."""
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

    Returns one segment more than there are cut points. Run in a chain, the segments compute what
    the model does. Side inputs are fed to a segment for the samples that are still in the batch.
    """
    ends = [*(cut.tensors for cut in cuts), (model.answer.output,)]
    shares = np.diff([0.0, *(cut.flops_share_before for cut in cuts), 1.0])
    shared = {name for cut in cuts for name in cut.side_inputs}
    source = _Source.of(model)
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
    """Return the operators between some tensors and others, and the tensors they read first."""
    operators = graph.upstream(ends, stop=frozenset(starts))
    read = {t for op in operators for t in op.reads}
    needed = [name for name in graph.inputs if name in read]
    side = [name for name in needed if starts or name in shared]
    main = [name for name in starts or needed if name in read and name not in side]
    return operators, (*main, *side)


class _Source(NamedTuple):
    """A model to extract segments from, with its nodes and tensors by name."""

    surgeon: gs.Graph
    flow: Dataflow
    nodes: Mapping[str, gs.Node]
    tensors: Mapping[str, gs.Tensor]

    @classmethod
    def of(cls, model: SourceModel) -> _Source:
        surgeon = gs.import_onnx(model.proto)
        nodes = {node.name: node for node in surgeon.nodes}
        return cls(surgeon, model.flow, nodes, surgeon.tensors())

    def extract(
        self,
        operators: Sequence[Operator],
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
    ) -> onnx.ModelProto:
        """Make a model of some operators, in the form that graphsurgeon exports.

        ``Graph.cleanup`` is not used: it edits the graph that all segments are taken from.
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
                f"{name} reads {sorted(free)}, which no segment or input provides; this is a "
                "defect, report it with the model"
            )
        check_standard(proto)
        return proto


VERIFIED_SAMPLES = 64
"""Number of calibration samples for which the chained segments must agree with their model."""
TOLERANCE = 1e-5
"""Relative difference allowed between the chained segments and the source model. Float32 sums are
in another order, because layouts and fusions differ where the model is cut."""


def verify(
    model: SourceModel,
    segments: Sequence[SegmentModel],
    samples: Mapping[str, NDArray[np.generic]],
    *,
    tolerance: float = TOLERANCE,
    batch_sizes: Sequence[int] = (1, 7),
) -> float:
    """Run the segments in a chain at some batch sizes, and compare with the source model.

    ``samples`` are arrays by graph input, and are repeated to fill a batch; ``tolerance`` is
    relative to the scale of each value (:mod:`~offramp.engine.answers.differences`).

    After each cut, some samples are also run alone, as if the other samples had left.

    Returns the largest difference. VerificationError names the first segment that differs, by more
    than ``tolerance`` or by NaN or infinity on one side only. ModelError names operators that make
    an answer depend on other samples, or a cut after which answers depend on other samples.
    """
    answer = model.answer.output
    rows = [middle(size, max(batch_sizes)) for size in batch_sizes]
    fed = [{k: v[chosen % len(v)] for k, v in samples.items()} for chosen in rows]
    wanted = [values[answer] for values in _run_alone(model.proto, fed)]
    chained: list[dict[str, NDArray[np.generic]]] = [dict(feeds) for feeds in fed]
    largest = int(np.argmax(batch_sizes))
    left: list[_RemainingRows] = []
    for segment in segments:
        chained, left = _through(segment, chained, left)
        if segment is not segments[-1]:
            left += _survivors(chained[largest], segment)
    worst, scales = 0.0, Scales.of(wanted[largest])
    for size, feeds, right, values in zip(batch_sizes, fed, wanted, chained, strict=True):
        difference = compare(values[answer], right, scales=scales, answer=model.answer)
        if not difference.share <= tolerance:
            raise VerificationError(
                f"chained segments differ from the source model at batch {size}, by "
                f"{difference.describe()}; allowed are {tolerance:.1e} of a model in "
                f"{rounding_of(model.proto).name}; "
                + _diagnosis(model, segments, feeds, values, tolerance)
                + _allowance(difference)
            )
        worst = max(worst, difference.share)
    answers = dict(zip(batch_sizes, wanted, strict=True))
    compare_batches(model.proto, samples, answers, model.answer)
    if not scaled_by_batch(model.proto):
        for survivors in left:
            survivors.check(wanted[largest], model.answer, rounding_of(model.proto).batches)
    return worst


def _allowance(difference: Difference) -> str:
    if not math.isfinite(difference.share):
        return ". No tolerance allows that; report it with the model"
    return f". If only rounding differs, allow it with --tolerance {2 * difference.share:.0e}"


def _through(
    segment: SegmentModel,
    chained: Sequence[dict[str, NDArray[np.generic]]],
    left: Sequence[_RemainingRows],
) -> tuple[list[dict[str, NDArray[np.generic]]], list[_RemainingRows]]:
    """Run a segment on whole batches and on remaining samples; its session is released then."""
    runner = GraphRunner(segment.proto)
    passed = [values | runner.run(values) for values in chained]
    return passed, [survivors.through(runner) for survivors in left]


class _RemainingRows(NamedTuple):
    """Samples of a batch that go on after a cut when the others have left."""

    rows: NDArray[np.intp]
    cut: str
    values: dict[str, NDArray[np.generic]]

    def through(self, runner: GraphRunner) -> _RemainingRows:
        """Run the next segment on the remaining samples; ModelError if that fails."""
        try:
            return self._replace(values=self.values | runner.run(self.values))
        except RuntimeError as error:
            reason = str(error)
            raise ModelError(f"{self._where()} cannot go on: {reason}; {_APART}") from error

    def check(self, wanted: NDArray[np.generic], answer: Answer, tolerance: float) -> None:
        """Compare with the source model's answers to these samples in the whole batch."""
        found, right = self.values[answer.output], wanted[self.rows]
        difference = compare(found, right, scales=Scales.of(wanted), answer=answer)
        if not difference.share <= tolerance:
            raise ModelError(
                f"{self._where()} have other answers, by {difference.describe()} "
                f"({tolerance:.0e} allowed); {_APART}"
            )

    def _where(self) -> str:
        rows = ", ".join(map(str, self.rows.tolist()))
        return f"after the cut `{self.cut}` samples {rows} of a batch, without the others,"


_APART = (
    "a value that is recomputed after the cut depends on the whole batch, such as its longest "
    "sample: let the model compute it for each sample separately, or build exits elsewhere "
    "(--exits)"
)


def _survivors(
    values: Mapping[str, NDArray[np.generic]], segment: SegmentModel
) -> Iterator[_RemainingRows]:
    """Yield samples that go on after a segment: one sample, then three samples.

    Other samples are chosen for each segment. ``values`` are graph inputs and the outputs of
    segments so far.
    """
    batch = len(values[segment.output])
    for count in {1, min(3, batch - 1)} - {0} if batch > 1 else ():
        rows = np.sort((segment.index + np.arange(count)) % batch)
        kept = {name: value[rows] for name, value in values.items()}
        yield _RemainingRows(rows, segment.output, kept)


def _run_alone(
    proto: onnx.ModelProto, fed: Sequence[Mapping[str, NDArray[np.generic]]]
) -> list[dict[str, NDArray[np.generic]]]:
    """Run a graph on some batches while no other graph is loaded, because each holds weights."""
    runner = GraphRunner(proto)
    return [runner.run(feeds) for feeds in fed]


def _diagnosis(
    model: SourceModel,
    segments: Sequence[SegmentModel],
    feeds: Mapping[str, NDArray[np.generic]],
    chained: Mapping[str, NDArray[np.generic]],
    tolerance: float,
) -> str:
    """Describe the first segment whose output differs from the same tensor in the source model."""
    exposed = copied(model.proto)
    known = {info.name: info for info in model.proto.graph.value_info}
    inner = [name for s in segments for name in s.outputs if name in known]
    exposed.graph.output.extend(known[name] for name in inner)
    wanted = GraphRunner(exposed).run(feeds)
    for segment in segments:
        for name in segment.outputs:
            if not relative_difference(chained[name], wanted[name]) <= tolerance:
                return f"the first that diverges is segment {segment.index}, at `{name}`"
    return "each segment is within tolerance alone, the differences add up"
