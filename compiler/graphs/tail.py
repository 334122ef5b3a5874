"""The tail of a model: the operators between the scores that heads imitate and the answer.

Every exit ends with the model's own operators, so its answers have the model's scale, range and
steps ("the output remains unchanged to preserve result formats", Apparate 3.1). The scores are the
only input of a tail that depends on the data. Layers with weights come before the tail. Models that
end with logits, or with only a Softmax or a Sigmoid, have no tail:
:mod:`offramp.compiler.exits.endings` adds these activations.

The possible answers of a tail are found by running it on scores of all kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, version_converter

from offramp.bundle import Answer, AnswerForm, TaskKind
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import (
    Dataflow,
    Operator,
    default_opset,
    integer,
    is_standard,
    rename_graph,
)
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.shapes import TensorType, declared_types, dtype_name, shape_of
from offramp.engine.graphs.assembly import assemble

SIGMOIDS: Final = frozenset({"Sigmoid", "HardSigmoid"})
SOFTMAXES: Final = frozenset({"Softmax", "LogSoftmax"})
_MOVES: Final = frozenset({"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Dropout"})
"""Operators that change neither the values of their input nor the order of these values."""
_AFFINE: Final = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "BatchNormalization"})
"""Operators that keep an unbounded range of values unbounded, if their constants are finite."""
_SELECTIONS: Final = frozenset(
    {"Concat", "Gather", "GatherElements", "Slice", "Split", "Transpose"}
)
"""Operators that change the order of values, or leave out some."""
_BY_COLUMN: Final = _MOVES | frozenset(
    {"Abs", "Add", "Cast", "Ceil", "Clip", "DequantizeLinear", "Div", "Exp", "Floor", "Greater"}
    | {"GreaterOrEqual", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Pow"}
    | {"QuantizeLinear", "Reciprocal", "Relu", "Round", "Sigmoid", "HardSigmoid", "Sqrt", "Sub"}
    | {"Tanh", "Where"}
)
"""Operators that compute each column of their output from the same column of their input."""
_WEIGHTED: Final = frozenset(
    {"Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul"}
    | {"MatMulInteger", "QLinearConv", "QLinearMatMul", "RNN"}
)
"""Operators that mix features with weights, which no tail has."""
_MASKING: Final = 1e4
"""Smallest magnitude of a constant that masks classes; smaller ones only shift scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Operators from the scores that heads imitate to the model's answer."""

    taught: Answer
    """Scores that heads imitate, described like an answer: tensor, width, form and task."""
    dtype: str
    """Element type of the scores, by numpy's name."""
    shape: tuple[int | str, ...]
    """Sizes of the scores; the first one is the batch."""
    graph: bytes = field(default=b"", repr=False)
    """ONNX model from the scores to the answer; empty if the scores are the answer."""
    kinds: tuple[str, ...] = ()
    """Types of the operators in ``graph`` that compute something, in order."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value that the answer can have, if the scores are probabilities."""
    takes_levels: bool = False
    """True if the answer changes when a constant is added to all scores, as with clipped logits."""

    def end(self, exit_: bytes, prefix: str, outputs: list[str]) -> bytes:
        """Append the tail to an exit's graph; the exit's scores have ``prefix`` in their name."""
        if not self.graph:
            return exit_
        head = onnx.ModelProto.FromString(exit_)
        proto = in_opset(onnx.ModelProto.FromString(self.graph), default_opset(head))
        rename_graph(proto.graph, lambda name: prefix + name)
        known = {imported.domain for imported in head.opset_import} | {"ai.onnx"}
        head.opset_import.extend(o for o in proto.opset_import if o.domain not in known)
        return assemble([head.SerializeToString(), proto.SerializeToString()], outputs)

    def apply(self, scores: NDArray[Any]) -> NDArray[Any]:
        """Compute answers [b, …] from scores [b, …]."""
        if not self.graph:
            return scores
        runner = GraphRunner(onnx.ModelProto.FromString(self.graph))
        (answers,) = runner.run({self.taught.output: scores.astype(self.dtype)}).values()
        return answers


def dominators(flow: Dataflow, output: str) -> Iterator[str]:
    """Yield the tensors through which all of the output's data passes, the output first.

    The search from the output towards the inputs ends at the first operator with weights or with a
    body.
    """
    pending = {output}
    while True:
        if len(pending) == 1 and pending <= flow.producers.keys():
            yield from pending
        made = [flow.producers[name] for name in pending if name in flow.producers]
        if len(made) < len(pending):  # a graph input: no tensor before it carries all data
            return
        op = max(made, key=lambda op: op.index)
        if _ends_walk(op):
            return
        pending -= set(op.writes)
        pending |= {name for name in op.reads if name in flow.variable}


def _ends_walk(op: Operator) -> bool:
    known = is_standard(op.proto) or op.kind in ("QuantizeLinear", "DequantizeLinear")
    return op.has_body or op.kind in _WEIGHTED or not known


def find_activation(proto: onnx.ModelProto, flow: Dataflow, output: str) -> Operator | None:
    """Find the first activation after the last weights through which all data passes.

    Activations are Softmax, LogSoftmax and Sigmoid. A Softmax counts if it is computed along the
    last axis that has more than one element.
    """
    types = declared_types(proto)
    found = [activation_of(flow, types, name) for name in dominators(flow, output)]
    return next((op for op in reversed(found) if op is not None), None)


def activation_of(
    flow: Dataflow, types: Mapping[str, TensorType], tensor: str, axis: int | None = None
) -> Operator | None:
    """Return the activation whose values a tensor holds, if there is one.

    A softmax must be computed along ``axis``; by default along the last axis of more than one
    element.
    """
    op = flow.producers.get(tensor)
    while op is not None and keeps_values((op,)):
        op = flow.producers.get(op.proto.input[0])
    return op if op is not None and _is_activation(op, types, axis) else None


def _is_activation(op: Operator, types: Mapping[str, TensorType], wanted: int | None) -> bool:
    """Return whether an operator computes probabilities or their logarithms from class scores."""
    if op.kind in SIGMOIDS:
        return True
    tensor = types.get(op.writes[0])
    if op.kind not in SOFTMAXES or tensor is None or tensor.shape is None:
        return False
    axis = integer(op.proto, "axis", -1) % len(tensor.shape)
    if wanted is not None:
        return axis == wanted
    return axis > 0 and all(size == 1 for size in tensor.shape[axis + 1 :])


def operators_between(flow: Dataflow, scores: str, output: str) -> tuple[Operator, ...]:
    """Return the operators that compute the output from the scores, except constant operators."""
    found = flow.upstream([output], stop=frozenset([scores]))
    return tuple(op for op in found if not flow.is_constant(op))


def keeps_columns(operators: tuple[Operator, ...]) -> bool:
    """Return whether each column of the output depends only on the same column of the input."""
    return all(op.kind in _BY_COLUMN for op in operators)


def keeps_values(operators: tuple[Operator, ...]) -> bool:
    """Return whether operators only reshape values, or cast them to another floating-point type."""
    return all(op.kind in _MOVES or _is_floating_cast(op) for op in operators)


def _is_floating_cast(op: Operator) -> bool:
    return op.kind == "Cast" and "float" in dtype_name(integer(op.proto, "to"))


def keeps_unbounded(op: Operator, proto: onnx.ModelProto) -> bool:
    """Return whether an operator only selects, moves, scales or shifts scores.

    Heads can then imitate the operator's result.
    """
    if op.kind not in _AFFINE:
        return op.kind in _SELECTIONS or keeps_values((op,))
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    constants = [array_of(stored[name]) for name in op.reads if name in stored]
    return all(np.abs(value).max(initial=0) < _MASKING for value in constants)


def cut_tail(
    proto: onnx.ModelProto, flow: Dataflow, taught: Answer, output: str, **facts: Any
) -> Tail:
    """Copy the operators from the scores to the answer into a separate model.

    ``proto`` contains its weights and the types of its tensors. ``taught`` describes the scores,
    which heads imitate; the scores must be one of :func:`dominators`. ``output`` is the answer.
    ``facts`` are further fields of the :class:`Tail`.
    """
    types, start = declared_types(proto), taught.output
    dtype, shape = types[start].dtype, types[start].shape or ()
    between = operators_between(flow, start, output)
    if start == output or keeps_values(between):
        return Tail(taught=taught, dtype=dtype, shape=shape, **facts)
    operators = flow.upstream([output], stop=frozenset([start]))
    read = {name for op in operators for name in op.reads}
    model = onnx.ModelProto(ir_version=proto.ir_version, producer_name="offramp")
    model.opset_import.extend(proto.opset_import)
    graph = model.graph
    graph.name = "tail"
    graph.node.extend(op.proto for op in operators)
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in read)
    for place, name in ((graph.input, start), (graph.output, output)):
        sizes = list(types[name].shape or ())
        place.append(helper.make_tensor_value_info(name, types[name].elem_type, sizes))
    graph_bytes = model.SerializeToString()
    kinds = tuple(op.kind for op in between if op.kind not in _MOVES)
    return Tail(taught=taught, dtype=dtype, shape=shape, graph=graph_bytes, kinds=kinds, **facts)


def find_dense_tail(proto: onnx.ModelProto, flow: Dataflow, answer: Answer) -> Tail | None:
    """Find the tail of a model that answers for tokens or pixels, by its graph alone.

    The tail begins before an ArgMax, or after a Softmax over the classes that other operators
    follow.
    """
    if answer.task.kind not in _AXES:
        return None
    types, axis = declared_types(proto), _AXES[answer.task.kind]
    if answer.form == "classes":
        op = flow.producers[answer.output]
        while op.kind != "ArgMax":
            op = flow.producers[op.proto.input[0]]
        scores = op.proto.input[0]
        soft = activation_of(flow, types, scores, axis)
    else:
        rank = _rank(types, answer.output)
        chain = [name for name in dominators(flow, answer.output) if _rank(types, name) == rank]
        softs = ((name, activation_of(flow, types, name, axis)) for name in reversed(chain))
        scores, soft = next(((n, op) for n, op in softs if op is not None), (answer.output, None))
        if soft is None or keeps_values(operators_between(flow, scores, answer.output)):
            return None
    form = _FORMS.get(soft.kind if soft else "", "logits")
    return cut_tail(proto, flow, replace(answer, output=scores, form=form), answer.output)


_AXES: Final[dict[TaskKind, int]] = {"token-classification": 2, "segmentation": 1}
"""Dimension of the classes, by task."""
_FORMS: Final[dict[str, AnswerForm]] = {
    "Softmax": "probabilities",
    "LogSoftmax": "log-probabilities",
}


def _rank(types: Mapping[str, TensorType], name: str) -> int:
    shape = shape_of(types, name)
    return -1 if shape is None else len(shape)


def in_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Convert a tail to another opset, because a quantised copy of the model may have another."""
    if default_opset(proto) == opset:
        return proto
    try:
        return version_converter.convert_version(proto, opset)
    except Exception as error:  # the converter raises RuntimeError and its own kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"the operators after the model's scores are of opset {default_opset(proto)} and "
            f"cannot be converted to {opset}, which its int8 copy has ({reason}); compile with "
            "--precision fp32"
        ) from error


def giving(graph: bytes, tensor: str) -> bytes:
    """Return a graph with an inner tensor as an additional output, if the graph computes it."""
    model = onnx.ModelProto.FromString(graph)
    if tensor in {output.name for output in model.graph.output}:
        return graph
    if not any(tensor in node.output for node in model.graph.node):
        return graph
    model.graph.output.append(onnx.ValueInfoProto(name=tensor))
    return model.SerializeToString()


_CERTAIN: Final = 200.0
"""Logit of a class with a probability of almost 1."""
_DRAWN: Final = 2048
"""Number of random scores on which a tail is tried, in addition to scores of certain classes."""
_ROUNDING: Final = frozenset({"Cast", "Ceil", "Floor", "QuantizeLinear", "Round"})


def find_bounds(tail: Tail, wanted: NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and largest value of answers that are computed from probabilities.

    ``wanted`` [n, …] are answers of the model on data.
    """
    ends = np.concatenate([_tried(tail).ravel(), wanted.ravel()])
    ends = ends[np.isfinite(ends)]
    return float(ends.min()), float(ends.max())


def find_thresholds(tail: Tail, wanted: NDArray[Any]) -> tuple[float, ...]:
    """Return, for each label, the smallest value of the answer at which the label is assigned.

    That is the value at probability one half; for a rounded answer, the middle between two steps.
    ``wanted`` [n, labels] are answers of the model on data. A model may answer its smallest value
    for every unlikely label. So a threshold that is not above the smallest value is raised: the
    label is then assigned only at larger values.
    """
    taught = tail.taught
    neutral, near = (0.0, 0.02) if taught.form == "logits" else (0.5, 0.005)
    around = np.array([-near, near]) if _ROUNDING.intersection(tail.kinds) else np.zeros(1)
    scores = np.repeat(neutral + around[:, None], taught.classes, axis=1)
    if taught.form == "log-probabilities":
        scores = np.log(scores)
    middle = tail.apply(scores).astype(np.float64).mean(axis=0)
    tried = np.concatenate([_tried(tail), wanted]).astype(np.float64)
    columns = zip(middle.tolist(), tried.T, strict=True)
    return tuple(_above_smallest(threshold, column) for threshold, column in columns)


def _tried(tail: Tail) -> NDArray[Any]:
    """Return answers to scores with one class certain, one class impossible, and random scores."""
    k, rng = tail.taught.classes, np.random.default_rng(0)
    inner = rng.random((_DRAWN, k))
    corners = np.concatenate([np.eye(k), 1 - np.eye(k), np.zeros((1, k)), np.ones((1, k)), inner])
    if tail.taught.form == "logits":
        corners = np.concatenate([_CERTAIN * (2 * corners - 1), 10 * (2 * inner - 1)])
    elif tail.taught.task.kind == "classification":
        corners = corners[corners.sum(axis=1) > 0]
        corners /= corners.sum(axis=1, keepdims=True)
        if tail.taught.form == "log-probabilities":
            corners = np.log(np.maximum(corners, np.finfo(np.float32).tiny))
    return tail.apply(corners)


def _above_smallest(threshold: float, values: NDArray[np.float64]) -> float:
    """Return the threshold; if it is not above the smallest value, return a larger threshold."""
    steps = np.unique(values[np.isfinite(values)])
    if len(steps) < 2 or threshold > steps[0]:
        return threshold
    return float(steps[:2].mean())
