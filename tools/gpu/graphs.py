"""Graphs with random weights, made of onnx and numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
"""TensorRT 8.6 reads no newer one."""

Shape = Sequence[int]
"""Shape of one row."""
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
        """A weight of normally distributed values."""
        rng = np.random.default_rng([self._seed, *name.encode()])
        values: NDArray[np.float32] = rng.standard_normal(tuple(shape), np.float32)
        return self.constant(name, values * np.float32(scale))

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """A given weight."""
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """An operator and its only output, both of that name."""
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
            name: Of the graph.
            inputs: By name: numpy's name of the type, and the shape of a row.
            outputs: By name, in float32: the shape of a row.
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
