"""What operators cost by the shapes that they read, and which have multiply-adds at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

from offramp.compiler.graphs.graph import Operator, is_standard

FlopRule: TypeAlias = "Callable[[Operator, Sequence[tuple[int, ...]], float], float]"


def _convolution(weight: int) -> FlopRule:
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
