"""Operators over spatial axes: convolutions and pools with their windows, and resizing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import (
    GraphNode,
    TorchOperator,
    numbers,
    operator,
    padded,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of an operator over the spatial axes of its input: one number for each axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    """Padding at the beginning."""
    ends: tuple[int, ...]
    """Padding at the end of each spatial axis."""

    @classmethod
    def of(cls, node: GraphNode, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
        """Read a node's attributes, for an input of some spatial sizes."""
        axes = len(kernel)
        strides = tuple(node.get("strides", (1,) * axes))
        dilations = tuple(node.get("dilations", (1,) * axes))
        pads = tuple(node.get("pads", (0,) * (2 * axes)))
        how = node.get("auto_pad", "NOTSET")
        begins, ends = pads[:axes], pads[axes:]
        if how == "VALID":
            begins = ends = (0,) * axes
        elif how != "NOTSET":
            totals = [
                max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
                for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
            ]
            begins, ends = halved(totals, more_in_front=how == "SAME_LOWER")
        return cls(
            kernel=tuple(kernel), strides=strides, dilations=dilations, begins=begins, ends=ends
        )

    def overhang(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return how many elements the last windows need after the padding, rounding up.

        A window that would begin in the padding after the input does not count.
        """
        found = []
        for axis, size in enumerate(sizes):
            span = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            stride, begin = self.strides[axis], self.begins[axis]
            whole = size + begin + self.ends[axis]
            count = -(-(whole - span) // stride) + 1
            if (count - 1) * stride >= size + begin:
                count -= 1
            found.append(max((count - 1) * stride + span - whole, 0))
        return tuple(found)

    def pad(self, x: Tensor, value: float, extra: Sequence[int] | None = None) -> Tensor:
        """Pad the spatial axes of a tensor, with ``extra`` elements at the end."""
        more = extra or (0,) * len(self.ends)
        amounts = [
            amount
            for begin, end, added in reversed(list(zip(self.begins, self.ends, more, strict=True)))
            for amount in (begin, end + added)
        ]
        return functional.pad(x, amounts, value=value) if any(amounts) else x


def halved(
    totals: Sequence[int], *, more_in_front: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide padding between both ends; an odd element goes to the beginning or to the end."""
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - half for total, half in zip(totals, smaller, strict=True))
    return (larger, smaller) if more_in_front else (smaller, larger)


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
    if windows.begins != windows.ends or min(padding) < 0:  # torch pads both ends equally
        x, padding = windows.pad(x, 0.0), (0,) * len(padding)
    return _CONVOLVE[x.ndim - 3](
        x, weight, bias, windows.strides, padding, windows.dilations, node.get("group", 1)
    )


def _conv_transpose(
    node: GraphNode, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Convolve without any padding, then cut off the padding."""
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
    # output_padding adds zeros at the end, before the bias
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
    """Return the sizes to cut off at both ends, by ``pads``, ``output_shape`` or ``auto_pad``."""
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
    # torch does not pool bytes; float32 represents every value of a byte
    filled = windows.pad(x.float(), float(torch.iinfo(x.dtype).min), extra)
    pooled = _MAX_POOL[x.ndim - 3](filled, windows.kernel, windows.strides, 0, windows.dilations)
    return pooled.to(x.dtype)


def _max_pool_lacks(node: GraphNode) -> str | None:
    return "with its second output, the indices" if node.writes(1) else None


def _average_pool(node: GraphNode, x: Tensor) -> Tensor:
    """Divide sums of windows by each window's number of input elements, or of all elements."""
    windows = Windows.of(node, x.shape[2:], node.get("kernel_shape", ()))
    extra = windows.overhang(x.shape[2:]) if node.get("ceil_mode", 0) else None
    summed = _summed(windows, windows.pad(x, 0.0, extra))
    if not any((*windows.begins, *windows.ends, *(extra or ()))):
        return summed / math.prod(windows.kernel)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if not node.get("count_include_pad", 0):
        counted = windows.pad(ones, 0.0, extra)
    else:  # places after the padding never count
        behind = [amount for added in reversed(extra or ()) for amount in (0, added)]
        counted = functional.pad(windows.pad(ones, 1.0), behind)
    return summed / _summed(windows, counted)


def _summed(windows: Windows, x: Tensor) -> Tensor:
    """Sum the windows of a padded tensor."""
    if max(windows.dilations) > 1:
        for axis, (k, stride, dilation) in enumerate(
            zip(windows.kernel, windows.strides, windows.dilations, strict=True), 2
        ):
            x = x.unfold(axis, (k - 1) * dilation + 1, stride)[..., ::dilation].sum(-1)
        return x
    return _AVERAGE_POOL[x.ndim - 3](x, windows.kernel, windows.strides) * math.prod(windows.kernel)


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


CONVOLUTIONS: Mapping[str, TorchOperator] = {
    "AveragePool": operator(_average_pool),
    "Conv": operator(_conv),
    "ConvTranspose": operator(_conv_transpose),
    "GlobalAveragePool": operator(lambda _, x: x.mean(_spatial(x), keepdim=True)),
    "GlobalMaxPool": operator(lambda _, x: x.amax(_spatial(x), keepdim=True)),
    "MaxPool": operator(_max_pool, lacks=_max_pool_lacks),
}


_Floats = NDArray[np.float32]


class _Axis(NamedTuple):
    """Sizes and scale of one axis that is resized."""

    before: int
    after: int
    scale: float


def _resize(node: GraphNode, x: Tensor, *rest: Tensor | None) -> Tensor:
    """Resize by scales, or to sizes."""
    _, scales, sizes = padded(rest, 3)
    along = [axis % x.ndim for axis in node.get("axes", tuple(range(x.ndim)))]
    axes = {}
    if sizes is not None and sizes.numel():
        for axis, size in zip(along, numbers(sizes), strict=True):
            axes[axis] = _Axis(x.shape[axis], size, size / x.shape[axis])
    elif scales is not None:
        for axis, scale in zip(along, scales.tolist(), strict=True):
            axes[axis] = _Axis(x.shape[axis], int(x.shape[axis] * scale), scale)
    return _resized(node, x, axes)


def _resize_lacks(node: GraphNode) -> str | None:
    if node.get("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return "with the coordinates tf_crop_and_resize"
    if node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "with keep_aspect_ratio_policy"
    return "with antialias" if node.get("antialias", 0) else None


def _resized(node: GraphNode, x: Tensor, axes: Mapping[int, _Axis]) -> Tensor:
    """Interpolate one axis after the other; the result is the same as for all axes at once."""
    for axis, resized in axes.items():
        if resized.before == resized.after and resized.scale == 1:
            continue
        places, weights = _taps(node, resized)
        parts = []
        for at, weight in zip(places, weights, strict=True):
            taken = x.index_select(axis, torch.from_numpy(at).to(x.device))
            if weight is not None:
                shape = [-1 if a == axis else 1 for a in range(x.ndim)]
                taken = taken * torch.from_numpy(weight).to(x).reshape(shape)
            parts.append(taken)
        x = sum(parts[1:], parts[0])
    return x


def _taps(node: GraphNode, axis: _Axis) -> tuple[list[NDArray[np.int64]], list[_Floats | None]]:
    """Return the input indices from which each output element is computed, and their weights."""
    original = _original(node, axis)
    most = axis.before - 1
    mode = node.get("mode", "nearest")
    if mode == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        nearest = _NEAREST[rounding](original)
        return [np.clip(nearest.astype(np.int64), 0, most)], [None]
    if mode == "linear":
        original = np.clip(original, 0, most)
    floor = np.floor(original)
    part = (original - floor).astype(np.float32)
    first = floor.astype(np.int64)
    if mode == "linear":
        return [first, np.minimum(first + 1, most)], [1 - part, part]
    weights = _cubic(part, node.get("cubic_coeff_a", -0.75))
    places = [first + offset for offset in (-1, 0, 1, 2)]
    if node.get("exclude_outside", 0):
        inside = [(at >= 0) & (at <= most) for at in places]
        kept = [np.where(i, w, np.float32(0)) for i, w in zip(inside, weights, strict=True)]
        total = np.sum(kept, axis=0)
        weights = [(w / total).astype(np.float32) for w in kept]
    return [np.clip(at, 0, most) for at in places], list(weights)


def _original(node: GraphNode, axis: _Axis) -> _Floats:
    """Return the (fractional) position in the input of each element of the output.

    It is float32 as in ONNX Runtime, so that half-way positions are rounded to the same side.
    """
    x = np.arange(axis.after, dtype=np.float32)
    scale, before, after = np.float32(axis.scale), np.float32(axis.before), np.float32(axis.after)
    half = np.float32(0.5)
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        return np.asarray(x / scale, np.float32)
    if mode == "align_corners":
        spans = before * scale - 1  # of the size before rounding
        step = (before - 1) / spans if spans and axis.after > 1 else np.float32(0)
        return np.asarray(x * step, np.float32)
    if mode == "pytorch_half_pixel" and axis.after == 1:
        return np.full_like(x, -half if node.get("mode", "nearest") == "nearest" else 0)
    if mode == "tf_half_pixel_for_nn":
        return np.asarray((x + half) / scale, np.float32)
    shift: np.floating[Any] = np.float32(0)
    if mode == "half_pixel_symmetric":
        # rounding the size does not move the middle
        shift = before / 2 * (1 - after / (before * scale))
    return np.asarray(shift + (x + half) / scale - half, np.float32)


_NEAREST: Mapping[str, Any] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _cubic(part: _Floats, a: float) -> list[_Floats]:
    """Return the weights of the four neighbours, by the distance from the second (Keys, 1981)."""

    def near(d: _Floats) -> _Floats:
        return np.asarray((a + 2) * d**3 - (a + 3) * d**2 + 1, np.float32)

    def far(d: _Floats) -> _Floats:
        return np.asarray(a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a, np.float32)

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def _grid_sample(node: GraphNode, x: Tensor, grid: Tensor) -> Tensor:
    mode = node.get("mode", "linear")
    return functional.grid_sample(
        x,
        grid,
        mode={"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode),
        padding_mode=node.get("padding_mode", "zeros"),
        align_corners=bool(node.get("align_corners", 0)),
    )


RESIZING: Mapping[str, TorchOperator] = {
    "GridSample": operator(_grid_sample),
    "Resize": operator(_resize, settings=(1, 2, 3), lacks=_resize_lacks),
}
