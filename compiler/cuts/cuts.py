"""Cut points: places where an exit can be attached, and the reasons why others cannot.

Apparate 3.1 and PAME 4.1: an exit belongs where one tensor carries all data onward, between
residual blocks and not inside them. If a large part of the model has no such tensor, a few tensors
together are a cut point. :class:`CutAnalysis` holds the cut points, and the reasons why other
places are not cut points.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import onnx

from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.cuts.flow import SHAPE_KINDS, Flow, Gate, SetSearch, cheap_operators, trace
from offramp.compiler.cuts.gate_fitness import GateFitness
from offramp.compiler.cuts.work import OperatorWork, is_heavy
from offramp.compiler.graphs.graph import Dataflow, Operator
from offramp.compiler.graphs.shapes import TensorType

if TYPE_CHECKING:
    from offramp.compiler.graphs.source_model import SourceModel


MAX_CUT_TENSORS = 4
"""Largest number of tensors of a cut point."""
WIDE_STRETCH = 0.4
"""Cut points of several tensors are searched for only in a part of the model that has more than
this share of its work, and no cut point of a single tensor. Elsewhere they would only add exits
that are similar to others, at a higher cost."""
NEAR = 0.1
"""A set of tensors is dropped if a cut point of fewer tensors is within this share of the model's
FLOPs."""


def find_cuts(model: SourceModel, *, max_tensors: int = MAX_CUT_TENSORS) -> CutAnalysis:
    """Find the cut points by dominance in the dataflow graph (Apparate 3.1, PAME 4.1).

    Main inputs, main flow and side work are explained in :mod:`.flow`. Each graph input is tried as
    the only main input; then all inputs are, without and with repeated reads. The choice with the
    largest number of cut points wins. Among equals, a choice that reads no main input again is
    preferred, then one with less side work. If a large part of the work has no cut point, sets of
    up to ``max_tensors`` tensors are cut points, too. The result may have no cut point; then
    :func:`~offramp.compiler.cuts.exit_placement.choose_candidates` raises.
    """
    analysis = GraphAnalysis.of(model.proto, model.flow, max_tensors=max_tensors)
    flow, kept, rejected = analysis.best()
    rejected = [*rejected, *analysis.shape_rejections(flow)]
    step_of = {t: i for i, op in enumerate(flow.steps) for t in op.writes}
    return CutAnalysis(
        cuts=tuple(analysis.cut_point(i, flow, gate) for i, gate in enumerate(kept)),
        end=analysis.end(flow, kept),
        rejected=tuple(sorted(rejected, key=lambda r: step_of.get(r.tensor, 0))),
        main_inputs=flow.main_inputs,
        total_flops=0.0 if analysis.work.measured else analysis.fitness.total,
        unknown_work=analysis.work.unknown,
        total_s=analysis.fitness.total if analysis.work.measured else None,
        rereads=flow.rereads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """Possible data flows through a model, and the gates on them that can be cut points."""

    fitness: GateFitness
    max_tensors: int

    @classmethod
    def of(
        cls,
        proto: onnx.ModelProto,
        graph: Dataflow | None = None,
        *,
        transpose: bool = False,
        max_tensors: int = MAX_CUT_TENSORS,
    ) -> GraphAnalysis:
        """Analyse an annotated model with a single output.

        With ``transpose``, tensors are judged as if their batch were transposed to the front.
        """
        graph = graph or Dataflow(proto.graph)
        return cls(
            fitness=GateFitness.of(proto, graph, transpose=transpose), max_tensors=max_tensors
        )

    @property
    def graph(self) -> Dataflow:
        """Operators of the model."""
        return self.fitness.graph

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Types of the model's tensors."""
        return self.fitness.types

    @property
    def work(self) -> OperatorWork:
        """Costs of the model's operators."""
        return self.fitness.work

    def best(self, *, free_shapes: frozenset[int] = frozenset()) -> _Judged:
        """Choose the main inputs; return their flow, the gates kept, and the rejected tensors."""
        inputs = self.graph.inputs
        choices = [(name,) for name in inputs] + ([inputs] if len(inputs) > 1 else [])
        tries = [*((choice, False) for choice in choices), (inputs, True)]
        judged: list[_Judged] = []
        for main, rereads in tries:
            flow = self.trace(main, free_shapes=free_shapes, rereads=rereads)
            judged.append(_Judged(flow, *self.judge(flow)))
        best = max(judged, key=self._merit)
        if self.max_tensors == 1 or not any(self._wide_stretches(best.flow, best.kept)):
            return best
        as_good = [t for t, j in zip(tries, judged, strict=True) if len(j.kept) == len(best.kept)]
        for main, rereads in as_good:
            for interleaved in (False, True):
                search = SetSearch(self.max_tensors, is_heavy, self.fitness.is_lazy, interleaved)
                flow = self.trace(main, free_shapes=free_shapes, rereads=rereads, search=search)
                judged.append(_Judged(flow, *self.judge(flow)))
        return max(judged, key=self._merit)

    def _merit(self, choice: _Judged) -> tuple[float, ...]:
        """Return a sort key: first cut points of one tensor, then the gain by sets, then costs."""
        flow, kept, _ = choice
        alone = [gate for gate in kept if gate.alone]
        side = sum(self.work.costs[i] for i in flow.side_use)
        divided = self._widest(flow, alone) - self._widest(flow, kept)
        size = sum(self.fitness.size(gate)[1] for gate in kept)
        return (len(alone), len(flow.steps) > 0, round(divided, 1), not flow.rereads, -side, -size)

    def _widest(self, flow: Flow, kept: Sequence[Gate]) -> float:
        """Return the largest share of the model's work between two neighbouring gates."""
        return max(share for *_, share in self._stretches(flow, kept))

    def _stretches(self, flow: Flow, kept: Sequence[Gate]) -> Iterator[tuple[int, int, float]]:
        """Yield, for each part between gates, the steps before and after the part, and its work.

        Work is a share of the model's.
        """
        steps = [-1, *(gate.step for gate in kept), len(flow.steps)]
        left = [1.0, *(self.fitness.share_after(flow, gate) for gate in kept), 0.0]
        for (begin, end), (before, after) in zip(pairwise(steps), pairwise(left), strict=True):
            yield begin, end, before - after

    def _wide_stretches(self, flow: Flow, kept: Sequence[Gate]) -> Iterator[tuple[int, int]]:
        for begin, end, share in self._stretches(flow, kept):
            if share > WIDE_STRETCH:
                yield begin, end

    def trace(
        self,
        main_inputs: tuple[str, ...],
        *,
        free_shapes: frozenset[int] = frozenset(),
        rereads: bool = False,
        search: SetSearch | None = None,
    ) -> Flow:
        """Trace the flow from some main inputs. With ``rereads`` they may be read again later."""
        cheap = None
        if rereads:
            sizes = {
                name: prod(size for size in tensor.shape or () if isinstance(size, int))
                for name, tensor in self.types.items()
                if name not in self.graph.variable
            }
            cheap = cheap_operators(self.graph, self.work.costs, sizes)
        return trace(
            self.graph,
            self.work.costs,
            main_inputs,
            free_shapes=free_shapes,
            cheap=cheap,
            search=search,
        )

    def judge(self, flow: Flow) -> tuple[list[Gate], list[Rejection]]:
        """Keep one gate in each run of cheap steps, and reject the other tensors with reasons."""
        kept: list[Gate] = []
        rejected: list[Rejection] = []
        ends: dict[str, list[Gate]] = {}
        for run in _runs(flow, [gate for gate in flow.gates if gate.alone]):
            reason = self.fitness.useless(flow, run)
            if reason:
                ends.setdefault(reason, []).extend(run)
                continue
            reasons = {gate.tensor: self.fitness.unfit(gate) for gate in run}
            fit = [gate for gate in run if not reasons[gate.tensor]]
            if fit:
                kept.append(self.fitness.best_of(fit))
            else:
                rejected.append(self._rejection(run, reasons[run[-1].tensor]))
        rejected += [self._rejection(run, reason) for reason, run in ends.items()]
        sets = list(self._sets(flow, kept))
        rejected += self._inside_blocks(flow, sets)
        return sorted([*kept, *sets], key=attrgetter("step")), rejected

    def _sets(self, flow: Flow, kept: Sequence[Gate]) -> Iterator[Gate]:
        """Yield the smallest sets of tensors in large parts of the work that have no gate."""
        several = [gate for gate in flow.gates if not gate.alone]
        found: list[Gate] = []
        for begin, end in self._wide_stretches(flow, kept) if several else ():
            inside = [gate for gate in several if begin < gate.step < end]
            for run in _runs(flow, inside):
                fit = [gate for gate in run if not self.fitness.unfit(gate)]
                if fit and not self.fitness.useless(flow, run):
                    found.append(min(reversed(fit), key=self.fitness.size))
        every = sorted([*kept, *found], key=attrgetter("step"))
        done = [1 - self.fitness.share_after(flow, gate) for gate in every]
        for gate in found:
            here = 1 - self.fitness.share_after(flow, gate)
            near = every[bisect_right(done, here - NEAR) : bisect_left(done, here + NEAR)]
            if not any(g.alone or len(g.tensors) < len(gate.tensors) for g in near):
                yield gate

    def cut_point(self, index: int, flow: Flow, gate: Gate) -> CutPoint:
        """Describe a gate that was kept."""
        first, *others = map(self.fitness.cut_tensor, gate.tensors)
        return CutPoint(
            index=index,
            tensor=first.name,
            dtype=first.dtype,
            shape=first.shape,
            operator=self.graph.producers[gate.tensor].kind,
            flops_share_before=1 - self.fitness.share_after(flow, gate),
            side_inputs=tuple(i for i in self.graph.inputs if i in gate.side_inputs),
            channels=first.channels,
            beside=tuple(others),
        )

    def end(self, flow: Flow, kept: Sequence[Gate]) -> CutPoint | None:
        """Return the first cut point with hardly any work after it, if there is one.

        The model's own head begins there.
        """
        for run in _runs(flow, [gate for gate in flow.gates if gate.alone]):
            if self.fitness.is_end(flow, run):
                fit = [gate for gate in run if not self.fitness.unfit(gate)]
                return self.cut_point(len(kept), flow, fit[0]) if fit else None
        return None

    def shape_rejections(self, flow: Flow) -> Iterator[Rejection]:
        """Yield cut points that would be possible if no tensor's shape were used across them."""
        inner = frozenset(op.index for op in self.graph.operators if op.kind in SHAPE_KINDS)
        if not inner:
            return
        free = self.trace(
            flow.main_inputs,
            free_shapes=inner,
            rereads=flow.rereads,
            search=flow.search,
        )
        gates = {gate.tensor for gate in flow.gates}
        for gate in self.judge(free)[0]:
            if gate.tensor not in gates:
                yield self._rejection(
                    [gate],
                    "a shape that is measured before this place is used after it, and cannot be "
                    "computed from the graph inputs; export the model with fixed sizes",
                )

    def _rejection(self, run: Sequence[Gate], reason: str) -> Rejection:
        tensor = run[0].tensor
        kind = self.graph.producers[tensor].kind
        return Rejection(tensor=tensor, operator=kind, places=len(run), reason=reason)

    def _inside_blocks(self, flow: Flow, sets: Sequence[Gate]) -> Iterator[Rejection]:
        """Yield one rejection for each part between gates, with a tensor that bypasses the part.

        Parts that are cut at ``sets`` get no rejection.
        """
        previous = -1
        cuts = [cut.step for cut in sets]
        for gate in flow.gates:
            if not gate.alone:
                continue
            inside = flow.steps[previous + 1 : gate.step]
            divided = bisect_left(cuts, gate.step) > bisect_right(cuts, previous)
            if not divided and any(is_heavy(op) for op in inside):
                yield self._bypassed(flow, previous, inside)
            previous = gate.step

    def _bypassed(self, flow: Flow, before: int, inside: Sequence[Operator]) -> Rejection:
        first = inside[0]
        entries = flow.steps[before].writes if before >= 0 else flow.main_inputs
        born = dict.fromkeys(entries, before) | {
            t: before + 1 + i for i, op in enumerate(inside) for t in op.writes
        }
        bypass = max(born, key=lambda t: flow.last_use.get(t, -1) - born[t])
        maker = self.graph.producers.get(bypass)
        again = [t for t in flow.main_inputs if maker is not None and t in maker.reads]
        origin = f", computed from the input `{again[0]}`," if again else ""
        return Rejection(
            tensor=first.writes[0],
            operator=first.kind,
            places=len(inside),
            reason=f"inside a block: `{bypass}`{origin} also carries data past this place"
            + self._too_many(flow, born, before, len(inside)),
        )

    def _too_many(self, flow: Flow, born: Mapping[str, int], before: int, steps: int) -> str:
        """Return a note with the smallest number of tensors of a cut between two gates."""
        after = flow.flops_after[before] if before >= 0 else self.fitness.total
        if after - flow.flops_after[before + steps] <= WIDE_STRETCH * self.fitness.total:
            return ""
        begin, changes = before + 1, [0] * (steps + 1)
        for tensor, step in born.items():
            first = max(step - begin, 0)
            last = min(flow.last_use.get(tensor, step) - begin, steps)
            if first < last:
                changes[first] += 1
                changes[last] -= 1
        fewest = min(accumulate(changes[:steps]))
        if fewest <= self.max_tensors:
            return ""
        return (
            f"; at least {fewest} tensors do, and a cut point has at most {self.max_tensors} "
            "(--max-cut-tensors)"
        )


class _Judged(NamedTuple):
    """A flow, the gates on it that are cut points, and the rejected tensors."""

    flow: Flow
    kept: list[Gate]
    rejected: list[Rejection]


def _runs(flow: Flow, gates: Sequence[Gate]) -> Iterator[list[Gate]]:
    """Yield groups of gates with only cheap steps between the gates of a group."""
    heavy = set(flow.heavy_steps)
    run: list[Gate] = []
    for gate in gates:
        if run and not heavy.isdisjoint(range(run[-1].step + 1, gate.step + 1)):
            yield run
            run = []
        run.append(gate)
    if run:
        yield run


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """A tensor, or a few tensors, through which all data reaches the rest of the model."""

    index: int
    """Position among the cut points of the model, from 0."""
    tensor: str
    """Name of the tensor. For several tensors, the name of the one that is written last."""
    dtype: str
    """Element type, by numpy's name."""
    shape: tuple[int | str, ...]
    """Sizes of the tensor; the first one is the batch."""
    operator: str
    """ONNX type of the operator that writes the tensor."""
    flops_share_before: float
    """Share of the model's FLOPs before the cut, from 0 to 1."""
    side_inputs: tuple[str, ...]
    """Graph inputs that later segments need in addition to the tensor, in the model's order."""
    channels: int | None = None
    """Dimension of the channels, if the operators around the tensor show it."""
    beside: tuple[CutTensor, ...] = ()
    """Other tensors, if the cut point is a set of several."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the cut point."""
        return (self.tensor, *(other.name for other in self.beside))

    def head_input(self) -> CutTensor:
        """Return a description of the tensors for building heads."""
        return CutTensor(
            name=self.tensor,
            dtype=self.dtype,
            shape=self.shape,
            channels=self.channels,
            beside=self.beside,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A tensor, or several of one kind, where no exit can be attached."""

    tensor: str
    """Name of the tensor, or of the first one of several."""
    operator: str
    """ONNX type of the operator that writes it."""
    places: int
    """Number of tensors that this entry covers."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnalysis:
    """All cut points of a model in the order of its data flow, and the rejected tensors."""

    cuts: tuple[CutPoint, ...]
    rejected: tuple[Rejection, ...]
    main_inputs: tuple[str, ...]
    """Graph inputs whose data reaches the answer through the cut tensors."""
    total_flops: float
    """FLOPs of one sample, a multiply-add counting as two; 0 if they are not known."""
    unknown_work: tuple[str, ...] = ()
    """Types of operators whose FLOPs are not known. If there are any, shares are of measured
    time."""
    total_s: float | None = None
    """If shares are of time: the time in seconds of one run of all operators, each run alone."""
    end: CutPoint | None = None
    """First cut at a single tensor that has too little work after it for an exit. The model's own
    head begins there."""
    rereads: bool = False
    """True if main inputs are read again after cut tensors. They are then passed to every
    segment."""
