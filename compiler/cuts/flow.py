"""The main flow through a model, its gates, and cheap operators.

Apparate (3.1) attaches ramps at cut vertices: no edge may start before a ramp and enter the model
after it. By this definition a transformer has no cut vertex, since its attention mask enters every
layer. So the graph inputs are divided: the *main* inputs carry the data that is classified. Tensors
that depend only on the other inputs are *side*, and so are the operators that compute them: side
operators run again in every segment that needs them. Many models read their main input again in
every layer, for instance token ids for a mask; so cheap computations on main inputs may count as
side, too (:func:`cheap_operators`).

*Gates* are the tensors that all data passes. In most models one tensor carries all data between two
blocks (Apparate 3.1). Some models have long parallel branches (two towers, convolutions of several
widths, a decoder and its encoder). No single tensor carries all data there; a gate is then the set
of tensors that are still to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from offramp.compiler.cuts.work import HEAVY, is_heavy
from offramp.compiler.graphs.graph import Dataflow, Operator

SHAPE_KINDS = frozenset({"Shape", "Size"})
"""Operators that read only the sizes of their input; their input carries no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The main flow (see the module) for one choice of main inputs."""

    main_inputs: tuple[str, ...]
    steps: tuple[Operator, ...]
    """Operators on paths from a main input to the answer, in topological order."""
    gates: tuple[Gate, ...]
    last_use: dict[str, int]
    """For each main tensor, the index in ``steps`` of the last step that reads it."""
    side_use: dict[int, int]
    """For each side operator, by index, the last step that needs its value."""
    rereads: bool
    """True if main inputs may be read again after a gate, and by side operators."""
    search: SetSearch | None
    """Settings of the search for gates of several tensors, if there was one."""
    heavy_steps: tuple[int, ...]
    """Indices in ``steps`` of the operators that do the work."""
    flops_after: tuple[float, ...]
    """For each step, the cost of all steps after it."""


def trace(
    graph: Dataflow,
    costs: Sequence[float],
    main_inputs: tuple[str, ...],
    *,
    free_shapes: frozenset[int] = frozenset(),
    cheap: frozenset[int] | None = None,
    search: SetSearch | None = None,
) -> Flow:
    """Follow the main flow of a model with one output and find its gates, in linear time.

    ``costs`` are FLOPs per operator. ``free_shapes`` are the indices of ``Shape`` operators on
    inner tensors that carry no data, because graph inputs determine their values. With ``cheap``
    operators, main inputs may be read again anywhere: results of these operators are side. With a
    ``search``, gates may be sets of tensors, and steps are ordered for it.
    """
    split = _Division.of(graph, main_inputs, free_shapes, cheap)
    steps = split.steps
    reads = [tuple(split.carried(op)) for op in steps]
    if search is not None:
        places = arranged(steps, reads, costs, search)
        steps, reads = tuple(steps[i] for i in places), [reads[i] for i in places]
    sides = _SideSweep(graph, costs, split.main)
    most = 1 if search is None else search.most_tensors
    waiting = gates_of(steps, main_inputs, graph.outputs, reads, most)
    gates: list[Gate] = []
    for i in range(len(steps) - 1, -1, -1):
        if (here := waiting.get(i)) is not None:
            gates.append(
                Gate(
                    tensors=here.tensors,
                    step=i,
                    alone=here.alone,
                    side_inputs=here.inputs | sides.inputs,
                    side_flops=sides.flops,
                )
            )
        sides.add(steps[i], i)
    last_use = {t: i for i, read in enumerate(reads) for t in read}
    return Flow(
        main_inputs=tuple(name for name in main_inputs if name in last_use),
        steps=steps,
        gates=tuple(reversed(gates)),
        last_use=last_use,
        side_use=sides.last_step,
        rereads=cheap is not None,
        search=search,
        heavy_steps=tuple(i for i, op in enumerate(steps) if is_heavy(op)),
        flops_after=_costs_after([costs[op.index] for op in steps]),
    )


def _costs_after(costs: Sequence[float]) -> tuple[float, ...]:
    """Return, for each cost, the sum of the costs after it."""
    sums = tuple(accumulate(reversed(costs), initial=0.0))
    return sums[-2::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """Division of operators into the main flow and side operators (see the module)."""

    steps: tuple[Operator, ...]
    """Operators that the answer needs and that read a main tensor, or that are the first to do work
    on an input."""
    main: frozenset[str]
    """Tensors that the steps write. The main inputs are included if they may not be read again."""
    origins: Mapping[str, frozenset[str]]
    """For each cheaply computed tensor, the main inputs that it depends on; empty if they may not
    be read again."""

    @classmethod
    def of(
        cls,
        graph: Dataflow,
        main_inputs: tuple[str, ...],
        free_shapes: frozenset[int],
        cheap: frozenset[int] | None,
    ) -> _Division:
        main = set(main_inputs) if cheap is None else set()
        origins = {} if cheap is None else {name: frozenset([name]) for name in main_inputs}
        forward: list[Operator] = []
        for op in graph.operators:
            if op.kind in SHAPE_KINDS and (op.index in free_shapes or op.reads[0] in graph.inputs):
                continue
            behind = [origins[t] for t in op.reads if t in origins]
            if not main.isdisjoint(op.reads) or (behind and op.index not in (cheap or ())):
                forward.append(op)
                main.update(op.writes)
            elif behind:
                origins.update(dict.fromkeys(op.writes, frozenset().union(*behind)))
        needed = set(graph.outputs)
        steps: list[Operator] = []
        for op in reversed(forward):
            if not needed.isdisjoint(op.writes):
                steps.append(op)
                needed.update(op.reads)
        return cls(steps=tuple(reversed(steps)), main=frozenset(main), origins=origins)

    def carried(self, op: Operator) -> Iterator[str]:
        """Yield the tensors that a step waits for: its main operands.

        A step without main operands begins the flow: such a step waits for the main inputs that its
        operands are computed from.
        """
        main = [t for t in op.reads if t in self.main]
        yield from main
        if not main:
            yield from frozenset().union(*(self.origins.get(t, frozenset()) for t in op.reads))


_MOST_WEIGHTS = 0.01
"""Share of the elements of all constants that an operator may read and still count as cheap."""
_SMALL = 64
"""Constants of up to this number of elements are small in any model, such as axes or scalars."""
_MOST_WORK = 0.001
"""Matrix products of up to this share of the model's FLOPs are cheap, for instance in rotary
embeddings."""
_PRODUCTS = frozenset({"MatMul", "Einsum"})
_BROADCASTING = frozenset(
    {"And", "Or", "Xor", "Where", "Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
)
"""Operators that may read a constant as large as their output, such as a causal mask."""
_RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
                     "Multinomial", "Bernoulli", "Dropout"})  # fmt: skip


def cheap_operators(
    graph: Dataflow, costs: Sequence[float], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return indices of the operators that every segment should recompute rather than receive.

    Such operators do hardly any work, and read only small constants, so that no large table of
    embeddings is stored twice. ``sizes`` are the numbers of elements of constant tensors by name.
    """
    weights = sum(sizes.get(name, 0) for name in graph.constants)
    most_weights, most_work = max(_SMALL, _MOST_WEIGHTS * weights), _MOST_WORK * sum(costs)

    def is_cheap(op: Operator) -> bool:
        if op.has_body or op.kind in _RANDOM or op.proto.domain not in {"", "ai.onnx"}:
            return False
        if op.kind in HEAVY and (op.kind not in _PRODUCTS or costs[op.index] > most_work):
            return False
        most = max(most_weights, costs[op.index] if op.kind in _BROADCASTING else 0.0)
        return all(t in graph.variable or sizes.get(t, 0) <= most for t in op.reads)

    return frozenset(op.index for op in graph.operators if is_cheap(op))


class _SideSweep:
    """Side operators that the steps need, collected from the last step backwards."""

    def __init__(self, graph: Dataflow, costs: Sequence[float], main: frozenset[str]) -> None:
        self.last_step: dict[int, int] = {}
        self._graph = graph
        self._costs = costs
        self._main = main
        self.inputs: set[str] = set()
        self.flops = 0.0

    def add(self, op: Operator, step: int) -> None:
        pending = [t for t in op.reads if t not in self._main]
        while pending:
            tensor = pending.pop()
            source = self._graph.producers.get(tensor)
            if source is None:
                if tensor in self._graph.inputs:
                    self.inputs.add(tensor)
            elif source.index not in self.last_step:
                self.last_step[source.index] = step
                self.flops += self._costs[source.index]
                # a side operator reads a main tensor only for its sizes, or a main input
                inputs = self._graph.inputs
                pending += [t for t in source.reads if t not in self._main or t in inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Main tensors that together cut every path from the main inputs to the answer."""

    tensors: tuple[str, ...]
    """Tensors of the gate. The gate's step writes the first one, which is the first of no other
    gate."""
    step: int
    """Index of the operator before the gate in :attr:`~offramp.compiler.cuts.flow.Flow.steps`."""
    alone: bool
    """True if one tensor carries all data. Otherwise several tensors carry it, or a tensor and main
    inputs."""
    side_inputs: frozenset[str]
    """Graph inputs that the operators after the gate need in addition to the gate's tensors."""
    side_flops: float
    """Cost of the side operators that the operators after the gate need."""

    @property
    def tensor(self) -> str:
        """Tensor that the gate's step writes."""
        return self.tensors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Tensors that later steps have yet to read after a step."""

    tensors: tuple[str, ...]
    """Tensors that steps wrote; the first one was written by the step itself."""
    inputs: frozenset[str]
    """Main inputs that later steps have yet to read."""

    @property
    def alone(self) -> bool:
        """True if a single tensor, and no main input, has yet to be read."""
        return len(self.tensors) == 1 and not self.inputs


class SetSearch(NamedTuple):
    """Settings of the search for gates of several tensors."""

    most_tensors: int
    is_heavy: Callable[[Operator], bool]
    """Function that returns whether an operator does much work."""
    is_lazy: Callable[[Operator], bool]
    """Function that returns whether an operator, such as a view, should wait until it is needed."""
    interleaved: bool
    """True if steps that do work are ordered by their progress. Branches that the exporter wrote
    one after the other then advance side by side, so a set of tensors has information from all
    branches."""


def gates_of(
    steps: Sequence[Operator],
    main_inputs: Sequence[str],
    outputs: Sequence[str],
    reads: Sequence[Sequence[str]],
    most_tensors: int,
) -> dict[int, Unread]:
    """Find the steps after which few tensors are still to be read, and those tensors.

    ``reads`` are, by step, the main tensors and inputs that the step waits for. If a single tensor
    is left, all data passes through it, in any topological order, because every step is on a path
    to the answer. Sets of up to ``most_tensors`` tensors depend on the order of steps; each set
    holds everything that later sets are computed from. A set follows only after all main inputs
    were read: an exit before would lack some of them.
    """
    last = {tensor: i for i, read in enumerate(reads) for tensor in read}
    unread = {name for name in main_inputs if name in last}
    inputs = set(unread)
    ends: dict[int, list[str]] = {}
    for tensor, step in last.items():
        ends.setdefault(step, []).append(tensor)
    written: dict[str, None] = {}
    found: dict[int, Unread] = {}
    for i, op in enumerate(steps):
        unread.difference_update(reads[i])
        for tensor in ends.get(i, ()):
            written.pop(tensor, None)
            inputs.discard(tensor)
        new = [t for t in op.writes if t in last or t in outputs]
        written.update(dict.fromkeys(new))
        if not new or len(written) > most_tensors:
            continue
        others = [t for t in written if t != new[0]]
        here = Unread(tensors=(new[0], *others), inputs=frozenset(inputs))
        if here.alone or (most_tensors > 1 and not unread):
            found[i] = here
    return found


def arranged(
    steps: Sequence[Operator],
    reads: Sequence[Sequence[str]],
    costs: Sequence[float],
    search: SetSearch,
) -> tuple[int, ...]:
    """Return an order of steps (indices) in which few tensors wait between steps that do work.

    A cheap step, such as the pooling of a branch, comes as early as possible if that does not
    increase the number of waiting tensors; otherwise it comes when it is needed. ``reads`` are, by
    step, the main tensors that the step waits for; ``costs`` are by operator.
    """
    order = _Arrangement(steps, reads, search)
    worked = [i for i, op in enumerate(steps) if search.is_heavy(op)]
    if search.interleaved:
        worked.sort(key=_progress([costs[op.index] for op in steps], order.sources).__getitem__)
    for i in (*worked, *range(len(steps))):
        order.reach(i)
    return tuple(order.places)


class _Arrangement:
    """An order of steps: each comes when it is needed, or earlier if no more tensors wait then."""

    def __init__(
        self,
        steps: Sequence[Operator],
        reads: Sequence[Sequence[str]],
        search: SetSearch,
    ) -> None:
        self._steps, self._reads, self._search = steps, reads, search
        writer = {t: i for i, op in enumerate(steps) for t in op.writes}
        self.sources = [sorted({writer[t] for t in op.reads if t in writer}) for op in steps]
        self._readers: dict[str, list[int]] = {}
        for i, read in enumerate(reads):
            for tensor in read:
                self._readers.setdefault(tensor, []).append(i)
        self._left = {tensor: len(readers) for tensor, readers in self._readers.items()}
        self._missing = [len(sources) for sources in self.sources]
        self._done = [False] * len(steps)
        self.places: list[int] = []

    def reach(self, step: int) -> None:
        """Append a step, after all steps that it needs."""
        pending = [step]
        while pending:
            i = pending[-1]
            needed = [j for j in self.sources[i] if not self._done[j]]
            if needed:
                pending += reversed(needed)
                continue
            pending.pop()
            self._take(i)

    def _take(self, step: int) -> None:
        """Append a step, then cheap steps that are possible and leave no more tensors waiting."""
        ready = [step]
        while ready:
            i = ready.pop()
            if self._done[i]:
                continue
            self._done[i] = True
            self.places.append(i)
            for tensor in self._reads[i]:
                self._left[tensor] -= 1
            written = self._steps[i].writes
            behind = sorted({r for t in written for r in self._readers.get(t, ())})
            for reader in behind:
                self._missing[reader] -= 1
            ending = (t for t in self._reads[i] if self._left[t] == 1)
            among = {r for t in ending for r in self._readers[t]} | set(behind)
            ready += sorted((r for r in among if self._is_free(r)), reverse=True)

    def _is_free(self, step: int) -> bool:
        """Return whether a step is possible, does no work, and leaves no more tensors waiting."""
        op = self._steps[step]
        if self._done[step] or self._missing[step]:
            return False
        if self._search.is_heavy(op) or self._search.is_lazy(op):
            return False
        used = [t for t in op.writes if self._readers.get(t)]
        ended = [t for t in self._reads[step] if self._left[t] == 1]
        return len(used) <= len(ended)


def _progress(costs: Sequence[float], sources: Sequence[Collection[int]]) -> list[float]:
    """Return, by step, the finished share of the work of the longest path through the step."""
    before, after = [0.0] * len(costs), [0.0] * len(costs)
    for i, behind in enumerate(sources):
        before[i] = max((before[j] for j in behind), default=0.0) + costs[i]
    for i in range(len(costs) - 1, -1, -1):
        for j in sources[i]:
            after[j] = max(after[j], after[i] + costs[i])
    return [b / (b + a) if b + a else 0.0 for b, a in zip(before, after, strict=True)]
