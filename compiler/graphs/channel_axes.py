"""Channel dimension of tensors, derived from the operators around them.

A map may be [batch, channels, height, width] or have its channels last, and a tensor of three
dimensions may hold tokens or the channels of a signal. Heads need to know which dimension holds the
channels. Convolutions, poolings and normalisations have their channels at a known dimension. So the
search for such an operator begins at the tensor, and continues through elementwise operators and
``Transpose``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import helper

from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import Dataflow, Operator, constant_tensor, integer
from offramp.compiler.graphs.shapes import TensorType

_CHANNELS_FIRST = frozenset(
    {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "FusedConv", "DeformConv"}
    | {"BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN"}
    | {"MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"}
    | {"DepthToSpace", "SpaceToDepth"}
)
_CHANNELS_LAST = frozenset(
    {"SkipLayerNormalization", "SimplifiedLayerNormalization", "EmbedLayerNormalization"}
    | {"SkipSimplifiedLayerNormalization", "LSTM", "GRU", "RNN", "MultiHeadAttention"}
)
_NORMALISATIONS = frozenset({"LayerNormalization", "RMSNormalization"})
_WEIGHTS = {"MatMul": 1, "FusedMatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3}
"""Matrix products, and the index of their weight input [width before, width after]."""
_MEANS = frozenset({"ReduceMean", "ReduceMax", "ReduceSum"})
_NORMALISING = frozenset({"Sub", "Add", "Sqrt"})
"""Operators that follow a mean if a normalisation is written as single operators."""
_TRANSPARENT = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Sum", "Concat", "Pad", "Slice"}
    | {"Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "Swish", "Erf", "Tanh"}
    | {"Sigmoid", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "ThresholdedRelu", "Clip"}
    | {"Sqrt", "Exp", "Log", "Neg", "Abs", "Reciprocal", "Identity", "Dropout", "Cast"}
    | {"QuantizeLinear", "DequantizeLinear", "FastGelu", "BiasGelu", "QuickGelu"}
)
"""Operators whose output has the dimensions of their operands, in the same order."""
_MOST_STEPS = 64
"""Largest number of tensors that a search visits; operators farther away do not show the
channels."""
_MOST_AXES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFinder:
    """Finds the dimension that holds the channels of a graph's tensors."""

    graph: Dataflow
    types: Mapping[str, TensorType]
    axes: Mapping[str, tuple[int, ...]]
    """Values of integer constants that may be the axes of a mean, by name."""

    @classmethod
    def of(
        cls, proto: onnx.ModelProto, graph: Dataflow, types: Mapping[str, TensorType]
    ) -> ChannelFinder:
        """Create a finder for a model and the types of its tensors."""
        constants = [t for node in proto.graph.node if (t := constant_tensor(node)) is not None]
        axes = {
            tensor.name: tuple(array_of(tensor).ravel().tolist())
            for tensor in (*proto.graph.initializer, *constants)
            if tensor.data_type == onnx.TensorProto.INT64
            and len(tensor.dims) <= 1
            and sum(tensor.dims) <= _MOST_AXES
        }
        return cls(graph=graph, types=types, axes=axes)

    def channels_of(self, tensor: str) -> int | None:
        """Return the dimension of a tensor's channels; ``None`` if no operator shows it."""
        rank = self._rank(tensor)
        pending = deque([(tensor, tuple(range(rank)))])
        seen = {tensor}
        while pending and len(seen) < _MOST_STEPS:
            name, axes = pending.popleft()
            for told in self._implied(name):
                if axes[told]:  # 0 is the batch
                    return axes[told]
            for neighbour, moved in self._neighbours(name, axes):
                if neighbour not in seen:
                    seen.add(neighbour)
                    pending.append((neighbour, moved))
        return None

    def _rank(self, tensor: str) -> int:
        found = self.types.get(tensor)
        return len(found.shape or ()) if found is not None else 0

    def _implied(self, tensor: str) -> Iterator[int]:
        """Yield the channel dimensions that are implied by the operators next to a tensor."""
        last = self._rank(tensor) - 1
        readers = [op for op in self.graph.consumers.get(tensor, ()) if op.reads[0] == tensor]
        writer = self.graph.producers.get(tensor)
        for op in (*readers, *([writer] if writer else ())):
            if op.kind in _CHANNELS_FIRST:
                yield 1
            elif op.kind in _CHANNELS_LAST or self._is_last(op, tensor):
                yield last
        for op in readers:
            if op.kind in _MEANS:
                yield from self._spared(op, last)

    def _is_last(self, op: Operator, tensor: str) -> bool:
        """Return whether an operator works along the last dimension of a tensor only."""
        if op.kind in _NORMALISATIONS:
            return integer(op.proto, "axis", -1) in (-1, self._rank(tensor) - 1)
        if op.kind in _WEIGHTS:
            return self._is_matrix(op, _WEIGHTS[op.kind])
        return op.kind == "Gather" and tensor in op.writes and self._is_matrix(op, 0)  # embedding

    def _is_matrix(self, op: Operator, place: int) -> bool:
        """Return whether an operator's input at an index is a constant of two dimensions."""
        names = op.proto.input[place : place + 1]
        return any(name not in self.graph.variable and self._rank(name) == 2 for name in names)

    def _spared(self, op: Operator, last: int) -> Iterator[int]:
        """Yield the channel dimension that a mean shows.

        It is the only dimension that the mean keeps, besides the batch, or the last one if the mean
        is part of a normalisation.
        """
        attributes = {a.name: helper.get_attribute_value(a) for a in op.proto.attribute}
        given = op.proto.input[1] if len(op.proto.input) > 1 else ""
        over = {a % (last + 1 or 1) for a in attributes.get("axes", self.axes.get(given, ()))}
        followers = [f for name in op.writes for f in self.graph.consumers.get(name, ())]
        if over == {last} and any(follower.kind in _NORMALISING for follower in followers):
            yield last
        elif 0 not in over and len(over) == last - 1:
            yield from set(range(1, last + 1)) - over

    def _neighbours(
        self, tensor: str, axes: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield tensors with the same channels, with the original dimension of each dimension."""
        for op in self.graph.consumers.get(tensor, ()):
            if op.kind == "Transpose":
                order = self._order(op, len(axes))
                yield from self._alike(op.writes, tuple(axes[i] for i in order))
            elif op.kind in _TRANSPARENT:
                yield from self._alike((*op.writes, *op.reads), axes)
        writer = self.graph.producers.get(tensor)
        if writer is not None and writer.kind == "Transpose":
            order = self._order(writer, len(axes))
            yield from self._alike(writer.reads, tuple(axes[order.index(i)] for i in sorted(order)))
        elif writer is not None and writer.kind in _TRANSPARENT:
            yield from self._alike(writer.reads, axes)

    def _alike(
        self, tensors: tuple[str, ...], axes: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in tensors:
            if name in self.graph.variable and self._rank(name) == len(axes):
                yield name, axes

    def _order(self, op: Operator, rank: int) -> list[int]:
        """Return the permutation of a Transpose; empty if it is not valid for the rank."""
        usual = list(reversed(range(rank)))
        given = next((list(a.ints) for a in op.proto.attribute if a.name == "perm"), usual)
        return given if sorted(given) == sorted(usual) else []
