"""Types of what an operator gives, found by running it alone on a few rows.

Operators of a library (``--custom-ops``) tell nobody the shapes that they give: neither ONNX's
inference nor ONNX Runtime's knows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.engine.backends.custom_ops import load_session, session_options

_ROWS = (2, 3, 5)
"""Runs whose shapes have to lie on a line, which tells those of any number of rows."""
_MOST_ELEMENTS = 2**24
"""Of what an operator reads in such a run."""


class OperandType(NamedTuple):
    """What is known of a tensor that an operator reads."""

    elem_type: int
    """A value of ``onnx.TensorProto.DataType``."""
    shape: tuple[int, ...]
    value: NDArray[Any] | None = None
    """Where it is constant, and small."""


def run_alone(
    node: onnx.NodeProto,
    operands: Mapping[str, OperandType],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> dict[str, OperandType]:
    """Find what an operator gives at these shapes; nothing if it does not run, or sizes vary.

    Rows are the largest first dimension of what it reads. They are scaled down for the runs, and
    sizes are taken to grow with them in proportion: a batch of thousands need not be computed.
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
    """Make a model of one operator, whose constants it holds."""
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
    """Run on ``fewer`` rows where there are ``rows``; ValueError if that is too much."""
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
    """Give the shape at ``rows`` of which these at :data:`_ROWS` are; None if none is."""
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
