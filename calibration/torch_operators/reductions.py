"""Operators that reduce or accumulate along axes, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from offramp.calibration.torch_operators.node import (
    GraphNode,
    TorchOperator,
    axes_of,
    numbers,
    operator,
)

_Reduction = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Reduces some axes, perhaps none, which stay with size 1."""


def _reduced(function: _Reduction) -> TorchOperator:
    """List a reduction of all axes, or of those that an attribute or, later, an input names."""

    def run(node: GraphNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
        found = axes_of(node, axes) or ()
        along = tuple(sorted(axis % x.ndim for axis in found))
        if not along and not node.get("noop_with_empty_axes", 0):
            along = tuple(range(x.ndim))
        reduced = function(x, along)
        if node.get("keepdims", 1) or not along:
            return reduced
        return reduced.squeeze(along)

    return operator(run, settings=(1,))


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(axes, keepdim=True, dtype=x.dtype) if axes else x


def _mean(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    count = math.prod(x.shape[axis] for axis in axes)
    if x.is_floating_point():
        return x.mean(axes, keepdim=True) if axes else x
    return torch.div(_sum(x, axes), count, rounding_mode="trunc")


def _product(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis in axes:
        x = x.prod(axis, keepdim=True, dtype=x.dtype)
    return x


def _most(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    if 0 in x.shape:
        return _of_nothing(x, axes, largest=True)
    return x.amax(axes, keepdim=True) if axes else x


def _least(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    if 0 in x.shape:
        return _of_nothing(x, axes, largest=False)
    return x.amin(axes, keepdim=True) if axes else x


def _of_nothing(x: Tensor, axes: tuple[int, ...], *, largest: bool) -> Tensor:
    """Give the least (or greatest) value there is for a maximum (or minimum) of no elements."""
    sizes = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    if x.is_floating_point():
        return x.new_full(sizes, -math.inf if largest else math.inf)
    if x.dtype == torch.bool:
        return x.new_full(sizes, not largest)
    bounds = torch.iinfo(x.dtype)
    return x.new_full(sizes, bounds.min if largest else bounds.max)


def _log_sum_exp(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return torch.logsumexp(x, axes, keepdim=True) if axes else x


def _square_root(x: Tensor) -> Tensor:
    return torch.sqrt(x) if x.is_floating_point() else torch.sqrt(x.double()).to(x.dtype)


def _cumulated(node: GraphNode, x: Tensor, axis: Tensor, *, product: bool) -> Tensor:
    (along,) = numbers(axis)
    along %= x.ndim
    if node.get("reverse", 0):
        x = x.flip(along)
    if node.get("exclusive", 0) and x.shape[along]:
        first = torch.full_like(x.narrow(along, 0, 1), int(product))
        x = torch.cat([first, x.narrow(along, 0, x.shape[along] - 1)], along)
    x = (torch.cumprod if product else torch.cumsum)(x, along, dtype=x.dtype)
    return x.flip(along) if node.get("reverse", 0) else x


def _softened(function: Callable[[Tensor, int], Tensor]) -> TorchOperator:
    """List a function along an axis: the last one, or before opset 13 all from the axis on."""

    def run(node: GraphNode, x: Tensor) -> Tensor:
        if node.opset >= 13:
            return function(x, node.get("axis", -1))
        axis = node.get("axis", 1)
        axis += x.ndim if axis < 0 else 0
        flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
        return function(flat, 1).reshape(x.shape)

    return operator(run)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


REDUCTIONS: Mapping[str, TorchOperator] = {
    "CumProd": operator(lambda n, x, a: _cumulated(n, x, a, product=True), settings=(1,)),
    "CumSum": operator(lambda n, x, a: _cumulated(n, x, a, product=False), settings=(1,)),
    "Hardmax": _softened(_hardmax),
    "LogSoftmax": _softened(torch.log_softmax),
    "ReduceL1": _reduced(lambda x, axes: _sum(x.abs(), axes)),
    "ReduceL2": _reduced(lambda x, axes: _square_root(_sum(x * x, axes))),
    "ReduceLogSum": _reduced(lambda x, axes: _sum(x, axes).log()),
    "ReduceLogSumExp": _reduced(_log_sum_exp),
    "ReduceMax": _reduced(_most),
    "ReduceMean": _reduced(_mean),
    "ReduceMin": _reduced(_least),
    "ReduceProd": _reduced(_product),
    "ReduceSum": _reduced(_sum),
    "ReduceSumSquare": _reduced(lambda x, axes: _sum(x * x, axes)),
    "Softmax": _softened(torch.softmax),
}
