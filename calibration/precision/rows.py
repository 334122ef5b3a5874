"""Int8 matrix products whose activations are scaled row by row, while the model runs.

A row of an activation, one token of one sample, is divided by the largest magnitude in it, rounded
to 127 steps on each side of zero, multiplied in integers by int8 weights (scaled per output), and
scaled back. So nothing is calibrated, and a row's answer depends on no other row: neither on batch
mates nor on padding. ``DynamicQuantizeLinear``, which ONNX Runtime's own dynamic quantisation puts
before products, has one scale for all rows of a batch instead.

(Per-token scales: Yao et al., "ZeroQuant", 2022, 3.1.) Division and rounding are two operators on
purpose: with one ``QuantizeLinear`` that has a scale per row, a transformer took twice as long at a
batch of 16 (ONNX Runtime 1.31).
"""

from __future__ import annotations

import numpy as np
import onnx

from offramp.calibration.precision.graphs import (
    LEVELS,
    PREFIX,
    Editor,
    Rewrite,
    make,
    multiply,
)

_AXES_AS_INPUT = 18
"""The opset in which reductions take their axes as an input."""
_LEAST_LIMIT = 1e-12
"""Stands in for the largest magnitude of a row of zeros, which is divided by."""


def quantise_rows(editor: Editor) -> Rewrite:
    """Replace the products that are large enough; those of one tensor share its rounding."""
    rewrite = Rewrite()
    rounded: set[str] = set()
    for product in editor.products():
        x, y = product.activation, product.node.output[0]
        nodes = [] if x in rounded else _scaled_rows(editor, x)
        rounded.add(x)
        weight, scale = editor.int8_weight(product.weight, axis=1)
        unscaled, (result, bias) = f"{PREFIX}{y}/unscaled", editor.with_bias(product)
        scaled = _one_and_middle(editor)
        nodes.append(multiply(editor, f"{PREFIX}{x}/steps", scaled, (y, weight, scale), unscaled))
        nodes.append(make("Mul", [unscaled, f"{PREFIX}{x}/step"], [result]))
        rewrite.replaced[y] = [*nodes, *bias]
    return rewrite


def _scaled_rows(editor: Editor, x: str) -> list[onnx.NodeProto]:
    """Give the nodes for a tensor's uint8 ``steps``, and the ``step`` that each row's are of."""

    def inner(name: str) -> str:
        return f"{PREFIX}{x}/{name}"

    least = editor.constant("least", np.float32(_LEAST_LIMIT))
    levels = editor.constant("levels", np.float32(LEVELS))
    return [
        _reduced(editor, "ReduceMax", x, inner("most")),
        _reduced(editor, "ReduceMin", x, inner("lowest")),
        make("Neg", [inner("lowest")], [inner("negated")]),
        make("Max", [inner("most"), inner("negated"), least], [inner("limit")]),
        make("Div", [inner("limit"), levels], [inner("step")]),
        make("Div", [x, inner("step")], [inner("divided")]),
        make("QuantizeLinear", [inner("divided"), *_one_and_middle(editor)], [inner("steps")]),
    ]


def _one_and_middle(editor: Editor) -> tuple[str, str]:
    one = editor.constant("one", np.float32(1))
    return one, editor.constant("middle", np.uint8(LEVELS + 1))


def _reduced(editor: Editor, kind: str, x: str, out: str) -> onnx.NodeProto:
    if editor.opset >= _AXES_AS_INPUT:
        return make(kind, [x, editor.constant("last", np.array([-1], np.int64))], [out])
    return make(kind, [x], [out], axes=[-1])
