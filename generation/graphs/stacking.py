"""Outputs of graphs in the form that caches take: all keys and values of one size in one tensor.

A propagation graph of seven layers has 14 outputs. To fetch and to write them one by one took
longer than to compute them.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from offramp.compiler.graphs.graph import refill
from offramp.generation.bundle.tensor_names import stacked_name


def stacked(model: onnx.ModelProto, sizes: Mapping[str, tuple[int, int]]) -> onnx.ModelProto:
    """Join outputs [n, heads, tokens, size] of equal heads and size along their first axis.

    ``sizes`` are heads and size of each, in the order in which they are joined. The model is
    changed in place, and returned; its other outputs stay.
    """
    graph = model.graph
    alike: dict[tuple[int, int], list[str]] = {}
    for name, size in sizes.items():
        alike.setdefault(size, []).append(name)
    given = {info.name: info for info in graph.output}
    outputs = [info for name, info in given.items() if name not in sizes]
    for size, names in alike.items():
        joined = stacked_name(*size)
        graph.node.append(helper.make_node("Concat", names, [joined], name=joined, axis=0))
        kind = given[names[0]].type.tensor_type
        tokens = kind.shape.dim[2]
        shape: list[str | int | None] = [
            "rows",
            size[0],
            tokens.dim_param or tokens.dim_value or None,
            size[1],
        ]
        outputs.append(helper.make_tensor_value_info(joined, kind.elem_type, shape))
    refill(graph.output, outputs)
    return model


def return_input(model: onnx.ModelProto, name: str, output: str) -> None:
    """Return an input as an output too, in place."""
    graph = model.graph
    info = next(info for info in graph.input if info.name == name)
    graph.node.append(helper.make_node("Identity", [name], [output], name=output))
    copied = graph.output.add()
    copied.CopyFrom(info)
    copied.name = output
