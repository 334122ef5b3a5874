"""Float16 graphs as a CPU computes them truly: in float32, each result rounded to float16.

ONNX Runtime has few float16 kernels for CPUs. It puts casts around each operator and then removes
those that face each other, at every optimisation level: a float16 graph runs in float32 with
rounded weights, and nothing overflows. Casts that the graph itself has are kept. So here they are
written into it, behind each operator.

That is the arithmetic that the graph states. TensorRT sums in float32 too, and where it fuses
operators into one kernel it rounds less often.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.engines.half_rules import FLOAT, FLOAT16
from offramp.compiler.engines.halving import element_types
from offramp.compiler.graph import Dataflow, Operator

SINGLE = "/offramp_fp32"
"""What the name of a float16 tensor's float32 form ends with."""
_UNROUNDED = "/offramp_unrounded"


def rounded(graph: bytes) -> bytes:
    """Write the roundings of a graph's float16 operators into it.

    Operators of other domains, what comes of them with no type that can be known, and operators
    with bodies stay as they are, as do the names and types of the graph's inputs and outputs. A
    graph without float16 stays the same.

    Args:
        graph: A serialised ONNX model, for instance one that
            :func:`~offramp.compiler.engines.halving.halve` gave.

    Returns:
        The serialised model, for ONNX Runtime.
    """
    proto = onnx.ModelProto.FromString(graph)
    types = element_types(proto)
    if FLOAT16 not in types.values():
        return graph
    _Rounding(proto.graph, types).rewrite()
    serialised: bytes = proto.SerializeToString(deterministic=True)
    return serialised


class _Rounding:
    """Rewrites one graph; every float16 tensor keeps its name and gets a float32 form."""

    def __init__(self, graph: onnx.GraphProto, types: Mapping[str, int]) -> None:
        self._graph = graph
        self._types = types
        self._half = {name for name, kind in types.items() if kind == FLOAT16}
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        self._single: set[str] = set()
        """Float16 tensors that have a float32 form."""

    def rewrite(self) -> None:
        flow = Dataflow(self._graph)
        read = set(flow.outputs)
        for op in flow.operators:
            if self._computes_in_half(op):
                self._round(op.proto)
            else:
                self._nodes.append(op.proto)
                read.update(op.reads)
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self._nodes]
        # Float16 weights that nothing reads any more would cost ONNX Runtime its optimisations.
        weights = [t for name, t in self._weights.items() if name in read or name not in self._half]
        weights += [_as_single(self._weights[n]) for n in self._single if n in self._weights]
        weights.sort(key=lambda tensor: tensor.name)
        weights = [onnx.TensorProto.FromString(t.SerializeToString()) for t in weights]
        del self._graph.node[:], self._graph.initializer[:], self._graph.value_info[:]
        self._graph.node.extend(nodes)
        self._graph.initializer.extend(weights)

    def _computes_in_half(self, op: Operator) -> bool:
        if op.proto.domain not in {"", "ai.onnx"} or op.has_body or op.kind == "Cast":
            return False
        known = self._types.keys() >= {*op.reads, *op.writes}
        return known and not self._half.isdisjoint(op.reads)

    def _round(self, half: onnx.NodeProto) -> None:
        node = onnx.NodeProto()
        node.CopyFrom(half)
        for place, name in enumerate(half.input):
            if name in self._half:
                self._need_single(name)
                node.input[place] = name + SINGLE
        self._nodes.append(node)
        for place, name in enumerate(half.output):
            if name in self._half:
                node.output[place] = name + _UNROUNDED
                self._nodes.append(_cast(name + _UNROUNDED, name, FLOAT16))

    def _need_single(self, name: str) -> None:
        if name not in self._single and name not in self._weights:
            self._nodes.append(_cast(name, name + SINGLE, FLOAT))
        self._single.add(name)


def _as_single(tensor: onnx.TensorProto) -> onnx.TensorProto:
    values = numpy_helper.to_array(tensor).astype(np.float32)
    return numpy_helper.from_array(values, tensor.name + SINGLE)


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], to=kind)
