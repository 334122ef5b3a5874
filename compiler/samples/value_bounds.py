"""Input values on which the model fails: derived from the graph, then tested.

A request with such a value would fail its whole batch, so the server refuses the request before.
The graph shows the ranges of input values that operators require (:mod:`.graphs.index_flow`). Each
end of a range is tested: the operators are run on a sample with one value beyond it. An end is
dropped if nothing fails beyond it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from offramp.bundle import TensorSpec, ValueBound
from offramp.compiler.graphs.graph import Dataflow, Operator, emptied, integer
from offramp.compiler.graphs.index_flow import IndexRange, Requirement, index_requirements
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel

_log = logging.getLogger(__name__)

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"


def find_value_bounds(model: SourceModel, sample: Arrays) -> tuple[ValueBound, ...]:
    """Find the legal values of a model's inputs; ``sample`` has arrays [1, …] by input."""
    required: dict[str, list[Requirement]] = {}
    for requirement in index_requirements(model.proto, model.flow):
        required.setdefault(requirement.input, []).append(requirement)
    drafts = {spec.name: list(_drafts(spec, required.get(spec.name, ()))) for spec in model.inputs}
    legal = _clipped(sample, [draft for of_input in drafts.values() for draft in of_input])
    found: list[ValueBound] = []
    for name, of_input in drafts.items():
        if of_input:
            operators = [requirement.operator for requirement in required[name]]
            found += _tried(_part(model.proto, model.flow, operators), legal, of_input)
    return tuple(found)


def _clipped(sample: Arrays, drafts: Sequence[ValueBound]) -> Arrays:
    """Return a sample with illegal values replaced by the nearest legal ones."""
    clipped = {name: array.copy() for name, array in sample.items()}
    for draft in drafts:
        array = clipped[draft.input]
        where: Any = (slice(None),) * draft.axis + (list(draft.places),) if draft.places else ...
        array[where] = np.clip(array[where], draft.lowest, draft.highest)
    return clipped


def _drafts(spec: TensorSpec, required: Sequence[Requirement]) -> Iterator[ValueBound]:
    """Yield the bounds that the graph implies for an input; equal bounds are merged."""
    if not required:
        return
    legal = required[0].range
    for requirement in required[1:]:
        legal = legal.meet(requirement.range)
    legal = IndexRange(*np.broadcast_arrays(legal.lowest, legal.highest))
    varying = [axis for axis, size in enumerate(legal.lowest.shape) if size > 1]
    axis = len(spec.shape) - legal.lowest.ndim + varying[0] if len(varying) == 1 else 0
    if not axis:
        legal = legal.loosest()
    places: dict[tuple[float | None, float | None], list[int]] = {}
    ends = zip(legal.lowest.reshape(-1).tolist(), legal.highest.reshape(-1).tolist(), strict=True)
    for place, (lowest, highest) in enumerate(ends):
        places.setdefault(_within(spec.dtype, lowest, highest), []).append(place)
    for (low, high), having in places.items():
        if (low, high) != (None, None) and not (
            low is not None and high is not None and low > high
        ):
            yield ValueBound(
                input=spec.name,
                lowest=low,
                highest=high,
                axis=axis,
                places=tuple(having) if axis else (),
                operator=_described(required[0].operator),
            )


def _within(dtype: str, lowest: float, highest: float) -> tuple[float | None, float | None]:
    """Return both ends; ``None`` for an end that no value of the element type can exceed."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        least, most = 0.0, 1.0
    else:
        info = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
        least, most = float(info.min), float(info.max)
    return lowest if lowest > least else None, highest if highest < most else None


def _described(op: Operator) -> str:
    return f"{op.kind} {op.name!r:.100}" if op.name else op.kind


def _tried(
    part: onnx.ModelProto, sample: Arrays, drafts: Sequence[ValueBound]
) -> Iterator[ValueBound]:
    """Yield the bounds beyond which operators fail; ends without a failure are left out."""
    try:
        runner = GraphRunner(part)
        runner.run(sample)
    except RuntimeError as error:
        _log.info(
            "Legal values of input %r were not tested, and are not checked: %s",
            drafts[0].input,
            error,
        )
        return
    for draft in drafts:
        ends = {
            name: value
            for name, value, step in (
                ("lowest", draft.lowest, -1),
                ("highest", draft.highest, 1),
            )
            if value is not None and _fails(runner, _beyond(sample, draft, value, step))
        }
        if ends:
            yield replace(draft, lowest=ends.get("lowest"), highest=ends.get("highest"))


def _beyond(sample: Arrays, draft: ValueBound, value: float, step: int) -> Arrays:
    """Return a sample in which one value is beyond an end of a bound."""
    array = sample[draft.input].copy()
    place = [0] * array.ndim
    if draft.places:
        place[draft.axis] = draft.places[0]
    array[tuple(place)] = value + step
    return {**sample, draft.input: array}


def _fails(runner: GraphRunner, feeds: Arrays) -> bool:
    try:
        runner.run(feeds)
    except RuntimeError:
        return True
    return False


def _part(
    proto: onnx.ModelProto, graph: Dataflow, operators: Sequence[Operator]
) -> onnx.ModelProto:
    """Extract the part of a model that computes some operators; indexed tables become narrow."""
    outputs = list(dict.fromkeys(op.writes[0] for op in operators))
    nodes = graph.upstream(outputs, stop=frozenset())
    read = {name for op in nodes for name in op.reads}
    part = emptied(proto, "part")
    part.graph.node.extend(op.proto for op in nodes)
    part.graph.input.extend(info for info in proto.graph.input if info.name in read)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    tables = {
        op.proto.input[0]: integer(op.proto, "axis")
        for op in nodes
        if op.kind == "Gather" and sum(op.proto.input[0] in other.reads for other in nodes) == 1
    }
    for tensor in proto.graph.initializer:
        if tensor.name in read:
            axis = tables.get(tensor.name)
            part.graph.initializer.append(tensor if axis is None else _thin(tensor, axis))
    return part


def _thin(table: onnx.TensorProto, axis: int) -> onnx.TensorProto:
    """Return zeros in place of a table: the same length along ``axis``, and size 1 elsewhere."""
    dims = [1] * len(table.dims)
    dims[axis] = table.dims[axis]
    dtype = helper.tensor_dtype_to_np_dtype(table.data_type)
    zeros = bytes(dims[axis] * dtype.itemsize)
    return helper.make_tensor(table.name, table.data_type, dims, zeros, raw=True)
