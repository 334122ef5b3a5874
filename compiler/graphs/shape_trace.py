"""Shapes and small values of a graph's tensors at one batch size, one operator after another.

ONNX's inference over a whole model stops at an operator that contradicts its inputs. Here the
caller follows the operators in order, and can repair an operator before the operators that read its
result are reached. The inferences of ONNX and ONNX Runtime do not know the shapes of operators from
a library (``--custom-ops``): each such operator is run alone on a few rows (:func:`run_alone`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import bodies, constant_tensor, default_opset, is_standard
from offramp.engine.backends.custom_ops import libraries, load_session, session_options

Shape: TypeAlias = "tuple[int, ...]"
Value: TypeAlias = NDArray[Any]

_MOST_INTEGERS, _MOST_OTHERS = 4096, 64
"""Largest number of elements of a tensor whose values are followed: for integers (shapes, indices),
and for others (scales of a resize)."""
_REFUSED = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError)
_NONE: Mapping[str, int] = MappingProxyType({})


class ShapeTrace:
    """Known types of tensors, and values that shapes may be computed from."""

    def __init__(
        self, proto: onnx.ModelProto, batch: int | None = None, sizes: Mapping[str, int] = _NONE
    ) -> None:
        """Begin at the graph inputs, with batch size ``batch`` and ``sizes`` of other symbols.

        Without ``batch`` the inputs have their declared sizes.
        """
        self._opsets = list(proto.opset_import)
        self._opset = default_opset(proto)
        self._types: dict[str, onnx.TypeProto] = {}
        self._values: dict[str, Value] = {}
        for tensor in proto.graph.initializer:
            self.give(tensor)
        for info in proto.graph.input:
            tensor_type = info.type.tensor_type
            dims = [d.dim_value or sizes.get(d.dim_param, 1) for d in tensor_type.shape.dim]
            if batch is not None:
                dims[:1] = [batch]
            self._know(info.name, tensor_type.elem_type, dims)

    def shape(self, name: str) -> Shape | None:
        """Return a tensor's shape if all of its sizes are known, else ``None``."""
        found = self._types.get(name)
        if found is None or not found.tensor_type.HasField("shape"):
            return None
        dims = found.tensor_type.shape.dim
        return (
            tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None
        )

    def type_of(self, name: str) -> onnx.TypeProto | None:
        """Return a tensor's type if all of its sizes are known, else ``None``."""
        return None if self.shape(name) is None else self._types[name]

    def value(self, name: str) -> Value | None:
        """Return a small tensor's value, if it depends only on shapes and constants."""
        return self._values.get(name)

    def give(self, tensor: onnx.TensorProto) -> None:
        """Add a constant, whose value is then known."""
        self._know(tensor.name, tensor.data_type, tensor.dims)
        if _is_followed(tensor.data_type, tensor.dims):
            with suppress(ValueError):  # larger tensors of a skeleton have no content
                self._values[tensor.name] = array_of(tensor)

    def assume(self, name: str, elem_type: int, shape: Sequence[int]) -> None:
        """Add a type that :meth:`follow` cannot find."""
        self._know(name, elem_type, shape)

    def follow(self, node: onnx.NodeProto) -> None:
        """Infer the outputs of a node; ValueError if it contradicts its inputs.

        Shapes that inference does not find stay unknown.
        """
        tensor = constant_tensor(node)
        if tensor is not None:
            self.give(tensor)
        elif not self._evaluate(node):
            self._infer(node)

    def _evaluate(self, node: onnx.NodeProto) -> bool:
        """Compute a node's values if all inputs are known; return whether that is done."""
        if node.op_type in {"Shape", "Size"} and (shape := self.shape(node.input[0])) is not None:
            ends = {a.name: a.i for a in node.attribute}
            found = np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)
            self._store(node.output[0], found if node.op_type == "Shape" else found.prod())
            return True
        read = [name for name in node.input if name]
        if (
            not read
            or not is_standard(node)
            or bodies(node)
            or any(n not in self._values for n in read)
        ):
            return False
        if self._is_large(node):  # for instance, a mask of all rows is not computed here
            return True
        try:
            values = ReferenceEvaluator(node, opsets={"": self._opset}).run(
                None, {name: self._values[name] for name in read}
            )
        except Exception:  # any failure of the evaluator: inference may know more
            return False
        for name, value in zip(node.output, values, strict=False):
            self._store(name, np.asarray(value))
        return True

    def _is_large(self, node: onnx.NodeProto) -> bool:
        """Return whether inference shows an output with too many elements to follow its values."""
        with suppress(ValueError):
            self._infer(node)
        kinds = {name: self._types[name].tensor_type for name in node.output if name in self._types}
        shapes = {name: self.shape(name) for name in kinds}
        return any(s and not _is_followed(kinds[n].elem_type, s) for n, s in shapes.items())

    def _infer(self, node: onnx.NodeProto) -> None:
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opset, node.domain)
        except onnx.defs.SchemaError:
            self._try(node)
            return
        types = {name: self._types[name] for name in node.input if name in self._types}
        if bodies(node) or len(types) < len({name for name in node.input if name}):
            return
        values = {
            name: numpy_helper.from_array(self._values[name], name)
            for name in node.input
            if name in self._values
        }
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema, node, types, values, opset_imports=self._opsets
            )
        except _REFUSED as error:
            raise ValueError(" ".join(str(error).split())) from error
        self._types.update(found)

    def _try(self, node: onnx.NodeProto) -> None:
        """Run an operator of a library, whose shapes inference does not know."""
        if not libraries() or bodies(node):
            return
        operands: dict[str, OperandType] = {}
        for name in filter(None, node.input):
            shape = self.shape(name)
            if shape is None:
                return
            kind = self._types[name].tensor_type.elem_type
            operands[name] = OperandType(kind, shape, self._values.get(name))
        for name, found in run_alone(node, operands, self._opsets).items():
            self._know(name, found.elem_type, found.shape)

    def _store(self, name: str, value: Value) -> None:
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        self._know(name, kind, value.shape)
        if _is_followed(kind, value.shape):
            self._values[name] = value

    def _know(self, name: str, elem_type: int, shape: Sequence[int]) -> None:
        self._types[name] = helper.make_tensor_type_proto(elem_type, list(shape))


def _is_followed(elem_type: int, shape: Sequence[int]) -> bool:
    integer = elem_type in {onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL}
    return int(np.prod(shape, dtype=np.int64)) <= (_MOST_INTEGERS if integer else _MOST_OTHERS)


_ROWS = (2, 3, 5)
"""Numbers of rows in trial runs. If sizes grow linearly with these, the sizes for any number of
rows are computed."""
_MOST_ELEMENTS = 2**24
"""Largest number of elements of an operator's input in a trial run."""


class OperandType(NamedTuple):
    """Known type and value of an operator's input."""

    elem_type: int
    """A value of ``onnx.TensorProto.DataType``."""
    shape: tuple[int, ...]
    value: NDArray[Any] | None = None
    """Value of the input, if it is a small constant."""


def run_alone(
    node: onnx.NodeProto,
    operands: Mapping[str, OperandType],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> dict[str, OperandType]:
    """Run an operator on a few rows; return the types of its outputs for all rows.

    The number of rows is the largest first dimension of the inputs. It is reduced for trial runs,
    so that large batches need not be computed. Outputs whose sizes do not grow linearly with the
    number of rows are left out. The result is empty if the operator fails.
    """
    free = {name: operand for name, operand in operands.items() if operand.value is None}
    fronts = [operand.shape[0] for operand in free.values() if operand.shape]
    rows = max(fronts, default=0)
    try:
        session = load_session(_model(node, operands, opsets), session_options())
        runs = [_run(session, free, rows, fewer) for fewer in _ROWS if rows]
    except Exception:  # ONNX Runtime's own classes derive from Exception only
        return {}
    if not runs:
        return {}
    found: dict[str, OperandType] = {}
    for name, given in zip((o.name for o in session.get_outputs()), zip(*runs, strict=True)):  # noqa: B905
        shape = _on_a_line([array.shape for array in given], rows)
        if shape is not None:
            kind = helper.np_dtype_to_tensor_dtype(given[0].dtype)
            found[name] = OperandType(kind, shape)
    return found


def _model(
    node: onnx.NodeProto,
    operands: Mapping[str, OperandType],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> bytes:
    """Make a model of one operator, which contains the operator's constant inputs."""
    inputs = [
        helper.make_tensor_value_info(name, o.elem_type, [None] * len(o.shape))
        for name, o in operands.items()
        if o.value is None
    ]
    constants = [
        numpy_helper.from_array(o.value, name)
        for name, o in operands.items()
        if o.value is not None
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "alone", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=list(opsets), ir_version=8)
    return bytes(model.SerializeToString())


def _run(
    session: Any, operands: Mapping[str, OperandType], rows: int, fewer: int
) -> list[NDArray[Any]]:
    """Run an operator on ``fewer`` rows instead of ``rows``; ValueError if inputs are too large."""
    rng = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    for name, operand in operands.items():
        shape = (fewer, *operand.shape[1:]) if operand.shape[:1] == (rows,) else operand.shape
        if prod(shape) > _MOST_ELEMENTS:
            raise ValueError(f"{name} has {prod(shape)} elements")
        dtype = helper.tensor_dtype_to_np_dtype(operand.elem_type)
        floating = np.issubdtype(dtype, np.floating)
        values = rng.standard_normal(shape) if floating else rng.integers(0, 2, shape)
        feeds[name] = values.astype(dtype)
    given: list[NDArray[Any]] = session.run(None, feeds)
    return given


def _on_a_line(shapes: Sequence[tuple[int, ...]], rows: int) -> tuple[int, ...] | None:
    """Return the shape at ``rows``, extrapolated; ``None`` if sizes are not linear in rows.

    ``shapes`` are those at the numbers of rows in :data:`_ROWS`.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    first, second, third = _ROWS
    found: list[int] = []
    for a, b, c in zip(*shapes, strict=True):
        grows = (b - a) // (second - first)
        if c != a + grows * (third - first):
            return None
        found.append(a + grows * (rows - first))
    return tuple(found)
