"""An LM head that has the weights of the embedding names them, and holds no copy.

Exporters write both: the table of the embedding, [vocabulary, width], and what the head multiplies
by, which is the table turned. With the copy computed of the table, files hold it once. A session
turns and packs it when it loads, and the table stays as it is mapped.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import refill


def tie(proto: onnx.ModelProto) -> None:
    """Compute the weights of products that are a table of the graph, turned; in place."""
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
