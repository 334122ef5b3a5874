"""The assembly of segments and an exit into the one graph of a stage.

Every segment and exit names its tensors as the source model does (exits under a prefix of their
own), so that a stage is the plain union of its parts: nodes and initializers that several parts
recompute, such as a mask bias, are the same and are kept once. One graph instead of a chain
matters: a border costs layout changes and lost fusion (6 to 10 % on CNNs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offramp.engine.graphs.onnx_subset import FLOAT32, INT, INT64, INTS, ModelProto


def assemble(parts: Sequence[bytes], outputs: Sequence[str]) -> bytes:
    """Join serialised ONNX models whose tensors share one namespace, in the order of execution.

    They share IR version and opset (the first one's are kept). The joined model gives ``outputs``,
    in this order; its inputs are what no part computes. Raises ValueError if no part gives an
    output.
    """
    models = [ModelProto.FromString(part) for part in parts]
    joined = models[0]
    nodes, produced = _union_of_nodes(models)
    initializers = _by_name(model.graph.initializer for model in models)
    inputs = _by_name(model.graph.input for model in models)
    described = _by_name(model.graph.output for model in models)
    known = _by_name(model.graph.value_info for model in models)
    missing = [name for name in outputs if name not in described]
    if missing:
        raise ValueError(f"no part gives {missing}; they give {sorted(described)}")

    graph = joined.graph
    _replace(graph.node, nodes)
    _replace(graph.initializer, initializers.values())
    _replace(graph.input, [v for k, v in inputs.items() if k not in produced])
    _replace(graph.output, [described[name] for name in outputs])
    inner = {**{k: v for k, v in described.items() if k not in outputs}, **known}
    _replace(graph.value_info, [v for k, v in inner.items() if k not in outputs])
    result: bytes = joined.SerializeToString(deterministic=True)
    return result


CONFIDENCE = "offramp/confidence"
"""Name of the output that :func:`with_confidence` adds."""


def with_confidence(model: bytes, logits: str) -> bytes | None:
    """Add the largest probability of logits to what a graph gives, as :data:`CONFIDENCE`.

    Two operators in the graph cost less than the seven calls of numpy that do it outside
    (:func:`.answers.exit_check.confidence_of`). It is NaN where that gives 0: where a logit
    is NaN or plus infinity. ``None`` where the logits are not known to be a float32 matrix, or the
    opset is older than 13 (which we refuse to compile).
    """
    proto = ModelProto.FromString(model)
    graph = proto.graph
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    given = {output.name: output.type.tensor_type for output in graph.output}[logits]
    if opset < 13 or given.elem_type != FLOAT32 or len(given.shape.dim) != 2:
        return None
    probabilities = f"{CONFIDENCE}/probabilities"  # along the last axis by default
    graph.node.add(op_type="Softmax", input=[logits], output=[probabilities])
    largest = graph.node.add(op_type="ReduceMax", input=[probabilities], output=[CONFIDENCE])
    largest.attribute.add(name="keepdims", i=0, type=INT)
    if opset >= 18:  # axes became an input
        axes = graph.initializer.add(name=f"{CONFIDENCE}/axes", data_type=INT64)
        axes.dims.append(1)
        axes.int64_data.append(1)
        largest.input.append(axes.name)
    else:
        largest.attribute.add(name="axes", ints=[1], type=INTS)
    added = graph.output.add(name=CONFIDENCE)
    added.type.tensor_type.elem_type = FLOAT32
    added.type.tensor_type.shape.dim.add().CopyFrom(given.shape.dim[0])
    result: bytes = proto.SerializeToString(deterministic=True)
    return result


def _union_of_nodes(models: Sequence[Any]) -> tuple[list[Any], set[str]]:
    nodes: list[Any] = []
    produced: set[str] = set()
    for model in models:
        for node in model.graph.node:
            made = {name for name in node.output if name}
            if not made <= produced:
                nodes.append(node)
                produced |= made
    return nodes, produced


def _by_name(groups: Any) -> dict[str, Any]:
    return {item.name: item for group in groups for item in group}


def _replace(field: Any, items: Any) -> None:
    kept = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(kept)
