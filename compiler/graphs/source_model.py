"""A model in the form that slicing needs, and inputs of its file that no operator reads.

ONNX Runtime accepts unread inputs, so clients may send them, and data sets may contain them. Unread
inputs are only part of the model's interface: slicing and serving do not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import helper

from offramp.bundle.schema.answers import Answer
from offramp.bundle.schema.inputs import NUMBER_DTYPES, TensorSpec, UnreadInput, declared_inputs
from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import Dataflow, copied, read_names, refill
from offramp.compiler.graphs.shapes import BATCH, dtype_name
from offramp.compiler.graphs.tail import Tail


@dataclass(frozen=True, kw_only=True)  # without slots, for cached properties
class SourceModel:
    """A model in the form that slicing needs.

    The batch dimension is symbolic, shapes are inferred, operators have unique names, no shape that
    could be computed from a graph input is used across a cut point, and the answer is the only
    output.
    """

    proto: onnx.ModelProto
    """The whole model with its weights; read-only."""
    name: str
    inputs: tuple[TensorSpec, ...]
    """Inputs that the model reads, in the order of the file."""
    outputs: tuple[TensorSpec, ...]
    original_sha256: str
    """Hash of the file that was read and of its external data."""
    opset: int
    answer: Answer
    unread: tuple[UnreadInput, ...] = ()
    """Inputs that the file declares and that no operator reads; ``proto`` does not have them."""
    tail: Tail | None = None
    """Operators between the scores that heads imitate and the answer; ``None`` if heads imitate the
    answer itself."""

    @cached_property
    def flow(self) -> Dataflow:
        """Operators of ``proto``."""
        return Dataflow(self.proto.graph)

    @property
    def declared(self) -> tuple[TensorSpec, ...]:
        """All inputs that the file declares, in the file's order."""
        return declared_inputs(self.inputs, self.unread)

    def as_declared(self) -> onnx.ModelProto:
        """Return the model with all inputs that its file declares."""
        return with_unread(self.proto, self.unread)

    @property
    def taught(self) -> Answer:
        """Scores that heads imitate, in the form of a description of an answer."""
        return self.answer if self.tail is None else self.tail.taught

    @property
    def mask(self) -> TensorSpec | None:
        """Input that marks the tokens of the answer that count."""
        return next((spec for spec in self.inputs if spec.name == self.answer.task.mask), None)

    @property
    def versions(self) -> dict[str, int]:
        """Versions of opset and file format for the graphs of exits."""
        return {"opset": self.opset, "ir_version": self.proto.ir_version}


@dataclass(frozen=True, slots=True)
class DeclaredInputs:
    """Inputs of a model as its file declares them."""

    infos: tuple[onnx.ValueInfoProto, ...]
    """Inputs in the order of the file."""
    freed: frozenset[str]
    """Names of inputs that operators read before the model is simplified; their batch size is made
    symbolic."""

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> DeclaredInputs:
        """Copy the inputs, before the batch of the graph is renamed."""
        read = read_names(graph).intersection(info.name for info in graph.input)
        return cls(tuple(map(copied, graph.input)), frozenset(read))

    def unread(self, graph: onnx.GraphProto) -> tuple[UnreadInput, ...]:
        """Describe the inputs that are not in ``graph``, the graph of the prepared model.

        The first dimension of such an input is the batch if its size is symbolic, or equal to the
        fixed batch size of inputs that are read. ModelError if an input is not an array of numbers.
        """
        read = {info.name for info in graph.input}
        fronts = [
            info.type.tensor_type.shape.dim[0] for info in self.infos if info.name in self.freed
        ]
        fixed = next((front.dim_value for front in fronts if front.HasField("dim_value")), None)
        return tuple(
            UnreadInput(spec=_spec(info, fixed), place=place)
            for place, info in enumerate(self.infos)
            if info.name not in read
        )


def drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the inputs that no operator reads, in place."""
    read = read_names(graph)
    refill(graph.input, [info for info in graph.input if info.name in read])


def with_unread(proto: onnx.ModelProto, unread: Sequence[UnreadInput]) -> onnx.ModelProto:
    """Return a model that also declares unread inputs; ``proto`` is not changed."""
    if not unread:
        return proto
    declared = copied(proto)
    for each in unread:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(each.spec.dtype))
        info = helper.make_tensor_value_info(each.spec.name, kind, each.spec.shape)
        declared.graph.input.insert(each.place, info)
    return declared


def _spec(info: onnx.ValueInfoProto, fixed: int | None) -> TensorSpec:
    tensor = info.type.tensor_type
    dtype = dtype_name(tensor.elem_type)
    if not tensor.HasField("shape") or dtype not in NUMBER_DTYPES:
        raise ModelError(
            f"input {info.name!r}, which nothing reads, is not an array of numbers of known rank; "
            "remove it from the inputs of the model"
        )
    shape = [_size(dim, f"{info.name}_{axis}") for axis, dim in enumerate(tensor.shape.dim)]
    if shape and (isinstance(shape[0], str) or shape[0] == fixed):
        shape[0] = BATCH
    try:
        return TensorSpec(name=info.name, dtype=dtype, shape=tuple(shape))
    except ValueError as error:
        raise ModelError(f"input {info.name!r}, which nothing reads: {error}") from error


def _size(dim: onnx.TensorShapeProto.Dimension, unnamed: str) -> int | str:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or unnamed
