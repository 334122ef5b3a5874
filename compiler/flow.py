"""The main flow through a model, and the gates that all of it passes through.

Apparate (3.1) attaches ramps at cut vertices: no edge may start before a ramp and enter the
model after it. Taken literally a transformer has none, since its attention mask enters every
layer. So the graph inputs are divided: the *main* ones carry the data that is classified, and
what is computed from the others alone is *side*, to be recomputed wherever it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offramp.compiler.flops import HEAVY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offramp.compiler.graph import Dataflow, Operator

SHAPE_KINDS = frozenset({"Shape", "Size"})
"""Operators that read sizes only: an edge into them carries no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A main tensor that every path from the main inputs to the answer passes through."""

    tensor: str
    step: int
    """Index in :attr:`Flow.steps` of the operator that writes it."""
    side_inputs: frozenset[str]
    """Graph inputs that the operators after it need besides the tensor."""
    side_flops: float
    """Cost of the side operators that the operators after it need."""


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

    def heavy_steps(self) -> tuple[int, ...]:
        """Indices in ``steps`` of the operators that do the work."""
        return tuple(i for i, op in enumerate(self.steps) if op.kind in HEAVY or op.has_body)


def trace(
    graph: Dataflow,
    costs: Sequence[float],
    main_inputs: tuple[str, ...],
    *,
    free_shapes: frozenset[int] = frozenset(),
) -> Flow:
    """Follow the main flow and find its gates, in time linear in the size of the graph.

    Args:
        graph: The model, with one output.
        costs: FLOPs per operator.
        main_inputs: Graph inputs whose data are followed; those not named are side inputs.
        free_shapes: Indices of ``Shape`` operators on inner tensors whose value can be had
            from the graph inputs, and which hence carry nothing.
    """
    steps, main = _main_steps(graph, main_inputs, free_shapes)
    last_use = {t: i for i, op in enumerate(steps) for t in op.reads if t in main}
    sides = _SideSweep(graph, costs, main)
    passed = _gates(steps, main_inputs, graph.outputs, last_use)
    gates: list[Gate] = []
    for i in range(len(steps) - 1, -1, -1):
        if i in passed:
            gates.append(sides.gate(passed[i], i))
        sides.add(steps[i], i)
    return Flow(
        main_inputs=main_inputs,
        steps=steps,
        gates=tuple(reversed(gates)),
        last_use=last_use,
        side_use=sides.last_step,
    )


def _main_steps(
    graph: Dataflow, main_inputs: tuple[str, ...], free_shapes: frozenset[int]
) -> tuple[tuple[Operator, ...], frozenset[str]]:
    """Operators with a main operand that matter for the answer, and all main tensors."""
    main = set(main_inputs)
    forward: list[Operator] = []
    for op in graph.operators:
        sizes_only = op.kind in SHAPE_KINDS and (
            op.index in free_shapes or op.reads[0] in graph.inputs
        )
        if not sizes_only and not main.isdisjoint(op.reads):
            forward.append(op)
            main.update(op.writes)
    needed = set(graph.outputs)
    steps: list[Operator] = []
    for op in reversed(forward):
        if not needed.isdisjoint(op.writes):
            steps.append(op)
            needed.update(op.reads)
    return tuple(reversed(steps)), frozenset(main)


def _gates(
    steps: Sequence[Operator],
    main_inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    last_use: dict[str, int],
) -> dict[int, str]:
    """Steps after which a single main tensor is still to be read, and that tensor.

    Every operator here lies on a path to the answer, so it comes either before or after a
    tensor that all paths share, whatever the topological order: counting suffices.
    """
    waiting = {t for t in main_inputs if t in last_use}
    passed: dict[int, str] = {}
    for i, op in enumerate(steps):
        waiting.difference_update([t for t in op.reads if last_use.get(t) == i])
        waiting.update(t for t in op.writes if t in last_use or t in outputs)
        if len(waiting) == 1:
            (tensor,) = waiting
            if tensor in op.writes:
                passed[i] = tensor
    return passed


class _SideSweep:
    """Collects, from the last step backwards, the side operators that the steps need."""

    def __init__(self, graph: Dataflow, costs: Sequence[float], main: frozenset[str]) -> None:
        self.last_step: dict[int, int] = {}
        self._graph = graph
        self._costs = costs
        self._main = main
        self._inputs: set[str] = set()
        self._flops = 0.0

    def add(self, op: Operator, step: int) -> None:
        """Take in what one more step needs."""
        pending = [t for t in op.reads if t not in self._main]
        while pending:
            tensor = pending.pop()
            source = self._graph.producers.get(tensor)
            if source is None:
                if tensor in self._graph.inputs:
                    self._inputs.add(tensor)
            elif source.index not in self.last_step:
                self.last_step[source.index] = step
                self._flops += self._costs[source.index]
                pending.extend(self._side_reads(source))

    def _side_reads(self, op: Operator) -> list[str]:
        """What a side operator reads: a main tensor only for its sizes, or a main input."""
        return [t for t in op.reads if t not in self._main or t in self._graph.inputs]

    def gate(self, tensor: str, step: int) -> Gate:
        """Describe a gate given all steps after it."""
        return Gate(
            tensor=tensor, step=step, side_inputs=frozenset(self._inputs), side_flops=self._flops
        )
