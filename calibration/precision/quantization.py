"""Int8 for TensorRT: ranges of activations from data, and graphs that mark int8 with Q/DQ pairs.

TensorRT quantises exactly the operators with ``QuantizeLinear``/``DequantizeLinear`` pairs
(explicit quantisation: the only kind since TensorRT 11, and it works in 8.6). Its rules: symmetric
int8 with zero points of 0, weights per output channel and in float32 before their own pair, no
quantised bias, a pair before each operator that runs in int8.

Ranges are measured once, on the whole model. Tensors have the same names in every segment and
stage, and whether a tensor is quantised depends on the operator that reads it, so that a tensor has
the same scale in every engine.

``onnxruntime.quantization`` is not used: its calibrators write an augmented model to disk, keep
every activation of the data in memory for histograms, and add random names, while these graphs
must be the same each time (engines are keyed on their hash).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.calibration.data.activations import activations
from offramp.calibration.data.dataset import DataError, Dataset

PREFIX = "offramp_int8/"
"""Prefix of all names that are added."""

RANGE_SAMPLES = 1000
"""Samples that ranges are measured on: beyond some hundreds they no longer change (Wu et al.,
"Integer Quantization for Deep Learning Inference", 2020)."""

_BINS = 2048
_LEVELS = 127


Ranges: TypeAlias = Mapping[str, float]
"""Magnitude that int8's 127 represents, by tensor: larger activations are clipped."""


class _Edge(NamedTuple):
    """An input of an operator; this input is quantised."""

    node: int
    place: int
    tensor: str
    axis: int | None
    """Axis of the output channels, for weights; ``None`` for activations."""


def measure_ranges(graph: bytes, dataset: Dataset, *, threads: int) -> Ranges:
    """Measure the ranges of all activations that :func:`quantize` would quantise.

    The limit of a tensor is the value with the smallest squared error on the tensor's histogram:
    outliers are clipped if the finer steps of all other values outweigh that. ``graph`` is the
    source model. All samples are run, twice; they should be other samples than those that the
    result is evaluated on. A ``DataError`` if there are none, or the model fails on one or its
    results are not finite.
    """
    proto = onnx.ModelProto.FromString(graph)
    tensors = tuple(dict.fromkeys(e.tensor for e in _edges(proto.graph) if e.axis is None))
    if not tensors:
        raise DataError(
            "the model has no convolution or matrix product with constant float32 weights, so "
            "there is nothing to compute in int8; build it with --precision fp16"
        )
    largest = dict.fromkeys(tensors, 0.0)
    for name, values in _magnitudes(proto, tensors, dataset, threads):
        largest[name] = max(largest[name], float(values.max(initial=0)))
    counts = {name: np.zeros(_BINS, np.int64) for name in tensors}
    for name, values in _magnitudes(proto, tensors, dataset, threads):
        counts[name] += np.histogram(values, _BINS, (0, largest[name] or 1))[0]
    return {name: _least_error(counts[name], largest[name]) for name in tensors}


def quantize(graph: bytes, ranges: Ranges) -> bytes:
    """Insert Q/DQ pairs before the convolutions and matrix products of a graph.

    Both inputs of ``Conv``, ``Gemm`` and ``MatMul`` with constant weights are quantised. At a
    residual ``Add`` the input that is not the convolution's output is quantised, so that
    convolution, sum and activation become one int8 kernel. Everything else stays float32, and
    inputs and outputs keep their names and types.

    ``graph`` is the source model, a segment, or several joined; ``ranges`` are those of the whole
    model (``ValueError`` if a tensor has none). The same graph and ranges produce the same bytes.
    """
    proto = onnx.ModelProto.FromString(graph)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    pairs: dict[int, list[onnx.NodeProto]] = {}
    for edge in tuple(_edges(proto.graph)):  # find all before the first node changes
        node = proto.graph.node[edge.node]
        if edge.axis is not None:
            scale = _weight_scale(numpy_helper.to_array(weights[edge.tensor]), edge.axis)
        elif edge.tensor in ranges:
            scale = np.asarray(ranges[edge.tensor] / _LEVELS, np.float32)
        else:
            raise ValueError(
                f"there is no range for {edge.tensor!r}; measure the ranges on this bundle's "
                "source model"
            )
        # A separate pair for every reader: TensorRT fuses pairs into the operator after them.
        stem = f"{PREFIX}{node.output[0]}/{edge.place}"
        pairs.setdefault(edge.node, []).extend(_pair(stem, edge))
        zeros = np.zeros(scale.shape, np.int8)
        proto.graph.initializer.append(numpy_helper.from_array(scale, f"{stem}/scale"))
        proto.graph.initializer.append(numpy_helper.from_array(zeros, f"{stem}/zero"))
        node.input[edge.place] = f"{stem}/dequantized"
    nodes = [n for i, node in enumerate(proto.graph.node) for n in (*pairs.get(i, ()), node)]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    quantized: bytes = proto.SerializeToString(deterministic=True)
    return quantized


def _pair(stem: str, edge: _Edge) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    constants = [f"{stem}/scale", f"{stem}/zero"]
    between, after = f"{stem}/quantized", f"{stem}/dequantized"
    down = helper.make_node("QuantizeLinear", [edge.tensor, *constants], [between], name=between)
    up = helper.make_node("DequantizeLinear", [between, *constants], [after], name=after)
    if edge.axis is not None:
        for node in (down, up):
            node.attribute.append(helper.make_attribute("axis", edge.axis))
    return down, up


def _edges(graph: onnx.GraphProto) -> Iterator[_Edge]:
    """Yield the inputs that are quantised, in the order of the nodes."""
    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    constants = {t.name for t in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    convolved = {
        node.output[0]
        for node in graph.node
        if node.op_type == "Conv" and _channel_axis(node, weights) is not None
    }
    for index, node in enumerate(graph.node):
        axis = _channel_axis(node, weights)
        if axis is not None and node.input[0] not in constants:
            yield _Edge(index, 0, node.input[0], None)
            yield _Edge(index, 1, node.input[1], axis)
        elif node.op_type == "Add" and constants.isdisjoint(node.input):
            fused = [p for p, n in enumerate(node.input) if n in convolved and readers[n] == 1]
            if fused:
                yield _Edge(index, 1 - fused[0], node.input[1 - fused[0]], None)


def _channel_axis(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> int | None:
    """Return the axis of output channels in an operator's constant weights; ``None`` if none."""
    if len(node.input) < 2 or node.input[1] not in weights:
        return None
    flags = {a.name: a.i for a in node.attribute}
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm" and not flags.get("transA"):
        return 0 if flags.get("transB") else 1
    if node.op_type == "MatMul" and len(weights[node.input[1]].dims) == 2:
        return 1
    return None


def _weight_scale(weight: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Return a scale per output channel; 1 if all its weights are 0, as scales must be positive."""
    others = tuple(a for a in range(weight.ndim) if a != axis)
    scale = np.abs(weight).max(axis=others) / np.float32(_LEVELS)
    return np.where(scale > 0, scale, 1).astype(np.float32)


def _magnitudes(
    proto: onnx.ModelProto, tensors: Sequence[str], dataset: Dataset, threads: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the magnitudes of each tensor, batch by batch, flat."""
    for name, values, where in activations(proto, tensors, dataset, threads=threads):
        magnitudes = np.abs(values).reshape(-1)
        largest = magnitudes.max(initial=0)  # NaN if any value is NaN
        if not np.isfinite(largest):
            raise DataError(
                f"tensor {name!r} holds {largest} for one of samples {where}, so it has no "
                "range; correct or remove that sample, or build with --precision fp32"
            )
        yield name, magnitudes


def _least_error(counts: NDArray[np.int64], largest: float) -> float:
    """Return the limit with the least squared error of rounding and clipping, on a histogram.

    ``counts`` [bins] are of magnitudes from 0 to ``largest``, which is the greatest possible limit;
    the limit is 1 if all values were 0.
    """
    if not largest > 0:
        return 1.0
    width = largest / len(counts)
    centers = (np.arange(len(counts)) + 0.5) * width
    limits = largest * np.arange(len(counts) // 32, len(counts) + 1) / len(counts)
    steps = limits / _LEVELS
    beyond = np.maximum(centers[None, :] - limits[:, None], 0)
    clipped = (counts * beyond**2).sum(axis=1)
    inside = (counts * (beyond == 0)).sum(axis=1)
    errors = clipped + inside * steps**2 / 12
    return float(limits[errors.argmin()])
