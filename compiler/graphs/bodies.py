"""Bodies of ``If``, ``Loop`` and ``Scan`` as models of their own, and what follows from them.

ONNX's inference gives up the shape of what a ``Loop`` carries, since a body might change it, and
knows nothing of work inside of bodies. With the types of what is outside, a body is a model like
others: its shapes can be inferred, and its operators counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.graphs.graph import bodies, captured_by, constant_tensor, copied

SizedType: TypeAlias = "tuple[int, tuple[int | None, ...] | None]"
"""Element type, and sizes as far as they are known."""
Infer: TypeAlias = "Callable[[onnx.ModelProto], Mapping[str, SizedType]]"
"""Infers the types of a model's tensors."""

_CARRIED = 2
"""Where a ``Loop``'s carried values begin, after trip count and condition."""
_SMALL = 64
"""Elements of a constant that may be a trip count, or a shape that a body reads."""


class BodyScope(NamedTuple):
    """What is known around an operator with bodies."""

    types: Mapping[str, SizedType]
    values: Mapping[str, NDArray[Any]]
    """Of small constants."""
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    functions: tuple[onnx.FunctionProto, ...] = ()

    @classmethod
    def of(cls, proto: onnx.ModelProto, types: Mapping[str, SizedType]) -> BodyScope:
        """Take constants, opsets and functions of a model."""
        tensors = [t for t in proto.graph.initializer if _is_small(t)]
        tensors += [t for node in proto.graph.node if (t := constant_tensor(node)) is not None]
        values = {
            t.name: numpy_helper.to_array(t)
            for t in tensors
            if t.data_type != onnx.TensorProto.STRING and _is_small(t)
        }
        return cls(types, values, tuple(proto.opset_import), tuple(proto.functions))

    def models(self, node: onnx.NodeProto) -> list[onnx.ModelProto]:
        """Make a model of each body, with the inputs that it is given, and all that it captures.

        Nothing if the type of one of these is not known.
        """
        found = [self._model(node, body) for body in bodies(node)]
        return [model for model in found if model is not None] if all(found) else []

    def trips(self, node: onnx.NodeProto) -> int | None:
        """Count how often a body runs, at most; None if nobody can tell before it runs."""
        if node.op_type == "If":
            return 1
        if node.op_type == "Loop":
            told = self.values.get(node.input[0]) if node.input[0] else None
            most = None if told is None or told.size != 1 else int(told.reshape(-1)[0])
            return most if most is not None and 0 <= most < np.iinfo(np.int32).max else None
        if node.op_type == "Scan":
            states, axes = _scanned(node)
            _, shape = self.types.get(node.input[states], (0, None))
            return None if shape is None else shape[axes[0]]
        return None

    def flops(self, node: onnx.NodeProto, count: Callable[[onnx.ModelProto], float]) -> float:
        """Count an operator's work: that of the larger body, as often as it runs at most.

        NaN where that is not known before it runs. ``count`` gives that of a body.
        """
        trips, models = self.trips(node), self.models(node)
        if trips is None or not models:
            return float("nan")
        return float(trips * np.max([count(model) for model in models]))

    def carried(self, node: onnx.NodeProto, infer: Infer) -> dict[str, SizedType]:
        """Find the types of what a ``Loop`` carries: those that it begins with, if kept."""
        models = self.models(node) if node.op_type == "Loop" else []
        if not models:
            return {}
        types = infer(models[0])
        given = list(models[0].graph.output)[1:]
        found: dict[str, SizedType] = {}
        for begins, ends, output in zip(node.input[_CARRIED:], given, node.output, strict=False):
            first, after = self.types.get(begins), types.get(ends.name)
            if output and first is not None and first == after:
                found[output] = first
        return found

    def _model(self, node: onnx.NodeProto, body: onnx.GraphProto) -> onnx.ModelProto | None:
        names = [name for name in dict.fromkeys(captured_by(body)) if name]
        outside = [(name, self.types.get(name)) for name in names if name not in self.values]
        if any(told is None for _, told in outside):
            return None
        given = list(self._given(node))
        if len(given) != len(body.input) or any(told is None for told in given):
            return None
        graph = copied(body)
        for info, told in zip(graph.input, given, strict=True):
            if told is not None:
                info.CopyFrom(_info(info.name, told))
        graph.input.extend(_info(name, told) for name, told in outside if told is not None)
        graph.initializer.extend(
            numpy_helper.from_array(self.values[name], name)
            for name in names
            if name in self.values
        )
        return helper.make_model(
            graph, opset_imports=self.opsets, functions=self.functions, ir_version=10
        )

    def _given(self, node: onnx.NodeProto) -> Iterator[SizedType | None]:
        """Types of what a body is given at each turn."""
        if node.op_type == "Loop":
            yield onnx.TensorProto.INT64, ()
            yield onnx.TensorProto.BOOL, ()
            yield from (self.types.get(name) for name in node.input[_CARRIED:])
        elif node.op_type == "Scan":
            states, axes = _scanned(node)
            yield from (self.types.get(name) for name in node.input[:states])
            for name, axis in zip(node.input[states:], axes, strict=True):
                kind, shape = self.types.get(name, (0, None))
                whole = list(shape or ())
                if not -len(whole) <= axis < len(whole):
                    yield None
                    continue
                del whole[axis]
                yield kind, tuple(whole)


def _scanned(node: onnx.NodeProto) -> tuple[int, list[int]]:
    """How many states a ``Scan`` has, and along which axis it takes each input apart."""
    told = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "body"}
    count = told["num_scan_inputs"]
    return len(node.input) - count, list(told.get("scan_input_axes", [0] * count))


def _info(name: str, told: SizedType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, *told)


def _is_small(tensor: onnx.TensorProto) -> bool:
    return int(np.prod(tensor.dims, dtype=np.int64)) <= _SMALL
