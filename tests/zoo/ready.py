"""Models that come as files: those of the onnx package, and one as tf2onnx writes it.

The nine of the package are the classics of the ONNX model zoo at opset 9, with the batch fixed at
1. Their weights are constant fills, with which every class comes out alike and nothing is tested,
so they are replaced by random ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from offramp.compiler.graphs.runtime import random_inputs
from tests.zoo.conversions import Arrays

FOLDER = Path(onnx.__file__).parent / "backend/test/data/light"
CLASSES = 5


@dataclass(frozen=True, kw_only=True)
class ReadyFile:
    """A file that no exporter of torch wrote."""

    make: Callable[[], onnx.ModelProto]
    batch: int | None
    """Rows that it takes; ``None`` where it takes any."""
    rows: int
    """Samples to try: the classics take a second for each."""

    def inputs(self, proto: onnx.ModelProto) -> Arrays:
        one = {name: array[0].shape for name, array in random_inputs(proto, self.rows).items()}
        rng = np.random.default_rng(0)
        return {
            name: rng.standard_normal((self.rows, *shape), np.float32)
            for name, shape in one.items()
        }


def with_random_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Put variance-preserving convolution and linear weights for the constant fills."""
    rng = np.random.default_rng(0)
    graph = proto.graph
    shapes = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "ConstantOfShape"]:
        dims = shapes[node.input[0]]
        if len(dims) < 2:
            continue
        values = rng.standard_normal(dims, np.float32) * np.sqrt(2 / np.prod(dims[1:]))
        tensor = numpy_helper.from_array(values.astype(np.float32), node.output[0])
        graph.node.remove(node)
        graph.initializer.append(tensor)
        graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    return proto


def _light(name: str) -> ReadyFile:
    def make() -> onnx.ModelProto:
        return with_random_weights(onnx.load(FOLDER / f"light_{name}.onnx"))

    return ReadyFile(make=make, batch=1, rows=4)


class _Keras:
    """Writes what tf2onnx does of a Keras CNN, whose maps have their channels last."""

    def __init__(self, *, everywhere: bool) -> None:
        self._everywhere = everywhere
        """True if each convolution is transposed in and out, as before tf2onnx optimises."""
        self._rng = np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        x = "input_1"
        if not self._everywhere:
            x = self._add("Transpose", x, perm=[0, 3, 1, 2])
        x = self._conv(x, 3, 8)
        for _ in range(3):
            x = self._add("Add", x, self._conv(x, 8, 8))
        if self._everywhere:
            x = self._add("ReduceMean", x, axes=[1, 2], keepdims=0)
        else:
            x = self._add("GlobalAveragePool", x)
            x = self._add("Squeeze", x, self._weight(np.array([2, 3], np.int64)))
        x = self._add("MatMul", x, self._normal(8, CLASSES))
        x = self._add("Add", x, self._normal(CLASSES))
        self._nodes.append(helper.make_node("Softmax", [x], ["dense"], name="softmax"))
        graph = helper.make_graph(
            self._nodes,
            "tf2onnx",
            [helper.make_tensor_value_info("input_1", TensorProto.FLOAT, ["unk__1", 32, 32, 3])],
            [helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["unk__2", CLASSES])],
            initializer=self._weights,
        )
        opset = helper.make_opsetid("", 15)
        return helper.make_model(
            graph, producer_name="tf2onnx", opset_imports=[opset], ir_version=8
        )

    def _conv(self, x: str, before: int, after: int) -> str:
        """Convolution, bias and activation."""
        kernel = self._normal(after, before, 3, 3)
        settings = {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [1, 1]}
        if not self._everywhere:
            x = self._add("Conv", x, kernel, self._normal(after), **settings)
            return self._add("Relu", x)
        x = self._add("Transpose", x, perm=[0, 3, 1, 2])
        x = self._add("Transpose", self._add("Conv", x, kernel, **settings), perm=[0, 2, 3, 1])
        return self._add("Relu", self._add("Add", x, self._normal(after)))

    def _add(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"StatefulPartitionedCall/model/{op.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, list(inputs), [f"{name}:0"], name, **attributes))
        return f"{name}:0"

    def _normal(self, *sizes: int) -> str:
        scale = np.sqrt(2 / max(1, np.prod(sizes[1:])))
        return self._weight((self._rng.standard_normal(sizes) * scale).astype(np.float32))

    def _weight(self, value: np.ndarray) -> str:
        name = f"const_fold_opt__{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(value, name))
        return name


def _keras(*, everywhere: bool) -> ReadyFile:
    return ReadyFile(make=lambda: _Keras(everywhere=everywhere).model(), batch=None, rows=64)


LIGHT = {
    "AlexNet (onnx)": "bvlc_alexnet",
    "DenseNet-121 (onnx)": "densenet121",
    "Inception v1 (onnx)": "inception_v1",
    "Inception v2 (onnx)": "inception_v2",
    "ResNet-50 (onnx)": "resnet50",
    "ShuffleNet (onnx)": "shufflenet",
    "SqueezeNet (onnx)": "squeezenet",
    "VGG-19 (onnx)": "vgg19",
    "ZFNet-512 (onnx)": "zfnet512",
}
FILES = {
    "Keras CNN, channels last": _keras(everywhere=False),
    "Keras CNN, transposed at each layer": _keras(everywhere=True),
    **{name: _light(file) for name, file in LIGHT.items()},
}
