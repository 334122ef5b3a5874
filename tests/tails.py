"""Classifiers with random operators between their activation and their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from tests.models import Builder

INPUTS: Final = 16
_END: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor [batch, width] under way to the output."""

    name: str
    width: int
    top: float = 1.0
    """Largest value that it may have."""


Step = Callable[[Builder, Made], Made]


def _same(kind: str, *constants: float, top: Callable[[float], float] = lambda top: top) -> Step:
    def step(b: Builder, x: Made) -> Made:
        values = [b.constant(np.array(value, np.float32)) for value in constants]
        return Made(b.node(kind, x.name, *values), x.width, top(x.top))

    return step


def _complement(b: Builder, x: Made) -> Made:
    return Made(b.node("Sub", b.constant(np.array(x.top, np.float32)), x.name), x.width, x.top)


def _with_complement(b: Builder, x: Made) -> Made:
    other = _complement(b, x)
    return Made(b.node("Concat", other.name, x.name, axis=1), 2 * x.width, x.top)


def _quantised(b: Builder, x: Made) -> Made:
    scale = b.constant(np.array(x.top / 255, np.float32))
    zero = b.constant(np.array(0, np.uint8))
    steps = b.node("QuantizeLinear", x.name, scale, zero)
    return Made(b.node("DequantizeLinear", steps, scale, zero), x.width, x.top)


def _rounded(b: Builder, x: Made) -> Made:
    many = b.constant(np.array(50, np.float32))
    whole = b.node("Round", b.node("Mul", x.name, many))
    return Made(b.node("Div", whole, many), x.width, x.top + 0.01)


def _masked(b: Builder, x: Made) -> Made:
    first = b.constant(np.arange(x.width) == 0)
    return Made(b.node("Where", first, b.constant([-1.0], np.float32), x.name), x.width, x.top)


def _reversed(b: Builder, x: Made) -> Made:
    order = b.constant(np.arange(x.width)[::-1].copy(), np.int64)
    return Made(b.node("Gather", x.name, order, axis=1), x.width, x.top)


def _halved(b: Builder, x: Made) -> Made:
    half = b.node("Cast", x.name, to=TensorProto.FLOAT16)
    return Made(b.node("Cast", half, to=TensorProto.FLOAT), x.width, x.top)


def _reshaped(b: Builder, x: Made) -> Made:
    shape = b.constant([0, x.width, 1], np.int64)
    cube = b.node("Reshape", x.name, shape)
    axis = b.constant([2], np.int64)
    return Made(b.node("Squeeze", cube, axis), x.width, x.top)


def _sliced(b: Builder, x: Made) -> Made:
    if x.width < 3:
        return x
    ends = [b.constant([value], np.int64) for value in (1, _END, 1)]
    return Made(b.node("Slice", x.name, *ends), x.width - 1, x.top)


def _shared(b: Builder, x: Made) -> Made:
    """Divide by the sum of all columns, which are no longer negative then."""
    small = b.constant(np.array(1e-3, np.float32))
    shifted = b.node("Add", b.node("Abs", x.name), small)
    axes = b.constant([1], np.int64)
    return Made(b.node("Div", shifted, b.node("ReduceSum", shifted, axes, keepdims=1)), x.width)


def _curved(b: Builder, x: Made) -> Made:
    """Bend values by tanh where it does not round them to 1."""
    top = b.constant(np.array(x.top, np.float32))
    return Made(b.node("Tanh", b.node("Div", x.name, top)), x.width)


def _soft_again(b: Builder, x: Made) -> Made:
    return Made(b.node("Softmax", x.name, axis=-1), x.width)


STEPS: Final[dict[str, Step]] = {
    "percent": _same("Mul", 100.0, top=lambda top: 100 * top),
    "halves": _same("Div", 2.0, top=lambda top: top / 2),
    "shifted": _same("Add", 0.25, top=lambda top: top + 0.25),
    "clipped": _same("Clip", 0.02, 0.9),
    "root": lambda b, x: Made(b.node("Sqrt", b.node("Abs", x.name)), x.width, max(x.top, 1.0)),
    "squared": _same("Pow", 2.0, top=lambda top: top**2),
    "tanh": _curved,
    "complement": _complement,
    "with its complement": _with_complement,
    "quantised": _quantised,
    "rounded": _rounded,
    "masked": _masked,
    "reversed": _reversed,
    "halved": _halved,
    "reshaped": _reshaped,
    "sliced": _sliced,
    "shared": _shared,
    "softmax again": _soft_again,
}
"""Operations on probabilities by name; each one makes an output that exits must match."""


def _softmax(b: Builder, z: Made) -> Made:
    return Made(b.node("Softmax", z.name, axis=-1), z.width)


def _softmax_in_parts(b: Builder, z: Made) -> Made:
    largest = b.node("ReduceMax", z.name, axes=[1], keepdims=1)
    shares = b.node("Exp", b.node("Sub", z.name, largest))
    axes = b.constant([1], np.int64)
    return Made(b.node("Div", shares, b.node("ReduceSum", shares, axes, keepdims=1)), z.width)


def _colder(b: Builder, z: Made) -> Made:
    return _softmax(b, Made(b.node("Div", z.name, b.constant(np.array(2.5, np.float32))), z.width))


def _of_steps(b: Builder, z: Made) -> Made:
    """Quantise the logits too, as quantize_static does."""
    scale, zero = b.constant(np.array(0.1, np.float32)), b.constant(np.array(128, np.uint8))
    steps = b.node("QuantizeLinear", z.name, scale, zero)
    return _softmax(b, Made(b.node("DequantizeLinear", steps, scale, zero), z.width))


def _sigmoid_in_parts(b: Builder, z: Made) -> Made:
    one = b.constant(np.array(1, np.float32))
    below = b.node("Add", one, b.node("Exp", b.node("Neg", z.name)))
    return Made(b.node("Div", one, below), z.width)


SOFT: Final[dict[str, Step]] = {
    "softmax": _softmax,
    "softmax in parts": _softmax_in_parts,
    "softmax of a temperature": _colder,
    "softmax of quantised logits": _of_steps,
}
LABELS: Final[dict[str, Step]] = {
    "sigmoid": lambda b, z: Made(b.node("Sigmoid", z.name), z.width),
    "hard sigmoid": lambda b, z: Made(b.node("HardSigmoid", z.name), z.width),
    "sigmoid in parts": _sigmoid_in_parts,
}
BOUNDED: Final[dict[str, Step]] = {
    "tanh": _same("Tanh"),
    "clipped logits": _same("Clip", -1.0, 2.0),
    "clipped to the unit": _same("Clip", 0.0, 1.0),
    "logits not below zero": _same("Relu"),
    "quantised logits": lambda b, z: Made(
        _quantised_logits(b, z.name, np.array(0.05, np.float32)), z.width
    ),
}
"""Operations by name that bound or round logits."""


def _one_hot(b: Builder, z: Made) -> Made:
    place = b.node("ArgMax", z.name, axis=1, keepdims=0)
    ends = b.constant([0, 1], np.float32)
    return Made(b.node("OneHot", place, b.constant(z.width, np.int64), ends, axis=1), z.width)


def _largest(b: Builder, z: Made) -> Made:
    most = b.node("ReduceMax", z.name, axes=[1], keepdims=1)
    return Made(b.node("Cast", b.node("Equal", z.name, most), to=TensorProto.FLOAT), z.width)


PICKING: Final[dict[str, Step]] = {
    "hardmax": lambda b, z: Made(b.node("Hardmax", z.name, axis=1), z.width),
    "one-hot": _one_hot,
    "equal to the largest": _largest,
}
"""Operations by name with 1 for the class of the largest logit, and 0 for others."""


def _quantised_logits(b: Builder, z: str, scale: np.ndarray) -> str:
    step, zero = b.constant(scale), b.constant(np.array(128, np.uint8))
    return b.node("DequantizeLinear", b.node("QuantizeLinear", z, step, zero), step, zero)


def ending(activation: Step, steps: Sequence[Step] = (), *, columns: int = 4) -> onnx.ModelProto:
    """A chain of linear layers, an activation, and what comes after it."""
    b = Builder(seed=3)
    x = b.input("x", ["batch", INPUTS])
    for place in range(3):
        x = b.node("Relu", b.linear(x, INPUTS, INPUTS), out=f"hidden{place}")
    made = activation(b, Made(b.linear(x, INPUTS, columns, out="z"), columns))
    for step in steps:
        made = step(b, made)
    b.node("Identity", made.name, out="p")
    b.output("p", ["batch", made.width])
    return b.build()
