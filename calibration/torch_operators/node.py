"""Nodes of ONNX graphs with their torch functions; conversion of tensors to and from torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphNode:
    """A node of a graph: an operator of some kind, with its attributes."""

    kind: str
    """ONNX operator type, for instance ``Conv``; with its domain in front if it is not a standard
    operator."""
    name: str
    """Name of the node, which may be empty."""
    inputs: tuple[str, ...]
    """Tensors that it reads; an empty name is an optional input that is left out."""
    outputs: tuple[str, ...]
    """Tensors that it writes; an empty name is an output that is not used."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes: numbers, texts, tuples of them, and constants as tensors."""

    def get(self, name: str, default: _T) -> _T:
        """Return an attribute, or ``default`` if the node has none of that name."""
        return cast("_T", self.attributes.get(name, default))

    def reads(self, index: int) -> bool:
        """Return whether an optional input is present."""
        return index < len(self.inputs) and bool(self.inputs[index])

    def writes(self, index: int) -> bool:
        """Return whether an optional output is used."""
        return index < len(self.outputs) and bool(self.outputs[index])


Lacks: TypeAlias = Callable[[GraphNode], str | None]


def _lacks_nothing(_node: GraphNode) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchOperator:
    """An ONNX operator as a function on torch tensors, which keeps gradients."""

    run: Callable[..., Tensor | Sequence[Tensor]]
    """Function of the node and its inputs (``None`` for a missing one), which returns the
    outputs."""
    settings: frozenset[int] = frozenset()
    """Inputs that are read as numbers, such as sizes and axes: they stay in host memory."""
    untrained: frozenset[int] = frozenset()
    """Inputs that are computed with, but are not weights: statistics, bounds, exponents."""
    lacks: Lacks = _lacks_nothing
    """Function that returns which feature of a node, such as a mode, is not supported."""


def operator(
    run: Callable[..., Tensor | Sequence[Tensor]],
    *,
    settings: Sequence[int] = (),
    untrained: Sequence[int] = (),
    lacks: Lacks = _lacks_nothing,
) -> TorchOperator:
    """Return an operator whose function takes the node and the inputs."""
    return TorchOperator(
        run=run, settings=frozenset(settings), untrained=frozenset(untrained), lacks=lacks
    )


def plain(
    function: Callable[..., Tensor], *, settings: Sequence[int] = (), untrained: Sequence[int] = ()
) -> TorchOperator:
    """Return an operator whose function takes the inputs alone: it has no attributes."""
    return operator(
        lambda _node, *inputs: function(*inputs), settings=settings, untrained=untrained
    )


def numbers(tensor: Tensor) -> list[int]:
    """Read integers of a tensor of any shape."""
    return [int(value) for value in tensor.flatten().tolist()]


def padded(inputs: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
    """Return ``count`` optional inputs, adding ``None`` for those missing at the end."""
    return (*inputs, *[None] * count)[:count]


DTYPES: Mapping[int, torch.dtype] = {
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.BOOL: torch.bool,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8,
}
"""torch's types by ONNX's data type; uint8 is the only unsigned integer torch computes with."""


def to_torch(proto: onnx.TensorProto) -> Tensor:
    """Copy a tensor of a type in :data:`DTYPES` into torch's memory."""
    if proto.data_type == TensorProto.BFLOAT16:  # numpy does not have this type: use its bytes
        if proto.HasField("raw_data"):
            words = np.frombuffer(proto.raw_data, "<u2").astype(np.uint16)
        else:
            words = np.array(proto.int32_data, np.uint16)
        return (
            torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).reshape(tuple(proto.dims))
        )
    # copied even if it is a view already: torch requires writable memory
    return torch.from_numpy(np.array(numpy_helper.to_array(proto)))


def to_onnx(tensor: Tensor, name: str) -> onnx.TensorProto:
    """Copy a torch tensor into a tensor of ONNX."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        words = tensor.view(torch.int16).numpy().astype("<i2").tobytes()
        return helper.make_tensor(name, TensorProto.BFLOAT16, tensor.shape, words, raw=True)
    return numpy_helper.from_array(tensor.numpy(), name)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Read the attributes of a node: numbers, texts, tuples of them, and tensors."""
    return {a.name: _attribute(a) for a in node.attribute}


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return to_torch(value) if value.data_type in DTYPES else value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return tuple(v.decode() if isinstance(v, bytes) else v for v in value)
    return value
