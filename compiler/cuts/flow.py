"""The main flow through a model, the gates that all of it passes through, and its operators' cost.

Apparate (3.1) attaches ramps at cut vertices: no edge may start before a ramp and enter the
model after it. Taken literally a transformer has none, since its attention mask enters every
layer. So the graph inputs are divided: the *main* ones carry the data that is classified, and
what is computed from the others alone is *side*, to be recomputed wherever it is needed. Many
models read their main input again in every layer, for instance token ids that a mask is made of;
so what is cheap to compute from main inputs may count as side too (:func:`cheap_operators`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias, cast

import numpy as np
import onnx

from offramp.compiler.cuts.flop_rules import HEAVY, RULES, is_heavy
from offramp.compiler.cuts.gates import Gate, SetSearch, arranged, gates_of
from offramp.compiler.graphs.bodies import BodyScope, SizedType
from offramp.compiler.graphs.graph import Dataflow, Operator
from offramp.compiler.graphs.shapes import BATCH, concrete_shapes, symbolic_sizes

SHAPE_KINDS = frozenset({"Shape", "Size"})
"""Operators that read sizes only: an edge into them carries no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The main flow for one choice of main inputs."""

    main_inputs: tuple[str, ...]
    steps: tuple[Operator, ...]
    """Operators on paths from a main input to the answer, in topological order."""
    gates: tuple[Gate, ...]
    last_use: dict[str, int]
    """Main tensor to the index in ``steps`` of its last reader."""
    side_use: dict[int, int]
    """Index of a side operator to that of the last step which needs its value."""
    rereads: bool
    """Whether main inputs may be read again after a gate, and by side operators."""
    search: SetSearch | None
    """How gates of several tensors were looked for, if they were."""
    heavy_steps: tuple[int, ...]
    """Indices in ``steps`` of the operators that do the work."""
    flops_after: tuple[float, ...]
    """By step, the cost of the steps after it."""


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
    inner tensors whose value the graph inputs tell, and which hence carry nothing. With ``cheap``
    operators, main inputs may be read again anywhere: what these compute from them is side. With a
    ``search``, gates may be sets of tensors, and steps are arranged for it.
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
    """Sum, for each of some costs, those that come after it."""
    sums = tuple(accumulate(reversed(costs), initial=0.0))
    return sums[-2::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """The operators of the main flow, told from what is computed on the side."""

    steps: tuple[Operator, ...]
    """Those with a main operand, or the first to do work on an input, that matter in the end."""
    main: frozenset[str]
    """The tensors that they write, and the main inputs unless these may be read again."""
    origins: Mapping[str, frozenset[str]]
    """Main inputs that may be read again, and what is cheaply computed of them, by tensor."""

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
        """Yield what has to be there when a step begins: its main operands.

        A step without any begins the flow: it is the main inputs behind its operands that have
        to wait for it.
        """
        main = [t for t in op.reads if t in self.main]
        yield from main
        if not main:
            yield from frozenset().union(*(self.origins.get(t, frozenset()) for t in op.reads))


_MOST_WEIGHTS = 0.01
"""Share of the model's constants that an operator may read and still be recomputed."""
_SMALL = 64
"""Elements of a constant that is small in any model, such as axes, or a scalar."""
_MOST_WORK = 0.001
"""Share of the model's FLOPs up to which a product is cheap, as that of rotary embeddings is."""
_PRODUCTS = frozenset({"MatMul", "Einsum"})
_BROADCASTING = frozenset(
    {"And", "Or", "Xor", "Where", "Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
)
"""Operators that may read a constant as large as what they give, such as a causal mask."""
_RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
                     "Multinomial", "Bernoulli", "Dropout"})  # fmt: skip


def cheap_operators(
    graph: Dataflow, costs: Sequence[float], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Indices of the operators that every segment may rather compute again than be given.

    They do hardly any work, and read no weights but small constants: a table of embeddings is not
    to be there twice. ``sizes`` are the elements of constant tensors by name.
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
    """Collects, from the last step backwards, the side operators that the steps need."""

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


SYMBOLIC_SIZE = 128
"""What a symbolic size other than the batch counts as, for instance a sequence's length."""
_FALLBACK_SIZES = (64, 32, 16)
"""Tried where inference fails at 128, say because a table of positions is shorter."""

_Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


def count_flops(proto: onnx.ModelProto, graph: Dataflow) -> tuple[float, ...]:
    """Count the floating-point operations of each operator, a multiply-add counting as two.

    The batch is 1, and other symbolic sizes are :data:`SYMBOLIC_SIZE`. What depends on no graph
    input counts nothing: a backend folds it when it loads the model. Operators without
    multiply-adds count one per element of their outputs.
    """
    two, three = (_numeric_types(proto, batch) for batch in (2, 3))
    costs = [_costs(proto, graph, types) for types in (two, three)]
    return tuple(np.nan_to_num([2 * a - b for a, b in zip(*costs, strict=True)]).tolist())


def _costs(
    proto: onnx.ModelProto, graph: Dataflow, types: Mapping[str, SizedType]
) -> Iterator[float]:
    """Yield what operators cost, by index; NaN where that of a body is not known."""
    shapes = {n: s for n, (_, s) in types.items() if s is not None and None not in s}
    scope = BodyScope.of(proto, types)
    for op in graph.operators:
        if graph.is_constant(op):
            yield 0.0
        elif op.has_body:
            yield scope.flops(op.proto, _body_cost)
        else:
            yield _cost(op, cast("_Shapes", shapes))


def _body_cost(body: onnx.ModelProto) -> float:
    """Cost of a body's operators, one turn of it."""
    return sum(_costs(body, Dataflow(body.graph), concrete_shapes(body, {})))


def _numeric_types(proto: onnx.ModelProto, batch: int) -> Mapping[str, SizedType]:
    """Shapes at the first of the stated sizes at which most of them are known.

    Not at batch 1, where inference cannot tell a batch from a dimension to be broadcast: costs
    are linear in the batch and are extrapolated from 2 and 3. A single size that inference has
    lost counts as the size stated.
    """
    symbols = [s for s in symbolic_sizes(proto) if s != BATCH]
    most, best = -1, dict[str, SizedType]()
    for size in (SYMBOLIC_SIZE, *_FALLBACK_SIZES) if symbols else (SYMBOLIC_SIZE,):
        found = concrete_shapes(proto, {BATCH: batch} | dict.fromkeys(symbols, size))
        shapes = {name: told for name, told in found.items() if told[1] is not None}
        known = sum(None not in (shape or ()) for _, shape in shapes.values())
        if known > most:
            most, best = known, {n: (k, _sized(s or (), size)) for n, (k, s) in shapes.items()}
    return best


def _sized(shape: tuple[int | None, ...], size: int) -> tuple[int | None, ...]:
    return shape if shape.count(None) > 1 else tuple(size if d is None else d for d in shape)


def _cost(op: Operator, shapes: _Shapes) -> float:
    written = float(sum(prod(shapes.get(t, ())) for t in op.writes if t in shapes))
    rule = RULES.get(op.kind)
    if rule is None:
        return written
    operands = [shapes.get(t, ()) for t in op.proto.input]
    return max(written, float(rule(op, operands, written)))
