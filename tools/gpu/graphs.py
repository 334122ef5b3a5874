"""Graphs with random weights, made of onnx and numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
"""Opset of the graphs, the newest that TensorRT 8.6 reads."""

Shape = Sequence[int]
"""Shape of one row of a tensor, without the batch."""
Sizes = Sequence[int | str]
"""Shape of one row, with symbolic sizes."""


class GraphMaker:
    """Collects nodes and weights; a weight depends on its name and the seed alone."""

    def __init__(self, seed: int) -> None:
        """Begin an empty graph."""
        self._seed = seed
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def random(self, name: str, shape: Shape, scale: float) -> str:
        """Add a weight of normally distributed values; return its name."""
        rng = np.random.default_rng([self._seed, *name.encode()])
        values: NDArray[np.float32] = rng.standard_normal(tuple(shape), np.float32)
        return self.constant(name, values * np.float32(scale))

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """Add a weight with given values; return its name."""
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add an operator and its only output, both with the same name; return the name."""
        self._nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def model(
        self,
        name: str,
        inputs: Mapping[str, tuple[str, Sizes]],
        outputs: Mapping[str, Shape],
    ) -> onnx.ModelProto:
        """Finish the graph.

        Args:
            name: Name of the graph.
            inputs: Inputs by name: numpy's name of the type, and the shape of a row.
            outputs: Outputs (float32) by name: the shape of a row.
        """
        graph = helper.make_graph(
            self._nodes,
            name,
            [_info(key, dtype, shape) for key, (dtype, shape) in inputs.items()],
            [_info(key, "float32", shape) for key, shape in outputs.items()],
            initializer=self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = 8
        onnx.checker.check_model(model)
        return model


def _info(name: str, dtype: str, shape: Sizes) -> onnx.ValueInfoProto:
    element: TensorProto.DataType = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, ["batch", *shape])
