"""Documented behaviour of 16-bit floats equals ONNX Runtime's."""

from __future__ import annotations

import platform

import pytest
from benchmarks.precision import computes_natively, half_precision
from onnx import TensorProto


def test_float32_is_computed_in_float32() -> None:
    assert computes_natively(TensorProto.FLOAT)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have kernels of float16")
def test_x86_has_no_kernels_of_16_bits() -> None:
    assert half_precision() == {"float16": False, "bfloat16": False}
