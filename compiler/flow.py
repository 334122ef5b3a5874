"""The main flow through a model, the gates that all of it passes through, and its operators' cost.

Apparate (3.1) attaches ramps at cut vertices: no edge may start before a ramp and enter the
model after it. Taken literally a transformer has none, since its attention mask enters every
layer. So the graph inputs are divided: the *main* ones carry the data that is classified, and
what is computed from the others alone is *side*, to be recomputed wherever it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias

import onnx

from offramp.compiler.graph import Dataflow, Operator, is_standard
from offramp.compiler.shapes import BATCH, concrete_shapes, symbolic_sizes

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
) -> Flow:
    """Follow the main flow of a model with one output and find its gates, in linear time.

    ``costs`` are FLOPs per operator. ``free_shapes`` are the indices of ``Shape`` operators on
    inner tensors whose value the graph inputs tell, and which hence carry nothing.
    """
    steps, main = _main_steps(graph, main_inputs, free_shapes)
    last_use = {t: i for i, op in enumerate(steps) for t in op.reads if t in main}
    sides = _SideSweep(graph, costs, main)
    passed = _gates(steps, main_inputs, graph.outputs, last_use)
    gates: list[Gate] = []
    for i in range(len(steps) - 1, -1, -1):
        if i in passed:
            inputs, flops = frozenset(sides.inputs), sides.flops
            gates.append(Gate(tensor=passed[i], step=i, side_inputs=inputs, side_flops=flops))
        sides.add(steps[i], i)
    return Flow(
        main_inputs=main_inputs,
        steps=steps,
        gates=tuple(reversed(gates)),
        last_use=last_use,
        side_use=sides.last_step,
        heavy_steps=tuple(i for i, op in enumerate(steps) if is_heavy(op)),
        flops_after=_costs_after([costs[op.index] for op in steps]),
    )


def _costs_after(costs: Sequence[float]) -> tuple[float, ...]:
    """Sum, for each of some costs, those that come after it."""
    sums = tuple(accumulate(reversed(costs), initial=0.0))
    return sums[-2::-1]


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
    two, three = (_numeric_shapes(proto, batch) for batch in (2, 3))
    return tuple(
        0.0 if graph.is_constant(op) else 2 * _cost(op, two) - _cost(op, three)
        for op in graph.operators
    )


def _numeric_shapes(proto: onnx.ModelProto, batch: int) -> _Shapes:
    """Shapes at the first of the stated sizes at which most of them are known.

    Not at batch 1, where inference cannot tell a batch from a dimension to be broadcast: costs
    are linear in the batch and are extrapolated from 2 and 3.
    """
    symbols = [s for s in symbolic_sizes(proto) if s != BATCH]
    best: _Shapes = {}
    for size in (SYMBOLIC_SIZE, *_FALLBACK_SIZES) if symbols else (SYMBOLIC_SIZE,):
        found = concrete_shapes(proto, {BATCH: batch} | dict.fromkeys(symbols, size))
        known = {
            name: tuple(d or 0 for d in shape)
            for name, (_, shape) in found.items()
            if shape is not None and None not in shape
        }
        if len(known) > len(best):
            best = known
    return best


def _cost(op: Operator, shapes: _Shapes) -> float:
    written = float(sum(prod(shapes.get(t, ())) for t in op.writes if t in shapes))
    rule = _RULES.get(op.kind)
    if rule is None:
        return written
    operands = [shapes.get(t, ()) for t in op.proto.input]
    return max(written, float(rule(op, operands, written)))


_Rule: TypeAlias = "Callable[[Operator, Sequence[tuple[int, ...]], float], float]"


def _convolution(weight: int) -> _Rule:
    """Every output element sums over a window of all input channels of its group."""
    return lambda _, operands, written: 2 * written * prod(operands[weight][1:])


def _transposed(_: Operator, operands: Sequence[tuple[int, ...]], __: float) -> float:
    """Every input element is spread over a window of all output channels of its group."""
    return 2.0 * prod(operands[0]) * prod(operands[1][1:])


def _matmul(_: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    return 2 * written * (operands[0][-1] if operands[0] else 1)


def _gemm(op: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    transposed = any(a.name == "transA" and a.i for a in op.proto.attribute)
    return 2 * written * (operands[0][0 if transposed else -1] if operands[0] else 1)


def _einsum(op: Operator, operands: Sequence[tuple[int, ...]], _: float) -> float:
    equation = next(a.s.decode() for a in op.proto.attribute if a.name == "equation")
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {
        letter: size
        for term, operand in zip(terms, operands, strict=False)
        for letter, size in zip(reversed(term.replace(".", "")), reversed(operand), strict=False)
    }
    return 2.0 * prod(sizes.values())


def _recurrent(_: Operator, operands: Sequence[tuple[int, ...]], __: float) -> float:
    """Input and recurrent weights are applied once per step of the sequence."""
    return 2.0 * prod(operands[0][:2]) * (prod(operands[1]) + prod(operands[2]))


def _attention(_: Operator, operands: Sequence[tuple[int, ...]], __: float) -> float:
    """Scores and weighted sum, for queries, keys, values as separate operands."""
    query, key = operands[0], operands[1]
    return 4.0 * prod(query) * (key[-2] if len(key) > 1 else 1)


def _packed_attention(op: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    """Projection to queries, keys and values by one weight, then attention; ONNX's has none."""
    if not op.proto.domain:
        return _attention(op, operands, written)
    tokens, weight = operands[0], operands[1]
    if len(tokens) < 3 or len(weight) < 2:
        return 0.0
    return 2.0 * prod(tokens) * weight[-1] + 4.0 * prod(tokens) * tokens[1]


_RULES: Mapping[str, _Rule] = {
    "Conv": _convolution(1),
    "FusedConv": _convolution(1),
    "ConvInteger": _convolution(1),
    "QLinearConv": _convolution(3),
    "DeformConv": _convolution(1),
    "ConvTranspose": _transposed,
    "MatMul": _matmul,
    "FusedMatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul,
    "DynamicQuantizeMatMul": _matmul,
    "MatMulNBits": _matmul,
    "Gemm": _gemm,
    "FusedGemm": _gemm,
    "QGemm": _gemm,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _packed_attention,
    "MultiHeadAttention": _attention,
    "GroupQueryAttention": _attention,
}

HEAVY = frozenset(_RULES)
"""Operator types with multiply-adds; all others are cheap steps between them."""
_CHEAP = frozenset(
    {"BiasGelu", "DequantizeLinear", "EmbedLayerNormalization", "FastGelu", "Gelu", "QLinearAdd",
     "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearLeakyRelu",
     "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
     "QuantizeLinear", "QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization",
     "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
)  # fmt: skip
"""Operators of ONNX Runtime's own that cost about one operation an element of their outputs."""


def is_heavy(op: Operator) -> bool:
    """Whether an operator does the work, or might: others are cheap steps between."""
    if op.kind in HEAVY or op.has_body:
        return True
    return not is_standard(op.proto) and op.kind not in _CHEAP
