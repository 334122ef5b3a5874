"""What operators do with a dimension that a subnet has less of, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from offramp.compiler.supernet.operator_view import OperatorView
from offramp.compiler.supernet.reshape import ElasticAxis
from offramp.compiler.supernet.width_products import PRODUCTS

Rule: TypeAlias = "Callable[[OperatorView], None]"

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
    "statistics over fewer channels are others; keep the channels whole here and slice inside the "
    "block"
)


def _the_one(view: OperatorView) -> ElasticAxis:
    """Give the elastic dimension of the first input; no other may have one."""
    elastic = view.elastic(0)
    if elastic is None or len(view.elastic_inputs) > 1:
        view.refuse("fewer channels enter where only whole inputs can; keep them whole")
    return elastic


def _unary(view: OperatorView) -> None:
    elastic = _the_one(view)
    view.give_all(elastic.axis, elastic)


def _elementwise(view: OperatorView) -> None:
    """Operands are broadcast: those with the dimension must have the same of it."""
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
    """Slice a constant operand; refuse a computed one that has all of the dimension."""
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
    """Channels are dimension 1, and some inputs have a value for each."""

    def rule(view: OperatorView) -> None:
        elastic = _the_one(view)
        if elastic.axis != 1:
            view.refuse_axis(elastic, "has its channels in dimension 1, not in", "keep that whole")
        for position in positions:
            if view.has(position):
                view.cut(position, 0, elastic.kept)
        view.give(1, elastic)

    return rule


def _pooling(view: OperatorView) -> None:
    elastic = _the_one(view)
    if elastic.axis > 1:
        view.refuse_axis(elastic, "pools over", "slice the channels alone")
    view.give_all(elastic.axis, elastic)


def _transpose(view: OperatorView) -> None:
    elastic = _the_one(view)
    rank = len(view.shape(0))
    order = view.attributes.get("perm", list(range(rank))[::-1])
    view.give(list(order).index(elastic.axis), elastic)


def _reshape(view: OperatorView) -> None:
    """The shape that is asked for has the size of the supernet; what is computed is corrected."""
    elastic = view.regroup(_the_one(view))
    size, rank = len(elastic.kept), len(view.output_shape())
    asked = view.value(1)
    if asked is None:
        sizes = tuple(size if axis == elastic.axis else None for axis in range(rank))
        view.plan.sizes[view.op.name, 1] = sizes
    else:
        given = asked.astype(np.int64)
        if given[elastic.axis] != -1:
            given[elastic.axis] = size
        view.plan.values[view.op.name, 1] = given
    view.plan.elastic[view.op.proto.output[0]] = elastic


def _same_order(view: OperatorView) -> None:
    """Elements stay in their order, and dimensions follow from the input's."""
    elastic = view.regroup(_the_one(view))
    view.plan.elastic[view.op.proto.output[0]] = elastic


def _expand(view: OperatorView) -> None:
    elastic = _the_one(view)
    rank = len(view.output_shape())
    axis = elastic.axis + rank - len(view.shape(0))
    asked = view.value(1)
    if asked is None:
        sizes = tuple(1 if i == axis else None for i in range(rank))
        view.plan.sizes[view.op.name, 1] = sizes
    else:
        given = asked.astype(np.int64)
        place = axis - (rank - len(given))
        if place >= 0:
            given[place] = 1
            view.plan.values[view.op.name, 1] = given
    view.give(axis, elastic)


def _reduce(view: OperatorView) -> None:
    elastic = _the_one(view)
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
    """The operator works along one dimension, and leaves others alone."""

    def rule(view: OperatorView) -> None:
        elastic = _the_one(view)
        axis = view.attributes.get("axis", default) % len(view.shape(0))
        if axis == elastic.axis:
            view.refuse_axis(elastic, what, remedy)
        view.give_all(elastic.axis, elastic)

    return rule


def _split(view: OperatorView) -> None:
    """Of parts along the dimension each must keep some, as equal parts of a spec do."""
    elastic = _the_one(view)
    axis = view.attributes.get("axis", 0) % len(view.shape(0))
    if axis != elastic.axis:
        view.give_all(elastic.axis, elastic)
        return
    start, counts = 0, []
    for index in range(len(view.op.proto.output)):
        size = view.output_shape(index)[axis]
        if not isinstance(size, int):
            view.refuse("the sizes of its parts are not known; keep its input whole")
        kept = tuple(c - start for c in elastic.kept if start <= c < start + size)
        if not kept:
            view.refuse_axis(
                elastic,
                f"divides into {len(view.op.proto.output)} parts",
                f"say parts = {len(view.op.proto.output)} in the [[width]], or keep it whole",
            )
        view.plan.elastic[view.op.proto.output[index]] = ElasticAxis(
            axis=axis, full=size, kept=kept
        )
        start += size
        counts.append(len(kept))
    if view.has(1):
        view.plan.values[view.op.name, 1] = np.array(counts, np.int64)


def _layer_norm(view: OperatorView) -> None:
    elastic = _the_one(view)
    if elastic.axis >= view.attributes.get("axis", -1) % len(view.shape(0)):
        view.refuse_axis(elastic, _NORMALISED, _NORM_REMEDY)
    view.give(elastic.axis, elastic)


def _concat(view: OperatorView) -> None:
    rank = len(view.output_shape())
    axis = view.attributes["axis"] % rank
    elastic = view.elastic(view.elastic_inputs[0])
    assert elastic is not None
    if axis == elastic.axis:
        view.refuse_axis(elastic, "joins along", "keep what is joined whole, or slice behind it")
    for position in range(len(view.inputs)):
        other = view.elastic(position)
        if other is None and view.inputs[position] not in view.flow.variable:
            view.cut(position, elastic.axis, elastic.kept)
        elif other != elastic:
            name = view.inputs[position]
            told = f"{other} in dimension {other.axis}" if other else "all"
            view.refuse(
                f"{view.inputs[view.elastic_inputs[0]]!r} has {elastic} in dimension "
                f"{elastic.axis} and {name!r} {told}; {view.remedy_for(name)}"
            )
    view.give(elastic.axis, elastic)


def _slice(view: OperatorView) -> None:
    """Of a range along the dimension there is what is kept in it, as of equal parts of a spec."""
    elastic = _the_one(view)
    rank = len(view.shape(0))
    axes = view.value(3) if view.has(3) else np.arange(rank)
    if axes is None:
        view.refuse("its axes are computed; export it with fixed ones")
    along = [int(a) % rank for a in axes.tolist()]
    if elastic.axis not in along:
        view.give(elastic.axis, elastic)
        return
    place, starts, ends = along.index(elastic.axis), view.value(1), view.value(2)
    steps = view.value(4) if view.has(4) else np.ones(len(along), np.int64)
    if starts is None or ends is None or steps is None or steps[place] != 1:
        view.refuse_axis(elastic, "takes a part that is no fixed range of", "keep its input whole")
    first, last, _ = slice(int(starts[place]), int(ends[place])).indices(elastic.full)
    kept = tuple(c - first for c in elastic.kept if first <= c < last)
    if not kept:
        view.refuse_axis(
            elastic, "takes a part of", "say parts = N in the [[width]], or keep it whole"
        )
    new_first = sum(c < first for c in elastic.kept)
    for position, given, value in ((1, starts, new_first), (2, ends, new_first + len(kept))):
        changed = given.astype(np.int64)
        changed[place] = value
        view.plan.values[view.op.name, position] = changed
    view.give(elastic.axis, ElasticAxis(axis=elastic.axis, full=last - first, kept=kept))


def _gather(view: OperatorView) -> None:
    elastic = view.elastic(0)
    if elastic is None:
        view.refuse("fewer channels are used as indices; keep them whole")
    axis = view.attributes.get("axis", 0) % len(view.shape(0))
    if axis == elastic.axis:
        view.refuse_axis(elastic, "takes single elements of", "keep its input whole")
    shift = len(view.shape(1)) - 1 if axis < elastic.axis else 0
    view.give(elastic.axis + shift, elastic)


def _pad(view: OperatorView) -> None:
    elastic = _the_one(view)
    rank, pads = len(view.shape(0)), view.value(1)
    if pads is None or view.has(3):
        view.refuse("which dimensions it pads is not fixed; export it with fixed pads")
    if pads[elastic.axis] or pads[elastic.axis + rank]:
        view.refuse_axis(elastic, "pads", "keep its input whole")
    view.give(elastic.axis, elastic)


def _resize(view: OperatorView) -> None:
    """Of sizes that are asked for, that of the dimension is what there is."""
    elastic = _the_one(view)
    axes = view.attributes.get("axes", list(range(len(view.shape(0)))))
    if elastic.axis > 1:
        view.refuse_axis(elastic, "resizes", "slice the channels alone")
    if view.has(3) and elastic.axis in axes:
        sizes = view.value(3)
        if sizes is None:
            view.plan.sizes[view.op.name, 3] = tuple(
                len(elastic.kept) if a == elastic.axis else None for a in axes
            )
        else:
            given = sizes.astype(np.int64)
            given[list(axes).index(elastic.axis)] = len(elastic.kept)
            view.plan.values[view.op.name, 3] = given
    view.give(elastic.axis, elastic)


def _measured(_: OperatorView) -> None:
    """What asks for a shape gets the subnet's."""


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_UNARY, _unary),
        **dict.fromkeys(_NARY, _elementwise),
        **dict.fromkeys(_POOLING, _pooling),
        **dict.fromkeys(_REDUCING, _reduce),
        **PRODUCTS,
        "BatchNormalization": _per_channel(1, 2, 3, 4),
        "InstanceNormalization": _per_channel(1, 2),
        "Transpose": _transpose,
        "Reshape": _reshape,
        "Flatten": _same_order,
        "Squeeze": _same_order,
        "Unsqueeze": _same_order,
        "Expand": _expand,
        "Softmax": _along(-1, _NORMALISED, _NORM_REMEDY),
        "LogSoftmax": _along(-1, _NORMALISED, _NORM_REMEDY),
        "LpNormalization": _along(-1, _NORMALISED, _NORM_REMEDY),
        "Split": _split,
        "LayerNormalization": _layer_norm,
        "RMSNormalization": _layer_norm,
        "Concat": _concat,
        "Slice": _slice,
        "Gather": _gather,
        "Pad": _pad,
        "Resize": _resize,
        "Shape": _measured,
    }
)
