"""An operator as the slicing rules read and change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from offramp.compiler.graphs.graph import Dataflow, Operator
from offramp.compiler.graphs.shapes import TensorType
from offramp.supernet.graphs.errors import NotElasticError
from offramp.supernet.graphs.names import attributes_of
from offramp.supernet.graphs.reshape import ElasticAxis, MixedError, Size, regroup
from offramp.supernet.graphs.slicing_plan import SlicePlan

_WEIGHTED = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Kinds of operators that a spec may name in order to make their outputs elastic."""
_MOST_STEPS = 200
"""Largest number of operators that are searched to find an operator for a hint."""


@dataclass(frozen=True, slots=True)
class OperatorView:
    """An operator as the rule of its kind reads and changes it.

    A rule reads which dimensions of the inputs are elastic, and sets those of the outputs.
    """

    op: Operator
    flow: Dataflow
    types: Mapping[str, TensorType]
    weights: Mapping[str, onnx.TensorProto]
    named: Mapping[tuple[str, int], tuple[int, ...]]
    """Kept output channels, by the name of an operator in the spec and the index of the operator's
    input."""
    plan: SlicePlan

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the operator, by name."""
        return attributes_of(self.op)

    @property
    def inputs(self) -> Sequence[str]:
        """Names of all inputs; empty for omitted inputs."""
        return self.op.proto.input

    def elastic(self, position: int) -> ElasticAxis | None:
        """Return the elastic dimension of an input, if it has one."""
        return self.plan.elastic.get(self.inputs[position]) if self.has(position) else None

    @property
    def elastic_inputs(self) -> list[int]:
        """Indices of inputs with an elastic dimension."""
        return [i for i in range(len(self.inputs)) if self.elastic(i) is not None]

    def only_elastic(self) -> ElasticAxis:
        """Return the first input's elastic dimension; NotElasticError if another input has one."""
        elastic = self.elastic(0)
        if elastic is None or len(self.elastic_inputs) > 1:
            self.refuse("fewer channels enter where only whole inputs can; keep them whole")
        return elastic

    def has(self, position: int) -> bool:
        """Return whether the operator has an input with this index."""
        return position < len(self.inputs) and bool(self.inputs[position])

    def wanted(self, position: int) -> tuple[int, ...] | None:
        """Return the output channels of a weight that the spec keeps; ``None`` without an entry."""
        return self.named.get((self.op.name, position))

    def is_weight(self, position: int) -> bool:
        """Return whether an input is an initializer."""
        return self.has(position) and self.inputs[position] in self.weights

    def shape(self, position: int) -> tuple[Size, ...]:
        """Return the shape of an input in the supernet; NotElasticError if unknown."""
        return self._shape(self.inputs[position])

    def output_shape(self, index: int = 0) -> tuple[Size, ...]:
        """Return the shape of an output in the supernet; NotElasticError if unknown."""
        return self._shape(self.op.proto.output[index])

    def _shape(self, name: str) -> tuple[Size, ...]:
        found = self.types.get(name)
        if found is None or found.shape is None:
            self.refuse(f"the shape of {name!r} is unknown; export with fixed sizes")
        return found.shape

    def value(self, position: int) -> NDArray[Any] | None:
        """Return the value of a constant; ``None`` if an input is computed."""
        if not self.is_weight(position):
            return None
        return numpy_helper.to_array(self.weights[self.inputs[position]])

    def cut(self, position: int, axis: int, kept: tuple[int, ...]) -> None:
        """Keep only some elements of a dimension of a constant."""
        if not self.is_weight(position):
            self.refuse(
                f"its input {self.inputs[position]!r} is computed, expected an initializer; keep "
                "its channels whole"
            )
        place = (self.op.name, position)
        self.plan.cuts.setdefault(place, {})[axis] = kept

    def give(self, axis: int, like: ElasticAxis, *, index: int = 0) -> None:
        """Mark a dimension of an output as elastic, with the kept elements of ``like``."""
        name = self.op.proto.output[index]
        self.plan.elastic[name] = ElasticAxis(axis=axis, full=like.full, kept=like.kept)

    def give_all(self, axis: int, like: ElasticAxis) -> None:
        """Mark a dimension of all outputs as elastic, with the kept elements of ``like``."""
        for index, name in enumerate(self.op.proto.output):
            if name:
                self.give(axis, like, index=index)

    def regroup(self, like: ElasticAxis) -> ElasticAxis:
        """Return the output's elastic dimension after a reshape, from an input's."""
        try:
            return regroup(self.shape(0), self.output_shape(), like)
        except MixedError as error:
            self.refuse(str(error))

    def refuse(self, reason: str) -> NoReturn:
        """Raise a NotElasticError that names the operator."""
        raise NotElasticError(f"width: {self.op.kind} {self.op.name}: {reason}")

    def refuse_axis(self, elastic: ElasticAxis, what: str, remedy: str) -> NoReturn:
        """Raise NotElasticError for an operator that works along the elastic dimension."""
        self.refuse(f"{what} dimension {elastic.axis}, of which {elastic} are kept; {remedy}")

    def remedy_for(self, tensor: str) -> str:
        """Return a hint that says which weights to name so that a tensor becomes elastic, too."""
        pending, seen = [tensor], {tensor}
        found: list[str] = []
        while pending and len(seen) < _MOST_STEPS:
            op = self.flow.producers.get(pending.pop(0))
            if op is None:
                continue
            if op.kind in _WEIGHTED and any(name in self.weights for name in op.reads):
                found.append(op.name)
                continue
            new = [t for t in op.reads if t not in seen and t in self.flow.variable]
            pending += new
            seen.update(new)
        if not found:
            return "keep its channels whole"
        return f"name {' and '.join(dict.fromkeys(found[:3]))} in the same [[width]], or neither"
