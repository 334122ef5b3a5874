"""Changes that turn a graph into a subnet: they are planned first, then applied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.graphs.graph import bodies, captured_names, copied, read_names, refill
from offramp.supernet.graphs.reshape import ElasticAxis

Place = tuple[str, int]
"""An operator's name, and the index of one of its inputs."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The changes of a graph that slice its weights."""

    cuts: dict[Place, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Kept elements by dimension, for each constant input of an operator."""
    attributes: dict[tuple[str, str], int] = field(default_factory=dict)
    """New values of integer attributes, by operator and attribute name."""
    values: dict[Place, NDArray[np.int64]] = field(default_factory=dict)
    """New constants, such as shapes, that an operator reads instead of its own."""
    sizes: dict[Place, tuple[int | None, ...]] = field(default_factory=dict)
    """New values for some elements of a computed shape, by operator input; ``None`` keeps an
    element."""
    elastic: dict[str, ElasticAxis] = field(default_factory=dict)
    """Elastic dimension of tensors, by name."""
    contracting: set[str] = field(default_factory=set)
    """Operators that sum over fewer channels: the sizes of their outputs stay, the values change.
    """


def apply_plan(
    proto: onnx.ModelProto, plan: SlicePlan, weights: Mapping[str, onnx.TensorProto]
) -> dict[str, str]:
    """Change a graph in place, and add the weights that it reads, sliced as planned.

    A constant keeps its name if all its readers slice it in the same way; otherwise these readers
    get their own copies. Returns the source of each initializer.
    """
    graph = proto.graph
    _set_attributes(graph, plan.attributes)
    users: dict[str, list[tuple[onnx.NodeProto, int, _Change]]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in weights:
                users.setdefault(name, []).append((node, position, _change(plan, node, position)))
    captured = _captured(graph)
    origins: dict[str, str] = {}
    for name, uses in users.items():
        made: dict[_Change, str] = {}
        if name in captured or len({change for *_, change in uses}) > 1:
            made[()] = name
        for use in uses:
            node, position, change = use
            if change not in made:
                made[change] = _free(f"{name}/{node.name.strip('/')}", weights) if made else name
                graph.initializer.append(_changed(weights[name], made[change], plan, use))
                origins[made[change]] = name
            node.input[position] = made[change]
    kept = [n for n in (*captured, *users) if n in weights and n not in origins]
    read = read_names(graph)
    for name in dict.fromkeys(kept):
        if name in read:
            graph.initializer.append(weights[name])
            origins[name] = name
    if plan.sizes:
        _override_sizes(graph, plan.sizes)
    return origins


_Change = tuple[Any, ...]


def _change(plan: SlicePlan, node: onnx.NodeProto, position: int) -> _Change:
    """Return a constant's change, in a form such that equal changes compare equal."""
    place = (node.name, position)
    if place in plan.values:
        return ("value", *plan.values[place].tolist())
    return tuple(sorted(plan.cuts.get(place, {}).items()))


def _changed(
    tensor: onnx.TensorProto,
    name: str,
    plan: SlicePlan,
    use: tuple[onnx.NodeProto, int, _Change],
) -> onnx.TensorProto:
    node, position, change = use
    place = (node.name, position)
    if not change:
        return tensor
    if place in plan.values:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return numpy_helper.from_array(plan.values[place].astype(dtype), name)
    array = numpy_helper.to_array(tensor)
    for axis, kept in plan.cuts[place].items():
        array = np.take(array, kept, axis=axis)
    return numpy_helper.from_array(np.ascontiguousarray(array), name)


def _captured(graph: onnx.GraphProto) -> set[str]:
    """Return the constants that operators' subgraphs (of If or Loop) read; they stay unchanged."""
    having = (node for node in graph.node if bodies(node))
    return {name for node in having for name in (*node.input, *captured_names(node)) if name}


def _free(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "'"
    return name


def _set_attributes(graph: onnx.GraphProto, wanted: Mapping[tuple[str, str], int]) -> None:
    nodes = {node.name: node for node in graph.node}
    for (name, key), value in wanted.items():
        node = nodes[name]
        refill(node.attribute, [copied(a) for a in node.attribute if a.name != key])
        node.attribute.append(helper.make_attribute(key, value))


def _override_sizes(graph: onnx.GraphProto, sizes: Mapping[Place, Sequence[int | None]]) -> None:
    """Insert operators that set some elements of computed shapes, before these are read."""
    nodes = []
    for node in graph.node:
        for position in range(len(node.input)):
            if found := sizes.get((node.name, position)):
                stem = f"{node.name}/sizes{position}"
                which = np.array([size is not None for size in found])
                values = np.array([size or 0 for size in found], np.int64)
                names = [f"{stem}/which", f"{stem}/values"]
                graph.initializer.append(numpy_helper.from_array(which, names[0]))
                graph.initializer.append(numpy_helper.from_array(values, names[1]))
                inputs = [*names, node.input[position]]
                nodes.append(helper.make_node("Where", inputs, [stem], name=stem))
                node.input[position] = stem
        nodes.append(node)
    refill(graph.node, nodes)
