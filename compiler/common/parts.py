"""Small ONNX graphs that are written operator by operator: what exits are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

DescribedTensor: TypeAlias = tuple[str, str, Sequence[int | str]]
"""Name, numpy's name of the element type, shape."""


class PartBuilder:
    """Collects nodes and weights under a prefix of their own, so that parts can be joined."""

    def __init__(self, prefix: str, opset: int, ir_version: int) -> None:
        self.prefix = prefix
        self.opset = opset
        self._ir_version = ir_version
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """Add a node with one output; gives the output's name."""
        output = self.prefix + (name or f"{op.lower()}_{len(self._nodes)}")
        self._nodes.append(
            helper.make_node(op, list(inputs), [output], name=f"{output}:{op}", **attributes)
        )
        return output

    def add_all(
        self, op: str, inputs: Sequence[str], names: Sequence[str], **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs; gives their names, which are made up where empty."""
        number = len(self._nodes)
        outputs = [
            self.prefix + (name or f"{op.lower()}_{number}_{i}") for i, name in enumerate(names)
        ]
        node = helper.make_node(op, list(inputs), outputs, name=f"{outputs[0]}:{op}", **attributes)
        self._nodes.append(node)
        return outputs

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer; gives its name."""
        full = f"{self.prefix}{name}_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value, order="C"), full))
        return full

    def reduce(
        self, op: str, tensor: str, axis: int, name: str = "", *, keepdims: bool = False
    ) -> str:
        """Add ReduceMax, ReduceMin or ReduceMean; their axes became an input with opset 18."""
        if self.opset >= 18:
            axes = self.weight("axes", np.array([axis], np.int64))
            return self.add(op, [tensor, axes], name, keepdims=int(keepdims))
        return self.add(op, [tensor], name, axes=[axis], keepdims=int(keepdims))

    def build(self, inputs: Sequence[DescribedTensor], outputs: Sequence[DescribedTensor]) -> bytes:
        """Give the checked, serialised model."""
        graph = helper.make_graph(
            self._nodes,
            self.prefix.rstrip("/"),
            [_value_info(*tensor) for tensor in inputs],
            [_value_info(*tensor) for tensor in outputs],
            initializer=self._weights,
        )
        model = helper.make_model(
            graph,
            producer_name="offramp",
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=self._ir_version,
        )
        onnx.checker.check_model(model)
        return model.SerializeToString()


def _value_info(name: str, dtype: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, list(shape))
