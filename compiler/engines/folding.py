"""Batch normalisation that follows a convolution, as part of the convolution's weights.

Exporters mostly do so themselves. Where one did not, half precision would keep the normalisation
in float32 with casts around it, and TensorRT could not fuse it into the convolution.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from offramp.compiler.graph import Dataflow, Operator

Weights = dict[str, onnx.TensorProto]


def fold_normalisations(graph: onnx.GraphProto) -> None:
    """Multiply batch normalisations into the convolutions before them.

    That is done where the weights are constant and nothing else reads the convolution's output.
    """
    flow = Dataflow(graph)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    gone: set[int] = set()
    for norm in flow.operators:
        conv = flow.producers.get(norm.proto.input[0]) if _is_norm(norm, weights) else None
        if conv is None or not _is_foldable(conv, flow, weights):
            continue
        added = _folded(conv, norm, weights)
        graph.initializer.extend(added)
        del conv.proto.input[1:]
        conv.proto.input.extend(tensor.name for tensor in added)
        conv.proto.output[0] = norm.proto.output[0]
        gone.add(norm.index)
    nodes = [op.proto for op in flow.operators if op.index not in gone]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _is_norm(op: Operator, weights: Weights) -> bool:
    """Whether it is a normalisation by constants, as it is outside of training."""
    if op.kind != "BatchNormalization" or op.proto.domain or len(op.writes) != 1:
        return False
    training = any(a.name == "training_mode" and a.i for a in op.proto.attribute)
    return not training and all(_is_single(name, weights) for name in op.proto.input[1:])


def _is_foldable(conv: Operator, flow: Dataflow, weights: Weights) -> bool:
    if conv.kind != "Conv" or conv.proto.domain:
        return False
    output = conv.writes[0]
    alone = len(flow.consumers[output]) == 1 and output not in flow.outputs
    return alone and all(_is_single(name, weights) for name in conv.reads[1:])


def _is_single(name: str, weights: Weights) -> bool:
    return name in weights and weights[name].data_type == onnx.TensorProto.FLOAT


def _folded(conv: Operator, norm: Operator, weights: Weights) -> list[onnx.TensorProto]:
    """Weight and bias that do both, computed in float64."""
    values = [numpy_helper.to_array(weights[name]).astype(np.float64) for name in conv.reads[1:]]
    kernel, bias = (*values, np.zeros(len(values[0])))[:2]
    scale, shift, mean, variance = (
        numpy_helper.to_array(weights[name]).astype(np.float64) for name in norm.proto.input[1:]
    )
    epsilon = next((a.f for a in norm.proto.attribute if a.name == "epsilon"), 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    kernel = kernel * factor.reshape(-1, *[1] * (kernel.ndim - 1))
    made = {"weight": kernel, "bias": (bias - mean) * factor + shift}
    return [
        numpy_helper.from_array(value.astype(np.float32), f"{norm.writes[0]}/offramp_{name}")
        for name, value in made.items()
    ]
