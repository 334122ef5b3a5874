"""Effect of products on elastic channels: a product sums over channels, or passes them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from offramp.supernet.graphs.operator_view import OperatorView
from offramp.supernet.graphs.reshape import ElasticAxis


def _conv(view: OperatorView) -> None:
    """Multiply [batch, channels, …] by [output channels, channels of a group, …]."""
    given, groups = view.elastic(0), view.attributes.get("group", 1)
    _check_weight(view)
    if given is not None:
        _check_channels(view, given)
    if groups > 1:
        _grouped(view, given, groups)
        return
    if given is not None:
        view.cut(1, 1, given.kept)
        view.plan.contracting.add(view.op.name)
    if (kept := view.wanted(1)) is not None:
        _give_channels(view, kept, weight_axis=0, bias=2)


def _grouped(view: OperatorView, given: ElasticAxis | None, groups: int) -> None:
    """Keep whole groups of channels: in a depthwise convolution, each group has one channel."""
    size = view.shape(1)[0]
    if given is None:
        view.refuse(
            f"has {groups} groups, whose channels are those of its input; name the operator that "
            f"computes {view.inputs[0]!r} instead"
        )
    each, behind = given.full // groups, int(size) // groups
    kept = sorted({c // each for c in given.kept})
    whole = tuple(g * each + c for g in kept for c in range(each))
    if whole != given.kept:
        view.refuse(
            f"has {groups} groups of {each} channels, which {given} do not fit; keep multiples of "
            f"{each}"
        )
    outputs = tuple(g * behind + c for g in kept for c in range(behind))
    wanted = view.wanted(1)
    if wanted is not None and wanted != outputs:
        view.refuse(
            f"is to keep {len(wanted)} channels, but its groups keep {len(outputs)} for {given} "
            "that enter; remove its name, as they follow"
        )
    view.plan.attributes[view.op.name, "group"] = len(kept)
    _give_channels(view, outputs, weight_axis=0, bias=2)


def _conv_transpose(view: OperatorView) -> None:
    """Multiply [batch, channels, …] by [channels, output channels of a group, …]."""
    given = view.elastic(0)
    _check_weight(view)
    if view.attributes.get("group", 1) > 1:
        view.refuse("has groups, which cannot be sliced here; keep its channels whole")
    if given is not None:
        _check_channels(view, given)
        view.cut(1, 0, given.kept)
        view.plan.contracting.add(view.op.name)
    if (kept := view.wanted(1)) is not None:
        _give_channels(view, kept, weight_axis=1, bias=2)


def _check_weight(view: OperatorView) -> None:
    if view.elastic(1) is not None or view.elastic(2) is not None:
        view.refuse("fewer channels enter as its weight; keep them whole")


def _check_channels(view: OperatorView, given: ElasticAxis) -> None:
    if given.axis != 1:
        view.refuse_axis(given, "has its channels in dimension 1, not in", "keep that whole")


def _give_channels(
    view: OperatorView, kept: tuple[int, ...], *, weight_axis: int, bias: int
) -> None:
    """Slice weight and bias to some output channels."""
    size = int(view.shape(1)[weight_axis])
    view.cut(1, weight_axis, kept)
    if view.has(bias):
        view.cut(bias, 0, kept)
    view.give(1, ElasticAxis(axis=1, full=size, kept=kept))


def _matmul(view: OperatorView) -> None:
    """Multiply […, rows, inner] by [..., inner, columns]; leading dimensions are broadcast."""
    ranks = [len(view.shape(0)), len(view.shape(1))]
    if min(ranks) < 2:
        view.refuse("multiplies by a vector, which cannot be sliced here; keep its inputs whole")
    rank = len(view.output_shape())
    inner = (ranks[0] - 1, ranks[1] - 2)
    sums = False
    found: dict[int, ElasticAxis] = {}
    for position in (0, 1):
        elastic = view.elastic(position)
        if elastic is None:
            continue
        if elastic.axis == inner[position]:
            sums = True
            _contract(view, position, 1 - position, inner[1 - position])
        else:
            found[position] = ElasticAxis(
                axis=elastic.axis + rank - ranks[position], full=elastic.full, kept=elastic.kept
            )
    for position, axis in ((0, ranks[0] - 2), (1, ranks[1] - 1)):
        if (kept := view.wanted(position)) is not None:
            size = int(view.shape(position)[axis])
            view.cut(position, axis, kept)
            found[position] = ElasticAxis(axis=axis + rank - ranks[position], full=size, kept=kept)
    if sums:
        view.plan.contracting.add(view.op.name)
    if len(set(found.values())) > 1:
        view.refuse("would have fewer elements in two dimensions; slice one of its inputs alone")
    for position, elastic in found.items():
        if elastic.axis < rank - 2:
            _batched(view, 1 - position, elastic, rank)
        view.give(elastic.axis, elastic)


def _contract(view: OperatorView, position: int, other: int, axis: int) -> None:
    """Slice the inner dimension of the other operand, or check that it is sliced equally."""
    elastic, beside = view.elastic(position), view.elastic(other)
    assert elastic is not None
    if view.inputs[other] not in view.flow.variable:
        view.cut(other, axis, elastic.kept)
    elif beside is None or beside.axis != axis or beside.kept != elastic.kept:
        view.refuse(
            f"sums over {elastic} of {view.inputs[position]!r} and over "
            f"{beside if beside and beside.axis == axis else 'all'} of {view.inputs[other]!r}; "
            f"{view.remedy_for(view.inputs[other])}"
        )


def _batched(view: OperatorView, other: int, elastic: ElasticAxis, rank: int) -> None:
    """Slice a leading dimension of the other operand, such as heads, or check that it is sliced."""
    shape, beside = view.shape(other), view.elastic(other)
    axis = elastic.axis - (rank - len(shape))
    if axis < 0 or shape[axis] == 1:
        return
    if view.inputs[other] not in view.flow.variable:
        view.cut(other, axis, elastic.kept)
    elif beside is None or beside.axis != axis or beside.kept != elastic.kept:
        name = view.inputs[other]
        view.refuse(
            f"{name!r} has {beside or shape[axis]} in dimension {axis}, and the other operand "
            f"{elastic}; {view.remedy_for(name)}"
        )


def _gemm(view: OperatorView) -> None:
    """Multiply [rows, inner] by [inner, columns], and add a bias to all rows."""
    given, attributes = view.elastic(0), view.attributes
    if view.elastic(1) is not None or view.elastic(2) is not None:
        view.refuse("fewer channels enter as its weight or bias; keep them whole")
    columns = 0 if attributes.get("transB", 0) else 1
    if given is not None:
        if given.axis != (0 if attributes.get("transA", 0) else 1):
            view.refuse_axis(given, "takes rows from", "slice its channels instead")
        view.cut(1, 1 - columns, given.kept)
        view.plan.contracting.add(view.op.name)
    kept = view.wanted(1)
    if kept is None:
        return
    size = int(view.shape(1)[columns])
    view.cut(1, columns, kept)
    if view.has(2) and (shape := view.shape(2)) and shape[-1] != 1:
        view.cut(2, len(shape) - 1, kept)
    view.give(1, ElasticAxis(axis=1, full=size, kept=kept))


PRODUCTS: Mapping[str, Callable[[OperatorView], None]] = MappingProxyType(
    {"Conv": _conv, "ConvTranspose": _conv_transpose, "MatMul": _matmul, "Gemm": _gemm}
)
