"""Extraction of parts of a decoder as graphs: layers, keys and values of later layers, logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.common.errors import VerificationError
from offramp.compiler.graphs.graph import (
    Operator,
    captured_names,
    copied,
    emptied,
    integer,
    rename_graph,
)
from offramp.generation.bundle.tensor_names import size_name
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.sizes import Size


def extract(
    cut: DecoderCut,
    operators: Sequence[Operator],
    *,
    starts: Sequence[str],
    inputs: Iterable[str],
    outputs: Mapping[str, str],
    renamed: Mapping[str, str],
    name: str,
) -> onnx.ModelProto:
    """Return a model that consists of the given operators.

    ``starts`` are tensors fed to them, ``inputs`` the graph inputs that they may read. ``outputs``
    maps tensors that the model returns to their new names; ``renamed`` does so for tensors that it
    reads. Sizes of absent tensors are computed from present ones, or read from additional inputs.
    Raise VerificationError if anything else is read.
    """
    proto = cut.export.proto
    model = emptied(proto, name, producer="offramp")
    graph = model.graph
    given = _given(cut, operators, [*starts, *inputs])
    there = {*given, *starts, *(t for op in operators for t in op.writes)} | cut.flow.constants
    sizes = _SizeNodes(cut, graph, [t for t in given if t in cut.export.sizes.shapes])
    inner: list[onnx.NodeProto] = []
    for op in operators:
        if op.index in cut.measured and op.reads[0] not in there:
            inner.append(sizes.vector(op, cut.export.sizes.of(op.reads[0]) or ()))
        else:
            inner.append(copied(op.proto))
    graph.node.extend(inner)
    read = {t for node in graph.node for t in (*node.input, *captured_names(node)) if t}
    written = {t for node in graph.node for t in node.output}
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in read)
    held = {t.name for t in graph.initializer}
    used = [t for t in given if t in read]
    free = read - written - held - {*used, *sizes.inputs}
    if free:
        raise VerificationError(
            f"{name} reads {sorted(free)}, which nothing provides; this is a defect, report it "
            "with the model"
        )
    graph.input.extend(_info(cut, t) for t in used)
    graph.input.extend(
        helper.make_tensor_value_info(t, onnx.TensorProto.INT64, [1]) for t in sizes.inputs
    )
    graph.output.extend(_info(cut, t) for t in outputs)
    names = {**renamed, **outputs}
    rename_graph(graph, lambda tensor: names.get(tensor, tensor))
    _join_inputs(graph)
    return model


def _given(cut: DecoderCut, operators: Sequence[Operator], may: Iterable[str]) -> list[str]:
    """Return the tensors of ``may`` whose values the operators read, not only their sizes."""
    read = {t for op in operators if op.index not in cut.measured for t in op.reads}
    return [t for t in dict.fromkeys(may) if t in read]


def _join_inputs(graph: onnx.GraphProto) -> None:
    """Keep only one of several inputs with the same name, for example one mask for all layers."""
    kept = {info.name: info for info in reversed(graph.input)}
    infos = [copied(info) for info in reversed(kept.values())]
    del graph.input[:]
    graph.input.extend(infos)


def _info(cut: DecoderCut, tensor: str) -> onnx.ValueInfoProto:
    sizes = cut.export.sizes
    return helper.make_tensor_value_info(tensor, sizes.types[tensor], list(sizes.of(tensor) or ()))


class _SizeNodes:
    """Operators that compute shape vectors from the inputs of a graph."""

    def __init__(self, cut: DecoderCut, graph: onnx.GraphProto, given: Sequence[str]) -> None:
        self.inputs: list[str] = []
        """Names of the additional inputs of the graph; the value of each is a size."""
        self._cut, self._graph, self._given = cut, graph, given
        self._known: dict[Size, str] = {}

    def vector(self, op: Operator, shape: tuple[Size, ...]) -> onnx.NodeProto:
        """Return the operator that computes ``shape`` in place of the ``Shape`` operator ``op``."""
        begin, end = (integer(op.proto, k, d) for k, d in (("start", 0), ("end", len(shape))))
        parts = [self._size(size) for size in shape[begin:end]]
        return helper.make_node("Concat", parts, op.proto.output, name=op.name, axis=0)

    def _size(self, size: Size) -> str:
        if size not in self._known:
            self._known[size] = self._made(size)
        return self._known[size]

    def _made(self, size: Size) -> str:
        if isinstance(size, int):
            return self._constant(f"sizes/{size}", [size])
        assert size is not None, "measured operators have known sizes"
        for tensor in self._given:
            shape = self._cut.export.sizes.of(tensor) or ()
            if size in shape:
                axis = self._constant(f"sizes/{size}/axis", [shape.index(size)])
                measured = self._add("Shape", [tensor], f"sizes/{size}/shape")
                return self._add("Gather", [measured, axis], f"sizes/{size}")
        if size == "total":
            parts = [self._size("past"), self._size(self._cut.export.sizes.tokens)]
            return self._add("Add", parts, "sizes/total")
        self.inputs.append(size_name(size))
        return size_name(size)

    def _constant(self, name: str, values: list[int]) -> str:
        self._graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._graph.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output
