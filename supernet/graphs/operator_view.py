"""An operator as the rules of slicing see it: what it reads, and what they say of what it gives."""

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
"""Operators that may be named, so that what they give is elastic, too."""
_MOST_STEPS = 200
"""Operators that are looked at for one that should be elastic, too."""


@dataclass(frozen=True, slots=True)
class OperatorView:
    """An operator, as the rule of its kind sees it: what it reads, and what becomes of that."""

    op: Operator
    flow: Dataflow
    types: Mapping[str, TensorType]
    weights: Mapping[str, onnx.TensorProto]
    named: Mapping[tuple[str, int], tuple[int, ...]]
    """What is kept of the output channels, by operator that the spec names, and input."""
    plan: SlicePlan

    @property
    def attributes(self) -> dict[str, Any]:
        """By name."""
        return attributes_of(self.op)

    @property
    def inputs(self) -> Sequence[str]:
        """Names of all inputs; those left out are empty."""
        return self.op.proto.input

    def elastic(self, position: int) -> ElasticAxis | None:
        """Give the dimension of an input that there is less of."""
        return self.plan.elastic.get(self.inputs[position]) if self.has(position) else None

    @property
    def elastic_inputs(self) -> list[int]:
        """Inputs that there is less of."""
        return [i for i in range(len(self.inputs)) if self.elastic(i) is not None]

    def only_elastic(self) -> ElasticAxis:
        """Give the elastic dimension of the first input; refuses if another has one, too."""
        elastic = self.elastic(0)
        if elastic is None or len(self.elastic_inputs) > 1:
            self.refuse("fewer channels enter where only whole inputs can; keep them whole")
        return elastic

    def has(self, position: int) -> bool:
        """Whether there is such an input."""
        return position < len(self.inputs) and bool(self.inputs[position])

    def wanted(self, position: int) -> tuple[int, ...] | None:
        """Give the output channels of a weight that the spec keeps; ``None`` if it names it not."""
        return self.named.get((self.op.name, position))

    def is_weight(self, position: int) -> bool:
        """Whether an input is an initializer."""
        return self.has(position) and self.inputs[position] in self.weights

    def shape(self, position: int) -> tuple[Size, ...]:
        """Give the shape of an input in the supernet; refuses an unknown one."""
        return self._shape(self.inputs[position])

    def output_shape(self, index: int = 0) -> tuple[Size, ...]:
        """Give the shape of an output in the supernet; refuses an unknown one."""
        return self._shape(self.op.proto.output[index])

    def _shape(self, name: str) -> tuple[Size, ...]:
        found = self.types.get(name)
        if found is None or found.shape is None:
            self.refuse(f"the shape of {name!r} is not known; export with fixed sizes")
        return found.shape

    def value(self, position: int) -> NDArray[Any] | None:
        """Give the value of a constant; ``None`` if an input is computed."""
        if not self.is_weight(position):
            return None
        return numpy_helper.to_array(self.weights[self.inputs[position]])

    def cut(self, position: int, axis: int, kept: tuple[int, ...]) -> None:
        """Keep some elements of a dimension of a constant."""
        if not self.is_weight(position):
            self.refuse(
                f"its input {self.inputs[position]!r} is computed, expected an initializer; keep "
                "its channels whole"
            )
        place = (self.op.name, position)
        self.plan.cuts.setdefault(place, {})[axis] = kept

    def give(self, axis: int, like: ElasticAxis, *, index: int = 0) -> None:
        """Say of an output that a dimension is elastic, as one of an input is."""
        name = self.op.proto.output[index]
        self.plan.elastic[name] = ElasticAxis(axis=axis, full=like.full, kept=like.kept)

    def give_all(self, axis: int, like: ElasticAxis) -> None:
        """Say so of all outputs that there are."""
        for index, name in enumerate(self.op.proto.output):
            if name:
                self.give(axis, like, index=index)

    def regroup(self, like: ElasticAxis) -> ElasticAxis:
        """Find the dimension of the output that a reshape makes of an elastic one."""
        try:
            return regroup(self.shape(0), self.output_shape(), like)
        except MixedError as error:
            self.refuse(str(error))

    def refuse(self, reason: str) -> NoReturn:
        """Raise a NotElasticError that names the operator."""
        raise NotElasticError(f"width: {self.op.kind} {self.op.name}: {reason}")

    def refuse_axis(self, elastic: ElasticAxis, what: str, remedy: str) -> NoReturn:
        """Refuse an operator that works along the elastic dimension."""
        self.refuse(f"{what} dimension {elastic.axis}, of which {elastic} are kept; {remedy}")

    def remedy_for(self, tensor: str) -> str:
        """Say which weights to name so that a tensor is elastic, too."""
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
            return "leave its channels whole"
        return f"name {' and '.join(dict.fromkeys(found[:3]))} in the same [[width]], or neither"
