"""The model in pieces: candidates for exits, the mask, and one model for each segment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from offramp.bundle import Segment, TensorSpec
from offramp.calibration.families import CutTensor
from offramp.compiler.cuts import CutAnalysis, CutPoint, find_cuts
from offramp.compiler.errors import (
    ModelError,
    NoCutPointError,
    UnknownCutPointError,
    VerificationError,
)
from offramp.compiler.graph import Dataflow, copied
from offramp.compiler.model import SourceModel
from offramp.compiler.options import CompileOptions
from offramp.compiler.runtime import GraphRunner, relative_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """The model in pieces, as the later steps need them."""

    model: SourceModel
    cuts: tuple[CutTensor, ...]
    """What the exit after segment i would read; one less than there are segments."""
    segments: tuple[SegmentModel, ...]
    graphs: tuple[bytes, ...]
    """The segments, serialised."""
    front: SourceModel | None = None
    """In a cascade the quantised model, which all segments but the last are of."""

    @property
    def versions(self) -> dict[str, int]:
        """Of operators and file format, of the segments that exits follow."""
        return (self.front or self.model).versions

    def tolerance(self, options: CompileOptions) -> float:
        """Give the relative difference allowed between chained segments and what was cut."""
        return options.tolerance if self.front is None else max(options.tolerance, INT8_TOLERANCE)


def slice_model(model: SourceModel, options: CompileOptions) -> Sliced:
    """Cut the model at its candidates.

    CompileError if there are no cut points, or the user named one or a mask that does not exist.
    """
    analysis = find_cuts(model)
    points = choose_candidates(analysis, limit=options.candidates, exits=options.exits or None)
    cuts = cut_tensors(model, analysis, points, options)
    segments = split(model, points)
    graphs = tuple(s.proto.SerializeToString() for s in segments)
    return Sliced(model=model, cuts=cuts, segments=segments, graphs=graphs)


def cut_tensors(
    model: SourceModel, analysis: CutAnalysis, points: Sequence[CutPoint], options: CompileOptions
) -> tuple[CutTensor, ...]:
    """Describe what exits at some cut points read; ModelError if ``--mask`` fits none of them."""
    mask = find_mask(model.inputs, analysis.main_inputs, options.mask)
    cuts = tuple(_cut_tensor(point, mask) for point in points)
    if options.mask is not None and not any(cut.mask for cut in cuts):
        shapes = "; ".join(f"{cut.name}: [{', '.join(map(str, cut.shape))}]" for cut in cuts)
        raise ModelError(
            f"--mask {options.mask!r} fits no exit: none reads [batch, tokens, width] with as "
            f"many tokens as the mask; they read {shapes}"
        )
    return cuts


def _cut_tensor(point: CutPoint, mask: TensorSpec | None) -> CutTensor:
    cut = point.as_heads_see_it()
    if mask is None or cut.form != "tokens" or cut.shape[1] != mask.shape[1]:
        return cut
    return replace(cut, mask=mask.name, mask_dtype=mask.dtype)


DEFAULT_LIMIT = 12
"""Exits to build at most; PAME 5.2 finds eleven blocks to be enough."""
_SHOWN = 5
_DENSITY = 1.5
"""Exponent of the marks; 1 spaces candidates evenly."""


def choose_candidates(
    analysis: CutAnalysis, *, limit: int = DEFAULT_LIMIT, exits: Sequence[str | int] | None = None
) -> tuple[CutPoint, ...]:
    """Choose the cut points to build exits at, in the order of the data flow, at least one.

    At most ``limit`` are kept, spread over the cost (PAME 5.2). ``exits`` is the user's own list,
    of tensor names or indices; it wins over ``limit``.

    Raises:
        NoCutPointError: The model has no cut point.
        UnknownCutPointError: ``exits`` names something that is no cut point.
        ValueError: ``limit`` is not positive, or ``exits`` is empty.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    if not analysis.cuts:
        raise NoCutPointError(_why_none(analysis))
    if exits is not None:
        if not exits:
            raise ValueError("exits is empty, expected at least one cut point")
        wanted = {_find(analysis, item).index for item in exits}
        return tuple(cut for cut in analysis.cuts if cut.index in wanted)
    return _thinned(analysis.cuts, limit)


def _thinned(cuts: Sequence[CutPoint], limit: int) -> tuple[CutPoint, ...]:
    """Keep the cut points nearest to some shares of the cost, denser towards the start, none twice.

    The marks are (i/(limit+1))^1.5: neither a mark at the start nor one at the end saves anything.
    PAME spaces them evenly; but most samples leave at the first exits, and what those leave
    behind is where time is saved: on the Fashion-MNIST example a first exit at 4 % of the model
    instead of 8 % still answers 61 % of the samples.
    """
    if len(cuts) <= limit:
        return tuple(cuts)
    chosen: list[CutPoint] = []
    start = 0
    for i in range(limit):
        mark = ((i + 1) / (limit + 1)) ** _DENSITY
        window = cuts[start : len(cuts) - (limit - i - 1)]
        best = min(window, key=lambda cut: abs(cut.flops_share_before - mark))
        start = best.index + 1
        chosen.append(best)
    return tuple(chosen)


def _find(analysis: CutAnalysis, item: str | int) -> CutPoint:
    """Look up one entry of the user's list; digits are an index, unless they are a name."""
    names = [cut.tensor for cut in analysis.cuts]
    if item in names:
        return analysis.cuts[names.index(str(item))]
    if str(item).isdecimal() and int(item) < len(names):
        return analysis.cuts[int(item)]
    near = difflib.get_close_matches(str(item), names, n=_SHOWN, cutoff=0.0)
    reasons = [r.reason for r in analysis.rejected if r.tensor == item]
    places = {cut.tensor: cut.index for cut in analysis.cuts}
    raise UnknownCutPointError(
        f"no cut point {item!r}; indices run from 0 to {len(names) - 1}, the nearest names are "
        + ", ".join(f"{name!r} ({places[name]})" for name in near)
        + (f"; {item!r} was rejected: {reasons[0]}" if reasons else "")
    )


def _why_none(analysis: CutAnalysis) -> str:
    reasons = [f"`{r.tensor}` ({r.operator}): {r.reason}" for r in analysis.rejected[:_SHOWN]]
    return (
        "the model has no cut point, a place where one tensor carries everything onward, with "
        "work before and after it. " + ("Rejected: " + "; ".join(reasons) if reasons else "")
    ).strip()


def find_mask(
    inputs: Sequence[TensorSpec], main_inputs: Sequence[str], named: str | None
) -> TensorSpec | None:
    """Find the mask [batch, tokens]: the one that the user named, or the one side input called so.

    It is 1 where a token counts and 0 where it pads. ModelError if the input that was named is not
    there, or is not [batch, tokens].
    """
    shaped = {spec.name: spec for spec in inputs if len(spec.shape) == 2}
    if named is not None:
        if named not in shaped:
            known = "; ".join(spec.describe() for spec in inputs)
            raise ModelError(
                f"--mask {named!r} is not an input of shape [batch, tokens]; inputs are {known}"
            )
        return shaped[named]
    found = [s for n, s in shaped.items() if "mask" in n.lower() and n not in main_inputs]
    return found[0] if len(found) == 1 else None


VERIFIED_SAMPLES = 64
"""Calibration samples that chained segments and what was cut must agree on."""
SOURCE = "source.onnx"
"""The unmodified model's file in a bundle."""
TOLERANCE = 1e-5
"""Relative difference allowed between chained segments and source: float32 sums in another
order, as layouts and fusions differ at the borders."""
INT8_TOLERANCE = 0.05
"""The same for segments of a quantised model: where sums in another order round to another of 255
steps, the answer moves by a step too."""


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
    is_source: bool = False
    """Whether it is the whole source model, the last of a cascade."""

    def described(self) -> Segment:
        """Describe the segment as a bundle does."""
        return Segment(
            index=self.index,
            file=SOURCE if self.is_source else f"segments/{self.index:02d}.onnx",
            inputs=self.inputs,
            output=self.output,
            flops_share=self.flops_share,
        )


def split(model: SourceModel, cuts: Sequence[CutPoint]) -> tuple[SegmentModel, ...]:
    """Slice the model at ``cuts``, which are in the order of the data flow.

    Gives one segment more than there are cut points. Chained they compute what the model does,
    each taking the side inputs at its own, possibly shrunk, batch.
    """
    ends = [cut.tensor for cut in cuts] + [model.answer.output]
    shares = np.diff([0.0, *(cut.flops_share_before for cut in cuts), 1.0])
    shared = {name for cut in cuts for name in cut.side_inputs}
    graph = Dataflow(model.proto.graph)
    surgeon = gs.import_onnx(model.proto)
    segments: list[SegmentModel] = []
    for index, (end, share) in enumerate(zip(ends, shares.tolist(), strict=True)):
        start = ends[index - 1] if index else None
        names, inputs = _extent(graph, start, end, shared)
        proto = _extract(surgeon, names, inputs, end, f"{model.name}/{index}")
        made = SegmentModel(index=index, proto=proto, inputs=inputs, output=end, flops_share=share)
        segments.append(made)
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
    flow = Dataflow(proto.graph)
    known = {*flow.producers, *flow.constants, *flow.inputs}
    free = {t for op in flow.operators for t in op.reads} - known
    if free:
        raise VerificationError(
            f"{proto.graph.name} reads {sorted(free)}, which nothing provides; this is a defect, "
            "report it with the model"
        )
    onnx.checker.check_model(proto)
    return proto


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

    Gives the largest difference found. VerificationError names the first segment that diverges,
    beyond ``tolerance`` or with a value that is no number.
    """
    source = GraphRunner(model.proto)
    runners = [GraphRunner(segment.proto) for segment in segments]
    answer = model.answer.output
    worst = 0.0
    for size in batch_sizes:
        feeds = {k: v[np.arange(size) % len(v)] for k, v in samples.items()}
        wanted = source.run(feeds)[answer]
        chained: dict[str, NDArray[np.generic]] = dict(feeds)
        for runner in runners:
            chained |= runner.run(chained)
        difference = relative_difference(chained[answer], wanted)
        if not difference <= tolerance:
            raise VerificationError(
                f"chained segments differ from the source model by {difference:.1e} of its "
                f"largest value at batch {size}, allowed are {tolerance:.1e}; "
                + _diagnosis(model, segments, feeds, chained, tolerance)
            )
        worst = max(worst, difference)
    return worst


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
