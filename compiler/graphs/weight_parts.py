"""Weights of convolutions in parts, so that subnets with fewer input channels can share them.

If a convolution of a subnet sums over fewer channels, its weight is the first input channels of the
supernet's weight [out, in, …]. These values are not contiguous in memory. So the weight is stored
in parts [out, some of in, …], split at each subnet's number of input channels. Each graph joins the
parts that it needs by a ``Concat`` before the convolution. If a subnet has fewer output channels,
its weight is the first bytes of each part. ONNX Runtime joins the parts once, when it loads a
graph, if its kernels pack weights; with shared weights it joins them at each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.bundle.graph_weights import ITEM_BYTES
from offramp.compiler.common.tensors import named_place
from offramp.compiler.graphs.graph import refill
from offramp.compiler.graphs.weights import LEAST_BYTES, WeightFile

_INPUTS: Final = 1
"""Dimension of a convolution's weight that has the input channels."""
_Group: TypeAlias = tuple[int, tuple[int, ...]]
"""Key of weights that can contain each other: their element type, and the size of the kernel."""


@dataclass(slots=True)
class _FullWeight:
    """A weight, and its numbers of first input channels that are the weight of some graph."""

    values: NDArray[Any]
    borders: set[int]


def has_first_channels(part: NDArray[Any], whole: NDArray[Any]) -> bool:
    """Return whether ``part`` is the first input and output channels of ``whole``."""
    if part.ndim != whole.ndim or part.ndim <= _INPUTS + 1:
        return False
    outputs, inputs = part.shape[:2]
    first = whole[:outputs, :inputs]
    if first.shape != part.shape or (first[:1, :1] != part[:1, :1]).any():
        return False
    return bool((first == part).all())


def in_parts(graphs: Mapping[str, bytes], kept: WeightFile | None) -> dict[str, bytes]:
    """Store a weight in parts if another weight is its first input channels.

    Weights are in the ``graphs``, or in the file ``kept``; the resulting graphs contain the parts.
    Graphs without such weights are returned unchanged. Every resulting graph computes the same as
    before.
    """
    protos = {name: onnx.ModelProto.FromString(graph) for name, graph in graphs.items()}
    wholes = _find_wholes([proto.graph for proto in protos.values()], kept)
    found = dict(graphs)
    for name, proto in protos.items():
        if _split(proto.graph, wholes, kept):
            found[name] = proto.SerializeToString()
    return found


def _find_wholes(
    graphs: Sequence[onnx.GraphProto], kept: WeightFile | None
) -> dict[_Group, list[_FullWeight]]:
    """Find weights that others are the first input channels of, and these numbers of channels."""
    groups: dict[_Group, list[onnx.TensorProto]] = {}
    for tensor in (t for graph in graphs for t in graph.initializer if _may_be_one(t)):
        groups.setdefault(_group_of(tensor), []).append(tensor)
    found = {}
    for group, tensors in groups.items():
        if len({tensor.dims[_INPUTS] for tensor in tensors}) > 1:
            wholes = [w for w in _wholes_of(tensors, kept) if len(w.borders) > 1]
            if wholes:
                found[group] = wholes
    return found


def _wholes_of(tensors: Iterable[onnx.TensorProto], kept: WeightFile | None) -> list[_FullWeight]:
    wholes: list[_FullWeight] = []
    for tensor in sorted(tensors, key=lambda t: (-t.dims[_INPUTS], -t.dims[0])):
        values = _values(tensor, kept)
        whole = next((w for w in wholes if has_first_channels(values, w.values)), None)
        if whole is None:
            wholes.append(whole := _FullWeight(values, set()))
        whole.borders.add(values.shape[_INPUTS])
    return wholes


def _split(
    graph: onnx.GraphProto, wholes: Mapping[_Group, list[_FullWeight]], kept: WeightFile | None
) -> bool:
    """Store weights of a graph in parts, in place; return whether the graph has such weights."""
    stored: list[onnx.TensorProto] = []
    joins: list[onnx.NodeProto] = []
    for tensor in graph.initializer:
        whole = None
        if _may_be_one(tensor) and (candidates := wholes.get(_group_of(tensor))):
            values = _values(tensor, kept)
            whole = next((w for w in candidates if has_first_channels(values, w.values)), None)
        if whole is None:
            stored.append(tensor)
            continue
        ends = [0, *sorted(b for b in whole.borders if b <= values.shape[_INPUTS])]
        parts = [
            numpy_helper.from_array(
                np.ascontiguousarray(values[:, begin:end]), f"{tensor.name}/inputs{begin}-{end}"
            )
            for begin, end in pairwise(ends)
        ]
        stored += parts
        if len(parts) == 1:
            parts[0].name = tensor.name
            continue
        names = [part.name for part in parts]
        node = helper.make_node("Concat", names, [tensor.name], name=f"{tensor.name}/joined")
        node.attribute.append(helper.make_attribute("axis", _INPUTS))
        joins.append(node)
    if joins:
        refill(graph.initializer, stored)
        refill(graph.node, [*joins, *graph.node])
    return bool(joins)


def _may_be_one(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor may be a convolution's weight, and is large enough for the file."""
    size = int(np.prod(tensor.dims)) * ITEM_BYTES.get(tensor.data_type, 0)
    return len(tensor.dims) > 2 and tensor.dims[_INPUTS] > 1 and size >= LEAST_BYTES


def _group_of(tensor: onnx.TensorProto) -> _Group:
    return tensor.data_type, tuple(tensor.dims[_INPUTS + 1 :])


def _values(tensor: onnx.TensorProto, kept: WeightFile | None) -> NDArray[Any]:
    """Return the values of a weight, from the graph or from the file of weights."""
    if not tensor.external_data:
        return numpy_helper.to_array(tensor)
    assert kept is not None, "no file of weights is named without one"
    content = b"".join(kept.read(named_place(tensor)))
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(content, dtype).reshape(tensor.dims)
