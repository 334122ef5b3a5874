"""Tensors of ONNX as tensors of torch, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

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
"""By ONNX's data type, those that torch computes with: of unsigned integers bytes alone."""


def to_torch(proto: onnx.TensorProto) -> Tensor:
    """Copy a tensor of a type in :data:`DTYPES` into torch's memory."""
    if proto.data_type == TensorProto.BFLOAT16:  # numpy has none, so its bytes are taken
        if proto.HasField("raw_data"):
            words = np.frombuffer(proto.raw_data, "<u2").astype(np.uint16)
        else:
            words = np.array(proto.int32_data, np.uint16)
        return (
            torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).reshape(tuple(proto.dims))
        )
    # copied also where it is a view already: torch wants memory that may be written
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
