"""Cut points: where an exit can be attached, and why not elsewhere.

Apparate 3.1 and PAME 4.1: an exit belongs where one tensor carries everything onward, between
residual blocks and not inside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import onnx

from offramp.calibration.families import CutTensor, why_no_head
from offramp.compiler.flop_rules import is_heavy
from offramp.compiler.flow import SHAPE_KINDS, Flow, Gate, cheap_operators, trace
from offramp.compiler.graph import Dataflow, Operator
from offramp.compiler.layout import ChannelFinder
from offramp.compiler.shapes import BATCH, TensorType, declared_types
from offramp.compiler.work import OperatorWork, work_of

if TYPE_CHECKING:
    from offramp.compiler.model import SourceModel

MAX_SIDE_SHARE = 0.02
"""Share of the model's FLOPs that a later segment may have to recompute on the side."""
MIN_SHARE_LEFT = 0.005
"""An exit that skips less than this share of the model's FLOPs saves nothing."""

_VIEWS = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout", "Cast"}
)
"""The same values, rearranged: an exit rather sees them before, while there is a map to pool."""

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""These give a dimension of one or two directions; a view without it is tokens."""
_TOKENS = 3
"""Dimensions of [batch, tokens, width]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """A tensor through which everything passes that the rest of the model needs."""

    index: int
    """Position among the cut points of the model, from 0."""
    tensor: str
    dtype: str
    """numpy's name of the element type."""
    shape: tuple[int | str, ...]
    """Sizes; the first one is the batch."""
    operator: str
    """ONNX type of the operator that writes the tensor."""
    flops_share_before: float
    """Share of the model's FLOPs spent up to here, 0 to 1."""
    side_inputs: tuple[str, ...]
    """Graph inputs that later segments need beside the tensor, in the model's order."""
    channels: int | None = None
    """The dimension that holds the channels, where the operators around the tensor tell."""

    def as_heads_see_it(self) -> CutTensor:
        """Describe the tensor to what builds heads."""
        return CutTensor(
            name=self.tensor, dtype=self.dtype, shape=self.shape, channels=self.channels
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A place, or several alike, where no exit can be attached."""

    tensor: str
    """The tensor of the place, or the first of several."""
    operator: str
    """ONNX type of the operator that writes it."""
    places: int
    """How many tensors this stands for."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnalysis:
    """All cut points of a model in the order of its data flow, and what was rejected."""

    cuts: tuple[CutPoint, ...]
    rejected: tuple[Rejection, ...]
    main_inputs: tuple[str, ...]
    """Graph inputs whose data flow through the cut tensors."""
    total_flops: float
    """Of one sample, a multiply-add counting as two; 0 where that is not known."""
    unknown_work: tuple[str, ...] = ()
    """Types of operators whose FLOPs are not known. Shares are of time then, which was measured."""
    total_s: float | None = None
    """Time of one run of all operators, alone, where that is what shares are of."""
    rereads: bool = False
    """Whether main inputs are read again after cut tensors, and hence taken along."""


def find_cuts(model: SourceModel) -> CutAnalysis:
    """Find the cut points by dominance in the dataflow graph (Apparate 3.1, PAME 4.1).

    Each graph input in turn is tried as the only main one, then all together, then all together
    with leave to read them again. The choice that gives most cut points wins, ties going to one
    that reads no main input again, then to that which leaves least work on the side. There may be
    none: :func:`~offramp.compiler.placement.choose_candidates` is what raises then.
    """
    analysis = GraphAnalysis.of(model.proto)
    flow, kept, rejected = analysis.best()
    rejected = [*rejected, *analysis.shape_rejections(flow)]
    step_of = {t: i for i, op in enumerate(flow.steps) for t in op.writes}
    return CutAnalysis(
        cuts=tuple(analysis.cut_point(i, flow, gate) for i, gate in enumerate(kept)),
        rejected=tuple(sorted(rejected, key=lambda r: step_of.get(r.tensor, 0))),
        main_inputs=flow.main_inputs,
        total_flops=0.0 if analysis.work.measured else analysis.total,
        unknown_work=analysis.work.unknown,
        total_s=analysis.total if analysis.work.measured else None,
        rereads=flow.rereads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """A model's graph, types and costs, and the judgement of its gates."""

    graph: Dataflow
    types: dict[str, TensorType]
    layouts: ChannelFinder
    work: OperatorWork
    total: float
    """Of the work of all operators, in its unit."""
    turns: bool = False
    """Whether tensors are judged as they are with the batch in front, wherever it is."""

    @classmethod
    def of(cls, proto: onnx.ModelProto, *, turns: bool = False) -> GraphAnalysis:
        """Look at an annotated model with a single output."""
        graph = Dataflow(proto.graph)
        work = work_of(proto, graph)
        needed = graph.behind(graph.outputs, stop=frozenset())
        total = sum(work.costs[op.index] for op in needed)
        types = declared_types(proto)
        layouts = ChannelFinder.of(proto, graph, types)
        return cls(graph=graph, types=types, layouts=layouts, work=work, total=total, turns=turns)

    def best(
        self, *, free_shapes: frozenset[int] = frozenset()
    ) -> tuple[Flow, list[Gate], list[Rejection]]:
        """Choose the main inputs; return their flow, the gates kept and the rejections."""
        inputs = self.graph.inputs
        choices = [(name,) for name in inputs] + ([inputs] if len(inputs) > 1 else [])
        flows = [self.trace(c, free_shapes=free_shapes) for c in choices]
        flows.append(self.trace(inputs, free_shapes=free_shapes, rereads=True))
        judged = [(flow, *self.judge(flow)) for flow in flows]

        def merit(choice: tuple[Flow, list[Gate], list[Rejection]]) -> tuple[float, ...]:
            flow, kept, _ = choice
            side = sum(self.work.costs[i] for i in flow.side_use)
            return len(kept), len(flow.steps) > 0, not flow.rereads, -side

        return max(judged, key=merit)

    def trace(
        self,
        main_inputs: tuple[str, ...],
        *,
        free_shapes: frozenset[int] = frozenset(),
        rereads: bool = False,
    ) -> Flow:
        """Follow the flow from some main inputs, which may be read again if ``rereads``."""
        cheap = None
        if rereads:
            sizes = {
                name: prod(size for size in tensor.shape or () if isinstance(size, int))
                for name, tensor in self.types.items()
                if name not in self.graph.variable
            }
            cheap = cheap_operators(self.graph, self.work.costs, sizes)
        return trace(self.graph, self.work.costs, main_inputs, free_shapes=free_shapes, cheap=cheap)

    def judge(self, flow: Flow) -> tuple[list[Gate], list[Rejection]]:
        """Keep one gate per run of cheap steps, and say why the others fall."""
        kept: list[Gate] = []
        rejected = list(self._inside_blocks(flow))
        ends: dict[str, list[Gate]] = {}
        for run in _runs(flow):
            reason = self._useless(flow, run)
            if reason:
                ends.setdefault(reason, []).extend(run)
                continue
            reasons = {gate.tensor: self._unfit(gate) for gate in run}
            fit = [gate for gate in run if not reasons[gate.tensor]]
            if fit:
                kept.append(self._best_of(fit))
            else:
                rejected.append(self._rejection(run, reasons[run[-1].tensor]))
        rejected += [self._rejection(run, reason) for reason, run in ends.items()]
        return kept, rejected

    def _best_of(self, fit: Sequence[Gate]) -> Gate:
        """Choose the last that has its batch in front and is more than a view of another."""
        in_front = [g for g in fit if (self.types[g.tensor].shape or ("",))[0] == BATCH] or fit
        solid = [g for g in in_front if self.graph.producers[g.tensor].kind not in _VIEWS]
        if solid and self.graph.producers[solid[-1].tensor].kind in _RECURRENT:
            tokens = [g for g in in_front if len(self.types[g.tensor].shape or ()) == _TOKENS]
            return (tokens or solid)[-1]
        return (solid or in_front)[-1]

    def cut_point(self, index: int, flow: Flow, gate: Gate) -> CutPoint:
        """Describe a gate that was kept."""
        tensor = self.types[gate.tensor]
        return CutPoint(
            index=index,
            tensor=gate.tensor,
            dtype=tensor.dtype,
            shape=tensor.shape or (),
            operator=self.graph.producers[gate.tensor].kind,
            flops_share_before=1 - self._share_after(flow, gate),
            side_inputs=tuple(i for i in self.graph.inputs if i in gate.side_inputs),
            channels=self.layouts.channels_of(gate.tensor),
        )

    def shape_rejections(self, flow: Flow) -> Iterator[Rejection]:
        """Yield the cut points that are lost only because a shape crosses them."""
        inner = frozenset(op.index for op in self.graph.operators if op.kind in SHAPE_KINDS)
        if not inner:
            return
        free = self.trace(flow.main_inputs, free_shapes=inner, rereads=flow.rereads)
        gates = {gate.tensor for gate in flow.gates}
        for gate in self.judge(free)[0]:
            if gate.tensor not in gates:
                yield self._rejection(
                    [gate],
                    "a shape that is measured before this place is used after it, and cannot be "
                    "computed from the graph inputs; export the model with fixed sizes",
                )

    def _share_after(self, flow: Flow, gate: Gate) -> float:
        return flow.flops_after[gate.step] / self.total if self.total else 0.0

    def _useless(self, flow: Flow, run: Sequence[Gate]) -> str:
        if not flow.heavy_steps or flow.heavy_steps[0] > run[-1].step:
            return "no work is done yet, an exit here could know nothing"
        if self._share_after(flow, run[-1]) < MIN_SHARE_LEFT:
            return self._little_left()
        return ""

    def _little_left(self) -> str:
        kinds = ", ".join(f"`{kind}`" for kind in self.work.unknown)
        if not self.total:
            what = f"of {kinds}, and it could not be measured" if kinds else "of its operators"
            return f"how much work is left cannot be told: nothing is known {what}"
        how = ""
        if self.work.measured:
            how = f"; it was measured as time, since the work of {kinds} is not known"
        elif kinds:
            how = f"; that of {kinds} is not known, could not be measured, and counts nothing"
        return f"less than {MIN_SHARE_LEFT:.1%} of the work is left to save{how}"

    def _unfit(self, gate: Gate) -> str:
        tensor = self.types.get(gate.tensor)
        if tensor is None or tensor.shape is None:
            return "its shape is not known to shape inference"
        if not tensor.is_floating:
            return f"its elements are {tensor.dtype}, not floating-point numbers"
        order = batch_first(tensor.shape)
        if not order or (order[0] and not self.turns):
            sizes = ", ".join(map(str, tensor.shape))
            return (
                f"its shape is [{sizes}], and the first dimension has to be the batch; let the "
                "model keep it a dimension of its own there"
            )
        found = self.layouts.channels_of(gate.tensor)
        turned = CutTensor(
            name=gate.tensor,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape[axis] for axis in order),
            channels=None if found is None else order.index(found),
        )
        if lacks := why_no_head(turned):
            return lacks
        share = gate.side_flops / self.total if self.total else 0.0
        if share > MAX_SIDE_SHARE:
            names = ", ".join(f"`{name}`" for name in sorted(gate.side_inputs))
            return (
                f"{share:.0%} of the work would have to be done again after it, from {names}, at "
                f"most {MAX_SIDE_SHARE:.0%} may be; let the model add what it computes of them "
                "before this place"
            )
        return ""

    def _rejection(self, run: Sequence[Gate], reason: str) -> Rejection:
        tensor = run[0].tensor
        kind = self.graph.producers[tensor].kind
        return Rejection(tensor=tensor, operator=kind, places=len(run), reason=reason)

    def _inside_blocks(self, flow: Flow) -> Iterator[Rejection]:
        """Yield one rejection for each stretch with work in it that something bypasses."""
        previous = -1
        for gate in flow.gates:
            inside = flow.steps[previous + 1 : gate.step]
            if any(is_heavy(op) for op in inside):
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
        origin = f", computed of the input `{again[0]}`," if again else ""
        return Rejection(
            tensor=first.writes[0],
            operator=first.kind,
            places=len(inside),
            reason=f"inside a block: `{bypass}`{origin} also carries data past this place",
        )


def batch_first(shape: Sequence[int | str]) -> tuple[int, ...]:
    """Order the dimensions of a shape so that the batch is first; empty where there is none."""
    if len(shape) < 2 or list(shape).count(BATCH) != 1:
        return ()
    front = list(shape).index(BATCH)
    return (front, *(axis for axis in range(len(shape)) if axis != front))


def _runs(flow: Flow) -> Iterator[list[Gate]]:
    """Yield gates grouped so that only cheap steps lie between those of a group."""
    heavy = set(flow.heavy_steps)
    run: list[Gate] = []
    for gate in flow.gates:
        if run and not heavy.isdisjoint(range(run[-1].step + 1, gate.step + 1)):
            yield run
            run = []
        run.append(gate)
    if run:
        yield run
