"""Files that ONNX Runtime runs and the ONNX checker refuses, brought into the form that it takes.

Exporters and tools that cut graphs write such files. What they compute is clear, so that nothing is
gained by refusing them: ONNX Runtime is the judge of what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import onnx
from onnx import defs, helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import bodies, captured_names, refill
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.shapes import UNKNOWN, TensorType, infer_types

_ROWS = 2
"""Samples that tell the shape of an output, where inference does not."""


def to_standard_form(proto: onnx.ModelProto) -> None:
    """Rewrite, in place, what differs from the ONNX standard in form alone.

    The domain ``ai.onnx`` gets its other name, the empty one; operator sets that are used and not
    imported are imported; sizes of 0 and below are open; graphs have names; of initializers of one
    name, the one that ONNX Runtime takes is left; outputs get types and shapes. ModelError for what
    cannot be repaired.
    """
    _check_versions(proto)
    graphs = list(_graphs(proto.graph))
    _rename_domains(proto, graphs)
    _import_domains(proto, graphs)
    for graph in graphs:
        graph.name = graph.name or "graph"
        _open_sizes(graph)
        last = {tensor.name: tensor for tensor in graph.initializer}
        if len(last) < len(graph.initializer):
            refill(graph.initializer, list(last.values()))
    _check_reads(proto.graph)
    _check_shapes(proto.graph)
    _describe_outputs(proto)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and all graphs that its operators run."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from _graphs(body)


def _check_versions(proto: onnx.ModelProto) -> None:
    if not proto.ir_version or not proto.opset_import:
        missing = "opset_import" if proto.ir_version else "ir_version"
        raise ModelError(
            f"the file has no {missing}, so that nothing tells which version of ONNX it is written "
            "in; export the model again"
        )
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"the file is of IR version {proto.ir_version}, and the onnx package that is installed "
            f"here reads {onnx.IR_VERSION} at most; install a newer onnx and onnxruntime, or save "
            "the model with an older onnx"
        )


def _rename_domains(proto: onnx.ModelProto, graphs: Iterable[onnx.GraphProto]) -> None:
    nodes = [graph.node for graph in graphs] + [each.node for each in proto.functions]
    for node in chain.from_iterable(nodes):
        if node.domain == "ai.onnx":
            node.domain = ""
    for imports in (proto.opset_import, *(each.opset_import for each in proto.functions)):
        versions: dict[str, int] = {}
        for each in imports:
            domain = "" if each.domain == "ai.onnx" else each.domain
            versions[domain] = max(each.version, versions.get(domain, 0))
        refill(imports, [helper.make_opsetid(d, v) for d, v in versions.items()])


def _import_domains(proto: onnx.ModelProto, graphs: Iterable[onnx.GraphProto]) -> None:
    """Import what ONNX Runtime imports by itself: the newest version of a domain that is used."""
    known = {each.domain for each in proto.opset_import}
    for domain in dict.fromkeys(node.domain for graph in graphs for node in graph.node):
        if domain not in known:
            versions = [s.since_version for s in defs.get_all_schemas() if s.domain == domain]
            proto.opset_import.append(helper.make_opsetid(domain, max(versions, default=1)))


def _open_sizes(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value <= 0:
                dim.ClearField("dim_value")


def _check_reads(graph: onnx.GraphProto) -> None:
    """Refuse operators, of a graph that is sorted, which read what nothing gives before them."""
    given = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    given.update(tensor.values.name for tensor in graph.sparse_initializer)
    written = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for name in (*node.input, *captured_names(node)):
            if name and name not in given:
                why = "is no input and no initializer, and no operator gives it"
                if name in written:
                    why = "only operators after it give: the graph has a cycle"
                raise ModelError(
                    f"operator {node.name or node.output[0]!r} ({node.op_type}) reads {name!r}, "
                    f"which {why}; export the model again"
                )
        given.update(node.output)


def _check_shapes(graph: onnx.GraphProto) -> None:
    constants = {tensor.name for tensor in graph.initializer}
    for info in graph.input:
        kind = info.type.WhichOneof("value") or "tensor_type"
        known = kind != "tensor_type" or info.type.tensor_type.HasField("shape")
        if not known and info.name not in constants:
            raise ModelError(
                f"input {info.name!r} is no tensor of known rank: its type or shape is missing in "
                "the file; export the model again, with a shape for every input (sizes in it may "
                "be open)"
            )


def _describe_outputs(proto: onnx.ModelProto) -> None:
    """Add types and shapes to outputs that have none: inferred, or as a run of the model has it."""
    vague = [output for output in proto.graph.output if _is_vague(output)]
    if not vague:
        return
    types: dict[str, TensorType] = {}
    with suppress(Exception):  # of inference, which reads what no checker has seen
        types = infer_types(proto)
    if any((found := types.get(o.name)) is None or found.shape is None for o in vague):
        types = _types_of_run(proto)
    for output in vague:
        found = types[output.name]
        dims = [None if size == UNKNOWN else size for size in found.shape or ()]
        output.CopyFrom(helper.make_tensor_value_info(output.name, found.elem_type, dims))


def _is_vague(output: onnx.ValueInfoProto) -> bool:
    tensor = output.type.tensor_type
    if output.type.WhichOneof("value") not in (None, "tensor_type"):
        return False
    return not tensor.elem_type or not tensor.HasField("shape")


def _types_of_run(proto: onnx.ModelProto) -> dict[str, TensorType]:
    """Run a model on random inputs; what it gives has types and ranks, and all sizes are open."""
    try:
        given: dict[str, Any] = GraphRunner(proto).run(random_inputs(proto, _ROWS))
    except RuntimeError as error:
        names = ", ".join(repr(output.name) for output in proto.graph.output if _is_vague(output))
        raise ModelError(
            f"the file has no type or shape of its output {names}, and running the model on random "
            "inputs, which would tell, fails; export it again with types of its outputs. ONNX "
            f"Runtime says: {error}"
        ) from error
    return {
        name: TensorType(
            elem_type=helper.np_dtype_to_tensor_dtype(array.dtype), shape=(UNKNOWN,) * array.ndim
        )
        for name, array in given.items()
    }
