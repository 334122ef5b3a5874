"""Floating-point operations of each operator, a multiply-add counting as two."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

from offramp.compiler.shapes import BATCH, concrete_shapes, symbolic_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import onnx

    from offramp.compiler.graph import Dataflow, Operator

SYMBOLIC_SIZE = 128
"""What a symbolic size other than the batch counts as, for instance a sequence's length."""
_FALLBACK_SIZES = (64, 32, 16)
"""Tried where inference fails at 128, say because a table of positions is shorter."""

_Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


def count_flops(proto: onnx.ModelProto, graph: Dataflow) -> tuple[float, ...]:
    """Count per operator, at batch 1 and :data:`SYMBOLIC_SIZE` for other symbolic sizes.

    What depends on no graph input counts nothing: a backend folds it when it loads the model.
    Operators without multiply-adds count one per element of their outputs.

    Returns:
        One number per operator, in the order of ``graph.operators``.
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


def _packed_attention(_: Operator, operands: Sequence[tuple[int, ...]], __: float) -> float:
    """Projection to queries, keys and values by one weight, then attention."""
    tokens, weight = operands[0], operands[1]
    if len(tokens) < 3 or len(weight) < 2:
        return 0.0
    return 2.0 * prod(tokens) * weight[-1] + 4.0 * prod(tokens) * tokens[1]


def _standard_or_packed(op: Operator, operands: Sequence[tuple[int, ...]], written: float) -> float:
    rule = _packed_attention if op.proto.domain else _attention
    return rule(op, operands, written)


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
    "Gemm": _gemm,
    "FusedGemm": _gemm,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _standard_or_packed,
    "MultiHeadAttention": _attention,
    "GroupQueryAttention": _attention,
}

HEAVY = frozenset(_RULES)
"""Operator types with multiply-adds; all others are cheap steps between them."""
