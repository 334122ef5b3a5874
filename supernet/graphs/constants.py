"""Constants as initializers: what a graph computes of constants alone is computed once."""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import numpy_helper

from offramp.compiler.frontend.preparation import remove_unused
from offramp.compiler.graphs.graph import hoisted, refill
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel


def with_plain_constants(model: SourceModel) -> SourceModel:
    """Give a model with initializers for all that does not depend on a graph input.

    Simplified models have nothing else, and are given as they are; of others, weights may be
    transposed as they run.
    """
    if len(model.flow.changing) == len(model.flow.operators):
        return model
    model = replace(model, proto=hoisted(model.proto))
    copy, flow = model.proto, model.flow
    computed = {op.name for op in flow.operators if flow.is_constant(op)}
    if not computed:
        return model
    read = {t for op in flow.operators if op.name not in computed for t in op.reads}
    read.update(flow.outputs)
    wanted = [t for op in flow.operators if op.name in computed for t in op.writes if t in read]
    part = onnx.ModelProto(ir_version=copy.ir_version)
    part.opset_import.extend(copy.opset_import)
    part.functions.extend(copy.functions)
    part.graph.name = "constants"
    part.graph.node.extend(op.proto for op in flow.operators if op.name in computed)
    part.graph.initializer.extend(copy.graph.initializer)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    remove_unused(part)
    found = GraphRunner(part).run({}) if wanted else {}
    graph = copy.graph
    graph.initializer.extend(numpy_helper.from_array(found[name], name) for name in wanted)
    refill(graph.node, [node for node in graph.node if node.name not in computed])
    refill(graph.value_info, [info for info in graph.value_info if info.name not in found])
    remove_unused(copy)
    return replace(model)  # its operators are others now
