"""Int8 on the CPU with two kinds of scales: measured beforehand, or computed for each row.

:func:`quantise_static` inserts Q/DQ pairs around convolutions and before matrix products. Their
scales come from :func:`activation_ranges`, which measures tensors on data. :func:`quantise_rows`
needs no data: it rewrites matrix products so that each row is rounded by its range at run time.

ONNX Runtime replaces an operator between Q/DQ pairs by an integer kernel. A convolution needs pairs
on all sides and its bias in int32; a matrix product reads a rounded input and returns float32.
Operators after a convolution that have integer kernels (:data:`_FOLLOWING`) stay in integers with
it. All else stays float32.

A tensor's pair is inserted after the tensor. So every tensor of the source keeps its name and its
type, float32, and the graph can be cut at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.calibration.data.activations import activations
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.precision.quantised_graphs import (
    LEVELS,
    PREFIX,
    Editor,
    Product,
    Rewrite,
    make,
    multiply,
)

_ABSORBED = frozenset({"Relu", "Clip"})
"""Operators whose effect the rounding after them includes, if the output's range begins at 0."""
_FOLLOWING = _ABSORBED | {"MaxPool", "Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool"}
_STEPS = 255
_LARGEST_BIAS = 2.0**30
"""Largest bias in int32 that leaves space for the sum of products."""


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
    """Insert Q/DQ pairs around convolutions and operators after them, and before matrix products.

    Scales are measured on ``dataset``, except for tensors with ``known`` ranges; new ranges are
    added to these. Activations are uint8, or int8 if ``signed``, with the same steps; weights are
    int8, with a scale per output channel.
    """
    convolved = _convolutions(editor) if convolutions else {}
    multiplied = {p.node.output[0]: p for p in editor.products()} if products else {}
    inside = _integer_tensors(editor, convolved)
    pooled = {  # pooling only moves integers: its output has the scale of its input
        n.output[0]: n.input[0]
        for n in editor.proto.graph.node
        if n.op_type == "MaxPool" and n.output[0] in inside and n.input[0] in inside
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
        rewrite.following[tensor] = (
            pair if tensor in inside else pair[:1]
        )  # products read the steps
    # Readers of a convolution's output must read it rounded, or the kernel would not be int8.
    rewrite.renamed.update((t, _dequantised(t)) for t in inside)
    for y, node in convolved.items():
        rewrite.replaced[y] = _convolution(editor, node, ranges, signed=signed)
    for y, product in multiplied.items():
        rewrite.replaced[y] = _product(editor, product)
    return rewrite


def _convolutions(editor: Editor) -> dict[str, onnx.NodeProto]:
    """Return the convolutions with constant weights, by output.

    Convolutions whose output is the model's output are left out: that output has to be float32,
    which integer kernels do not write.
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
    """Return the tensors that become integers around convolutions and the operators after them.

    Tensors that only a :data:`_ABSORBED` operator reads are left out: this operator becomes part of
    the rounding.
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
    """Return the size of a step, and the zero point."""
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
    # A bias counts the same steps as the sum of products, in int32: even if weights are nearly 0,
    # their steps must not be.
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
    # Pairs do not work here: for [rows, inputs], ONNX Runtime would fuse the product with the bias
    # after it, to an operator without an integer kernel.
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
    """Return the node that converts an integer constant to floats; adds its name to ``reads``."""
    constants = [
        editor.constant(stem, values),
        editor.constant(f"{stem}/step", scale),
        editor.constant(f"{stem}/zero", np.zeros(scale.shape, values.dtype)),
    ]
    reads.append(f"{PREFIX}{stem}/rounded")
    return [make("DequantizeLinear", constants, reads[-1:], axis=axis)]


_BINS = 2048
_VALUES = 2**16
"""Largest number of values of a tensor in a batch that are counted for its histogram, at even
distances: more would not change the limits, and counting all of them took longer than running the
model."""
_SHARES = np.linspace(1 / 16, 1, 61)
"""Shares of the whole range that are tried as limits."""


class Range(NamedTuple):
    """The values that the lowest and the highest step represent; 0 is between them."""

    low: float
    high: float


def activation_ranges(
    proto: onnx.ModelProto, tensors: Sequence[str], dataset: Dataset, *, threads: int
) -> Mapping[str, Range]:
    """Return the ranges of some tensors with the least squared error on their histograms.

    All samples are run, twice; only a histogram of some of a tensor's values is kept. A
    ``DataError`` if there are no samples, or the model fails on one or its results are not finite.
    """
    widest = dict.fromkeys(tensors, Range(0.0, 0.0))
    for name, values, where in activations(proto, tensors, dataset, threads=threads):
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        if not np.isfinite([low, high]).all():
            raise DataError(
                f"tensor {name!r} holds values from {low} to {high} for one of samples {where}, "
                "so it has no range; correct or remove that sample, or stay with float32"
            )
        known = widest[name]
        widest[name] = Range(min(known.low, low), max(known.high, high))
    counts = {name: np.zeros(_BINS, np.int64) for name in tensors}
    for name, values, _ in activations(proto, tensors, dataset, threads=threads):
        low, high = widest[name]
        some = values.reshape(-1)[:: -(-values.size // _VALUES) or 1]
        counts[name] += np.histogram(some, _BINS, (low, high if high > low else low + 1))[0]
    return {name: _least_error(counts[name], widest[name]) for name in tensors}


def _least_error(counts: NDArray[np.int64], widest: Range) -> Range:
    """Return the range with the least squared error of rounding to 255 steps, and of clipping.

    ``counts`` [bins] are between the limits of ``widest``.
    """
    low, high = widest
    if not high > low:
        return Range(0.0, 1.0)
    centers = low + (np.arange(len(counts)) + 0.5) * (high - low) / len(counts)
    best = widest
    for _ in range(2):  # one limit after the other: the best first one depends on the second
        best = min(
            (Range(low * a, best.high) for a in _SHARES), key=partial(_error, counts, centers)
        )
        best = min(
            (Range(best.low, high * b) for b in _SHARES), key=partial(_error, counts, centers)
        )
    return best


def _error(counts: NDArray[np.int64], centers: NDArray[np.float64], limits: Range) -> float:
    clipped = np.clip(centers, *limits)
    step = (limits.high - limits.low) / 255
    beyond = centers != clipped
    return float(counts @ (centers - clipped) ** 2 + counts[~beyond].sum() * step**2 / 12)


_AXES_AS_INPUT = 18
"""Oldest opset in which reductions take their axes as an input."""
_LEAST_LIMIT = 1e-12
"""Value that replaces the largest magnitude of a row if that is 0, as it is a divisor."""


def quantise_rows(editor: Editor) -> Rewrite:
    """Quantise the products that are large enough; a tensor is rounded once for all products."""
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
    """Return the nodes for a tensor's uint8 ``steps``, and each row's step size ``step``."""

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
