"""What rounding alone may change, by the precision that a model computes in."""

from __future__ import annotations

from typing import NamedTuple

import onnx
from onnx import TensorProto


class Rounding(NamedTuple):
    """Differences that are no fault, relative to the largest value of an answer."""

    name: str
    """Of the precision, for messages."""
    chained: float
    """Between a model and its pieces: sums are the same, fused differently."""
    batches: float
    """Between the same rows in batches of other sizes, and of a simplified model: other sums."""


SINGLE = Rounding("single precision", 1e-5, 1e-4)
HALF = Rounding("half precision", 1e-2, 1e-2)
"""Ten times the step of a float16."""
BFLOAT = Rounding("bfloat16", 5e-2, 5e-2)
STEPS = Rounding("quantised to 8 bits", 5e-2, 5e-2)
"""A difference in the last bit becomes one step of a scale."""


def rounding_of(proto: onnx.ModelProto) -> Rounding:
    """Tell the coarsest precision that an annotated model computes in."""
    kinds = {tensor.data_type for tensor in proto.graph.initializer}
    kinds |= {info.type.tensor_type.elem_type for info in proto.graph.value_info}
    if any("Quantize" in node.op_type or "QLinear" in node.op_type for node in proto.graph.node):
        return STEPS
    if TensorProto.BFLOAT16 in kinds:
        return BFLOAT
    return HALF if TensorProto.FLOAT16 in kinds else SINGLE
