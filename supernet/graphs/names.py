"""Resolution of a spec's names to weights and blocks of the graph after reading.

Reading a model keeps the names of operators and their scopes, except for operators that are fused
into others (a batch norm is fused into its convolution, which keeps its name). Torch's newer
exporter (``dynamo=True``) names operators without scopes, and linear weights are renamed if they
are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from onnx import helper

from offramp.compiler.graphs.graph import Dataflow, Operator, is_standard
from offramp.compiler.graphs.shapes import TensorType
from offramp.supernet.graphs.elastic_spec import ElasticSpec, WidthGroup
from offramp.supernet.graphs.errors import ElasticSpecError

_WEIGHTS = {"Conv": (1,), "ConvTranspose": (1,), "MatMul": (1, 0), "Gemm": (1,)}
"""Kinds of operators whose output channels are channels of a weight. The numbers are the indices of
inputs that may be the weight."""
_MOST_NEAR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeight:
    """A constant that an operator reads, and the dimension of its output channels."""

    node: str
    position: int
    """Index of the constant among the operator's inputs."""
    axis: int
    size: int
    """Number of output channels of the whole weight."""
    parts: int = 1

    def kept(self, ratio: float) -> tuple[int, ...]:
        """Return the channels that are kept: the first of each part.

        ElasticSpecError if that is not a whole number of channels.
        """
        if self.size % self.parts:
            raise ElasticSpecError(
                f"{self.node} has {self.size} output channels, which cannot be split into "
                f"{self.parts} equal parts; set parts to a number that divides {self.size}"
            )
        part, wanted = self.size // self.parts, self.size // self.parts * ratio
        count = round(wanted)
        if abs(wanted - count) > 1e-6 or count < 1:
            of = f"{self.parts} equal parts of {self.node}'s" if self.parts > 1 else self.node
            near = {max(1, min(part, n)) for n in (int(wanted), int(wanted) + 1)}
            told = " or ".join(f"{n / part:g} ({n} of {part})" for n in sorted(near))
            raise ElasticSpecError(
                f"{ratio:g} of the {self.size} output channels of {of} is {wanted:g}, which is not "
                f"a whole number; possible ratios are {told}"
            )
        return tuple(p * part + c for p in range(self.parts) for c in range(count))


def attributes_of(op: Operator) -> dict[str, Any]:
    """Return an operator's attributes by name."""
    return {a.name: helper.get_attribute_value(a) for a in op.proto.attribute}


def output_axis(op: Operator, position: int, rank: int) -> int:
    """Return the dimension of a weight with the output channels of its operator."""
    if op.kind == "Conv":
        return 0
    if op.kind == "ConvTranspose":
        return 1
    if op.kind == "Gemm":
        return 0 if attributes_of(op).get("transB", 0) else 1
    return rank - 1 if position else rank - 2


@dataclass(frozen=True, slots=True)
class WeightFinder:
    """Finds the names of a spec among the operators and initializers of a graph."""

    spec: ElasticSpec
    flow: Dataflow
    types: Mapping[str, TensorType]

    def find(self, group: WidthGroup) -> tuple[NamedWeight, ...]:
        """Return the weights of a width group; ElasticSpecError for an unknown name."""
        by_name = {op.name: op for op in self.flow.operators}
        found: list[NamedWeight] = []
        for name in group.weights:
            if name in by_name:
                found.append(self._weight(by_name[name], None, group))
            elif name in self.flow.constants and name in self.flow.consumers:
                found += [self._weight(op, name, group) for op in self.flow.consumers[name]]
            else:
                raise ElasticSpecError(
                    f"{self.spec.source}: width.weights names {name!r}, which is neither an "
                    "operator nor an initializer of the model as it is read; "
                    f"{nearest(name, self._known())}"
                )
        return tuple(found)

    def _known(self) -> list[str]:
        """Return all names that a spec may use."""
        operators = [op.name for op in self.flow.operators if op.kind in _WEIGHTS]
        constants = (name for name in self.flow.constants if len(self.types[name].shape or ()) > 1)
        return [*operators, *sorted(constants)]

    def _weight(self, op: Operator, only: str | None, group: WidthGroup) -> NamedWeight:
        """Describe an operator's weight; with ``only``, it must be this initializer."""
        places = _WEIGHTS.get(op.kind, ()) if is_standard(op.proto) else ()
        for position in places:
            name = op.proto.input[position]
            shape = self.types[name].shape if name in self.flow.constants else None
            if not shape or len(shape) < 2 or only not in (None, name):
                continue
            axis = output_axis(op, position, len(shape))
            if group.axis not in (None, axis):
                raise ElasticSpecError(
                    f"{self.spec.source}: width.axis = {group.axis}, but the output channels of "
                    f"{op.kind} {op.name} are dimension {axis} of its weight {list(shape)}; omit "
                    "axis"
                )
            return NamedWeight(
                node=op.name,
                position=position,
                axis=axis,
                size=int(shape[axis]),
                parts=group.parts,
            )
        raise ElasticSpecError(
            f"{self.spec.source}: width.weights names {only or op.name!r}, but for {op.kind} "
            f"{op.name} this selects no constant weight with output channels; name a "
            f"{', '.join(_WEIGHTS)} that has such a weight"
        )


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint with similar names, and with ways to see all names."""
    close = get_close_matches(name, dict.fromkeys(known), n=_MOST_NEAR, cutoff=0.5)
    told = f"the nearest are {', '.join(map(repr, close))}" if close else "none is similar"
    return (
        f"{told}; `eecompile inspect` shows tensors, and a viewer such as Netron names of "
        "operators (fused ones keep the convolution's)"
    )
