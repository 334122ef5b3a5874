"""Write a supernet for ``eecompile supernet``: its largest subnet as ONNX, and a specification.

The specification is a TOML file that names parts of the ONNX graph: ``[[depth]]`` tables name
scopes of nodes that may be skipped, in the order of skipping; ``[[width]]`` tables name nodes whose
weights have elastic output channels; ``[norm]`` and ``[points]`` are as in
:func:`.spec_file.read_spec`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from torch import nn

from offramp.supernet.training.space import ElasticWidth
from offramp.supernet.training.supernet import ElasticModule, extract

SPECIFICATION = "spec.toml"
_OPSET = 17
_COMPONENT = re.compile(r"[^.]*[^.\d][^.]*(\.\d+)*$")
"""Last name of a module path, with its indices; in an export, this is the name of a scope."""
_WITH_WEIGHT = ("Conv", "Gemm", "MatMul")


def export_supernet(
    supernet: ElasticModule,
    path: Path,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]] | None = None,
    specification: Path | None = None,
    norm_layers: Literal["auto", "none"] | Sequence[str] = "auto",
    keep: int = 6,
) -> Path:
    """Write the largest subnet as an ordinary ONNX file, and the specification next to it.

    Record the statistics of the largest subnet first (:meth:`ElasticModule.record_norms`), because
    batch norms are folded into convolutions here.

    Args:
        supernet: Supernet to write; the exporter traces its sample. It is not changed.
        path: The ONNX file.
        inputs: Names of the module's arguments.
        outputs: Names of its answers.
        axes: Symbolic dimensions by input or output, as for ``torch.onnx.export``; by default the
            first of each is ``batch``.
        specification: The TOML file; by default ``spec.toml`` in the folder of ``path``.
        norm_layers: Convolutions whose outputs get a scale and a shift per subnet: ``auto`` for all
            that need it, ``none``, or prefixes of node names.
        keep: Number of operating points that compiling keeps, including the full one; 1 or more.

    Returns:
        Path of the specification.

    Raises:
        ValueError: A block or layer of the space has no nodes in the graph, or ``keep`` is less
            than 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: keep 1 operating point or more, the full one included")
    largest = extract(supernet, supernet.space.largest())
    largest.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        largest,
        supernet.sample,
        str(path),
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_axes={
            name: dict((axes or {}).get(name, {0: "batch"})) for name in (*inputs, *outputs)
        },
        opset_version=_OPSET,
        dynamo=False,
    )
    graph = onnx.load(str(path)).graph
    scopes = _scopes(largest, supernet.sample)
    tables = [
        *(_depth_table(group.skip, scopes, graph) for group in supernet.space.depth),
        *(_width_table(group, scopes, graph) for group in supernet.space.width),
        _table("[norm]", layers=norm_layers if isinstance(norm_layers, str) else [*norm_layers]),
        _table("[points]", keep=keep),
    ]
    written = specification or path.parent / SPECIFICATION
    written.write_text("\n".join(tables), encoding="utf-8")
    return written


def _table(header: str, **entries: Any) -> str:
    """Return a TOML table; strings, numbers and lists of JSON are also valid TOML."""
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items())
    return "\n".join((header, *lines, ""))


def _depth_table(skip: Sequence[str], scopes: Mapping[str, str], graph: onnx.GraphProto) -> str:
    for name in skip:
        scope = scopes.get(name)
        if scope is None or not any(node.name.startswith(f"{scope}/") for node in graph.node):
            raise ValueError(
                f"block {name} has no nodes in the exported graph (its scope: {scope}): make the "
                "module's forward call it once"
            )
    return _table("[[depth]]", skip=[scopes[name] for name in skip])


def _width_table(group: ElasticWidth, scopes: Mapping[str, str], graph: onnx.GraphProto) -> str:
    constants = {tensor.name for tensor in graph.initializer}
    axis_by_node = {
        node.name: _output_axis(node)
        for node in graph.node
        if node.op_type in _WITH_WEIGHT and node.input[1] in constants
    }
    nodes = []
    for name in group.layers:
        scope = scopes.get(name)
        found = [node for node in axis_by_node if node.startswith(f"{scope}/")]
        if len(found) != 1:
            raise ValueError(
                f"layer {name} has {len(found)} nodes with a weight in the exported graph (its "
                f"scope: {scope}) where one was expected: make the module's forward call it once"
            )
        nodes += found
    axes = {axis_by_node[node] for node in nodes}
    if len(axes) > 1:
        by_axis = ", ".join(f"{node} on axis {axis_by_node[node]}" for node in nodes)
        raise ValueError(
            f"layers of one width have their output channels on several axes ({by_axis}): "
            "use separate widths for convolutions and linear layers"
        )
    return _table("[[width]]", weights=nodes, axis=axes.pop(), ratios=list(group.ratios))


def _output_axis(node: onnx.NodeProto) -> int:
    if node.op_type == "Conv":
        return 0
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return 0 if transposed else 1


def _scopes(module: nn.Module, sample: Sequence[torch.Tensor]) -> dict[str, str]:
    """Return the prefix of node names for each module that a forward pass calls, by its name.

    The exporter names nodes after calls: a module that is never called itself, such as a
    ``ModuleList``, does not add a component.
    """
    scopes: dict[str, str] = {}
    calls = [""]
    handles = []
    for name, part in module.named_modules():
        if not name:
            continue
        found = _COMPONENT.search(name)
        component = found[0] if found else name

        def enter(_part: nn.Module, _given: Any, name: str = name, last: str = component) -> None:
            calls.append(f"{calls[-1]}/{last}")
            scopes.setdefault(name, calls[-1])

        def leave(_part: nn.Module, _given: Any, _answer: Any) -> None:
            calls.pop()

        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    with torch.no_grad():
        module(*sample)
    for handle in handles:
        handle.remove()
    return scopes
