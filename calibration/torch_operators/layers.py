"""Whole layers: matrix products and attention, normalisation, recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, operator, padded


def _gemm(node: GraphNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if node.get("transA", 0) else a
    b = b.T if node.get("transB", 0) else b
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    if c is not None and c.is_floating_point():
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    product = a @ b * alpha
    return product if c is None else product + c * beta


def _einsum(node: GraphNode, *inputs: Tensor) -> Tensor:
    return torch.einsum(node.get("equation", ""), *inputs)


def _attention(
    node: GraphNode, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute attention with several heads.

    Inputs are [b, heads, tokens, width], or [b, tokens, heads * width], which are split.
    """
    flat = query.ndim == 3
    if flat:
        heads = node.get("q_num_heads", 1), *([node.get("kv_num_heads", 1)] * 2)
        query, key, value = (
            x.reshape(*x.shape[:2], count, -1).transpose(1, 2)
            for x, count in zip((query, key, value), heads, strict=True)
        )
    shared = query.shape[1] // key.shape[1]  # number of query heads per key head
    key, value = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
    scale = node.get("scale", 1 / math.sqrt(query.shape[-1]))
    scores = (query * math.sqrt(scale)) @ (key * math.sqrt(scale)).transpose(-1, -2)
    cap = node.get("softcap", 0.0)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if node.get("is_causal", 0):
        tokens = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~tokens.tril(), -math.inf)
    # a token that may attend to no other gets zeros; neither they nor their gradients are NaN
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    attended = weights.to(value.dtype) @ value
    return attended.transpose(1, 2).flatten(2) if flat else attended


_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap"}
_WITHOUT_EFFECT = {"qk_matmul_output_mode", "softmax_precision"}


def _attention_lacks(node: GraphNode) -> str | None:
    other = sorted(node.attributes.keys() - _KNOWN - _WITHOUT_EFFECT)
    if other:
        return f"with {', '.join(other)}"
    if any(node.reads(index) for index in (4, 5, 6)):
        return "with past keys, past values or lengths"
    if any(node.writes(index) for index in (1, 2, 3)):
        return "with more outputs than the attended values"
    return None


def _rotary_embedding(
    node: GraphNode, x: Tensor, cosines: Tensor, sines: Tensor, places: Tensor | None = None
) -> Tensor:
    """Rotate pairs of coordinates by angles of their position; shapes as in ``_attention``."""
    flat = x.ndim == 3
    if flat:
        x = x.reshape(*x.shape[:2], node.get("num_heads", 1), -1).transpose(1, 2)
    turned = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    if places is not None:
        cosines, sines = cosines[places], sines[places]
    cosines, sines = (table[:, None, :, : turned // 2] for table in (cosines, sines))
    paired = node.get("interleaved", 0)
    moved, rest = x[..., :turned], x[..., turned:]
    first, second = (moved[..., ::2], moved[..., 1::2]) if paired else moved.chunk(2, -1)
    real, imaginary = first * cosines - second * sines, first * sines + second * cosines
    if paired:
        joined = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        joined = torch.cat([real, imaginary], -1)
    y = torch.cat([joined, rest], -1)
    return y.transpose(1, 2).flatten(2) if flat else y


PRODUCTS: Mapping[str, TorchOperator] = {
    "Attention": operator(_attention, lacks=_attention_lacks),
    "Einsum": operator(_einsum),
    "Gemm": operator(_gemm),
    "MatMul": operator(lambda _, a, b: a @ b),
    "RotaryEmbedding": operator(_rotary_embedding),
}


def _batch_norm(
    node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor, *statistics: Tensor
) -> Tensor:
    """Normalise by the statistics in the graph, not by those of the batch."""
    mean, variance = statistics
    eps = node.get("epsilon", 1e-5)
    if not (mean.requires_grad or variance.requires_grad):
        return functional.batch_norm(x, mean, variance, scale, bias, eps=eps)
    # torch does not support gradients of statistics
    shape = (-1, *([1] * (x.ndim - 2)))
    factor = scale * torch.rsqrt(variance + eps)
    return x * factor.reshape(shape) + (bias - mean * factor).reshape(shape)


def _batch_norm_lacks(node: GraphNode) -> str | None:
    """Refuse training mode, in which a sample's answer would depend on its batch."""
    if node.get("training_mode", 0):
        return "in training mode; export the model with model.eval()"
    return None


def _instance_norm(node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    axes = tuple(range(2, x.ndim))
    shape = (-1, *([1] * len(axes)))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    normal = (x - mean) * torch.rsqrt(variance + node.get("epsilon", 1e-5))
    return normal * scale.reshape(shape) + bias.reshape(shape)


def _layer_norm(
    node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """Normalise over an axis and all later ones; mean and inverse deviation are further outputs."""
    axis, eps = node.get("axis", -1) % x.ndim, node.get("epsilon", 1e-5)
    sizes = x.shape[axis:]
    whole = scale.shape == sizes and (bias is None or bias.shape == sizes)
    if whole and not (node.writes(1) or node.writes(2)):
        return [functional.layer_norm(x, sizes, scale, bias, eps)]
    axes = tuple(range(axis, x.ndim))
    variance, mean = torch.var_mean(x.float(), axes, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    normal = ((x.float() - mean) * inverse).to(x.dtype) * scale
    return [normal if bias is None else normal + bias, mean, inverse]


def _rms_norm(node: GraphNode, x: Tensor, scale: Tensor) -> Tensor:
    axis = node.get("axis", -1) % x.ndim
    wide = x if x.dtype == torch.float64 else x.float()
    square = wide.square().mean(tuple(range(axis, x.ndim)), keepdim=True)
    return (wide * torch.rsqrt(square + node.get("epsilon", 1e-5))).to(x.dtype) * scale


def _group_norm(node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalise groups of channels; before opset 21 there was one scale per group."""
    groups = node.get("num_groups", 1)
    if len(scale) != x.shape[1]:
        scale, bias = (each.repeat_interleave(x.shape[1] // groups) for each in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


def _local_response(node: GraphNode, x: Tensor) -> Tensor:
    """Divide by the squares of neighbouring channels."""
    size = node.get("size", 1)
    front, behind = (size - 1) // 2, size - 1 - (size - 1) // 2
    flat = x.square().reshape(len(x), 1, x.shape[1], -1)
    summed = functional.avg_pool2d(functional.pad(flat, (0, 0, front, behind)), (size, 1), 1)
    # the mean of a window is its sum divided by the size, as ONNX divides alpha
    base = node.get("bias", 1.0) + node.get("alpha", 1e-4) * summed.reshape(x.shape)
    return x / base ** node.get("beta", 0.75)


NORMALISATION: Mapping[str, TorchOperator] = {
    "BatchNormalization": operator(_batch_norm, untrained=(3, 4), lacks=_batch_norm_lacks),
    "GroupNormalization": operator(_group_norm),
    "InstanceNormalization": operator(_instance_norm),
    "LRN": operator(_local_response),
    "LayerNormalization": operator(_layer_norm),
    "RMSNormalization": operator(_rms_norm),
}


_GATES: Mapping[str, tuple[int, ...]] = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
"""Positions in ONNX of the gates, in torch's order."""
_ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""Activations of torch's layers."""


def _recurrent(
    node: GraphNode, x: Tensor, weight: Tensor, recurrent: Tensor, *rest: Tensor | None
) -> list[Tensor]:
    """Run a layer over [tokens, b, width], in one direction or both.

    Returns all hidden states [tokens, directions, b, hidden] and the last ones of each kind.
    """
    ways, gates = len(weight), _GATES[node.kind]
    bias, _, *states = padded(rest, 4)
    nothing = x.new_zeros(ways, x.shape[1], recurrent.shape[-1])
    hidden, cell = (nothing if state is None else state for state in states)
    parameters = []
    for way in range(ways):
        both = weight.new_zeros(2 * weight.shape[1]) if bias is None else bias[way]
        for tensor in (weight[way], recurrent[way], *both.chunk(2)):
            parts = tensor.chunk(len(gates))
            parameters.append(torch.cat([parts[gate] for gate in gates]))
    settings = (parameters, True, 1, 0.0, True, ways == 2, False)
    match node.kind:
        case "LSTM":
            every, *ends = torch.lstm(x, (hidden, cell), *settings)
        case "GRU":
            every, *ends = torch.gru(x, hidden, *settings)
        case _:
            every, *ends = torch.rnn_tanh(x, hidden, *settings)
    return [every.reshape(*x.shape[:2], ways, -1).transpose(1, 2), *ends]


def _recurrent_lacks(node: GraphNode) -> str | None:
    """Refuse layers of other forms than those that exporters of torch and Keras write."""
    usual = _ACTIVATIONS[node.kind]
    names = node.get("activations", tuple(usual))
    other = [name for place, name in enumerate(names) if name != usual[place % len(usual)]]
    if other:
        return f"with the activation {other[0]}"
    if node.kind == "GRU" and not node.get("linear_before_reset", 0):
        return "without linear_before_reset"
    if node.get("direction", "forward") == "reverse":
        return "in reverse alone"
    if node.reads(4) or node.reads(7):
        return "with lengths of sequences, or peepholes"
    unusual = {name for name in ("clip", "input_forget", "layout") if node.get(name, 0)}
    return f"with {', '.join(sorted(unusual))}" if unusual else None


RECURRENT: Mapping[str, TorchOperator] = {
    kind: operator(_recurrent, lacks=_recurrent_lacks) for kind in _GATES
}
