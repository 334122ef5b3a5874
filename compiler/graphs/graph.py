"""A read-only view of an ONNX graph as a dataflow graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import helper, numpy_helper

_PLAIN_CONSTANTS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}

_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A node of the graph, with all tensors that it reads."""

    index: int
    """Position of the operator in topological order."""
    name: str
    kind: str
    """ONNX operator type, for instance ``Conv``."""
    reads: tuple[str, ...]
    """Tensors that the operator reads, each once, including those that bodies of ``If`` and
    ``Loop`` read from outside."""
    writes: tuple[str, ...]
    has_body: bool
    """True if the operator runs a subgraph (body)."""
    proto: onnx.NodeProto

    @property
    def label(self) -> str:
        """Name (or first output, if the node has no name) and kind, for messages."""
        return f"{self.name or self.writes[0]!r} ({self.kind})"


class Dataflow:
    """Producer and consumers of each tensor, in one topological order.

    ``constants`` are the names of initializers; ``inputs`` are the graph inputs that are not
    initializers. ``producers`` maps a tensor to the operator that writes the tensor, and
    ``consumers`` to the operators that read it, in order. ``variable`` are the tensors that depend
    on a graph input; others are constant.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.constants = frozenset(_initializer_names(graph))
        self.inputs = tuple(i.name for i in graph.input if i.name not in self.constants)
        self.outputs = tuple(o.name for o in graph.output)
        self.operators = _operators(graph)
        self.producers = {t: op for op in self.operators for t in op.writes}
        self.consumers: dict[str, list[Operator]] = {}
        for op in self.operators:
            for tensor in op.reads:
                self.consumers.setdefault(tensor, []).append(op)
        self.variable = self._variable()

    def _variable(self) -> frozenset[str]:
        variable = set(self.inputs)
        for op in self.operators:
            if not variable.isdisjoint(op.reads):
                variable.update(op.writes)
        return frozenset(variable)

    @property
    def changing(self) -> tuple[Operator, ...]:
        """Operators whose value depends on a graph input, in order."""
        return tuple(op for op in self.operators if not self.is_constant(op))

    @property
    def needed(self) -> tuple[Operator, ...]:
        """Operators that an output depends on, in order."""
        return self.upstream(self.outputs, stop=frozenset())

    def is_constant(self, op: Operator) -> bool:
        """Return whether an operator computes the same values whatever the graph inputs are."""
        return self.variable.isdisjoint(op.writes)

    def upstream(
        self,
        tensors: Iterable[str],
        *,
        stop: frozenset[str],
        instead_of: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[Operator, ...]:
        """Return the operators that compute ``tensors`` from the tensors in ``stop``, in order.

        Where an operator reads a key of ``instead_of``, the mapped tensor is used in its place.
        """
        needed: set[int] = set()
        pending = list(tensors)
        while pending:
            tensor = pending.pop()
            tensor = instead_of.get(tensor, tensor)
            op = None if tensor in stop else self.producers.get(tensor)
            if op is not None and op.index not in needed:
                needed.add(op.index)
                pending.extend(op.reads)
        return tuple(self.operators[i] for i in sorted(needed))


def is_standard(node: onnx.NodeProto) -> bool:
    """Return whether a node's operator is in ONNX's standard operator set."""
    return node.domain in {"", "ai.onnx"}


def default_opset(proto: onnx.ModelProto) -> int:
    """Return the version of the standard operator set that a model uses."""
    versions = [o.version for o in proto.opset_import if o.domain in {"", "ai.onnx"}]
    return max(versions, default=0)


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the subgraphs that a node runs, as ``If`` and ``Loop`` do."""
    found: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found.extend(attribute.graphs)
    return found


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and all graphs that its operators run."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from all_graphs(body)


def copied(message: _Message) -> _Message:
    """Copy a protobuf message, so that the original can be changed or dropped."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def refill(field: Any, items: Iterable[Any]) -> None:
    """Replace all items of a repeated field, such as a graph's nodes; old items may be reused."""
    kept = list(items)
    del field[:]
    field.extend(kept)


def rename_tensor(graph: onnx.GraphProto, name: str, other: str) -> None:
    """Rename a tensor in all nodes of the graph that write or read it."""
    for node in graph.node:
        for names in (node.input, node.output):
            for place, found in enumerate(names):
                if found == name:
                    names[place] = other


def rename_graph(graph: onnx.GraphProto, rename: Callable[[str], str]) -> None:
    """Rename every tensor and node of a graph, so that several graphs fit into one namespace.

    Names in bodies of operators are changed, too. ONNX has no shadowing: a name is the same tensor
    in a graph and in all bodies inside it.
    """
    for info in (*graph.input, *graph.output, *graph.value_info):
        info.name = rename(info.name)
    for tensor in graph.initializer:
        tensor.name = rename(tensor.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = rename(sparse.values.name)
    for node in graph.node:
        node.name = rename(node.name) if node.name else ""
        # An absent optional input has the empty name, which must stay.
        node.input[:] = [rename(name) if name else "" for name in node.input]
        node.output[:] = [rename(name) if name else "" for name in node.output]
        for body in bodies(node):
            rename_graph(body, rename)


def integer(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    """Return an integer attribute of a node, or the default if it is missing."""
    return next((a.i for a in node.attribute if a.name == name), default)


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return a ``Constant`` node's value under the name of its output; ``None`` for other nodes."""
    if node.op_type != "Constant" or not is_standard(node):
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor = copied(attribute.t)
    elif attribute.name in _PLAIN_CONSTANTS:
        value = helper.get_attribute_value(attribute)
        tensor = numpy_helper.from_array(np.asarray(value, _PLAIN_CONSTANTS[attribute.name]))
    else:
        return None
    tensor.name = node.output[0]
    return tensor


def hoisted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with initializers instead of ``Constant`` nodes."""
    copy = copied(proto)
    found = [(node, constant_tensor(node)) for node in copy.graph.node]
    copy.graph.initializer.extend(tensor for _, tensor in found if tensor is not None)
    refill(copy.graph.node, [node for node, tensor in found if tensor is None])
    return copy


def emptied(proto: onnx.ModelProto, name: str, *, producer: str | None = None) -> onnx.ModelProto:
    """Return a model without nodes, with the operator sets and functions of ``proto``."""
    model = onnx.ModelProto(ir_version=proto.ir_version)
    model.opset_import.extend(proto.opset_import)
    model.functions.extend(proto.functions)
    model.graph.name = name
    if producer is not None:
        model.producer_name = producer
    return model


def serialised(proto: onnx.ModelProto) -> bytes:
    """Serialise a model deterministically."""
    return bytes(proto.SerializeToString(deterministic=True))


def weight_bytes(proto: onnx.ModelProto) -> int:
    """Return the size in bytes of a model's initializers; ``ByteSize`` would copy them all."""
    sizes = ((t.dims, helper.tensor_dtype_to_np_dtype(t.data_type)) for t in _numbers(proto.graph))
    return sum(prod(dims) * dtype.itemsize for dims, dtype in sizes)


def _numbers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from (t for t in graph.initializer if t.data_type != onnx.TensorProto.STRING)


def captured_names(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the outer tensors that a node's subgraphs read, for instance those of an ``If``."""
    for body in bodies(node):
        yield from captured_by(body)


def captured_by(body: onnx.GraphProto) -> Iterator[str]:
    """Yield the tensors that a subgraph reads from outside."""
    local = {i.name for i in body.input} | set(_initializer_names(body))
    for inner in body.node:
        yield from (t for t in (*inner.input, *captured_names(inner)) if t not in local)
        local.update(inner.output)
    yield from (o.name for o in body.output if o.name not in local)


def read_names(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that operators or their bodies read, and the graph's outputs."""
    return {o.name for o in graph.output}.union(*map(_reads, graph.node))


def written_names(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that operators write."""
    return {name for node in graph.node for name in node.output if name}


def _initializer_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)


def _operators(graph: onnx.GraphProto) -> tuple[Operator, ...]:
    """Convert the nodes of a graph to operators, in topological order."""
    nodes = list(graph.node)
    reads = [_reads(node) for node in nodes]
    return tuple(
        _operator(place, nodes[i], reads[i]) for place, i in enumerate(_ordered(nodes, reads))
    )


def _operator(index: int, node: onnx.NodeProto, reads: tuple[str, ...]) -> Operator:
    return Operator(
        index=index,
        name=node.name,
        kind=node.op_type,
        reads=reads,
        writes=tuple(t for t in node.output if t),
        has_body=bool(bodies(node)),
        proto=node,
    )


def sort_operators(graph: onnx.GraphProto) -> None:
    """Sort the nodes of a graph and its bodies, in place; nodes of a cycle keep their order."""
    nodes = list(graph.node)
    order = _ordered(nodes, [_reads(node) for node in nodes])
    if len(order) == len(nodes):
        refill(graph.node, [nodes[i] for i in order])
    for node in graph.node:
        for body in bodies(node):
            sort_operators(body)


def _reads(node: onnx.NodeProto) -> tuple[str, ...]:
    return tuple(dict.fromkeys(t for t in (*node.input, *captured_names(node)) if t))


def _ordered(nodes: Sequence[onnx.NodeProto], reads: Sequence[tuple[str, ...]]) -> Sequence[int]:
    """Return a topological order of nodes (Kahn); it is stable: a sorted graph keeps its order."""
    written = {t: i for i, node in enumerate(nodes) for t in node.output if t}
    readers: dict[int, list[int]] = {}
    missing = [0] * len(nodes)
    for i, names in enumerate(reads):
        for source in {written[t] for t in names if t in written}:
            readers.setdefault(source, []).append(i)
            missing[i] += 1
    if all(min(later) > i for i, later in readers.items()):
        return range(len(nodes))
    ready = deque(i for i, count in enumerate(missing) if count == 0)
    order: list[int] = []
    while ready:
        i = ready.popleft()
        order.append(i)
        for reader in readers.get(i, ()):
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    return order
