"""Int8 by Q/DQ pairs whose scales are measured beforehand: convolutions, and matrix products.

ONNX Runtime makes integer kernels of an operator between pairs. A convolution needs them on all
sides and its bias in int32; a matrix product reads what is rounded, and what it gives is float32
again. What follows a convolution and has an integer kernel (:data:`_FOLLOWING`) stays in
integers with it. All else stays float32.

A tensor's pair stands behind it, so that every tensor of the source is there under its name, in
float32, and a graph can be cut at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.graphs import (
    LEVELS,
    PREFIX,
    Editor,
    Product,
    Rewrite,
    make,
    multiply,
)
from offramp.calibration.precision.ranges import Range, activation_ranges

_ABSORBED = frozenset({"Relu", "Clip"})
"""What the rounding behind it does as well, where its output's range begins at 0."""
_FOLLOWING = _ABSORBED | {"MaxPool", "Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool"}
_STEPS = 255
_LARGEST_BIAS = 2.0**30
"""In int32, with room for the sum of products."""


def quantise_static(
    editor: Editor,
    dataset: Dataset,
    *,
    threads: int,
    convolutions: bool = True,
    products: bool = True,
    signed: bool = False,
    known: dict[str, Range],
) -> Rewrite:
    """Put pairs around convolutions and what follows them, and before matrix products.

    Scales are measured on ``dataset``, but for tensors of ``known`` ranges, which are added to.
    Activations are uint8, or int8 if ``signed``, of the same
    steps; weights are int8, with a scale per output channel.
    """
    convolved = _convolutions(editor) if convolutions else {}
    multiplied = {p.node.output[0]: p for p in editor.products()} if products else {}
    inside = _integer_tensors(editor, convolved)
    pooled = {  # it moves integers: its output has the scale of its input
        n.output[0]: n.input[0]
        for n in editor.proto.graph.node
        if n.op_type == "MaxPool" and n.output[0] in inside
    }
    read = dict.fromkeys(p.activation for p in multiplied.values() if p.activation not in inside)
    measured = [t for t in (*inside, *read) if t not in pooled]
    if missing := [t for t in measured if t not in known]:
        known |= activation_ranges(editor.proto, missing, dataset, threads=threads)
    ranges = {t: known[t] for t in measured}
    for tensor, source in pooled.items():
        ranges[tensor] = ranges[source]
    rewrite = Rewrite()
    for tensor, limits in ranges.items():
        pair = _pair(editor, tensor, limits, signed=signed)
        rewrite.behind[tensor] = pair if tensor in inside else pair[:1]  # products read the steps
    # Whatever reads a convolution's output has to read it rounded, or the kernel is none of int8.
    rewrite.renamed.update((t, _dequantised(t)) for t in inside)
    for y, node in convolved.items():
        rewrite.replaced[y] = _convolution(editor, node, ranges, signed=signed)
    for y, product in multiplied.items():
        rewrite.replaced[y] = _product(editor, product)
    return rewrite


def _convolutions(editor: Editor) -> dict[str, onnx.NodeProto]:
    """Find the convolutions with constant weights, by output.

    None whose output is the model's: it has to be float32, and there is no integer kernel for that.
    """
    return {
        node.output[0]: node
        for node in editor.proto.graph.node
        if node.op_type == "Conv"
        and not node.domain
        and not editor.keeps(node)
        and node.input[0] not in editor.constants
        and node.output[0] not in editor.outputs
        and all(editor.floats(name) is not None for name in node.input[1:] if name)
    }


def _integer_tensors(editor: Editor, convolved: Mapping[str, onnx.NodeProto]) -> dict[str, None]:
    """Find the tensors around convolutions, and what follows them, that are integers; in order.

    What a :data:`_ABSORBED` operator alone reads is left out: it becomes part of the rounding.
    """
    found: dict[str, None] = {}
    for node in editor.proto.graph.node:
        if node.output and node.output[0] in convolved:
            found |= {node.input[0]: None, node.output[0]: None}
        elif node.op_type in _FOLLOWING and not node.domain and not editor.keeps(node):
            reads = node.input[:1] if node.op_type == "Clip" else node.input
            if any(t in found for t in reads) and editor.constants.keys().isdisjoint(reads):
                found |= dict.fromkeys((*reads, node.output[0]))
    return {t: None for t in found if t in editor.readers and not _is_absorbed(t, editor)}


def _is_absorbed(tensor: str, editor: Editor) -> bool:
    readers = editor.readers.get(tensor, [])
    if len(readers) != 1 or tensor in editor.outputs:
        return False
    return readers[0].op_type in _ABSORBED and not editor.keeps(readers[0])


def _pair(editor: Editor, x: str, limits: Range, *, signed: bool) -> list[onnx.NodeProto]:
    step, zero = _scale(limits, signed=signed)
    constants = [editor.constant(f"{x}/step", step), editor.constant(f"{x}/zero", zero)]
    between = f"{PREFIX}{x}/steps"
    return [
        make("QuantizeLinear", [x, *constants], [between]),
        make("DequantizeLinear", [between, *constants], [_dequantised(x)]),
    ]


def _dequantised(tensor: str) -> str:
    return f"{PREFIX}{tensor}/rounded"


def _scale(limits: Range, *, signed: bool) -> tuple[np.float32, np.int8 | np.uint8]:
    """Give the size of a step, and the step that 0 is."""
    step = (limits.high - limits.low) / _STEPS
    zero = int(np.clip(round(-limits.low / step), 0, _STEPS))
    return np.float32(step), np.int8(zero - LEVELS - 1) if signed else np.uint8(zero)


def _convolution(
    editor: Editor, node: onnx.NodeProto, ranges: Mapping[str, Range], *, signed: bool
) -> list[onnx.NodeProto]:
    x, y = node.input[0], node.output[0]
    weight = editor.floats(node.input[1])
    assert weight is not None
    biased = len(node.input) > 2 and bool(node.input[2])
    bias = editor.floats(node.input[2]) if biased else None
    step, _ = _scale(ranges[x], signed=signed)
    # A bias counts the same steps as the sum of products, in int32: where weights are next to
    # nothing, their steps must not be.
    least = None if bias is None else np.abs(bias) / (float(step) * _LARGEST_BIAS)
    rounded, scale = editor.int8_weight(weight, axis=0, least=least)
    reads = [_dequantised(x)]
    nodes = _constant_pair(editor, f"{y}/weight", rounded, scale, axis=0, reads=reads)
    if bias is not None:
        steps = np.rint(bias / (scale.astype(np.float64) * step)).astype(np.int32)
        scale = (scale * step).astype(np.float32)
        nodes += _constant_pair(editor, f"{y}/bias", steps, scale, axis=0, reads=reads)
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    del changed.input[:]
    changed.input.extend(reads)
    return [*nodes, changed]


def _product(editor: Editor, product: Product) -> list[onnx.NodeProto]:
    # Not a product between pairs: of [rows, inputs], ONNX Runtime fuses that with the bias behind
    # it, to what has no integer kernel.
    x, y = product.activation, product.node.output[0]
    weight, scale = editor.int8_weight(product.weight, axis=1)
    result, bias = editor.with_bias(product)
    step, zero = (f"{PREFIX}{x}/{name}" for name in ("step", "zero"))
    return [multiply(editor, f"{PREFIX}{x}/steps", (step, zero), (y, weight, scale), result), *bias]


def _constant_pair(
    editor: Editor,
    stem: str,
    values: NDArray[Any],
    scale: NDArray[np.float32],
    *,
    axis: int,
    reads: list[str],
) -> list[onnx.NodeProto]:
    """Give what makes floats of an integer constant, whose name is added to ``reads``."""
    constants = [
        editor.constant(stem, values),
        editor.constant(f"{stem}/step", scale),
        editor.constant(f"{stem}/zero", np.zeros(scale.shape, values.dtype)),
    ]
    reads.append(f"{PREFIX}{stem}/rounded")
    return [make("DequantizeLinear", constants, reads[-1:], axis=axis)]
