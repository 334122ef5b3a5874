"""Changes of an exported file: quantised, rounded, converted to another opset, split in two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import version_converter

from offramp.engine.common.environment import cpu_features

Arrays = dict[str, NDArray[Any]]
Conversion = Callable[[Path, Arrays], None]
"""Changes a file in place; has some inputs of it to measure ranges with."""


def _quantised(operators: str) -> Conversion:
    def convert(path: Path, inputs: Arrays) -> None:
        from onnxruntime.quantization import QuantFormat, quantize_static

        source = path.with_name("float.onnx")
        path.rename(source)
        form = QuantFormat.QDQ if operators == "QDQ" else QuantFormat.QOperator
        # where sums of 8-bit weights overflow, fused or not fused makes another answer
        reduced = cpu_features().saturates is True
        quantize_static(source, path, _Reader(inputs), quant_format=form, reduce_range=reduced)

    return convert


class _Reader:
    """Yields inputs once, one sample at a time: the batch may be fixed to 1."""

    def __init__(self, inputs: Arrays) -> None:
        rows = len(next(iter(inputs.values())))
        self._batches = iter([{k: v[i : i + 1] for k, v in inputs.items()} for i in range(rows)])

    def get_next(self) -> Arrays | None:
        return next(self._batches, None)


def _dynamically_quantised(path: Path, inputs: Arrays) -> None:
    from onnxruntime.quantization import quantize_dynamic

    source = path.with_name("float.onnx")
    path.rename(source)
    quantize_dynamic(source, path)


def _halved(*, keeps_inputs: bool) -> Conversion:
    def convert(path: Path, inputs: Arrays) -> None:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        made = convert_float_to_float16(onnx.load(path), keep_io_types=keeps_inputs)
        onnx.save(made, path)
        if not keeps_inputs:
            for name, array in inputs.items():
                if array.dtype == np.float32:
                    inputs[name] = array.astype(np.float16)

    return convert


def _outside(path: Path, inputs: Arrays) -> None:
    # smaller ones are sizes and axes, which ONNX Runtime wants in the file itself
    how = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 256}
    onnx.save(onnx.load(path), path, **how)


def _at_opset(version: int) -> Conversion:
    def convert(path: Path, inputs: Arrays) -> None:
        onnx.save(version_converter.convert_version(onnx.load(path), version), path)

    return convert


OPSETS = (11, 13, 15, 17, 18, 20, 22, 24, 26)
CONVERSIONS: Mapping[str, Conversion] = {
    "QDQ int8": _quantised("QDQ"),
    "QOperator int8": _quantised("QOperator"),
    "dynamic int8": _dynamically_quantised,
    "fp16": _halved(keeps_inputs=False),
    "fp16 inside": _halved(keeps_inputs=True),
    "external data": _outside,
    **{f"opset {version}": _at_opset(version) for version in OPSETS},
}
