"""Maps made larger or smaller, and read at other places: axis by axis, as ONNX counts places."""

from __future__ import annotations

from collections.abc import Mapping
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

_Floats = NDArray[np.float32]


class _Axis(NamedTuple):
    """How one axis is resized."""

    before: int
    after: int
    scale: float


def _upsample(node: GraphNode, x: Tensor, scales: Tensor | None = None) -> Tensor:
    factors = node.get("scales", ()) if scales is None else scales.tolist()
    axes = [
        _Axis(size, int(size * factor), factor)
        for size, factor in zip(x.shape, factors, strict=True)
    ]
    old = GraphNode(
        kind=node.kind,
        name=node.name,
        inputs=node.inputs,
        outputs=node.outputs,
        attributes={
            "mode": node.get("mode", "nearest"),
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "simple",
        },
    )
    return _resized(old, x, dict(enumerate(axes)))


def _resize(node: GraphNode, x: Tensor, *rest: Tensor | None) -> Tensor:
    """Resize by scales, or to sizes; opset 10 has no region as its second input."""
    if node.opset < 11:
        return _upsample(node, x, *rest)
    _, scales, sizes = padded(rest, 3)
    along = [axis % x.ndim for axis in node.get("axes", tuple(range(x.ndim)))]
    axes = {}
    if sizes is not None and sizes.numel():
        wanted = dict(zip(along, numbers(sizes), strict=True))
        policy = node.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            ratios = [size / x.shape[axis] for axis, size in wanted.items()]
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            for axis in along:
                axes[axis] = _Axis(x.shape[axis], int(x.shape[axis] * ratio + 0.5), ratio)
        else:
            for axis, size in wanted.items():
                axes[axis] = _Axis(x.shape[axis], size, size / x.shape[axis])
    elif scales is not None:
        for axis, scale in zip(along, scales.tolist(), strict=True):
            axes[axis] = _Axis(x.shape[axis], int(x.shape[axis] * scale), scale)
    return _resized(node, x, axes)


def _resize_lacks(node: GraphNode) -> str | None:
    if node.get("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return "with the coordinates tf_crop_and_resize"
    return "with antialias" if node.get("antialias", 0) else None


def _resized(node: GraphNode, x: Tensor, axes: Mapping[int, _Axis]) -> Tensor:
    """Interpolate one axis after the other, which is the same as all at once."""
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
    """Give the places of the input that each place of the output is made of, and their weights."""
    original = _original(node, axis)
    most = axis.before - 1
    mode = node.get("mode", "nearest")
    if mode == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        if rounding == "simple":  # ONNX Runtime's before opset 11, which ONNX leaves open
            rounding = "ceil" if axis.scale < 1 else "floor"
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
    """Give the place in the input of each place of the output, as a number between places.

    In float32 as ONNX Runtime does: half-way places fall to the same side.
    """
    x = np.arange(axis.after, dtype=np.float32)
    scale, before, after = np.float32(axis.scale), np.float32(axis.before), np.float32(axis.after)
    half = np.float32(0.5)
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        return np.asarray(x / scale, np.float32)
    if mode == "align_corners":
        spans = before * scale - 1  # of the size before it is rounded
        step = (before - 1) / spans if spans and axis.after > 1 else np.float32(0)
        return np.asarray(x * step, np.float32)
    if mode == "pytorch_half_pixel" and axis.after == 1:
        return np.full_like(x, -half if node.get("mode", "nearest") == "nearest" else 0)
    if mode == "tf_half_pixel_for_nn":
        return np.asarray((x + half) / scale, np.float32)
    shift: np.floating[Any] = np.float32(0)
    if mode == "half_pixel_symmetric":
        # a size that was rounded leaves the middle where it was
        shift = before / 2 * (1 - after / (before * scale))
    return np.asarray(shift + (x + half) / scale - half, np.float32)


_NEAREST: Mapping[str, Any] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _cubic(part: _Floats, a: float) -> list[_Floats]:
    """Give the weights of the four neighbours, by the distance from the second (Keys, 1981)."""

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
    "Upsample": operator(_upsample, settings=(1,)),
}
