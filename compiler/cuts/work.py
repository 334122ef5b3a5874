"""Work of a model's operators: counted if their arithmetic is known, else measured.

Operators of custom libraries, and operators whose shapes cannot be inferred, have no count. Only
shares of the total work matter, so one operator without a count makes all counts useless: then ONNX
Runtime's profiler times every operator. The rules at the end count an operator's FLOPs from the
shapes of its inputs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import onnx

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import Dataflow, Operator, bodies, integer, is_standard
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.runtime_shapes import BodyScope, SizedType
from offramp.compiler.graphs.shapes import BATCH, concrete_shapes, symbolic_sizes

_BATCH = 2
"""Number of samples in a timed run."""
_RUNS = 7
"""Number of timed runs after one warm-up run; the median time is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """Cost of each operator of a model; all costs have the same unit."""

    costs: tuple[float, ...]
    """Costs by operator: FLOPs for one sample, or measured seconds of one run."""
    unknown: tuple[str, ...] = ()
    """Types of operators whose arithmetic is not known."""
    measured: bool = False
    """True if ``costs`` are measured times, because the FLOPs of some operator are not known."""


def work_of(proto: onnx.ModelProto, graph: Dataflow) -> OperatorWork:
    """Count the work of an annotated model, or measure it if something cannot be counted.

    If the model cannot be run, the result has the counts, and names the uncounted operators.
    """
    counted = count_flops(proto, graph)
    unknown = _unknown(graph, counted)
    if not unknown:
        return OperatorWork(costs=counted)
    try:
        times = _measure(proto)
    except (ModelError, RuntimeError):
        return OperatorWork(costs=counted, unknown=unknown)
    costs = [0.0 if graph.is_constant(op) else times.get(op.name, 0.0) for op in graph.operators]
    if not any(costs[op.index] for op in graph.operators if op.kind in unknown):
        return OperatorWork(
            costs=counted, unknown=unknown
        )  # ONNX Runtime reports functions under the names of their parts
    return OperatorWork(costs=tuple(costs), unknown=unknown, measured=True)


def _unknown(graph: Dataflow, counted: Sequence[float]) -> tuple[str, ...]:
    """Return the types of operators that do work but have no count, each type once."""
    found = (op for op in graph.changing if _is_unknown(op, counted[op.index]))
    return tuple(dict.fromkeys(op.kind for op in found))


def _is_unknown(op: Operator, counted: float) -> bool:
    if op.kind in HEAVY or op.has_body:
        # The operator's shapes are not known, or how often its body (inner graph) runs.
        return not counted and not _only_constants(op)
    return is_heavy(op)


def _only_constants(op: Operator) -> bool:
    """Return whether an operator's bodies (inner graphs) only select constants, such as scales."""
    inside = [node for body in bodies(op.proto) for node in body.node]
    return op.has_body and all(node.op_type == "Constant" for node in inside)


def _measure(proto: onnx.ModelProto) -> dict[str, float]:
    """Time operators by name, in seconds; RuntimeError or ModelError if the model cannot be run."""
    feeds = random_inputs(proto, _BATCH)
    with tempfile.TemporaryDirectory(prefix="offramp-work-") as folder:
        runner = GraphRunner(proto, profile=Path(folder) / "work")
        for _ in range(1 + _RUNS):
            runner.run(feeds)
        events = json.loads(runner.end_profile().read_text())
    times: dict[str, list[float]] = {}
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if event["cat"] == "Node" and name != event["name"]:
            times.setdefault(name, []).append(event["dur"] / 1e6)
    return {name: statistics.median(found[1:] or found) for name, found in times.items()}


FlopRule: TypeAlias = "Callable[[Operator, Sequence[tuple[int, ...]], float], float]"


def _convolution(weight: int) -> FlopRule:
    """Return the rule for convolutions: each output sums over a window of its group's channels."""
    return lambda _, operands, written: 2 * written * prod(operands[weight][1:])


def _transposed(_: Operator, operands: Sequence[tuple[int, ...]], __: float) -> float:
    """Return FLOPs: each input element is added to a window of its group's output channels."""
    return 2.0 * prod(operands[0]) * prod(operands[1][1:])


def _matmul(_: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    return 2 * written * (operands[0][-1] if operands[0] else 1)


def _gemm(op: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    axis = 0 if integer(op.proto, "transA") else -1
    return 2 * written * (operands[0][axis] if operands[0] else 1)


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
    """Return FLOPs: input and recurrent weights are applied once for each step of the sequence."""
    return 2.0 * prod(operands[0][:2]) * (prod(operands[1]) + prod(operands[2]))


def _attention(_: Operator, operands: Sequence[tuple[int, ...]], __: float) -> float:
    """Return FLOPs of scores and weighted sum; queries, keys and values are separate operands."""
    query, key = operands[0], operands[1]
    return 4.0 * prod(query) * (key[-2] if len(key) > 1 else 1)


def _packed_attention(op: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    """Return FLOPs of attention, and of the projection that ONNX Runtime's operator includes.

    ONNX's own operator has no projection.
    """
    if not op.proto.domain:
        return _attention(op, operands, written)
    tokens, weight = operands[0], operands[1]
    if len(tokens) < 3 or len(weight) < 2:
        return 0.0
    return 2.0 * prod(tokens) * weight[-1] + 4.0 * prod(tokens) * tokens[1]


RULES: Mapping[str, FlopRule] = {
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

HEAVY = frozenset(RULES)
"""Operator types with multiply-adds; operators of all other types are cheap."""
_CHEAP = frozenset(
    {"BiasGelu", "DequantizeLinear", "EmbedLayerNormalization", "FastGelu", "Gelu", "QLinearAdd",
     "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearLeakyRelu",
     "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
     "QuantizeLinear", "QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization",
     "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
)  # fmt: skip
"""Operators of ONNX Runtime that cost about one operation per output element."""


def is_heavy(op: Operator) -> bool:
    """Return whether an operator does much work, or might; all other operators are cheap."""
    if op.kind in HEAVY or op.has_body:
        return True
    return not is_standard(op.proto) and op.kind not in _CHEAP


SYMBOLIC_SIZE = 128
"""Size assumed for symbolic sizes other than the batch, for instance a sequence's length."""
_FALLBACK_SIZES = (64, 32, 16)
"""Sizes to try if inference fails at :data:`SYMBOLIC_SIZE`, for instance because a position table
is shorter."""

_Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


def count_flops(proto: onnx.ModelProto, graph: Dataflow) -> tuple[float, ...]:
    """Count the floating-point operations of each operator, a multiply-add counting as two.

    The batch is 1, and other symbolic sizes are :data:`SYMBOLIC_SIZE`. Operators that depend on no
    graph input have zero cost: a backend folds them when it loads the model. Operators without
    multiply-adds cost one operation for each element of their outputs.
    """
    two, three = (_numeric_types(proto, batch) for batch in (2, 3))
    costs = [_costs(proto, graph, types) for types in (two, three)]
    return tuple(np.nan_to_num([2 * a - b for a, b in zip(*costs, strict=True)]).tolist())


def _costs(
    proto: onnx.ModelProto, graph: Dataflow, types: Mapping[str, SizedType]
) -> Iterator[float]:
    """Yield the costs of operators, in order; NaN if the cost of a body is not known."""
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
    """Return the cost of one run of a body's operators."""
    return sum(_costs(body, Dataflow(body.graph), concrete_shapes(body, {})))


def _numeric_types(proto: onnx.ModelProto, batch: int) -> Mapping[str, SizedType]:
    """Return shapes with one number for all symbolic sizes: the one with most shapes known.

    Batch 1 is not used, because inference cannot tell it from a dimension to be broadcast. Costs
    are linear in the batch, and are extrapolated from batches of 2 and 3. If one size of a shape is
    still unknown, the assumed number is used for it.
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
