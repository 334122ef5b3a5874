"""Values of graph inputs that are used as indices: ranges beyond which the model fails.

``Gather`` and similar operators fail on an index beyond the length of the indexed dimension. If
that length is fixed, the range of legal indices is known. The range is traced back through the
operators that compute the indices, up to the graph inputs. A trace ends at an unknown operator,
without a range, so a found range is never narrower than what the model accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import Dataflow, Operator, constant_tensor, is_standard
from offramp.compiler.graphs.shapes import TensorType, declared_types

_FLOAT_TYPES: Final = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)
_MOST_CONSTANTS: Final = 2**16
"""Largest number of elements of a constant whose values are read."""
_MOST_STEPS: Final = 2000
"""Largest number of steps of a trace from operator to operator, because there may be many paths."""
_INDEXING: Final = frozenset(
    {"Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND"}
)
"""Operators that read the indexed tensor first, and then the indices."""
_EMBEDDED: Final = ((0, 2), (1, 4), (8, 3))
"""Pairs of input indices of ``EmbedLayerNormalization``, an operator that ONNX Runtime fuses: an
input with indices and its table, for words, segments and positions."""

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class IndexRange:
    """Smallest and largest legal value, both inclusive, of each element of a tensor.

    Both arrays broadcast against the tensor. They are infinite where an element has no limit.
    """

    lowest: Array
    highest: Array

    def map(self, change: Callable[[Array], Array]) -> IndexRange:
        """Return the range with ``change`` applied to both of its arrays."""
        return IndexRange(change(self.lowest), change(self.highest))

    def meet(self, other: IndexRange) -> IndexRange:
        """Return the values that are legal in both ranges, which are for tensors of one shape."""
        return IndexRange(
            np.maximum(self.lowest, other.lowest), np.minimum(self.highest, other.highest)
        )

    def draw(self, rng: np.random.Generator, shape: Sequence[int]) -> NDArray[np.int64]:
        """Draw legal non-negative integers; elements without a limit are 0 or 1."""
        lowest = np.where(np.isfinite(self.lowest), np.ceil(self.lowest), 0)
        highest = np.where(np.isfinite(self.highest), np.floor(self.highest), lowest + 1)
        lowest = np.minimum(np.maximum(lowest, 0), highest)
        if lowest.size == highest.size == 1:  # a scalar keeps its former random numbers
            return rng.integers(int(lowest.item()), int(highest.item()) + 1, shape)
        return rng.integers(lowest.astype(np.int64), highest.astype(np.int64) + 1, shape)

    def clip(self, values: Array) -> Array:
        """Replace each value by the nearest legal value."""
        return np.clip(values, self.lowest, self.highest)

    def loosest(self, axes: tuple[int, ...] | None = None) -> IndexRange:
        """Return the widest range of all elements along some axes, as one range for all of them."""
        keep = axes is not None
        return IndexRange(
            np.asarray(self.lowest.min(axes, keepdims=keep)),
            np.asarray(self.highest.max(axes, keepdims=keep)),
        )


class Requirement(NamedTuple):
    """An operator that requires values of a graph input to be in a range."""

    operator: Operator
    """Operator that uses values of the graph input as indices."""
    input: str
    range: IndexRange


def index_requirements(proto: onnx.ModelProto, graph: Dataflow) -> tuple[Requirement, ...]:
    """Return the ranges of input values that a model's operators require, except those in bodies.

    A body (inner graph of If or Loop) may not run at all, so its requirements may not apply.
    """
    return tuple(_Trace(proto, graph).requirements())


def required_ranges(proto: onnx.ModelProto, graph: Dataflow) -> dict[str, IndexRange]:
    """Return the range of legal values for each input with a requirement."""
    found: dict[str, IndexRange] = {}
    for _, name, needed in index_requirements(proto, graph):
        found[name] = found[name].meet(needed) if name in found else needed
    return found


class _Trace:
    """Traces ranges of indices back to the graph inputs that they are computed from."""

    def __init__(self, proto: onnx.ModelProto, graph: Dataflow) -> None:
        self._graph = graph
        self._types = declared_types(proto)
        self._weights = {t.name: t for t in proto.graph.initializer}
        self._steps = 0

    def requirements(self) -> Iterator[Requirement]:
        for op in self._graph.operators:
            for tensor, legal in self._legal_indices(op):
                if tensor in self._graph.variable:
                    for name, needed in self._back(tensor, legal):
                        yield Requirement(op, name, needed)

    def _legal_indices(self, op: Operator) -> Iterator[tuple[str, IndexRange]]:
        """Yield the tensors that an operator uses as indices, with the range of legal values."""
        read = op.proto.input
        if op.proto.domain == "com.microsoft" and op.kind == "EmbedLayerNormalization":
            for place, of_table in _EMBEDDED:
                rows = self._size(read[of_table], 0) if len(read) > max(place, of_table) else None
                if rows is not None and read[place]:
                    yield read[place], _between(0, rows - 1)
        elif is_standard(op.proto) and op.kind in _INDEXING:
            table, indices = read[:2]
            sizes = self._indexed_sizes(op, table, indices)
            if sizes:
                lengths = np.array(sizes, np.float64)
                lengths = lengths if len(sizes) > 1 else lengths[0]
                yield indices, _between(-lengths, lengths - 1)

    def _indexed_sizes(self, op: Operator, table: str, indices: str) -> list[int]:
        """Return the sizes of the dimensions that are indexed; empty if one is not fixed."""
        if not op.kind.endswith("ND"):
            size = self._size(table, _attribute(op, "axis", 0))
            return [] if size is None else [size]
        first, shape = _attribute(op, "batch_dims", 0), self._shape(indices)
        count = shape[-1] if shape else None
        if not isinstance(count, int):
            return []
        sizes = [self._size(table, first + place) for place in range(count)]
        return [size for size in sizes if size is not None] if None not in sizes else []

    def _back(self, tensor: str, needed: IndexRange) -> Iterator[tuple[str, IndexRange]]:
        """Yield the graph inputs that a tensor is computed from, with their legal ranges."""
        pending = [(tensor, needed)]
        while pending and self._steps < _MOST_STEPS:
            self._steps += 1
            name, legal = pending.pop()
            legal = _fitted(legal, self._shape(name))
            if name in self._graph.inputs:
                yield name, legal
                continue
            op = self._graph.producers.get(name)
            rule = None if op is None or not is_standard(op.proto) else _RULES.get(op.kind)
            if op is not None and rule is not None:
                pending += rule(self, op, name, legal)

    # Helpers of the rules

    def _shape(self, name: str) -> tuple[int | str, ...] | None:
        return self._types[name].shape if name in self._types else None

    def _size(self, name: str, axis: int) -> int | None:
        shape = self._shape(name)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        size = shape[axis]
        return size if isinstance(size, int) else None

    def _value(self, name: str) -> NDArray[Any] | None:
        """Return the value of a small constant; ``None`` for other tensors."""
        tensor = self._weights.get(name)
        if tensor is None and (op := self._graph.producers.get(name)) is not None:
            tensor = constant_tensor(op.proto)
        if tensor is None or prod(tensor.dims) > _MOST_CONSTANTS:
            return None
        try:
            return array_of(tensor)
        except (ValueError, TypeError):  # the content is in another file
            return None

    def _operand(self, op: Operator) -> tuple[int, NDArray[Any]] | None:
        """Return the index of an operator's variable operand, and its constant operand's value."""
        for variable, constant in ((0, 1), (1, 0)):
            value = self._value(op.proto.input[constant])
            if value is not None and op.proto.input[variable] in self._graph.variable:
                return variable, value.astype(np.float64)
        return None

    # Rules: from the range of an operator's output to those of its inputs

    def same(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        return [(op.proto.input[0], legal)]

    def cast(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        source = op.proto.input[0]
        kind = self._types.get(source, TensorType(elem_type=0, shape=None)).elem_type
        if kind in _FLOAT_TYPES and _attribute(op, "to", 0) not in _FLOAT_TYPES:
            # The fraction is cut off: −0.9 and 0.9 become 0. Between two neighbouring integers,
            # every floating-point value becomes the one nearer to 0.
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            legal = IndexRange(_next(np.floor(legal.lowest), -1, dtype), legal.highest)
            legal = IndexRange(legal.lowest, _next(np.ceil(legal.highest), 1, dtype))
        return [(source, legal)]

    def reshape(self, op: Operator, given: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        source = op.proto.input[0]
        before, after = self._shape(source), self._shape(given)
        if legal.lowest.size == 1 or before is None or after is None:
            return [(source, legal.loosest())]
        inner, outer = _sizes(after[1:]), _sizes(before[1:])
        differs = legal.lowest.ndim == len(after) and legal.lowest.shape[0] != 1
        if before[:1] != after[:1] or inner is None or outer is None or differs:
            return [(source, legal.loosest())]
        return [(source, legal.map(lambda e: np.broadcast_to(e, (1, *inner)).reshape(1, *outer)))]

    def transpose(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        source = op.proto.input[0]
        shape = self._shape(source)
        if legal.lowest.size == 1 or shape is None:
            return [(source, legal.loosest())]
        order = _attribute(op, "perm", list(range(len(shape)))[::-1])
        return [(source, legal.map(lambda e: _of_rank(e, len(shape)).transpose(np.argsort(order))))]

    def add(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        found = self._operand(op)
        if found is None or (op.kind == "Sub" and found[0] == 1):
            return []
        shift = found[1] if op.kind == "Add" else -found[1]
        return [(op.proto.input[found[0]], legal.map(lambda ends: ends - shift))]

    def clip(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        ends = [self._value(name) if name else None for name in op.proto.input[1:]]
        low, high = (*ends, None, None)[:2]
        if len(op.proto.input) - 1 > sum(end is not None for end in ends):
            return []
        return [(op.proto.input[0], _clipped(legal, low, high))]

    def extreme(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        found = self._operand(op) if len(op.proto.input) == 2 else None
        if found is None:
            return []
        low, high = (found[1], None) if op.kind == "Max" else (None, found[1])
        return [(op.proto.input[found[0]], _clipped(legal, low, high))]

    def gather(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        places = self._value(op.proto.input[1])
        if places is None or places.ndim > 1:
            return []
        axis = _attribute(op, "axis", 0)
        return self._selected(op.proto.input[0], axis, places, legal)

    def slice(self, op: Operator, _: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        told = [self._value(name) if name else None for name in op.proto.input[1:]]
        if len(told) != sum(value is not None for value in told) or len(told) < 2:
            return []
        starts, ends = (np.asarray(v).ravel().tolist() for v in told[:2])
        axes = list(range(len(starts))) if len(told) < 3 else np.asarray(told[2]).ravel().tolist()
        steps = [1] * len(starts) if len(told) < 4 else np.asarray(told[3]).ravel().tolist()
        size = self._size(op.proto.input[0], axes[0]) if len(axes) == 1 else None
        if size is None:
            return []
        end = None if steps[0] < 0 and ends[0] < -size else ends[0]
        places = np.arange(size)[starts[0] : end : steps[0]]
        return self._selected(op.proto.input[0], axes[0], places, legal)

    def split(self, op: Operator, given: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        axis, outputs = _attribute(op, "axis", 0), list(op.proto.output)
        sizes = [self._size(name, axis) for name in outputs[: outputs.index(given) + 1]]
        if None in sizes:
            return []
        *before, mine = (size or 0 for size in sizes)
        places = np.arange(sum(before), sum(before) + mine)
        return self._selected(op.proto.input[0], axis, places, legal)

    def concat(self, op: Operator, given: str, legal: IndexRange) -> list[tuple[str, IndexRange]]:
        shape, names = self._shape(given), list(op.proto.input)
        if shape is None or legal.lowest.size == 1:
            return [(name, legal.loosest()) for name in names]
        axis, legal = _attribute(op, "axis", 0), legal.map(lambda e: _of_rank(e, len(shape)))
        sizes = [self._size(name, axis) for name in names]
        if legal.lowest.shape[axis] == 1:
            return [(name, legal) for name in names]
        if None in sizes:
            return [(name, legal.loosest()) for name in names]
        borders = np.cumsum([size or 0 for size in sizes])[:-1]
        lowest, highest = (np.split(e, borders, axis) for e in (legal.lowest, legal.highest))
        return [(n, IndexRange(a, b)) for n, a, b in zip(names, lowest, highest, strict=True)]

    def _selected(
        self, source: str, axis: int, places: NDArray[Any], legal: IndexRange
    ) -> list[tuple[str, IndexRange]]:
        """Limit the elements that are selected along an axis; other elements have no limit."""
        shape, size = self._shape(source), self._size(source, axis)
        if shape is None or size is None or not places.size:
            return []
        axis, places = axis % len(shape), np.asarray(places, np.int64) % size
        rank = len(shape) - (places.ndim == 0)
        chosen = legal.map(lambda ends: _of_rank(ends, rank))
        if places.ndim == 0:
            chosen = chosen.map(lambda ends: np.expand_dims(ends, axis))
        full = (*chosen.lowest.shape[:axis], size, *chosen.lowest.shape[axis + 1 :])
        lowest, highest = (np.moveaxis(np.full(full, e), axis, 0) for e in (-np.inf, np.inf))
        given = (len(places.reshape(-1)), *lowest.shape[1:])
        np.maximum.at(lowest, places.reshape(-1), _along(chosen.lowest, axis, given))
        np.minimum.at(highest, places.reshape(-1), _along(chosen.highest, axis, given))
        return [(source, IndexRange(*(np.moveaxis(e, 0, axis) for e in (lowest, highest))))]


_Rule: TypeAlias = Callable[[_Trace, Operator, str, IndexRange], Sequence[tuple[str, IndexRange]]]
_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(("Identity", "Dropout"), _Trace.same),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand"), _Trace.reshape),
    **dict.fromkeys(("Add", "Sub"), _Trace.add),
    **dict.fromkeys(("Max", "Min"), _Trace.extreme),
    "Cast": _Trace.cast,
    "Transpose": _Trace.transpose,
    "Clip": _Trace.clip,
    "Gather": _Trace.gather,
    "Slice": _Trace.slice,
    "Split": _Trace.split,
    "Concat": _Trace.concat,
}


def _between(lowest: Any, highest: Any) -> IndexRange:
    return IndexRange(np.asarray(lowest, np.float64), np.asarray(highest, np.float64))


def _fitted(legal: IndexRange, shape: Sequence[int | str] | None) -> IndexRange:
    """Return a range that broadcasts to a shape; a single widest range if that is not possible."""
    if legal.lowest.shape != legal.highest.shape:
        legal = IndexRange(*np.broadcast_arrays(legal.lowest, legal.highest))
    if legal.lowest.size == 1 or shape is None or legal.lowest.ndim > len(shape):
        return legal.loosest()
    sizes = shape[len(shape) - legal.lowest.ndim :]
    pairs = enumerate(zip(legal.lowest.shape, sizes, strict=True))
    return legal.loosest(tuple(axis for axis, (mine, size) in pairs if mine not in (1, size)))


def _sizes(shape: Sequence[int | str]) -> tuple[int, ...] | None:
    """Return the sizes if all are fixed, else ``None``."""
    fixed = tuple(size for size in shape if isinstance(size, int))
    return fixed if len(fixed) == len(shape) else None


def _of_rank(ends: Array, rank: int) -> Array:
    return ends.reshape((1,) * (rank - ends.ndim) + ends.shape)


def _along(ends: Array, axis: int, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.moveaxis(ends, axis, 0), shape)


def _clipped(legal: IndexRange, low: NDArray[Any] | None, high: NDArray[Any] | None) -> IndexRange:
    """Return the legal range before a Clip; where the Clip ensures a limit, there is none."""
    lowest, highest = legal.lowest, legal.highest
    if low is not None:
        lowest = np.where(low >= lowest, -np.inf, lowest)
    if high is not None:
        highest = np.where(high <= highest, np.inf, highest)
    return IndexRange(lowest, highest)


def _next(ends: Array, step: int, dtype: np.dtype[Any]) -> Array:
    """Return, for floats that are cast to integers, the limits just before the next integer."""
    beyond = np.nextafter((ends + step).astype(dtype), dtype.type(0)).astype(np.float64)
    return np.where(np.isfinite(ends), beyond, ends)


def _attribute(op: Operator, name: str, default: Any) -> Any:
    found = next((a for a in op.proto.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)
