"""Graph outputs in the layout of the caches: all keys and values of one size in one tensor.

A propagation graph of seven layers has 14 outputs. Fetching and writing them one by one took longer
than computing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from offramp.compiler.graphs.graph import refill
from offramp.generation.bundle.tensor_names import stacked_name


def stacked(model: onnx.ModelProto, sizes: Mapping[str, tuple[int, int]]) -> onnx.ModelProto:
    """Concatenate outputs [n, heads, tokens, size] of equal heads and size along their first axis.

    ``sizes`` maps each output, in the order of concatenation, to its number of heads and its size.
    The model is changed in place and returned; its other outputs stay.
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
        places = tokens.dim_param or tokens.dim_value or None
        shape: list[str | int | None] = ["rows", size[0], places, size[1]]
        outputs.append(helper.make_tensor_value_info(joined, kind.elem_type, shape))
    refill(graph.output, outputs)
    return model


def unstacked(
    given: Mapping[str, NDArray[Any]], sizes: Mapping[str, tuple[int, int]]
) -> dict[str, NDArray[Any]]:
    """Split the results of :func:`stacked` outputs; return [n, heads, tokens, size] by name."""
    found: dict[str, NDArray[Any]] = {}
    for size in dict.fromkeys(sizes.values()):
        names = [name for name, own in sizes.items() if own == size]
        joined = given[stacked_name(*size)]
        found |= zip(names, joined.reshape(len(names), -1, *joined.shape[1:]), strict=True)
    return found


def return_input(model: onnx.ModelProto, name: str, output: str) -> None:
    """Add an input of a model to its outputs, in place."""
    graph = model.graph
    info = next(info for info in graph.input if info.name == name)
    graph.node.append(helper.make_node("Identity", [name], [output], name=output))
    copied = graph.output.add()
    copied.CopyFrom(info)
    copied.name = output
