"""Operators that normalise: over batches' statistics, channels, groups, layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, operator


def _batch_norm(
    node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor, *statistics: Tensor
) -> Tensor:
    """Normalise by the statistics that the graph has, whatever the batch's own are."""
    mean, variance = statistics
    eps = node.get("epsilon", 1e-5)
    if not (mean.requires_grad or variance.requires_grad):
        return functional.batch_norm(x, mean, variance, scale, bias, eps=eps)
    # torch has no gradients of statistics
    shape = (-1, *([1] * (x.ndim - 2)))
    factor = scale * torch.rsqrt(variance + eps)
    return x * factor.reshape(shape) + (bias - mean * factor).reshape(shape)


def _batch_norm_lacks(node: GraphNode) -> str | None:
    """Statistics of the batch make a sample's answer hang on its neighbours."""
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
    """Normalise over the axes from one on; mean and inverse deviation are further outputs."""
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
    """Normalise groups of channels; scales were one a group before opset 21."""
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
    # the mean of the window is its sum by the size, as ONNX divides alpha
    base = node.get("bias", 1.0) + node.get("alpha", 1e-4) * summed.reshape(x.shape)
    return x / base ** node.get("beta", 0.75)


def _lp_norm(node: GraphNode, x: Tensor) -> Tensor:
    axis = node.get("axis", -1)
    length = torch.linalg.vector_norm(x, node.get("p", 2), axis, keepdim=True)
    return torch.where(length == 0, torch.zeros_like(x), x / length)


def _mean_variance(node: GraphNode, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, node.get("axes", (0, 2, 3)), correction=0, keepdim=True)
    return (x - mean) / (variance.sqrt() + 1e-9)


NORMALISATION: Mapping[str, TorchOperator] = {
    "BatchNormalization": operator(_batch_norm, untrained=(3, 4), lacks=_batch_norm_lacks),
    "GroupNormalization": operator(_group_norm),
    "InstanceNormalization": operator(_instance_norm),
    "LRN": operator(_local_response),
    "LayerNormalization": operator(_layer_norm),
    "LpNormalization": operator(_lp_norm),
    "MeanVarianceNormalization": operator(_mean_variance),
    "RMSNormalization": operator(_rms_norm),
}
