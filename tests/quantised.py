"""Copies of models: quantised, or standing for quantised ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.quantised_graphs import LEVELS, LEVELS_OF_16_BITS
from offramp.calibration.precision.quantization import measure_ranges, quantize
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.common.environment import cpu_features


def quantised(model: SourceModel, samples: Dataset) -> bytes:
    """Return an int8 copy with Q/DQ pairs, of any quality; its answers are equal on all CPUs."""
    graph = model.proto.SerializeToString()
    copy = quantize(graph, measure_ranges(graph, samples, threads=1))
    return of_7_bits(copy) if cpu_features().saturates else copy


def of_7_bits(graph: bytes) -> bytes:
    """Make the steps of quantised weights coarser, so that no two products overflow 16 bits."""
    proto = onnx.ModelProto.FromString(graph)
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in constants:
            scale = constants[node.input[1]]
            wider = numpy_helper.to_array(scale) * np.float32(LEVELS / LEVELS_OF_16_BITS)
            scale.CopyFrom(numpy_helper.from_array(wider, scale.name))
    return proto.SerializeToString()


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rounds all weights to so many bits, a scale a tensor: the same operators, other answers."""

    bits: int

    def __call__(self, model: SourceModel, samples: Dataset | None = None) -> bytes:
        proto = onnx.ModelProto.FromString(model.proto.SerializeToString())
        for tensor in proto.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if value.dtype != np.float32 or value.ndim < 2:
                continue
            scale = max(float(np.abs(value).max()), 1e-9) / (2 ** (self.bits - 1) - 1)
            rounded = (np.round(value / scale) * scale).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
        return proto.SerializeToString()
