"""Operators on each element, such as arithmetic and activations; reductions; softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import (
    DTYPES,
    GraphNode,
    TorchOperator,
    numbers,
    operator,
    plain,
)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _modulo(node: GraphNode, x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(x, exponent).to(x.dtype)


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> TorchOperator:
    """Return an operator for any number of tensors from a function of two."""
    return operator(lambda _node, *inputs: reduce(function, inputs))


def _mean(_node: GraphNode, *inputs: Tensor) -> Tensor:
    return reduce(torch.add, inputs) / len(inputs)


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _is_infinite(node: GraphNode, x: Tensor) -> Tensor:
    found = torch.isinf(x)
    if not node.get("detect_negative", 1):
        found &= x > 0
    if not node.get("detect_positive", 1):
        found &= x < 0
    return found


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _celu(node: GraphNode, x: Tensor) -> Tensor:
    return functional.celu(x, node.get("alpha", 1.0))


def _elu(node: GraphNode, x: Tensor) -> Tensor:
    return functional.elu(x, node.get("alpha", 1.0))


def _selu(node: GraphNode, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.6732632423543772), node.get("gamma", 1.0507009873554805)
    return gamma * functional.elu(x, alpha)


def _gelu(node: GraphNode, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=node.get("approximate", "none"))


def _hard_sigmoid(node: GraphNode, x: Tensor) -> Tensor:
    return torch.clamp(node.get("alpha", 0.2) * x + node.get("beta", 0.5), 0, 1)


def _hard_swish(x: Tensor) -> Tensor:
    return x * torch.clamp(x / 6 + 0.5, 0, 1)


def _leaky_relu(node: GraphNode, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, node.get("alpha", 0.01))


def _swish(node: GraphNode, x: Tensor) -> Tensor:
    return x * torch.sigmoid(node.get("alpha", 1.0) * x)


def _cast(node: GraphNode, x: Tensor) -> Tensor:
    return x.to(DTYPES[node.get("to", 1)])


def _cast_lacks(node: GraphNode) -> str | None:
    return None if node.get("to", 1) in DTYPES else f"to data type {node.get('to', 1)}"


def _cast_like(_node: GraphNode, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


def _dropout(_node: GraphNode, x: Tensor, *_settings: Tensor | None) -> list[Tensor]:
    """Return the input unchanged, even if the graph was exported for training."""
    return [x, torch.ones_like(x, dtype=torch.bool)]


ELEMENTWISE: Mapping[str, TorchOperator] = {
    "Abs": plain(torch.abs),
    "Acos": plain(torch.acos),
    "Acosh": plain(torch.acosh),
    "Add": plain(torch.add),
    "And": plain(torch.logical_and),
    "Asin": plain(torch.asin),
    "Asinh": plain(torch.asinh),
    "Atan": plain(torch.atan),
    "Atanh": plain(torch.atanh),
    "BitwiseAnd": plain(torch.bitwise_and),
    "BitwiseNot": plain(torch.bitwise_not),
    "BitwiseOr": plain(torch.bitwise_or),
    "BitwiseXor": plain(torch.bitwise_xor),
    "Cast": operator(_cast, lacks=_cast_lacks),
    "CastLike": operator(_cast_like),
    "Ceil": plain(torch.ceil),
    "Celu": operator(_celu),
    "Clip": plain(_clip, untrained=(1, 2)),
    "Cos": plain(torch.cos),
    "Cosh": plain(torch.cosh),
    "Div": plain(_divide),
    "Dropout": operator(_dropout, settings=(1, 2)),
    "Elu": operator(_elu),
    "Equal": plain(torch.eq),
    "Erf": plain(torch.erf),
    "Exp": plain(torch.exp),
    "Floor": plain(torch.floor),
    "Gelu": operator(_gelu),
    "Greater": plain(torch.gt),
    "GreaterOrEqual": plain(torch.ge),
    "HardSigmoid": operator(_hard_sigmoid),
    "HardSwish": plain(_hard_swish),
    "Identity": plain(lambda x: x),
    "IsInf": operator(_is_infinite),
    "IsNaN": plain(torch.isnan),
    "LeakyRelu": operator(_leaky_relu),
    "Less": plain(torch.lt),
    "LessOrEqual": plain(torch.le),
    "Log": plain(torch.log),
    "Max": _folded(torch.maximum),
    "Mean": operator(_mean),
    "Min": _folded(torch.minimum),
    "Mish": plain(functional.mish),
    "Mod": operator(_modulo),
    "Mul": plain(torch.mul),
    "Neg": plain(torch.neg),
    "Not": plain(torch.logical_not),
    "Or": plain(torch.logical_or),
    "Pow": plain(_power, untrained=(1,)),
    "PRelu": plain(_prelu),
    "Reciprocal": plain(torch.reciprocal),
    "Relu": plain(torch.relu),
    "Round": plain(torch.round),
    "Selu": operator(_selu),
    "Sigmoid": plain(torch.sigmoid),
    "Sign": plain(torch.sign),
    "Sin": plain(torch.sin),
    "Sinh": plain(torch.sinh),
    "Softplus": plain(functional.softplus),
    "Softsign": plain(functional.softsign),
    "Sqrt": plain(torch.sqrt),
    "Sub": plain(torch.sub),
    "Sum": _folded(torch.add),
    "Swish": operator(_swish),
    "Tan": plain(torch.tan),
    "Tanh": plain(torch.tanh),
    "Where": plain(torch.where),
    "Xor": plain(torch.logical_xor),
}


_Reduction = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Function that reduces some axes, perhaps none; reduced axes keep size 1."""


def _reduced(function: _Reduction) -> TorchOperator:
    """Return a reduction of all axes, or of those in an attribute or, in newer opsets, an input."""

    def run(node: GraphNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
        found = node.get("axes", ()) if axes is None else numbers(axes)
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


def _averaged(x: Tensor, axes: tuple[int, ...]) -> Tensor:
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
    """Return the maximum (minimum) of no elements: the smallest (largest) value of the type."""
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


def _cumulated(node: GraphNode, x: Tensor, axis: Tensor) -> Tensor:
    (along,) = numbers(axis)
    along %= x.ndim
    if node.get("reverse", 0):
        x = x.flip(along)
    if node.get("exclusive", 0) and x.shape[along]:
        first = torch.zeros_like(x.narrow(along, 0, 1))
        x = torch.cat([first, x.narrow(along, 0, x.shape[along] - 1)], along)
    x = torch.cumsum(x, along, dtype=x.dtype)
    return x.flip(along) if node.get("reverse", 0) else x


def _softened(function: Callable[[Tensor, int], Tensor]) -> TorchOperator:
    """Return an operator for a function along an axis."""
    return operator(lambda node, x: function(x, node.get("axis", -1)))


REDUCTIONS: Mapping[str, TorchOperator] = {
    "CumSum": operator(_cumulated, settings=(1,)),
    "LogSoftmax": _softened(torch.log_softmax),
    "ReduceL1": _reduced(lambda x, axes: _sum(x.abs(), axes)),
    "ReduceL2": _reduced(lambda x, axes: _square_root(_sum(x * x, axes))),
    "ReduceLogSum": _reduced(lambda x, axes: _sum(x, axes).log()),
    "ReduceLogSumExp": _reduced(_log_sum_exp),
    "ReduceMax": _reduced(_most),
    "ReduceMean": _reduced(_averaged),
    "ReduceMin": _reduced(_least),
    "ReduceProd": _reduced(_product),
    "ReduceSum": _reduced(_sum),
    "ReduceSumSquare": _reduced(lambda x, axes: _sum(x * x, axes)),
    "Softmax": _softened(torch.softmax),
}
