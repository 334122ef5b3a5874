"""Graphs in torch, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor

from offramp.calibration.torch.torch_graph import TorchGraph

Arrays = Mapping[str, NDArray[Any]]


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    """ONNX Runtime as it computes operator by operator, on one thread."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options)


def in_runtime(model: onnx.ModelProto, feeds: Arrays) -> dict[str, NDArray[Any]]:
    """Return ONNX Runtime's outputs of a model."""
    session = session_of(model)
    names = [output.name for output in session.get_outputs()]
    fed = {i.name: feeds[i.name] for i in session.get_inputs()}
    return dict(zip(names, session.run(names, fed), strict=True))


def tensors(feeds: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in feeds.items()}


def in_torch(graph: TorchGraph, feeds: Arrays) -> dict[str, NDArray[Any]]:
    """Return torch's outputs."""
    with torch.no_grad():
        return {name: tensor.numpy() for name, tensor in graph(tensors(feeds)).items()}


def difference(found: Arrays, wanted: Arrays) -> float:
    """The largest difference, relative to the largest value of a tensor; shapes and types agree."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, right in wanted.items():
        assert (found[name].shape, found[name].dtype) == (right.shape, right.dtype), name
        error = np.abs(found[name].astype(np.float64) - right.astype(np.float64))
        worst = max(worst, error.max(initial=0) / (np.abs(right).max(initial=0) or 1))
    return float(worst)


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The model with other outputs, inner tensors of float32."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    changed.graph.output.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
    )
    return changed


def summed(graph: TorchGraph, feeds: Mapping[str, Tensor]) -> Tensor:
    """A random but fixed linear function of all outputs."""
    random = torch.Generator().manual_seed(2)
    found = []
    for tensor in graph(feeds).values():
        weights = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        found.append((tensor.double() * weights).sum())
    return torch.stack(found).sum()


def wrong_slopes(model: onnx.ModelProto, feeds: Arrays) -> dict[str, tuple[float, float]]:
    """Return gradient and difference quotient in a random direction for weights where they differ.

    Computed in float64, where a difference quotient has six valid digits.
    """
    graph = TorchGraph(model).double()
    fed = {n: t.double() if t.is_floating_point() else t for n, t in tensors(feeds).items()}
    weights = {name: w for name, w in graph.weights.items() if w.requires_grad}
    assert weights
    slopes = torch.autograd.grad(summed(graph, fed), list(weights.values()))
    random, wrong, step = torch.Generator().manual_seed(1), {}, 1e-7
    for (name, weight), slope in zip(weights.items(), slopes, strict=True):
        direction = torch.randn(weight.shape, generator=random, dtype=torch.float64)
        said = float((slope * direction).sum())
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            higher = float(summed(graph, fed))
            weight.add_(direction, alpha=-2 * step)
            quotient = (higher - float(summed(graph, fed))) / (2 * step)
            weight.add_(direction, alpha=step)
        if not abs(said - quotient) <= 1e-5 * max(abs(said), abs(quotient), 1):
            wrong[name] = (said, quotient)
    return wrong
