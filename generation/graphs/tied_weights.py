"""Tied weights: the LM head refers to the weights of the embedding instead of a copy.

Exporters write both: the table of the embedding, [vocabulary, width], and the matrix of the head,
which is its transpose. Here the head's matrix is computed from the table, so that files store it
once. A session transposes and packs it at load time, and the table stays memory-mapped.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import refill


def tie(proto: onnx.ModelProto) -> None:
    """Replace each weight that is the transpose of an embedding table by that table, in place."""
    graph = proto.graph
    matrices = {t.name: t for t in graph.initializer if len(t.dims) == 2}
    tables = {n.input[0] for n in graph.node if n.op_type == "Gather"} & matrices.keys()
    factors = {n.input[1] for n in graph.node if n.op_type == "MatMul"} & matrices.keys()
    tied: dict[str, str] = {}
    for factor in sorted(factors - tables):
        for table in sorted(tables):
            if _is_turned(matrices[factor], matrices[table]):
                tied[factor] = table
                break
    if not tied:
        return
    turned = [
        helper.make_node("Transpose", [table], [factor], name=factor, perm=[1, 0])
        for factor, table in tied.items()
    ]
    refill(graph.initializer, [t for t in graph.initializer if t.name not in tied])
    refill(graph.node, [*turned, *graph.node])


def _is_turned(factor: onnx.TensorProto, table: onnx.TensorProto) -> bool:
    if list(factor.dims) != list(table.dims)[::-1] or factor.data_type != table.data_type:
        return False
    return np.array_equal(array_of(factor), array_of(table).T)
