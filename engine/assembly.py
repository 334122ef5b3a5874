"""Join segments and an exit into the one graph of a stage.

Every segment and exit names its tensors as the source model does (exits under a prefix of their
own), so that a stage is the plain union of its parts: nodes and initializers that several parts
recompute, such as a mask bias, are the same and are kept once. One graph instead of a chain
matters: a border costs layout changes and lost fusion (6 to 10 % on CNNs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offramp.engine.onnx_subset import ModelProto


def assemble(parts: Sequence[bytes], outputs: Sequence[str]) -> bytes:
    """Join ONNX models whose tensors share one namespace.

    Args:
        parts: Serialised models, in the order of execution; an earlier part gives what a later
            one reads. They share IR version and opset (the first one's are kept).
        outputs: Tensors that the joined graph shall give, in this order.

    Returns:
        The serialised model. Its inputs are what no part computes.

    Raises:
        ValueError: No part gives one of ``outputs``.
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
