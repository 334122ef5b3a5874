"""Convolutions and pools over one to three spatial axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, operator
from offramp.calibration.torch_operators.windows import Windows, halved

_CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
_MAX_POOL = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGE_POOL = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def _conv(node: GraphNode, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    windows = Windows.of(node, x.shape[2:], weight.shape[2:])
    padding = windows.begins
    if windows.begins != windows.ends or min(padding) < 0:  # torch pads both ends alike
        x, padding = windows.pad(x, 0.0), (0,) * len(padding)
    return _CONVOLVE[x.ndim - 3](
        x, weight, bias, windows.strides, padding, windows.dilations, node.get("group", 1)
    )


def _conv_transpose(
    node: GraphNode, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Convolve without any padding, then cut off what is padded."""
    axes = x.ndim - 2
    strides = tuple(node.get("strides", (1,) * axes))
    dilations = tuple(node.get("dilations", (1,) * axes))
    extra = tuple(node.get("output_padding", (0,) * axes))
    whole = [
        (size - 1) * stride + (k - 1) * dilation + 1 + more
        for size, stride, k, dilation, more in zip(
            x.shape[2:], strides, weight.shape[2:], dilations, extra, strict=True
        )
    ]
    begins, ends = _cut_off(node, x.shape[2:], strides, whole)
    y = _TRANSPOSED[axes - 1](
        x, weight, None, strides, 0, 0, groups=node.get("group", 1), dilation=dilations
    )
    # what output_padding adds behind is zeros before the bias
    amounts = [
        amount
        for begin, end, more in reversed(list(zip(begins, ends, extra, strict=True)))
        for amount in (-begin, more - end)
    ]
    y = functional.pad(y, amounts)
    return y if bias is None else y + bias.reshape(-1, *([1] * axes))


def _cut_off(
    node: GraphNode, sizes: Sequence[int], strides: Sequence[int], whole: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give what is cut off in front and behind, by ``pads``, ``output_shape`` or ``auto_pad``."""
    axes, how = len(strides), node.get("auto_pad", "NOTSET")
    wanted = node.get("output_shape", None)
    if wanted is None and how in {"NOTSET", "VALID"}:
        pads = tuple(node.get("pads", (0,) * (2 * axes))) if how == "NOTSET" else (0,) * (2 * axes)
        return pads[:axes], pads[axes:]
    if wanted is None:
        wanted = tuple(size * stride for size, stride in zip(sizes, strides, strict=True))
    totals = [a - b for a, b in zip(whole, wanted[-axes:], strict=True)]
    return halved(totals, more_in_front=how != "SAME_UPPER")


def _max_pool(node: GraphNode, x: Tensor) -> Tensor:
    windows = Windows.of(node, x.shape[2:], node.get("kernel_shape", ()))
    extra = windows.overhang(x.shape[2:]) if node.get("ceil_mode", 0) else None
    if x.is_floating_point():
        x = windows.pad(x, -math.inf, extra)
        return _MAX_POOL[x.ndim - 3](x, windows.kernel, windows.strides, 0, windows.dilations)
    # torch pools no bytes; every value of a byte is one of float32 too
    filled = windows.pad(x.float(), float(torch.iinfo(x.dtype).min), extra)
    pooled = _MAX_POOL[x.ndim - 3](filled, windows.kernel, windows.strides, 0, windows.dilations)
    return pooled.to(x.dtype)


def _max_pool_lacks(node: GraphNode) -> str | None:
    return "with its second output, the indices" if node.writes(1) else None


def _average_pool(node: GraphNode, x: Tensor) -> Tensor:
    """Sum windows, and divide by the places that count: the input's, perhaps the padding's too."""
    windows = Windows.of(node, x.shape[2:], node.get("kernel_shape", ()))
    extra = windows.overhang(x.shape[2:]) if node.get("ceil_mode", 0) else None
    summed = _summed(windows, windows.pad(x, 0.0, extra))
    if not any((*windows.begins, *windows.ends, *(extra or ()))):
        return summed / math.prod(windows.kernel)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if not node.get("count_include_pad", 0):
        counted = windows.pad(ones, 0.0, extra)
    else:  # what is beyond the padding never counts
        behind = [amount for added in reversed(extra or ()) for amount in (0, added)]
        counted = functional.pad(windows.pad(ones, 1.0), behind)
    return summed / _summed(windows, counted)


def _summed(windows: Windows, x: Tensor) -> Tensor:
    """Sum the windows of a tensor that is padded."""
    if max(windows.dilations) > 1:
        for axis, (k, stride, dilation) in enumerate(
            zip(windows.kernel, windows.strides, windows.dilations, strict=True), 2
        ):
            x = x.unfold(axis, (k - 1) * dilation + 1, stride)[..., ::dilation].sum(-1)
        return x
    return _AVERAGE_POOL[x.ndim - 3](x, windows.kernel, windows.strides) * math.prod(windows.kernel)


def _lp_pool(node: GraphNode, x: Tensor) -> Tensor:
    windows = Windows.of(node, x.shape[2:], node.get("kernel_shape", ()))
    extra = windows.overhang(x.shape[2:]) if node.get("ceil_mode", 0) else None
    p = node.get("p", 2)
    return _summed(windows, windows.pad(x.abs() ** p, 0.0, extra)) ** (1 / p)


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _global_lp_pool(node: GraphNode, x: Tensor) -> Tensor:
    p = node.get("p", 2)
    summed = (x.abs() ** p).sum(_spatial(x), keepdim=True)
    return summed ** (1 / p)


CONVOLUTIONS: Mapping[str, TorchOperator] = {
    "AveragePool": operator(_average_pool),
    "Conv": operator(_conv),
    "ConvTranspose": operator(_conv_transpose),
    "GlobalAveragePool": operator(lambda _, x: x.mean(_spatial(x), keepdim=True)),
    "GlobalLpPool": operator(_global_lp_pool),
    "GlobalMaxPool": operator(lambda _, x: x.amax(_spatial(x), keepdim=True)),
    "LpPool": operator(_lp_pool),
    "MaxPool": operator(_max_pool, lacks=_max_pool_lacks),
}
