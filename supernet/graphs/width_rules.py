"""Effect of operators on an elastic dimension, by kind of operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from offramp.supernet.graphs.operator_view import OperatorView
from offramp.supernet.graphs.reshape import ElasticAxis
from offramp.supernet.graphs.width_places import PLACES
from offramp.supernet.graphs.width_products import PRODUCTS

Rule: TypeAlias = Callable[[OperatorView], None]

_UNARY = frozenset(
    {"Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "Swish", "Erf", "Tanh", "Sigmoid"}
    | {"HardSigmoid", "HardSwish", "Softplus", "Softsign", "ThresholdedRelu", "Clip", "Sqrt", "Exp"}
    | {"Log", "Neg", "Abs", "Reciprocal", "Identity", "Dropout", "Cast", "Sign", "Floor", "Ceil"}
    | {"Round", "Not", "Sin", "Cos", "IsNaN", "Shrink"}
)
_NARY = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Where", "PRelu", "Mod"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"}
)
_POOLING = frozenset(
    {"MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"}
)
_REDUCING = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"})
_NORMALISED = "normalises over"
_NORM_REMEDY = (
    "statistics over fewer channels differ; keep the channels whole here and slice inside the block"
)


def _unary(view: OperatorView) -> None:
    elastic = view.only_elastic()
    view.give_all(elastic.axis, elastic)


def _elementwise(view: OperatorView) -> None:
    """Broadcast operands: all with the elastic dimension must keep the same elements of it."""
    rank = len(view.output_shape())
    kept: dict[ElasticAxis, int] = {}
    for position in view.elastic_inputs:
        found = view.elastic(position)
        assert found is not None
        axis = found.axis + rank - len(view.shape(position))
        kept[ElasticAxis(axis=axis, full=found.full, kept=found.kept)] = position
    (elastic, *others) = kept
    if others:
        first, second = (view.inputs[kept[e]] for e in (elastic, others[0]))
        view.refuse(
            f"{first!r} has {elastic} in dimension {elastic.axis} and {second!r} {others[0]} in "
            f"dimension {others[0].axis}; slice both by one [[width]]"
        )
    for position in range(len(view.inputs)):
        if view.has(position) and view.elastic(position) is None:
            _broadcast(view, position, elastic, rank)
    view.give(elastic.axis, elastic)


def _broadcast(view: OperatorView, position: int, elastic: ElasticAxis, rank: int) -> None:
    """Slice a constant operand; NotElasticError if a computed operand has the whole dimension."""
    shape = view.shape(position)
    axis = elastic.axis - (rank - len(shape))
    if axis < 0 or shape[axis] == 1:
        return
    if view.inputs[position] in view.flow.variable:
        name = view.inputs[position]
        view.refuse(
            f"{name!r} has {shape[axis]} in dimension {axis}, and the other operand {elastic} of "
            f"them; {view.remedy_for(name)}"
        )
    view.cut(position, axis, elastic.kept)


def _per_channel(*positions: int) -> Rule:
    """Return the rule of operators with channels in dimension 1 and one parameter per channel."""

    def rule(view: OperatorView) -> None:
        elastic = view.only_elastic()
        if elastic.axis != 1:
            view.refuse_axis(elastic, "has its channels in dimension 1, not in", "keep that whole")
        for position in positions:
            if view.has(position):
                view.cut(position, 0, elastic.kept)
        view.give(1, elastic)

    return rule


def _pooling(view: OperatorView) -> None:
    elastic = view.only_elastic()
    if elastic.axis > 1:
        view.refuse_axis(elastic, "pools over", "slice the channels alone")
    view.give_all(elastic.axis, elastic)


def _transpose(view: OperatorView) -> None:
    elastic = view.only_elastic()
    rank = len(view.shape(0))
    order = view.attributes.get("perm", list(range(rank))[::-1])
    view.give(list(order).index(elastic.axis), elastic)


def _reduce(view: OperatorView) -> None:
    elastic = view.only_elastic()
    rank, attributes = len(view.shape(0)), view.attributes
    given = view.value(1) if view.has(1) else attributes.get("axes")
    if view.has(1) and given is None:
        view.refuse("its axes are computed; export it with fixed ones")
    empty = attributes.get("noop_with_empty_axes", 0)
    axes = {int(a) % rank for a in ([] if given is None else given)}
    axes = axes or (set() if empty else set(range(rank)))
    if elastic.axis in axes:
        view.refuse_axis(elastic, "reduces", _NORM_REMEDY)
    dropped = 0 if attributes.get("keepdims", 1) else sum(a < elastic.axis for a in axes)
    view.give(elastic.axis - dropped, elastic)


def _along(default: int, what: str, remedy: str) -> Rule:
    """Return the rule of operators that work along one dimension, which must not be elastic."""

    def rule(view: OperatorView) -> None:
        elastic = view.only_elastic()
        axis = view.attributes.get("axis", default) % len(view.shape(0))
        if axis == elastic.axis:
            view.refuse_axis(elastic, what, remedy)
        view.give_all(elastic.axis, elastic)

    return rule


def _layer_norm(view: OperatorView) -> None:
    elastic = view.only_elastic()
    if elastic.axis >= view.attributes.get("axis", -1) % len(view.shape(0)):
        view.refuse_axis(elastic, _NORMALISED, _NORM_REMEDY)
    view.give(elastic.axis, elastic)


def _measured(_: OperatorView) -> None:
    """Do nothing: a shape that is computed at run time is the subnet's already."""


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_UNARY, _unary),
        **dict.fromkeys(_NARY, _elementwise),
        **dict.fromkeys(_POOLING, _pooling),
        **dict.fromkeys(_REDUCING, _reduce),
        **PRODUCTS,
        **PLACES,
        "BatchNormalization": _per_channel(1, 2, 3, 4),
        "InstanceNormalization": _per_channel(1, 2),
        "Transpose": _transpose,
        "Softmax": _along(-1, _NORMALISED, _NORM_REMEDY),
        "LogSoftmax": _along(-1, _NORMALISED, _NORM_REMEDY),
        "LpNormalization": _along(-1, _NORMALISED, _NORM_REMEDY),
        "LayerNormalization": _layer_norm,
        "RMSNormalization": _layer_norm,
        "Shape": _measured,
    }
)
