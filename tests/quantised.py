"""Copies of models: quantised, or standing for quantised ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from offramp.calibration.dataset import Dataset
from offramp.calibration.quantization import measure_ranges, quantize
from offramp.compiler.model import SourceModel


def quantised(model: SourceModel, samples: Dataset) -> bytes:
    """Give an int8 copy with Q/DQ pairs, of whatever worth."""
    graph = model.proto.SerializeToString()
    return quantize(graph, measure_ranges(graph, samples, threads=1))


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
