"""Differences that rounding alone may cause, by the precision that a model computes in."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from offramp.bundle import CpuFeatures
from offramp.calibration.precision.quantised_graphs import LEVELS_OF_16_BITS
from offramp.compiler.common.tensors import array_of

_log = logging.getLogger(__name__)


class Rounding(NamedTuple):
    """Differences that are not errors, relative to the scale of each value of an answer."""

    name: str
    """Name of the precision, for messages."""
    chained: float
    """Largest difference between a model and its pieces, which compute the same sums, but fuse
    operators differently."""
    batches: float
    """Largest difference of a row's answer between batches of different sizes, or after
    simplification: sums are then added in another order."""


SINGLE = Rounding("single precision", 1e-5, 1e-4)
HALF = Rounding("half precision", 1e-2, 1e-2)
"""Tolerances of ten times the step of a float16."""
BFLOAT = Rounding("bfloat16", 5e-2, 5e-2)
STEPS = Rounding("quantised to 8 bits", 5e-2, 5e-2)
"""Tolerances for quantised models, where a difference in the last bit may become a whole step of a
scale."""


def rounding_of(proto: onnx.ModelProto) -> Rounding:
    """Return the coarsest precision that an annotated model computes in."""
    kinds = {tensor.data_type for tensor in proto.graph.initializer}
    kinds |= {info.type.tensor_type.elem_type for info in proto.graph.value_info}
    if any("Quantize" in node.op_type or "QLinear" in node.op_type for node in proto.graph.node):
        return STEPS
    if TensorProto.BFLOAT16 in kinds:
        return BFLOAT
    return HALF if TensorProto.FLOAT16 in kinds else SINGLE


def warn_of_overflow(proto: onnx.ModelProto, cpu: CpuFeatures) -> None:
    """Warn if sums of products of a quantised model overflow on this CPU, but not on others."""
    if not cpu.saturates or rounding_of(proto) is not STEPS:
        return
    if not fits_16_bits(proto):
        _log.warning(
            "The model has int8 weights of 8 bits, and this CPU (%s) has no VNNI: sums of their "
            "products overflow in 16 bits here, and answers may depend on the batch size. "
            "Compile and serve it on CPUs with VNNI, or quantise it to weights of 7 bits "
            "(reduce_range=True in onnxruntime.quantization).",
            cpu.describe(),
        )


def fits_16_bits(proto: onnx.ModelProto) -> bool:
    """Return whether int8 weights are small: the sum of two products with uint8 fits 16 bits.

    Weights that are quantised in the graph are assumed to be larger.
    """
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    if any(n.op_type == "QuantizeLinear" and n.input[0] in weights for n in proto.graph.node):
        return False
    steps = (array_of(t) for t in weights.values() if t.data_type == TensorProto.INT8)
    return all(np.abs(s.astype(np.int16)).max(initial=0) <= LEVELS_OF_16_BITS for s in steps)
