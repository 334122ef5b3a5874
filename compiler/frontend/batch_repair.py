"""Freeing a batch size that an export has fixed, so that a model takes any batch size.

Exporters may write the batch size into the targets of ``Reshape`` and ``Expand``, and into
positions, initial states and class tokens. So shapes are followed through the graph at two batch
sizes together, the model's own and a large prime (:class:`BatchEdits`), with the position of the
batch in each tensor (:class:`BatchPlace`). Where a shape does not change with the batch size, the
operator is repaired. The result is tested: rows are run and compared with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import Dataflow, Operator, integer, refill
from offramp.compiler.graphs.shape_trace import Shape, ShapeTrace
from offramp.compiler.graphs.shapes import (
    BATCH,
    TensorType,
    declared_types,
    probe_sizes,
    symbolic_sizes,
)

REMEDY = (
    "export the model with a dynamic first dimension (torch.onnx.export: dynamic_shapes, or "
    "dynamic_axes with dynamo=False)"
)
_END = np.iinfo(np.int64).max
_STATES = {"LSTM": (4, 5, 6), "GRU": (4, 5), "RNN": (4, 5)}
"""Indices of inputs that have a size for each row: sequence lengths, and initial states."""
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean")
_LOGIC = ("Where", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor")


class BatchEdits:
    """A graph at its fixed batch size and at another one, and the changes made to it so far.

    ``fixed`` and ``freed`` hold shapes and small values at batch sizes ``old`` and ``rows``.
    ``nodes`` are the nodes of the new graph so far.
    """

    def __init__(self, proto: onnx.ModelProto, batch: int) -> None:
        sizes, _ = probe_sizes(proto)
        self.graph = proto.graph
        self.flow = Dataflow(proto.graph)
        self.old, self.rows = batch, sizes[BATCH]
        self.fixed = ShapeTrace(proto, batch, sizes)
        self.freed = ShapeTrace(proto, self.rows, sizes)
        self.nodes: list[onnx.NodeProto] = []
        self.weights = {tensor.name: tensor for tensor in proto.graph.initializer}

    def with_entries(
        self,
        node: onnx.NodeProto,
        vector: str,
        values: Mapping[int, int],
        length: int,
        computed: str = "",
    ) -> str:
        """Return a vector with some entries replaced; the vector may be constant or computed.

        The new entries are ``values`` by index, or all equal to the single entry of ``computed``.
        """
        name, known = f"{node.output[0]}/freed", self.fixed.value(vector)
        if vector not in self.flow.variable and known is not None and not computed:
            changed = known.astype(np.int64).copy()
            for i, value in values.items():
                changed[i] = value
            return self.constant(name, changed)
        at, new = np.zeros(length, np.bool_), np.zeros(length, np.int64)
        for i, value in values.items():
            at[i], new[i] = True, value
        replaced = computed or self.constant(f"{name}/new", new)
        return self.add("Where", [self.constant(f"{name}/at", at), replaced, vector], name)

    def numbers(self, size: str, name: str) -> str:
        """Add the numbers 0, 1, 2 … below ``size``, which is a vector with one element."""
        ends = [self.constant(f"{name}/{k}", np.array(v)) for k, v in (("0", 0), ("1", 1))]
        scalar = self.add("Squeeze", [size], f"{name}/scalar")
        return self.add("Range", [ends[0], scalar, ends[1]], f"{name}/count")

    def size_of(self, tensor: str, axis: int, name: str) -> str:
        """Add the size of a tensor along an axis, as a vector with one element."""
        shape = self.add("Shape", [tensor], f"{name}/shape")
        at = self.constant(f"{name}/axis", np.array([axis], np.int64))
        return self.add("Gather", [shape, at], f"{name}/size")

    def first_row(self, tensor: str, axis: int, name: str) -> str:
        """Take the first row of a tensor with the old number of rows, which must be equal."""
        if self.old == 1:
            return tensor
        weights = self.weights.get(tensor)
        if weights is not None:
            value = array_of(weights)
            row = value.take([0], axis)
            if not np.array_equal(value, np.broadcast_to(row, value.shape)):
                raise ValueError(f"its input {tensor!r} holds different values by row")
            return self.constant(f"{name}/first", row)
        ends = [self.constant(f"{name}/{k}", np.array([v])) for k, v in (("a", 0), ("b", 1))]
        axes = self.constant(f"{name}/along", np.array([axis], np.int64))
        return self.add("Slice", [tensor, *ends, axes], f"{name}/first")

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """Add an initializer; return its name."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        self.graph.initializer.append(tensor)
        self.fixed.give(tensor)
        self.freed.give(tensor)
        return name

    def add(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node before the node that is being repaired; return its output."""
        node = helper.make_node(kind, inputs, [name], name=name, **attributes)
        self.nodes.append(node)
        self.freed.follow(node)
        return name


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Position of the batch in a tensor: its axis, and the part of that axis before the batch."""

    axis: int
    slower: int = 1
    """Size of the part of the axis that varies slower than the batch: the number of tokens in
    ``[tokens * batch, width]``, 1 in ``[batch * heads, tokens, width]``."""


def scaled(shape: Shape, axis: int, old: int, rows: int) -> Shape:
    """Return a shape at batch size ``old``, changed to batch size ``rows``."""
    return (*shape[:axis], shape[axis] // old * rows, *shape[axis + 1 :])


def moved(place: BatchPlace, before: Shape, after: Shape, batch: int) -> BatchPlace | None:
    """Find where a reshape, which keeps the order of elements, puts the batch.

    ``before`` and ``after`` are shapes at batch size ``batch``. The product of the sizes before the
    batch is the same in both. If possible, the batch is at the beginning of an axis.
    """
    slower = prod(before[: place.axis]) * place.slower
    outer = [prod(after[:axis]) for axis in range(len(after))]
    alone = [i for i, size in enumerate(after) if outer[i] == slower and size % batch == 0]
    if alone and (alone[0] < len(after) - 1 or after[alone[0]] == batch):
        return BatchPlace(alone[0])
    for axis, size in enumerate(after):  # rows are preferred to features
        within, rest = divmod(slower, outer[axis])
        if within > 1 and not rest and size % (within * batch) == 0:
            return BatchPlace(axis, within)
    return BatchPlace(alone[0]) if alone else None


def repair(proto: onnx.ModelProto, batch: int) -> None:
    """Repair operators that fix the batch size, in place; ModelError if one cannot be repaired."""
    _Repair(proto, batch).run()


class _Repair(BatchEdits):
    def __init__(self, proto: onnx.ModelProto, batch: int) -> None:
        super().__init__(proto, batch)
        self._stated = declared_types(proto)
        self._dynamic = bool(symbolic_sizes(proto))
        self._places = {name: BatchPlace(0) for name in self.flow.inputs}
        self._repairs: dict[str, Callable[[onnx.NodeProto], None]] = {
            "Reshape": self._reshape,
            "Expand": self._expand,
            "Concat": self._concat,
            "Slice": self._slice,
            "Squeeze": self._squeeze,
            "Resize": self._resize,
            "Gather": self._gather,
            "GatherElements": self._elements,
            "GatherND": self._gather_nd,
            **dict.fromkeys(_STATES, self._states),
            **dict.fromkeys((*_ARITHMETIC, *_LOGIC, "PRelu", "MatMul"), self._broadcast),
            "Mul": self._offsets,
        }

    def run(self) -> None:
        for op in self.flow.operators:
            try:
                self._follow(op)
            except ValueError as error:
                raise ModelError(
                    f"the batch size was fixed at {self.old}, and the operator{_named(op)} "
                    f"({op.kind}, which computes {op.writes[0]!r}) cannot take another: {error}; "
                    f"{REMEDY}"
                ) from error
        refill(self.graph.node, self.nodes)

    def _follow(self, op: Operator) -> None:
        node = op.proto
        self.fixed.follow(node)
        if self.flow.is_constant(op):
            self.freed.follow(node)
        else:
            if (repair := self._repairs.get(op.kind)) is not None:
                repair(node)
            self.freed.follow(node)
            self._locate(op)
        self.nodes.append(node)

    def _locate(self, op: Operator) -> None:
        """Find the batch in the outputs of an operator."""
        sources = [t for t in op.reads if t in self._places]
        for name in op.writes:
            before, after = self.fixed.shape(name), self.freed.shape(name)
            if name in self._places:  # known from the repair
                continue
            if before is None and sources:
                self._assume(name, sources[0])
            elif before is not None and after is not None and len(before) == len(after):
                axes = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
                if len(axes) == 1:
                    self._places[name] = self._inherited(axes[0], before, sources)

    def _inherited(self, axis: int, shape: Shape, sources: list[str]) -> BatchPlace:
        for source in sources:
            place, size = self._places[source], self.fixed.shape(source)
            if size is not None and size[place.axis] == shape[axis]:
                return BatchPlace(axis, place.slower)
        return BatchPlace(axis)

    def _assume(self, name: str, source: str) -> None:
        """Use the type that the model states for an output, because inference does not know it."""
        stated, place = self._stated.get(name), self._places[source]
        read = self.fixed.shape(source)
        if stated is None or read is None or not _is_known(stated):
            return
        shape = [int(size) for size in stated.shape or ()]
        axis = place.axis
        if axis < len(shape) and shape[axis] == read[axis]:
            self.fixed.assume(name, stated.elem_type, shape)
            shape[axis] = shape[axis] // self.old * self.rows
            self.freed.assume(name, stated.elem_type, shape)
            self._places[name] = place

    # Each repair leaves the node in a form that can be followed at another batch size.

    def _reshape(self, node: onnx.NodeProto) -> None:
        data, target = node.input[0], node.input[1]
        place, before = self._places.get(data), self.fixed.shape(data)
        shape = self.fixed.shape(node.output[0])
        if place is None or before is None or shape is None:
            return
        found = moved(place, before, shape, self.old)
        if found is None:
            raise ValueError(
                f"it reshapes {list(before)} to {list(shape)}, where no dimension can hold the "
                "batch"
            )
        wanted = scaled(shape, found.axis, self.old, self.rows)
        with suppress(ValueError):  # other rows may not divide by the size that the target states
            self.freed.follow(node)
        if self.freed.shape(node.output[0]) != wanted:
            self._retarget(node, target, found.axis, shape)
        self._places[node.output[0]] = found

    def _retarget(self, node: onnx.NodeProto, target: str, axis: int, shape: Shape) -> None:
        """Write the batch into a target shape as 0 if the batch keeps its axis, and else as -1."""
        data, known = node.input[0], self.fixed.value(target)
        before, after = self.fixed.shape(data), self.freed.shape(data)
        if known is None or len(known) != len(shape) or before is None or after is None:
            raise ValueError("its target shape is computed in an unknown way")
        open_axes = [i for i, size in enumerate(known) if size == -1 and i != axis]
        copies = axis < len(before) and before[axis] == shape[axis] and before[axis] != after[axis]
        values: dict[int, int] = {axis: 0 if copies else -1}
        rows = ""
        if not copies and open_axes and self._dynamic:
            if shape[axis] != self.old:
                raise ValueError("two dimensions of its output are open")
            rows = self.size_of(self.flow.inputs[0], 0, f"{node.output[0]}/rows")
        elif not copies and open_axes:
            values[open_axes[0]] = shape[open_axes[0]]
        if integer(node, "allowzero"):
            if 0 in shape:
                raise ValueError("its output has no elements")
            refill(node.attribute, [a for a in node.attribute if a.name != "allowzero"])
        node.input[1] = self.with_entries(node, target, values, len(shape), rows)

    def _expand(self, node: onnx.NodeProto) -> None:
        data, target = node.input
        place, shape = self._places.get(data), self.fixed.shape(node.output[0])
        before, known = self.fixed.shape(data), self.fixed.value(target)
        if shape is None or before is None or known is None:
            return
        if place is None:
            for axis in range(-min(len(known), len(before)), 0):
                if before[axis] > 1 and self._freed_entry(target, axis) not in {before[axis], 1}:
                    node.input[0] = self.first_row(data, axis + len(before), f"{node.output[0]}/in")
            return
        axis = place.axis + len(shape) - len(before)
        entry = axis - (len(shape) - len(known))
        if entry >= 0 and known[entry] != 1 and self._freed_entry(target, entry) != self.rows:
            node.input[1] = self.with_entries(node, target, {entry: 1}, len(known))

    def _freed_entry(self, vector: str, entry: int) -> int | None:
        value = self.freed.value(vector)
        return None if value is None else int(value[entry])

    def _concat(self, node: onnx.NodeProto) -> None:
        source = next((t for t in node.input if t in self._places), None)
        shape = None if source is None else self.fixed.shape(source)
        if source is None or shape is None:
            return
        place = self._places[source]
        joined = integer(node, "axis") % len(shape)
        if joined == place.axis:
            return
        for i, tensor in enumerate(node.input):
            if tensor not in self._places:
                node.input[i] = self._fit(node, i, source, place.axis)

    def _elements(self, node: onnx.NodeProto) -> None:
        """Extend constant data or indices to the number of rows that the other input has."""
        for i, other in ((0, node.input[1]), (1, node.input[0])):
            if other in self._places and node.input[i] not in self._places:
                node.input[i] = self._fit(node, i, other, self._places[other].axis)

    def _states(self, node: onnx.NodeProto) -> None:
        data = node.input[0]
        if data not in self._places or integer(node, "layout"):
            return
        for i in _STATES[node.op_type]:
            if i < len(node.input) and node.input[i] and node.input[i] not in self._places:
                axis = 0 if i == 4 else 1
                node.input[i] = self._fit(node, i, data, axis, self._places[data].axis)

    def _fit(
        self, node: onnx.NodeProto, i: int, source: str, axis: int, measured: int | None = None
    ) -> str:
        """Extend an input to the number of rows of ``source``, by repeating the input's first row.

        If the rows are the numbers 0, 1, 2 …, which pick one element of each sample, the numbers
        are continued instead.
        """
        tensor, name = node.input[i], f"{node.output[0]}/row{i}"
        shape = self.fixed.shape(tensor)
        if shape is None or axis >= len(shape):
            return tensor
        if shape[axis] != self.old:
            raise ValueError(f"its input {tensor!r} has {shape[axis]} rows")
        measures = axis if measured is None else measured
        size = self.size_of(source, measures, name)
        known = self.fixed.value(tensor)
        if known is not None and shape[axis] == known.size and self._counts(node, known):
            sizes = [-1 if k == axis else 1 for k in range(len(shape))]
            target = self.constant(f"{name}/sizes", np.array(sizes, np.int64))
            return self.add("Reshape", [self.numbers(size, name), target], name)
        row = self.first_row(tensor, axis, name)
        ones = self.constant(f"{name}/ones", np.ones(1, np.int64))
        parts = [size if k == axis else ones for k in range(len(shape))]
        target = self.add("Concat", parts, f"{name}/target", axis=0)
        return self.add("Expand", [row, target], name)

    def _counts(self, node: onnx.NodeProto, known: NDArray[np.generic]) -> bool:
        """Return whether values are row numbers 0, 1, 2 …, and not by chance."""
        if not _counts_rows(known):
            return False
        readers = self.flow.consumers.get(node.output[0], [])
        return known.size > 1 or any(op.kind == "GatherND" for op in readers)

    def _offsets(self, node: onnx.NodeProto) -> None:
        """Extend the offsets 0, S, 2 S … of samples in a flattened tensor to the batch size."""
        adds = [op for op in self.flow.consumers.get(node.output[0], []) if op.kind == "Add"]
        picks = [r.kind for op in adds for r in self.flow.consumers.get(op.writes[0], [])]
        for i, tensor in enumerate(node.input):
            known = self.fixed.value(tensor)
            counted = known is not None and known.shape == (self.old,) and _counts_rows(known)
            if counted and tensor not in self.flow.variable and "Gather" in picks:
                name = f"{node.output[0]}/row{i}"
                node.input[i] = self.numbers(self.size_of(self.flow.inputs[0], 0, name), name)
                self._places[node.output[0]] = BatchPlace(0)
                return
        self._broadcast(node)

    def _broadcast(self, node: onnx.NodeProto) -> None:
        """Keep one row of operands that have the old batch size but do not depend on the batch."""
        shape = self.fixed.shape(node.output[0])
        if self.old == 1 or shape is None:
            return
        places = {
            self._places[t].axis + len(shape) - len(self.fixed.shape(t) or shape)
            for t in node.input
            if t in self._places
        }
        for i, tensor in enumerate(node.input):
            own = self.fixed.shape(tensor)
            if tensor in self._places or own is None:
                continue
            last = len(own) - 2 if node.op_type == "MatMul" else len(own)
            for axis in (place - len(shape) + len(own) for place in places):
                if 0 <= axis < last and own[axis] > 1:
                    node.input[i] = self.first_row(tensor, axis, f"{node.output[0]}/row{i}")

    def _slice(self, node: onnx.NodeProto) -> None:
        """Let a slice of the whole batch take batches of any size."""
        data = node.input[0]
        place, before = self._places.get(data), self.fixed.shape(data)
        given = [self.fixed.value(t) if t else None for t in node.input[1:]]
        if (
            place is None
            or before is None
            or len(given) < 2
            or given[0] is None
            or given[1] is None
        ):
            return
        starts, ends = given[0].tolist(), given[1].tolist()
        axes = given[2].tolist() if len(given) > 2 and given[2] is not None else range(len(starts))
        for entry, axis in enumerate(axes):
            whole = starts[entry] == 0 and ends[entry] == before[place.axis]
            if axis % len(before) == place.axis and whole:
                node.input[2] = self.with_entries(node, node.input[2], {entry: _END}, len(ends))

    def _squeeze(self, node: onnx.NodeProto) -> None:
        """State the axes, so that a batch of one sample is kept; ValueError for the batch axis."""
        place, before = self._places.get(node.input[0]), self.fixed.shape(node.input[0])
        if place is None or before is None:
            return
        if len(node.input) < 2 or not node.input[1]:
            axes = [i for i, size in enumerate(before) if size == 1 and i != place.axis]
            del node.input[1:]
            name = f"{node.output[0]}/axes"
            node.input.append(self.constant(name, np.array(axes, np.int64)))
            return
        known = self.fixed.value(node.input[1])
        if known is not None and place.axis in {axis % len(before) for axis in known.tolist()}:
            raise ValueError("it removes the dimension of the batch")

    def _resize(self, node: onnx.NodeProto) -> None:
        """Take the batch size from the input, if the operator's sizes are constants."""
        sizes = self.fixed.value(node.input[3]) if len(node.input) > 3 else None
        shape = self.fixed.shape(node.input[0])
        place = self._places.get(node.input[0])
        if sizes is None or shape is None or place is None or len(sizes) != len(shape):
            return
        name = f"{node.output[0]}/freed"
        rest = self.constant(f"{name}/rest", sizes.astype(np.int64)[1:])
        if place.axis == 0 and node.input[3] not in self.flow.variable:
            size = self.size_of(node.input[0], 0, name)
            node.input[3] = self.add("Concat", [size, rest], name, axis=0)

    def _gather(self, node: onnx.NodeProto) -> None:
        """Remove a Gather of all rows, or extend its indices; ValueError if it keeps only some."""
        place, before = self._places.get(node.input[0]), self.fixed.shape(node.input[0])
        known = self.fixed.value(node.input[1])
        axis = integer(node, "axis")
        if place is None or before is None or known is None or axis % len(before) != place.axis:
            return
        if np.array_equal(known, np.arange(before[place.axis])) and before[place.axis] > 1:
            del node.input[1:]
            del node.attribute[:]
            node.op_type = "Identity"
            return
        within = before[place.axis] // self.old
        first = known[:1] if known.ndim and len(known) == self.old and place.slower == 1 else None
        numbers = np.arange(self.old).reshape(-1, *[1] * (known.ndim - 1)) * within
        if first is None or within == 1 or not np.array_equal(known, first + numbers):
            raise ValueError(f"it picks rows {known.tolist()!s:.60} of the batch")
        node.input[1] = self._picks(node, first, np.array(within))

    def _gather_nd(self, node: onnx.NodeProto) -> None:
        """Extend constant indices that pick the same element of each sample to more samples."""
        data, indices = node.input
        place, known = self._places.get(data), self.fixed.value(indices)
        if place is None or indices in self._places or known is None or place.axis:
            return
        if not integer(node, "batch_dims"):
            step = np.eye(1, known.shape[-1], dtype=np.int64)[0]
            rows = np.arange(self.old).reshape(-1, *[1] * (known.ndim - 1)) * step
            if len(known) != self.old or not np.array_equal(known, known[:1] * (1 - step) + rows):
                raise ValueError("it picks some rows of the batch by constant indices")
            node.input[1] = self._picks(node, known[:1], step)

    def _picks(self, node: onnx.NodeProto, first: NDArray[Any], step: NDArray[Any]) -> str:
        """Add indices that pick the same element of each sample; ``step`` is added per sample."""
        name = f"{node.output[0]}/picks"
        size = self.size_of(self.flow.inputs[0], 0, name)
        sizes = np.array([-1, *[1] * (first.ndim - 1)], np.int64)
        rows = [self.numbers(size, name), self.constant(f"{name}/sizes", sizes)]
        steps = [
            self.add("Reshape", rows, f"{name}/rows"),
            self.constant(f"{name}/step", step.astype(np.int64)),
        ]
        picked = [self.add("Mul", steps, f"{name}/steps"), self.constant(f"{name}/first", first)]
        return self.add("Add", picked, name)


def _counts_rows(known: NDArray[np.generic]) -> bool:
    return known.dtype == np.int64 and np.array_equal(known.ravel(), np.arange(known.size))


def _named(op: Operator) -> str:
    return f" {op.name!r}" if op.name else ""


def _is_known(tensor: TensorType) -> bool:
    return tensor.shape is not None and all(isinstance(size, int) for size in tensor.shape)
