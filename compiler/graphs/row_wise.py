"""Operators that compute each token of a sequence separately, such as norms and projections.

If only one token of their result is needed, these operators can run on that token alone. Operators
that mix tokens, such as attention, need all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from offramp.compiler.graphs.graph import Dataflow, Operator, integer
from offramp.compiler.graphs.shapes import TensorType, shape_of

Size: TypeAlias = "int | str"
Rows: TypeAlias = Literal["tokens", "flat"]
"""Layout of tokens in a tensor: [batch, tokens, width], or [batch · tokens, width]."""

ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "BiasGelu", "Cast", "Clip", "Div", "Dropout", "Elu", "Equal",
    "Erf", "Exp", "FastGelu", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid",
    "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min",
    "Mish", "Mul", "Neg", "Not", "Or", "Pow", "QuickGelu", "Reciprocal", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Tanh", "Where",
})  # fmt: skip
"""Operators that compute each element separately."""
_REDUCTIONS = ("ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare")
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SKIP_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_ALL = 2**31 - 1
"""A slice whose end is this number or larger has no end."""


class RowWise:
    """Finds the operators of a graph that compute tokens one by one.

    ``rows`` are the sizes of the batch and token dimensions; ``values`` are the graph's small
    constants.
    """

    def __init__(
        self,
        flow: Dataflow,
        types: Mapping[str, TensorType],
        rows: tuple[Size, Size],
        values: Mapping[str, NDArray[Any]],
    ) -> None:
        self._flow, self._types, self._rows, self._values = flow, types, rows, values
        batch, tokens = rows
        self._flat: set[Size] = {f"{batch}*{tokens}", f"{tokens}*{batch}"}
        if batch == 1:
            self._flat.add(tokens)
        if isinstance(batch, int) and isinstance(tokens, int):
            self._flat.add(batch * tokens)
        self._checks: dict[str, Callable[[Operator], bool]] = {
            **dict.fromkeys((*ELEMENTWISE, *_SKIP_NORMS), self._is_plain),
            **dict.fromkeys(_REDUCTIONS, self._over_width),
            **dict.fromkeys(_NORMS, self._is_norm),
            **dict.fromkeys(("LogSoftmax", "Softmax"), self._is_softmax),
            **dict.fromkeys(("Concat", "Split"), self._is_along),
            "MatMul": self._is_projection,
            "Gemm": self._is_gemm,
            "Reshape": self._is_reshape,
            "Slice": self._takes_all,
        }

    def rows_of(self, tensor: str) -> Rows | None:
        """Return the layout of tokens in a tensor; ``None`` if the tensor holds no tokens."""
        shape = shape_of(self._types, tensor)
        if tensor not in self._flow.variable or shape is None:
            return None
        if len(shape) == 3 and shape[:2] == self._rows:
            return "tokens"
        return "flat" if len(shape) == 2 and shape[0] in self._flat else None

    def width(self, tensor: str) -> Size | None:
        """Return the number of elements of a token in a tensor."""
        shape = shape_of(self._types, tensor)
        return shape[-1] if shape else None

    def upstream(self, output: str) -> frozenset[str]:
        """Return operators (by first output) before ``output`` that may run on one token alone.

        Each of them computes tokens one by one, and its output is read only by other ones of them.
        """
        flow = self._flow
        found = {op.writes[0]: op for op in flow.operators if self._is_one_by_one(op)}
        needed = {op.writes[0] for op in flow.upstream([output], stop=frozenset())}
        found = {name: op for name, op in found.items() if name in needed}
        lost = set(found)
        while lost:
            targets = self._targets(found)
            lost = {n for n, op in found.items() if not self._fits(op, found, targets, output)}
            found = {name: op for name, op in found.items() if name not in lost}
        return frozenset(found)

    def _fits(
        self, op: Operator, found: Mapping[str, Operator], targets: AbstractSet[str], output: str
    ) -> bool:
        """Return whether ``found`` has an operator's readers, and the writers of flat tokens."""
        for tensor in op.writes:
            readers = {reader.writes[0] for reader in self._flow.consumers.get(tensor, ())}
            if tensor != output and not readers <= found.keys() | targets:
                return False
        flat = [t for t in op.reads if self.rows_of(t) == "flat"]
        return all(t in self._flow.producers and self._makes(t) in found for t in flat)

    def _targets(self, found: Mapping[str, Operator]) -> set[str]:
        """Return operators whose result only serves as target shape of reshapes in ``found``."""
        targets: set[str] = set()
        for op in reversed(self._flow.operators):
            readers = [(reader, t) for t in op.writes for reader in self._flow.consumers.get(t, ())]
            if readers and all(
                reader.writes[0] in targets
                or (
                    reader.kind == "Reshape"
                    and reader.writes[0] in found
                    and reader.proto.input[0] != tensor
                )
                for reader, tensor in readers
            ):
                targets.add(op.writes[0])
        return targets

    def _makes(self, tensor: str) -> str:
        return self._flow.producers[tensor].writes[0]

    def _is_one_by_one(self, op: Operator) -> bool:
        forms = {self.rows_of(tensor) for tensor in op.writes}
        check = self._checks.get(op.kind)
        return check is not None and len(forms) == 1 and None not in forms and check(op)

    def _is_projection(self, op: Operator) -> bool:
        return self._is_matrix(op.proto.input[1]) and self._has_rows(op)

    def _is_gemm(self, op: Operator) -> bool:
        return not integer(op.proto, "transA") and self._is_projection(op)

    def _is_norm(self, op: Operator) -> bool:
        return self._axis(op, -1) and self._has_rows(op)

    def _is_along(self, op: Operator) -> bool:
        return self._axis(op, 0) and self._is_plain(op)

    def _is_softmax(self, op: Operator) -> bool:
        return self._axis(op, -1) and self._is_plain(op)

    def _is_reshape(self, op: Operator) -> bool:
        return isinstance(self.width(op.writes[0]), int) and self._has_rows(op)

    def _has_rows(self, op: Operator) -> bool:
        """Return whether the first input is tokens, and others constants or target shapes."""
        first, *others = op.reads
        fixed = op.kind == "Reshape" or self._flow.variable.isdisjoint(others)
        return self.rows_of(first) is not None and fixed

    def _is_plain(self, op: Operator) -> bool:
        """Return whether all inputs are tokens in the same layout, or equal for every token."""
        form = self.rows_of(op.writes[0])
        return all(
            self.rows_of(t) == form if t in self._flow.variable else self._same_for_all(t)
            for t in op.reads
        )

    def _same_for_all(self, constant: str) -> bool:
        shape = shape_of(self._types, constant)
        if shape is None and constant in self._values:
            shape = self._values[constant].shape
        return shape is not None and all(size == 1 for size in shape[:-1])

    def _is_matrix(self, tensor: str) -> bool:
        shape = shape_of(self._types, tensor)
        return tensor not in self._flow.variable and shape is not None and len(shape) == 2

    def _axis(self, op: Operator, default: int) -> bool:
        shape = shape_of(self._types, op.writes[0])
        axis = integer(op.proto, "axis", default)
        return shape is not None and axis in {-1, len(shape) - 1}

    def _over_width(self, op: Operator) -> bool:
        given = {a.name: helper.get_attribute_value(a) for a in op.proto.attribute}
        axes = given.get("axes")
        if axes is None and len(op.proto.input) > 1:
            value = self._values.get(op.proto.input[1])
            axes = None if value is None else value.tolist()
        shape = shape_of(self._types, op.proto.input[0])
        last = shape is not None and axes is not None and list(axes) in ([-1], [len(shape) - 1])
        return last and given.get("keepdims", 1) == 1 and self._has_rows(op)

    def _takes_all(self, op: Operator) -> bool:
        """Return whether a slice keeps everything, such as ``[-0:]``."""
        values = [self._values.get(name) for name in op.proto.input[1:] if name]
        if any(value is None for value in values) or not self._has_rows(op):
            return False
        starts, ends, *rest = [value for value in values if value is not None]
        steps = rest[1] if len(rest) > 1 else np.ones(1)
        return bool(np.all(starts == 0) and np.all(ends >= _ALL) and np.all(steps == 1))
