"""Operators that change shapes and order, join, pad, and take or put elements by index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import (
    GraphNode,
    TorchOperator,
    numbers,
    operator,
    plain,
)


def _shape(node: GraphNode, x: Tensor) -> Tensor:
    sizes = list(x.shape)[node.get("start", 0) : node.get("end", x.ndim)]
    return torch.tensor(sizes, dtype=torch.int64)


def _size(_node: GraphNode, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


def _reshape(node: GraphNode, x: Tensor, shape: Tensor) -> Tensor:
    sizes = numbers(shape)
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: GraphNode, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(numbers(axes)))


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    found = numbers(axes)
    rank = x.ndim + len(found)
    for axis in sorted(axis % rank for axis in found):
        x = x.unsqueeze(axis)
    return x


def _transpose(node: GraphNode, x: Tensor) -> Tensor:
    return x.permute(node.get("perm", tuple(reversed(range(x.ndim)))))


def _expand(_node: GraphNode, x: Tensor, shape: Tensor) -> Tensor:
    sizes = np.broadcast_shapes(tuple(x.shape), tuple(numbers(shape)))
    return x.expand(sizes)


def _tile(_node: GraphNode, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(numbers(repeats)) if x.ndim else x


def _concat(node: GraphNode, *inputs: Tensor) -> Tensor:
    return torch.cat(inputs, node.get("axis", 1))


def _split(node: GraphNode, x: Tensor, split: Tensor | None = None) -> Sequence[Tensor]:
    """Split by sizes, or into equal parts, the last of which may be smaller (opset 18)."""
    axis = node.get("axis", 0)
    if split is not None:
        return x.split_with_sizes(numbers(split), axis)
    whole, parts = x.shape[axis], node.get("num_outputs", len(node.outputs))
    part = -(-whole // parts)
    starts = [min(part * i, whole) for i in range(parts + 1)]
    return x.split_with_sizes([b - a for a, b in itertools.pairwise(starts)], axis)


def _slice(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    first, last = numbers(starts), numbers(ends)
    along = list(range(len(first))) if axes is None else numbers(axes)
    by = [1] * len(first) if steps is None else numbers(steps)
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        taken = range(*slice(start, end, step).indices(x.shape[axis]))
        if step > 0:
            at = [slice(None)] * x.ndim
            at[axis] = slice(taken.start, max(taken.stop, taken.start), step)
            x = x[tuple(at)]
        else:  # torch does not support negative steps
            x = x.index_select(axis, torch.tensor(taken, dtype=torch.int64, device=x.device))
    return x


def _pad(
    node: GraphNode,
    x: Tensor,
    pads: Tensor,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    """Pad or crop each axis at both ends."""
    amounts = numbers(pads)
    along = list(range(x.ndim)) if axes is None else numbers(axes)
    half = len(amounts) // 2
    by_axis = {
        axis % x.ndim: (begin, end)
        for axis, begin, end in zip(along, amounts[:half], amounts[half:], strict=True)
    }
    mode = node.get("mode", "constant")
    if mode == "constant":
        fill = 0.0 if value is None else value.item()
        ordered = [by_axis.get(axis, (0, 0)) for axis in reversed(range(x.ndim))]
        return functional.pad(x, [amount for ends in ordered for amount in ends], value=fill)
    for axis, (begin, end) in by_axis.items():
        if begin or end:
            places = torch.arange(-begin, x.shape[axis] + end, device=x.device)
            x = x.index_select(axis, _PLACES[mode](places, x.shape[axis]))
    return x


def _reflected(places: Tensor, size: int) -> Tensor:
    """Return indices; mirror those outside [0, size) at the edges, without repeating the edge."""
    period = max(2 * (size - 1), 1)
    places = places.remainder(period)
    return torch.where(places < size, places, period - places)


_PLACES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "reflect": _reflected,
    "edge": lambda places, size: places.clamp(0, size - 1),
    "wrap": lambda places, size: places.remainder(size),
}


def _depth_to_space(node: GraphNode, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = node.get("blocksize", 1)
    if node.get("mode", "DCR") == "DCR":
        x = x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(n, c // b**2, h * b, w * b)


def _space_to_depth(node: GraphNode, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = node.get("blocksize", 1)
    places = (0, 3, 5, 1, 2, 4) if node.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    x = x.reshape(n, c, h // b, b, w // b, b).permute(places)
    return x.reshape(n, c * b**2, h // b, w // b)


def _constant(node: GraphNode) -> Tensor:
    for name, dtype in _CONSTANTS.items():
        if name in node.attributes:
            return torch.tensor(node.attributes[name], dtype=dtype)
    value: Tensor = node.attributes["value"]
    return value


_CONSTANTS = {
    "value_float": torch.float32,
    "value_floats": torch.float32,
    "value_int": torch.int64,
    "value_ints": torch.int64,
}


def _constant_lacks(node: GraphNode) -> str | None:
    known = isinstance(node.get("value", None), Tensor) or not _CONSTANTS.keys().isdisjoint(
        node.attributes
    )
    return None if known else "of texts or of a sparse tensor"


def _constant_of_shape(node: GraphNode, shape: Tensor) -> Tensor:
    value = node.get("value", torch.zeros(1))
    return value.reshape(()).expand(numbers(shape)).clone()


def _range(_node: GraphNode, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, step = start.item(), delta.item()
    count = max(math.ceil((limit.item() - first) / step), 0)
    return (torch.arange(count) * step + first).to(start.dtype)


SHAPES: Mapping[str, TorchOperator] = {
    "Concat": operator(_concat),
    "Constant": operator(_constant, lacks=_constant_lacks),
    "ConstantOfShape": operator(_constant_of_shape, settings=(0,)),
    "DepthToSpace": operator(_depth_to_space),
    "Expand": operator(_expand, settings=(1,)),
    "Flatten": operator(_flatten),
    "Pad": operator(_pad, settings=(1, 2, 3)),
    "Range": operator(_range, settings=(0, 1, 2)),
    "Reshape": operator(_reshape, settings=(1,)),
    "Shape": operator(_shape),
    "Size": operator(_size),
    "Slice": plain(_slice, settings=(1, 2, 3, 4)),
    "SpaceToDepth": operator(_space_to_depth),
    "Split": operator(_split, settings=(1,)),
    "Squeeze": plain(_squeeze, settings=(1,)),
    "Tile": operator(_tile, settings=(1,)),
    "Transpose": operator(_transpose),
    "Unsqueeze": plain(_unsqueeze, settings=(1,)),
}


_REDUCED: Final = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""torch's names of the ways to combine scattered values with existing ones."""


def _counted_from_zero(indices: Tensor, size: int) -> Tensor:
    """Convert indices that may be negative, counted from the end, to non-negative ones."""
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


def _gather(node: GraphNode, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    places = _counted_from_zero(indices, x.shape[axis])
    taken = x.index_select(axis, places.flatten())
    return taken.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather_elements(node: GraphNode, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    return x.gather(axis, _counted_from_zero(indices, x.shape[axis]))


def _gather_nd(node: GraphNode, x: Tensor, indices: Tensor) -> Tensor:
    shared = node.get("batch_dims", 0)
    batches = x.shape[:shared]
    flat = x.reshape(-1, *x.shape[shared:])
    places = indices.long().reshape(len(flat), -1, indices.shape[-1])
    rows = torch.arange(len(flat), device=x.device)[:, None].expand(places.shape[:2])
    taken = flat[(rows, *places.unbind(-1))]
    return taken.reshape((*batches, *indices.shape[shared:-1], *taken.shape[2:]))


def _scatter_elements(node: GraphNode, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    places = _counted_from_zero(indices, x.shape[axis])
    how = node.get("reduction", "none")
    if how == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCED[how])


def _scatter_nd(node: GraphNode, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    how, depth = node.get("reduction", "none"), indices.shape[-1]
    places = indices.long()
    if how == "none":
        return x.index_put(tuple(places.unbind(-1)), updates)
    row = torch.zeros(places.shape[:-1], dtype=torch.int64, device=x.device)
    for size, index in zip(x.shape[:depth], places.unbind(-1), strict=True):
        row = row * size + _counted_from_zero(index, size)
    flat = x.reshape(x.shape[:depth].numel(), -1)
    given = updates.reshape(row.numel(), -1)
    rows = row.reshape(-1, 1).expand_as(given)
    return flat.scatter_reduce(0, rows, given, _REDUCED[how]).reshape(x.shape)


def _one_hot(node: GraphNode, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    (size,) = numbers(depth)
    axis = node.get("axis", -1) % (indices.ndim + 1)
    places = _counted_from_zero(indices, size).unsqueeze(axis)
    counts = torch.arange(size, device=indices.device)
    counts = counts.reshape(-1, *([1] * (indices.ndim - axis)))
    return torch.where(places == counts, values[1], values[0])


def _non_zero(_node: GraphNode, x: Tensor) -> Tensor:
    return torch.nonzero(x if x.ndim else x.reshape(1)).T


def _arg_most(node: GraphNode, x: Tensor, *, largest: bool) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    last = node.get("select_last_index", 0)
    seen = x.flip(axis) if last else x
    found = (torch.argmax if largest else torch.argmin)(seen, axis, keepdim=True)
    found = x.shape[axis] - 1 - found if last else found
    return found if node.get("keepdims", 1) else found.squeeze(axis)


def _top_k(node: GraphNode, x: Tensor, k: Tensor) -> list[Tensor]:
    """Sort, and keep the first k; of equal elements, lower indices are first, as in ONNX."""
    axis = node.get("axis", -1)
    (count,) = numbers(k)
    descending = bool(node.get("largest", 1))
    values, places = torch.sort(x, dim=axis, descending=descending, stable=True)
    return [values.narrow(axis, 0, count), places.narrow(axis, 0, count)]


def _trilu(node: GraphNode, x: Tensor, k: Tensor | None = None) -> Tensor:
    (diagonal,) = [0] if k is None else numbers(k)
    return torch.triu(x, diagonal) if node.get("upper", 1) else torch.tril(x, diagonal)


INDEXING: Mapping[str, TorchOperator] = {
    "ArgMax": operator(lambda node, x: _arg_most(node, x, largest=True)),
    "ArgMin": operator(lambda node, x: _arg_most(node, x, largest=False)),
    "Gather": operator(_gather),
    "GatherElements": operator(_gather_elements),
    "GatherND": operator(_gather_nd),
    "NonZero": operator(_non_zero),
    "OneHot": operator(_one_hot, settings=(1,), untrained=(2,)),
    "ScatterElements": operator(_scatter_elements),
    "ScatterND": operator(_scatter_nd),
    "TopK": operator(_top_k, settings=(1,)),
    "Trilu": operator(_trilu, settings=(1,)),
}
