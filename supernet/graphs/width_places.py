"""Effect on an elastic dimension (:class:`.ElasticAxis`) of operators that move its elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from offramp.supernet.graphs.operator_view import OperatorView
from offramp.supernet.graphs.reshape import ElasticAxis


def _split(view: OperatorView) -> None:
    """Handle a Split; along the elastic dimension, each of its parts must keep some elements.

    The equal ``parts`` of a width group in a spec ensure this.
    """
    elastic = view.only_elastic()
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
                f"set parts = {len(view.op.proto.output)} in the [[width]], or keep it whole",
            )
        view.plan.elastic[view.op.proto.output[index]] = ElasticAxis(
            axis=axis, full=size, kept=kept
        )
        start += size
        counts.append(len(kept))
    if view.has(1):
        view.plan.values[view.op.name, 1] = np.array(counts, np.int64)


def _concat(view: OperatorView) -> None:
    rank = len(view.output_shape())
    axis = view.attributes["axis"] % rank
    elastic = view.elastic(view.elastic_inputs[0])
    assert elastic is not None
    if axis == elastic.axis:
        view.refuse_axis(elastic, "joins along", "keep the joined tensors whole, or slice after it")
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
    """Handle a Slice; along the elastic dimension, kept elements inside the range remain."""
    elastic = view.only_elastic()
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
        view.refuse_axis(
            elastic, "takes a part that is not a fixed range of", "keep its input whole"
        )
    first, last, _ = slice(int(starts[place]), int(ends[place])).indices(elastic.full)
    kept = tuple(c - first for c in elastic.kept if first <= c < last)
    if not kept:
        view.refuse_axis(
            elastic, "takes a part of", "set parts = N in the [[width]], or keep it whole"
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
    elastic = view.only_elastic()
    rank, pads = len(view.shape(0)), view.value(1)
    if pads is None or view.has(3):
        view.refuse("which dimensions it pads is not fixed; export it with fixed pads")
    if pads[elastic.axis] or pads[elastic.axis + rank]:
        view.refuse_axis(elastic, "pads", "keep its input whole")
    view.give(elastic.axis, elastic)


def _resize(view: OperatorView) -> None:
    """Replace the size that a Resize requests for the elastic dimension by the kept size."""
    elastic = view.only_elastic()
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


def _reshape(view: OperatorView) -> None:
    """Replace a Reshape's constant shape; correct a computed shape, which is the supernet's."""
    elastic = view.regroup(view.only_elastic())
    size, rank = len(elastic.kept), len(view.output_shape())
    asked = view.value(1)
    if asked is None:
        if isinstance(view.output_shape()[elastic.axis], str):
            view.refuse("merges it with a free size, as it computes; export it with fixed sizes")
        sizes = tuple(size if axis == elastic.axis else None for axis in range(rank))
        view.plan.sizes[view.op.name, 1] = sizes
    else:
        given = asked.astype(np.int64)
        if given[elastic.axis] != -1:
            given[elastic.axis] = size
        view.plan.values[view.op.name, 1] = given
    view.plan.elastic[view.op.proto.output[0]] = elastic


def _same_order(view: OperatorView) -> None:
    """Record the elastic dimension after a Flatten, Squeeze or Unsqueeze; nothing is replaced."""
    elastic = view.regroup(view.only_elastic())
    view.plan.elastic[view.op.proto.output[0]] = elastic


def _expand(view: OperatorView) -> None:
    elastic = view.only_elastic()
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


PLACES: Mapping[str, Callable[[OperatorView], None]] = MappingProxyType(
    {
        "Reshape": _reshape,
        "Flatten": _same_order,
        "Squeeze": _same_order,
        "Unsqueeze": _same_order,
        "Expand": _expand,
        "Split": _split,
        "Concat": _concat,
        "Slice": _slice,
        "Gather": _gather,
        "Pad": _pad,
        "Resize": _resize,
    }
)
