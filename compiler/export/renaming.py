"""Renaming the tensors of a graph, so that several graphs fit into one namespace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import onnx

Rename = Callable[[str], str]
"""Gives a tensor's new name."""


def rename_graph(graph: onnx.GraphProto, rename: Rename) -> None:
    """Rename every tensor and node of a graph, in the bodies of its operators too.

    ONNX has no shadowing: a name means the same tensor in a graph and in all bodies inside it,
    so that one function serves for all of them.
    """
    for info in (*graph.input, *graph.output, *graph.value_info):
        info.name = rename(info.name)
    for tensor in graph.initializer:
        tensor.name = rename(tensor.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = rename(sparse.values.name)
    for node in graph.node:
        node.name = rename(node.name) if node.name else ""
        # An optional input that is absent has the empty name, which means just that.
        node.input[:] = [rename(name) if name else "" for name in node.input]
        node.output[:] = [rename(name) if name else "" for name in node.output]
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                rename_graph(body, rename)


def rename_symbol(infos: Iterable[onnx.ValueInfoProto], old: str, new: str) -> None:
    """Rename a symbolic size in the shapes of tensors, in products with other sizes too."""
    token = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    for info in infos:
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = token.sub(lambda _: new, dim.dim_param)
