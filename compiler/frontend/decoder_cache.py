"""Removal of a decoder's cache: a prompt is read in one pass, and no text is generated after it.

Exports for text generation read the keys and values of earlier tokens (``past_key_values.*``) and
output those of all tokens (``present.*``). Here the past is given length 0. Then the inputs are
empty, and the outputs are not needed. A ``Concat`` of past and new tokens returns the new tokens,
and all sizes of the past are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import Dataflow, Operator, constant_tensor, is_standard, refill

_CACHE = "past"
"""Prefix of the names of inputs with keys and values of earlier tokens."""
_PRESENT = "present"
"""Prefix of the names of outputs with keys and values of all tokens."""
_BRANCH = "use_cache_branch"
"""Input of exports that hold two decoders, one with a cache and one without."""
_FUSED = frozenset(
    {
        "GroupQueryAttention",
        "DecoderMaskedMultiHeadAttention",
        "DecoderMaskedSelfAttention",
        "DecoderAttention",
        "PagedAttention",
        "SparseAttention",
    }
)
"""Operators of ONNX Runtime that contain a cache, and whose masks are not graph inputs."""
_PASSING = frozenset(
    {"Cast", "Identity", "Transpose", "Squeeze", "Unsqueeze", "Gather", "Slice", "Split"}
)
"""Operators whose output is empty if their first input is empty."""
_PLAIN = (
    "export the decoder without this fusion: plain ONNX as torch.onnx.export or optimum-cli makes "
    "it, not that of ONNX Runtime's GenAI builder or of an optimised model"
)


def check_no_fused_cache(proto: onnx.ModelProto) -> None:
    """Raise ModelError for operators that contain a cache, and for two decoders in one export."""
    names = [info.name for info in proto.graph.input]
    if _BRANCH in names:
        raise ModelError(
            f"input {_BRANCH!r}: the export holds a decoder with a cache and one without; export "
            "one of them (optimum-cli: --no-post-process)"
        )
    past = {name for name in names if name.startswith(_CACHE)}
    for node in proto.graph.node:
        reads_past = not is_standard(node) and not past.isdisjoint(node.input)
        if node.op_type in _FUSED or reads_past:
            raise ModelError(
                f"operator {node.name or node.output[0]!r} ({node.op_type}) contains the cache of "
                f"a decoder, and cannot be cut; {_PLAIN}"
            )


def check_no_cache(proto: onnx.ModelProto) -> None:
    """Raise ModelError for a decoder with a cache if no answer tokens are asked for."""
    held = [info.name for info in proto.graph.input if _holds_past(info)]
    if not held:
        return
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
    outputs = [info.name for info in proto.graph.output if not is_cache(info.name)]
    raise ModelError(
        f"input {held[0]!r}{more} hold the cache of a decoder with the output "
        f"{', '.join(map(repr, outputs)) or 'missing'}: if that output is [batch, tokens, "
        "vocabulary], name the tokens that it chooses between, such as those of yes and no, by "
        "--answer-tokens ID,ID; for any other answer export it without a cache (use_cache=False)"
    )


def _holds_past(info: onnx.ValueInfoProto) -> bool:
    """Return whether an input holds keys or values; the past of a forecast has fewer axes."""
    rank = len(info.type.tensor_type.shape.dim)
    return info.name.startswith(f"{_CACHE}_key") or (info.name.startswith(_CACHE) and rank >= 4)


def is_cache(name: str) -> bool:
    """Return whether an input or output holds keys and values, by its name."""
    return name.startswith((_CACHE, _PRESENT))


def drop_cache(proto: onnx.ModelProto, prompts: str) -> int:
    """Set the past to length 0, in place; ``prompts`` is the input [batch, tokens].

    Returns the number of inputs that were removed. ModelError if the length of a past is fixed.
    """
    graph = proto.graph
    cached = [info for info in graph.input if info.name.startswith(_CACHE)]
    if not cached:
        return 0
    batch = next(i for i in graph.input if i.name == prompts).type.tensor_type.shape.dim[0]
    edits = _Emptied(graph, prompts, batch.dim_value if batch.HasField("dim_value") else None)
    for info in cached:
        edits.add_empty(info)
    for op in Dataflow(graph).operators:
        edits.follow(op)
    refill(graph.input, [info for info in graph.input if not info.name.startswith(_CACHE)])
    refill(graph.node, edits.nodes)
    return len(cached)


class Past(NamedTuple):
    """Shape of an empty input for keys, for values, or for both."""

    sizes: tuple[int, ...]
    """Sizes of the empty past: 0 on the axis of its length. The number on the batch axis has no
    meaning."""
    batch_axis: int


class _Emptied:
    """Nodes of a graph, changed so that the graph runs without a past."""

    def __init__(self, graph: onnx.GraphProto, prompts: str, batch: int | None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._graph, self._prompts, self._batch = graph, prompts, batch
        self._past: dict[str, Past] = {}
        self._measured: dict[str, Past] = {}
        self._empty: set[str] = set()
        self._constants = {t.name: t for t in graph.initializer}
        found = (constant_tensor(node) for node in graph.node)
        self._constants |= {tensor.name: tensor for tensor in found if tensor is not None}

    def add_empty(self, info: onnx.ValueInfoProto) -> None:
        """Compute an empty tensor under the name of an input; ModelError if it cannot be empty."""
        name, past = info.name, read_past(info)
        self._past[name] = past
        self._empty.add(name)
        parts = [self._constant(f"{name}/size{i}", [size]) for i, size in enumerate(past.sizes)]
        if self._batch is None:
            self._add("Shape", [self._prompts], f"{name}/prompts")
            at = self._constant(f"{name}/front", [0])
            parts[past.batch_axis] = self._add("Gather", [f"{name}/prompts", at], f"{name}/batch")
        else:
            parts[past.batch_axis] = self._constant(f"{name}/batch", [self._batch])
        self._add("Concat", parts, f"{name}/shape", axis=0)
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        fill = numpy_helper.from_array(np.zeros(1, dtype))
        self._add("ConstantOfShape", [f"{name}/shape"], name, value=fill)

    def follow(self, op: Operator) -> None:
        """Add an operator of the graph, changed to run without a past."""
        node = op.proto
        first = node.input[0] if node.input else ""
        if op.kind == "Concat" and not self._empty.isdisjoint(node.input):
            left = [name for name in node.input if name not in self._empty]
            if not left:
                self._empty.update(op.writes)
            elif len(left) == 1:
                node = helper.make_node("Identity", left, node.output, name=node.name)
            else:
                node.input[:] = left
        elif op.kind in _PASSING and first in self._empty:
            self._empty.update(op.writes)
        elif op.kind == "Shape" and first in self._past and not node.attribute:
            self._measured[node.output[0]] = self._past[first]
        elif op.kind == "Gather" and first in self._measured:
            node = self._known(node, self._measured[first])
        self.nodes.append(node)

    def _known(self, node: onnx.NodeProto, past: Past) -> onnx.NodeProto:
        """Return a constant in place of a node that reads past sizes other than the batch."""
        chosen = self._constants.get(node.input[1])
        if chosen is None:
            return node
        at = array_of(chosen) % len(past.sizes)
        if np.any(at == past.batch_axis):
            return node
        value = numpy_helper.from_array(np.array(past.sizes, np.int64)[at])
        return helper.make_node("Constant", [], node.output, name=node.name, value=value)

    def _constant(self, name: str, values: list[int]) -> str:
        self._graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output


def read_past(info: onnx.ValueInfoProto) -> Past:
    """Find the axes of the batch and of the past's length, which are the only symbolic sizes."""
    dims = info.type.tensor_type.shape.dim
    # Keys and values may be one tensor [2, batch, heads, length, size].
    batch_axis = 1 if len(dims) == 5 and dims[0].dim_value == 2 else 0
    free = [i for i, d in enumerate(dims) if not d.HasField("dim_value") and i != batch_axis]
    if len(free) != 1:
        shape = ", ".join(d.dim_param or str(d.dim_value) for d in dims)
        raise ModelError(
            f"input {info.name!r} has shape [{shape}], expected one symbolic size besides the "
            "batch: the length of the past; export the decoder with that dimension dynamic alone"
        )
    sizes = tuple(0 if i == free[0] else max(d.dim_value, 1) for i, d in enumerate(dims))
    return Past(sizes, batch_axis)
