"""Small clean-ups of a graph that change nothing it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offramp.compiler.graph import Dataflow

if TYPE_CHECKING:
    import onnx


def unlist_initializers(proto: onnx.ModelProto) -> None:
    """Take initializers off the graph inputs, where files before IR version 4 list them."""
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [info for info in graph.input if info.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)


def remove_unused(proto: onnx.ModelProto) -> None:
    """Remove operators and initializers that no output depends on; sort the rest."""
    graph = proto.graph
    flow = Dataflow(graph)
    kept = flow.behind(flow.outputs, stop=frozenset())
    read = {t for op in kept for t in op.reads} | set(flow.outputs)
    nodes = [op.proto for op in kept]
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(tensors)


def name_operators(proto: onnx.ModelProto) -> None:
    """Give every operator a name of its own, so that segments can be united by name."""
    taken: set[str] = set()
    for node in proto.graph.node:
        if not node.name or node.name in taken:
            first = next((t for t in node.output if t), "")
            node.name = f"{node.op_type}:{first}"
        while node.name in taken:
            node.name += "'"
        taken.add(node.name)
