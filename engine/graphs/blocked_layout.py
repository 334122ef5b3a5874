"""A rewrite that keeps a stage in the blocked layout of ONNX Runtime's convolutions on CPUs.

ONNX Runtime runs convolutions on CPUs on tensors whose channels are in blocks (NCHWc), and reorders
plain tensors at their input and output. A stage's input is plain. A convolution reorders its own
copy, but a skip connection reads the plain tensor, and the sum of a plain and a blocked tensor is
neither fused into the convolution nor blocked; so the next block's skip connection is plain again,
and so on to the end of the stage. Pooling with a 1x1 window changes no value, and ONNX Runtime
always computes it in blocks: inserted between an input and its readers, it makes all of them read
one blocked tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offramp.engine.graphs.assembly import FLOAT32, INTS, ModelProto, NodeProto

SMALLEST_BLOCK = 8
"""Channels in a block on CPUs with short vectors; 16 with long ones."""

# Operators that ONNX Runtime 1.31 computes in blocks: always, ...
_ALWAYS = frozenset({"Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"})
# ... if their first input is in blocks, ...
_FOLLOWING = frozenset(
    {"Relu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Gelu", "Identity"}
    | {"BatchNormalization"}
)
# ... if they are fused into the convolution whose output they read, ...
_FUSED = frozenset({"Clip", "LeakyRelu"})
# ... and if all of their inputs are in blocks.
_JOINING = frozenset({"Add", "Sum", "Mul", "Concat"})


def enter_blocked(model: bytes, *, block: int = SMALLEST_BLOCK) -> bytes:
    """Make a graph's inputs enter the blocked layout once, before all of their readers.

    Returns the model with an identity pooling after every float32 input [n, channels, height,
    width] that is joined with blocked tensors (:data:`_JOINING`); ``model`` itself if there is no
    such input: first stages, transformers, float16 and explicitly quantised graphs. Values are the
    same, except that minus infinity becomes the lowest finite number. ``block`` is the number of
    channels in a block on the target CPU; maps whose channels are not a multiple of it are
    unchanged, because their pooling would be a plain copy.
    """
    proto = ModelProto.FromString(model)
    graph = proto.graph
    maps = [value.name for value in graph.input if _is_map(value, block)]
    chosen = [name for name in maps if _joins_more(graph, name)]
    if not chosen:
        return model
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    _pool_first(graph, {name: _unused(f"{name}/blocked", taken) for name in chosen})
    result: bytes = proto.SerializeToString(deterministic=True)
    return result


def _is_map(value: Any, block: int) -> bool:
    tensor = value.type.tensor_type
    dims = tensor.shape.dim
    if tensor.elem_type != FLOAT32 or len(dims) != 4:
        return False
    channels = dims[1].dim_value  # 0 where it is symbolic
    return bool(channels) and channels % block == 0


def _joins_more(graph: Any, name: str) -> bool:
    """Return whether pooling this input makes the tensors of some join all blocked.

    Such a join (:data:`_JOINING`) has plain and blocked tensors without the pooling.
    """
    before, after = _in_blocks(graph, ()), _in_blocks(graph, (name,))
    return any(
        node.op_type in _JOINING
        and after.issuperset(node.input)
        and before.intersection(node.input)
        and not before.issuperset(node.input)
        for node in graph.node
    )


def _in_blocks(graph: Any, entering: Iterable[str]) -> set[str]:
    """Return the tensors that are blocked if ``entering`` are; nodes are in execution order."""
    blocked = set(entering)
    convolved: set[str] = set()
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or not node.output:
            continue
        if (
            node.op_type in _ALWAYS
            or (node.op_type in _FOLLOWING and node.input[0] in blocked)
            or (node.op_type in _FUSED and node.input[0] in convolved)
            or (node.op_type in _JOINING and blocked.issuperset(node.input))
        ):
            blocked.add(node.output[0])
        if node.op_type == "Conv":
            convolved.add(node.output[0])
    return blocked


def _pool_first(graph: Any, renamed: Mapping[str, str]) -> None:
    """Insert a 1x1 pooling after inputs, under new names that all nodes read instead."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in renamed:
                node.input[position] = renamed[name]
    for name, pooled in renamed.items():
        node = NodeProto(op_type="MaxPool", name=f"{pooled}:MaxPool", input=[name], output=[pooled])
        node.attribute.add(name="kernel_shape", ints=(1, 1), type=INTS)
        graph.node.insert(0, node)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
