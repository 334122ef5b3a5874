"""Requirements that a model must meet to have exits, checked before the model is run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle.schema.inputs import NUMBER_DTYPES
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import Dataflow, Operator, constant_tensor, is_standard
from offramp.compiler.graphs.shapes import dtype_name

_MOST_DIMENSIONS: Final = 8
"""Largest number of dimensions of an input. A video has five, and each further dimension multiplies
the cost of trial runs."""
_BATCH_NAME: Final = re.compile(r"(mini_?)?batch(_?(size|dim|axis))?|bs", re.IGNORECASE)
"""Names that exporters and users choose for the size of the batch."""


def check_some_input(proto: onnx.ModelProto) -> None:
    """Raise ModelError for a model whose answer depends on no input."""
    if not proto.graph.input:
        raise ModelError("no inputs that the answer depends on: there is nothing to classify")


def check_inputs(proto: onnx.ModelProto) -> None:
    """Raise ModelError for inputs that are not arrays of numbers; name sizes that have no name."""
    check_some_input(proto)
    for info in proto.graph.input:
        tensor = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
            raise ModelError(f"input {info.name!r} is not a tensor of known rank; export it as one")
        if dtype_name(tensor.elem_type) not in NUMBER_DTYPES:
            kinds = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
            kind = kinds.get(tensor.elem_type, f"number {tensor.elem_type}")
            raise ModelError(
                f"input {info.name!r} has elements of type {kind}, expected a number type that "
                "numpy has; move the conversion out of the model"
            )
        for axis, dim in enumerate(tensor.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = f"{info.name}_{axis}"
        if len(tensor.shape.dim) > _MOST_DIMENSIONS:
            raise ModelError(
                f"input {info.name!r} has {len(tensor.shape.dim)} dimensions, expected at most "
                f"{_MOST_DIMENSIONS}"
            )


def check_batch_first(graph: onnx.GraphProto) -> None:
    """Raise ModelError if the names of an input's sizes show that the batch is not the first.

    A size counts as the batch if its name means batch, or else if it is the first size of the
    answer.
    """
    answers = {sizes[0] for output in graph.output if (sizes := _names(output)) and sizes[0]}
    for info in graph.input:
        front, *others = _names(info) or ("",)
        if _BATCH_NAME.fullmatch(front) or front in answers:
            continue
        called = [axis for axis, name in enumerate(others, 1) if _BATCH_NAME.fullmatch(name)]
        same = [axis for axis, name in enumerate(others, 1) if name in answers]
        if axes := called or same:
            raise ModelError(_misplaced_batch(info, axes[0]))


def _misplaced_batch(info: onnx.ValueInfoProto, axis: int) -> str:
    dims = info.type.tensor_type.shape.dim
    sizes = ", ".join(d.dim_param or (str(d.dim_value) if d.dim_value else "?") for d in dims)
    return (
        f"input {info.name!r} is [{sizes}]: its batch is dimension {axis}, "
        f"{dims[axis].dim_param!r}, expected the first one, along which samples join a batch "
        "and leave it. Export the model with the batch in front (recurrent networks: "
        "batch_first=True; else transpose the input at the beginning of forward); a first state "
        "can be a constant of the model"
    )


def _names(info: onnx.ValueInfoProto) -> tuple[str, ...]:
    """Return the names of a tensor's sizes; the name of a fixed or unnamed size is empty."""
    return tuple(dim.dim_param for dim in info.type.tensor_type.shape.dim)


def check_inference(graph: onnx.GraphProto) -> None:
    """Raise ModelError for a model with dropout in training mode."""
    flow = Dataflow(graph)
    values = dict(_constants(graph, flow))
    for op in flow.operators:
        if op.kind == "Dropout" and is_standard(op.proto) and _drops(op, values):
            raise ModelError(
                f"operator {op.name or op.writes[0]!r} is a Dropout in training mode, which drops "
                "at random: the same sample gets another answer each time, so that no exit can "
                "agree with it. Export the model for inference: model.eval() before the export, "
                "and training=TrainingMode.EVAL where the exporter asks"
            )


def _drops(op: Operator, values: dict[str, NDArray[np.generic]]) -> bool:
    """Return whether constants set a Dropout to training mode, with a ratio above 0."""
    _, ratio, training = (*op.proto.input, "", "", "")[:3]
    drops_none = ratio in values and not values[ratio].any()
    return training in values and bool(values[training].any()) and not drops_none


def _constants(graph: onnx.GraphProto, flow: Dataflow) -> Iterable[tuple[str, NDArray[np.generic]]]:
    """Yield the values of the constants that Dropouts read."""
    read = {name for op in flow.operators if op.kind == "Dropout" for name in op.proto.input[1:]}
    tensors = [*graph.initializer, *filter(None, map(constant_tensor, graph.node))]
    return ((t.name, array_of(t)) for t in tensors if t.name in read)
