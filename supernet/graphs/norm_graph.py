"""Graphs of a subnet whose layers normalise by each batch's moments, or by given moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.compiler.graphs.graph import copied, refill, sort_operators
from offramp.supernet.graphs.moments import Moments, moment_names, moment_nodes, raw_name
from offramp.supernet.graphs.norm_layers import NormLayer

_EPSILON = 1e-5
"""Default epsilon of a batch norm."""
_TINY = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Target moments of a folded layer's channels."""

    mean: NDArray[np.float64]
    """Mean that each channel gets, [channels]."""
    deviation: NDArray[np.float64]
    """Standard deviation that each channel gets, [channels]."""
    epsilon: NDArray[np.float64]
    """[channels]: added to the variance in the divisor. So a channel that hardly varies in a subnet
    is not amplified; its values are then close to the target mean."""

    def scale(self, variance: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor that changes a variance to the deviation; [channels]."""
        return self.deviation / np.sqrt(variance + self.epsilon + _TINY)


def correct(
    proto: onnx.ModelProto,
    layers: Sequence[NormLayer],
    targets: Mapping[str, Correction],
    moments: Mapping[str, Moments],
) -> onnx.ModelProto:
    """Return a copy of a subnet whose layers normalise by the given moments.

    A scale and a shift are added after each folded layer. The corrected tensor has the layer's
    name, so that its readers and cut points find it.
    """
    made = copied(proto)
    graph = made.graph
    nodes = {node.name: node for node in graph.node}
    for layer in layers:
        found, node = moments[layer.node], nodes[layer.node]
        if not layer.folded:
            for position, values in ((3, found.mean), (4, found.variance)):
                kind = _kind_of(graph, node.input[position])
                name = f"{layer.node}/{'mean' if position == 3 else 'variance'}"
                graph.initializer.append(_constant(name, values, kind))
                node.input[position] = name
            continue
        scale = targets[layer.node].scale(found.variance)
        shift = targets[layer.node].mean - found.mean * scale
        _rename_output(node, layer)
        for name, values in (("scale", scale), ("shift", shift)):
            tensor = _constant(f"{layer.node}/{name}", _shaped(values, layer), layer.elem_type)
            graph.initializer.append(tensor)
        scaled = f"{layer.tensor}/scaled"
        graph.node.append(_node("Mul", [raw_name(layer), f"{layer.node}/scale"], scaled))
        graph.node.append(_node("Add", [scaled, f"{layer.node}/shift"], layer.tensor))
    _drop_unread(graph)
    sort_operators(graph)
    return made


def normalise_by_batch(
    proto: onnx.ModelProto, layers: Sequence[NormLayer], targets: Mapping[str, Correction]
) -> onnx.ModelProto:
    """Return a copy of a subnet whose layers normalise by the batch's moments, and output these.

    :func:`~offramp.supernet.graphs.moments.measure` reads them.
    """
    made = copied(proto)
    graph = made.graph
    nodes = {node.name: node for node in graph.node}
    for layer in layers:
        node, stem = nodes[layer.node], f"{layer.node}/batch"
        if layer.folded:
            raw, result = raw_name(layer), layer.tensor
            _rename_output(node, layer)
            target = targets[layer.node]
            epsilon, gain, offset = target.epsilon, target.deviation, target.mean
        else:
            raw, result = layer.tensor, node.output[0]
            values = {t.name: t for t in graph.initializer}
            gain, offset = (
                numpy_helper.to_array(values[name]).astype(np.float64) for name in node.input[1:3]
            )
            told = next((a.f for a in node.attribute if a.name == "epsilon"), _EPSILON)
            epsilon = np.full(gain.shape, told)
            refill(graph.node, [n for n in graph.node if n.name != layer.node])
        graph.node.extend(moment_nodes(made, layer, raw))
        _, variance = moment_names(layer)
        centred = f"{layer.node}/moments/centred"
        for name, array in (("epsilon", epsilon + _TINY), ("gain", gain), ("offset", offset)):
            shaped = _shaped(array, layer)
            graph.initializer.append(_constant(f"{stem}/{name}", shaped, TensorProto.FLOAT))
        graph.node.extend(
            [
                _node("Add", [variance, f"{stem}/epsilon"], f"{stem}/sum"),
                _node("Sqrt", [f"{stem}/sum"], f"{stem}/root"),
                _node("Div", [f"{stem}/gain", f"{stem}/root"], f"{stem}/factor"),
                _node("Mul", [centred, f"{stem}/factor"], f"{stem}/scaled"),
                _node("Add", [f"{stem}/scaled", f"{stem}/offset"], f"{stem}/result"),
                helper.make_node(
                    "Cast", [f"{stem}/result"], [result], name=f"{stem}/cast", to=layer.elem_type
                ),
            ]
        )
    return made


def _rename_output(node: onnx.NodeProto, layer: NormLayer) -> None:
    node.output[list(node.output).index(layer.tensor)] = raw_name(layer)


def _node(kind: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [output], name=f"{output}/{kind}")


def _shaped(values: NDArray[np.float64], layer: NormLayer) -> NDArray[np.float64]:
    """Reshape values by channel to broadcast over a tensor of the layer's rank."""
    shape = [1] * layer.rank
    shape[layer.axis] = -1
    return values.reshape(shape)


def _constant(name: str, values: NDArray[np.float64], elem_type: int) -> onnx.TensorProto:
    return numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(elem_type)), name)


def _kind_of(graph: onnx.GraphProto, name: str) -> int:
    return next(t.data_type for t in graph.initializer if t.name == name)


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the statistics of the full model."""
    read = {name for node in graph.node for name in node.input}
    captured = any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute)
    if not captured:
        refill(graph.initializer, [t for t in graph.initializer if t.name in read])
