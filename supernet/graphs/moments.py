"""Mean and variance of each channel of tensors, over all samples, computed in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import run_over
from offramp.compiler.frontend.preparation import remove_unused
from offramp.compiler.graphs.graph import copied, default_opset, refill, serialised
from offramp.compiler.graphs.shapes import declared_types
from offramp.supernet.graphs.norm_layers import NormLayer

MOST_ROWS: Final = 2048
"""Largest batch of samples whose moments are computed at a time."""
_LEAST_ROWS: Final = 16
_MOST_ELEMENTS: Final = 2**26
"""Largest number of elements of a batch's largest tensor."""
_SYMBOL: Final = 64
"""Assumed value of a free size, to estimate memory."""
_AXES_ARE_INPUTS: Final = 18
"""First opset in which ``ReduceMean`` reads its dimensions from an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of a tensor's channels, over samples and positions."""

    mean: NDArray[np.float64]
    """Mean of each channel, [channels]."""
    variance: NDArray[np.float64]
    """Variance of each channel, [channels]; the divisor is the count, not the count minus one."""


def raw_name(layer: NormLayer) -> str:
    """Return the name of the output, before correction, of a layer with a folded batch norm.

    The corrected output has the tensor's name.
    """
    return f"{layer.tensor}/raw"


def measure(
    proto: onnx.ModelProto,
    layers: Sequence[NormLayer],
    samples: Dataset,
    *,
    threads: int,
    rows: int = 0,
    prepared: bool = False,
) -> dict[str, Moments]:
    """Run a graph on samples, and return the moments of each layer's tensor, by operator name.

    Moments of a batch of ``rows`` samples (0: as many as fit) are computed in the graph; the
    variance is about the mean of the same batch. Moments of all batches are combined in float64. A
    ``prepared`` graph computes them already, with the names of :func:`moment_nodes`. DataError if
    the graph fails on a sample.
    """
    if not layers:
        return {}
    rows = rows or rows_at_once(proto, layers, len(samples))
    probe = copied(proto)
    graph = probe.graph
    written = {name for node in graph.node for name in node.output}
    if not prepared:
        for layer in layers:
            raw = raw_name(layer)
            tensor = raw if raw in written else layer.tensor
            graph.node.extend(moment_nodes(probe, layer, tensor))
    outputs = [name for layer in layers for name in moment_names(layer)]
    refill(
        graph.output,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    del graph.value_info[:]
    remove_unused(probe)
    read = {name for node in graph.node for name in node.input}
    refill(graph.input, [copied(i) for i in graph.input if i.name in read])
    weights: list[int] = []
    values: list[list[NDArray[Any]]] = []
    for found, arrays in run_over(
        serialised(probe), outputs, samples, threads=threads, batch_size=rows
    ):
        weights.append(found.stop - found.start)
        values.append([array.astype(np.float64).ravel() for array in arrays])
    share = np.array(weights, np.float64) / sum(weights)
    return {
        layer.node: _united(share, [v[2 * i] for v in values], [v[2 * i + 1] for v in values])
        for i, layer in enumerate(layers)
    }


def _united(
    share: NDArray[np.float64],
    means: Sequence[NDArray[np.float64]],
    variances: Sequence[NDArray[np.float64]],
) -> Moments:
    """Combine the moments of batches: add the variances inside batches and between their means."""
    each = np.stack(means)
    mean = share @ each
    variance = share @ (np.stack(variances) + (each - mean) ** 2)
    return Moments(mean=mean, variance=variance)


def rows_at_once(proto: onnx.ModelProto, layers: Sequence[NormLayer], samples: int) -> int:
    """Return the size of equal batches: at most 2048 rows, and not more than memory should hold."""
    types = declared_types(proto)
    largest = max(
        prod(s if isinstance(s, int) else _SYMBOL for s in (types[layer.tensor].shape or ())[1:])
        for layer in layers
    )
    most = min(MOST_ROWS, max(_LEAST_ROWS, _MOST_ELEMENTS // max(largest, 1)))
    batches = -(-samples // most)
    return -(-samples // batches)


def moment_names(layer: NormLayer) -> tuple[str, str]:
    """Return the names of the tensors with a batch's mean and variance, of the layer's rank."""
    return f"{layer.node}/moments/mean", f"{layer.node}/moments/variance"


def moment_nodes(proto: onnx.ModelProto, layer: NormLayer, tensor: str) -> list[onnx.NodeProto]:
    """Return operators that compute mean and variance of a tensor by channel, in float32."""
    mean, variance = moment_names(layer)
    stem = f"{layer.node}/moments"
    nodes = []
    if layer.elem_type != TensorProto.FLOAT:
        nodes.append(helper.make_node("Cast", [tensor], [f"{stem}/cast"], to=TensorProto.FLOAT))
        tensor = f"{stem}/cast"
    nodes.append(_mean_node(proto, layer, tensor, mean))
    nodes.append(helper.make_node("Sub", [tensor, mean], [f"{stem}/centred"]))
    nodes.append(helper.make_node("Mul", [f"{stem}/centred"] * 2, [f"{stem}/square"]))
    nodes.append(_mean_node(proto, layer, f"{stem}/square", variance))
    for node in nodes:
        node.name = node.output[0]
    return nodes


def _mean_node(
    proto: onnx.ModelProto, layer: NormLayer, tensor: str, output: str
) -> onnx.NodeProto:
    axes = [axis for axis in range(layer.rank) if axis != layer.axis]
    if default_opset(proto) < _AXES_ARE_INPUTS:
        return helper.make_node("ReduceMean", [tensor], [output], axes=axes, keepdims=1)
    name = f"{output}/axes"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(axes, np.int64), name))
    return helper.make_node("ReduceMean", [tensor, name], [output], keepdims=1)
