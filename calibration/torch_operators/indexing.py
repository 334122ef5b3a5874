"""Operators that take elements by index, put them there, and find indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, numbers, operator
from offramp.calibration.torch_operators.tensors import DTYPES

_REDUCED: Final = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""What torch calls the ways in which scattered values are joined with those that are there."""


def _counted_from_zero(indices: Tensor, size: int) -> Tensor:
    """Give indices that may be negative, counted from the end, as torch wants them."""
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


def _compress(node: GraphNode, x: Tensor, condition: Tensor) -> Tensor:
    axis = node.get("axis", None)
    if axis is None:
        x, axis = x.flatten(), 0
    return x.index_select(axis, torch.nonzero(condition).flatten())


def _arg_most(node: GraphNode, x: Tensor, *, largest: bool) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    last = node.get("select_last_index", 0)
    seen = x.flip(axis) if last else x
    found = (torch.argmax if largest else torch.argmin)(seen, axis, keepdim=True)
    found = x.shape[axis] - 1 - found if last else found
    return found if node.get("keepdims", 1) else found.squeeze(axis)


def _top_k(node: GraphNode, x: Tensor, k: Tensor | None = None) -> list[Tensor]:
    """Sort, and keep the first: of equal elements those with the lower index, as ONNX wants."""
    axis = node.get("axis", -1)
    (count,) = [node.get("k", 1)] if k is None else numbers(k)
    descending = bool(node.get("largest", 1))
    values, places = torch.sort(x, dim=axis, descending=descending, stable=True)
    return [values.narrow(axis, 0, count), places.narrow(axis, 0, count)]


def _trilu(node: GraphNode, x: Tensor, k: Tensor | None = None) -> Tensor:
    (diagonal,) = [0] if k is None else numbers(k)
    return torch.triu(x, diagonal) if node.get("upper", 1) else torch.tril(x, diagonal)


def _eye_like(node: GraphNode, x: Tensor) -> Tensor:
    dtype = DTYPES[node.get("dtype", 1)] if "dtype" in node.attributes else x.dtype
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    columns = torch.arange(x.shape[1], device=x.device)[None]
    return (columns - rows == node.get("k", 0)).to(dtype)


INDEXING: Mapping[str, TorchOperator] = {
    "ArgMax": operator(lambda node, x: _arg_most(node, x, largest=True)),
    "ArgMin": operator(lambda node, x: _arg_most(node, x, largest=False)),
    "Compress": operator(_compress),
    "EyeLike": operator(_eye_like),
    "Gather": operator(_gather),
    "GatherElements": operator(_gather_elements),
    "GatherND": operator(_gather_nd),
    "NonZero": operator(_non_zero),
    "OneHot": operator(_one_hot, settings=(1,), untrained=(2,)),
    "Scatter": operator(_scatter_elements),
    "ScatterElements": operator(_scatter_elements),
    "ScatterND": operator(_scatter_nd),
    "TopK": operator(_top_k, settings=(1,)),
    "Trilu": operator(_trilu, settings=(1,)),
}
