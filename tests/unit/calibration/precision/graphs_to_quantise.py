"""Small models whose products are large enough to be quantised, and what kinds make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests import models
from tests.models import Builder
from tests.sliced import Sliced, slice_proto

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.kinds import CpuPrecision, quantise
from offramp.calibration.precision.quantised_graphs import PREFIX
from offramp.compiler.graphs.runtime import random_inputs
from offramp.engine.common.environment import cpu_features

_VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
RUN_HERE = [k for k in CpuPrecision if k is not CpuPrecision.BLOCKS or _VERSION >= (1, 22)]
"""The kinds that the installed ONNX Runtime runs."""
SATURATES = cpu_features().saturates is True
"""True if int8 of this CPU needs weights of 7 bits."""
OF_TRANSFORMERS = [kind for kind in RUN_HERE if kind is not CpuPrecision.MIXED]


def linear(weight: NDArray[np.float32]) -> bytes:
    """``y = x @ weight``."""
    b = Builder()
    b.node("MatMul", b.input("x", ["batch", weight.shape[0]]), b.constant(weight), out="y")
    b.output("y", ["batch", weight.shape[1]])
    return serialised(b.build())


def convolved_and_multiplied() -> bytes:
    """Two convolutions with a shortcut, and two products that are large enough."""
    b = Builder()
    x = b.input("image", ["batch", 4, 8, 8])
    first = b.node("Relu", b.conv(x, (4, 8)), out="first")
    third = [first, b.weight(8, 8, 1, 1), b.constant(np.linspace(-1, 1, 8), np.float32)]
    second = b.node("Add", b.node("Conv", *third, out="convolved"), first, out="second")
    pooled = b.node("MaxPool", second, out="pooled", kernel_shape=[2, 2], strides=[2, 2])
    flat = b.node("Flatten", pooled, axis=1)
    hidden = b.node("Relu", b.linear(flat, 128, 64, out="summed"), out="hidden")
    b.linear(b.node("Relu", b.linear(hidden, 64, 64)), 64, 5, out="y")
    b.output("y", ["batch", 5])
    return serialised(b.build())


def transformer() -> Sliced:
    """A BERT, sliced at every cut point."""
    return slice_proto(models.bert_like(layers=2, width=64))


def serialised(proto: onnx.ModelProto) -> bytes:
    """Return the model's bytes."""
    found: bytes = proto.SerializeToString()
    return found


def inputs(graph: bytes, samples: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Random inputs."""
    return dict(random_inputs(onnx.ModelProto.FromString(graph), samples, seed=seed))


def dataset(given: Mapping[str, NDArray[Any]]) -> Dataset:
    """A data set without labels."""
    return Dataset(inputs=given, labels=None, sha256="0")


def made(
    graph: bytes, kind: CpuPrecision, *, samples: int = 32, saturating: bool = SATURATES
) -> bytes:
    """The graph in a kind, its scales measured on random inputs."""
    data = dataset(inputs(graph, samples, seed=1))
    return quantise(graph, data, kind, threads=1, saturating=saturating)


def constants(graph: bytes) -> dict[str, NDArray[np.generic]]:
    """Return the added constants, by name without the prefix."""
    initializers = onnx.ModelProto.FromString(graph).graph.initializer
    return {t.name.removeprefix(PREFIX): numpy_helper.to_array(t) for t in initializers}


def kernels(graph: bytes, folder: Path) -> Counter[str]:
    """The operators that ONNX Runtime executes after all of its optimisations."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    optimised = onnx.load(options.optimized_model_filepath)
    return Counter(node.op_type for node in optimised.graph.node)


def scaled_by_the_batch() -> bytes:
    """``y = x @ weight`` as ``quantize_dynamic`` makes it: one scale for all rows of a batch."""
    weight = np.random.default_rng(0).integers(-127, 128, (64, 8)).astype(np.int8)
    named = {"weight": weight, "none": np.int8(0), "size": np.float32(1 / 127)}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["steps", "step", "zero"]),
        helper.make_node("MatMulInteger", ["steps", "weight", "zero", "none"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["step", "size"], ["scale"]),
        helper.make_node("Mul", ["floats", "scale"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
    weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in named.items()]
    graph = helper.make_graph(nodes, "dynamic", [given], [answer], initializer=weights)
    opset = [helper.make_opsetid("", 17)]
    return serialised(helper.make_model(graph, opset_imports=opset, ir_version=8))
