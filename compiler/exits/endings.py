"""The end of an exit as served: its answer in the source model's form, and its confidence.

The graph computes the confidence, because operators in the graph take a tenth of the time of numpy
calls between two stages. The same computation in numpy is in
:mod:`offramp.engine.answers.principal_values` and :mod:`offramp.engine.answers.certainty`. PAME's
count threshold (5.3) chooses one of the sorted principal values. :class:`PartBuilder` writes such
graphs operator by operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle import Answer, TensorSpec
from offramp.bundle.schema.answers import LEARNED_WEIGHTS
from offramp.compiler.graphs.graph import default_opset, refill
from offramp.engine.answers.certainty import LEAST, SMALLEST
from offramp.engine.answers.principal_values import HIGHEST, ROUNDING, stride_of
from offramp.engine.graphs.assembly import assemble

DescribedTensor: TypeAlias = tuple[str, str, Sequence[int | str]]
"""A tensor's name, its element type as a name of numpy's, and its shape."""


class PartBuilder:
    """Collects nodes and weights under a unique prefix, so that graphs can be joined later."""

    def __init__(self, prefix: str, opset: int, ir_version: int) -> None:
        self.prefix = prefix
        self.opset = opset
        self._ir_version = ir_version
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        output = self.prefix + (name or f"{op.lower()}_{len(self._nodes)}")
        self._nodes.append(
            helper.make_node(op, list(inputs), [output], name=f"{output}:{op}", **attributes)
        )
        return output

    def add_all(
        self, op: str, inputs: Sequence[str], names: Sequence[str], **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs; returns their names, which are generated if empty."""
        number = len(self._nodes)
        outputs = [
            self.prefix + (name or f"{op.lower()}_{number}_{i}") for i, name in enumerate(names)
        ]
        node = helper.make_node(op, list(inputs), outputs, name=f"{outputs[0]}:{op}", **attributes)
        self._nodes.append(node)
        return outputs

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer; returns its name."""
        full = f"{self.prefix}{name}_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value, order="C"), full))
        return full

    def reduce(
        self, op: str, tensor: str, axis: int, name: str = "", *, keepdims: bool = False
    ) -> str:
        """Add ReduceMax, ReduceMin or ReduceMean; axes are an input from opset 18 on."""
        if self.opset >= 18:
            axes = self.weight("axes", np.array([axis], np.int64))
            return self.add(op, [tensor, axes], name, keepdims=int(keepdims))
        return self.add(op, [tensor], name, axes=[axis], keepdims=int(keepdims))

    def build(self, inputs: Sequence[DescribedTensor], outputs: Sequence[DescribedTensor]) -> bytes:
        """Return the checked, serialised model."""
        graph = helper.make_graph(
            self._nodes,
            self.prefix.rstrip("/"),
            [_value_info(*tensor) for tensor in inputs],
            [_value_info(*tensor) for tensor in outputs],
            initializer=self._weights,
        )
        model = helper.make_model(
            graph,
            producer_name="offramp",
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=self._ir_version,
        )
        onnx.checker.check_model(model)
        return model.SerializeToString()


def _value_info(name: str, dtype: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, list(shape))


CONFIDENCE = "confidence"
"""Name of an exit's output with the confidence, without the exit's prefix."""
_STEP = 1e-3
"""Subtracted from a share multiplied by a number of tokens before the product is rounded up: if the
exact product is an integer, the error of float32 is smaller than this."""


def exit_prefix(candidate: int) -> str:
    """Return the prefix of all names in a candidate's exit, which is unique in the joined graph."""
    return f"offramp_exit_{candidate:02d}/"


def end_classes(
    part: PartBuilder, scores: str, answer: Answer, dtype: str, weights: Sequence[float] = ()
) -> None:
    """Add a classification answer from logits [b, classes], and its confidence.

    ``scores`` must have the answer's name already if the form is float32 logits. The answer's
    criterion determines the confidence; ``weights`` are for the criterion ``learned``.
    """
    # A tensor of the answer's type gets its name directly: a Cast to the same type would be
    # executed.
    names = {answer.form: answer.output} if dtype == "float32" else {}
    probabilities = part.add("Softmax", [scores], names.get("probabilities", ""), axis=-1)
    criterion = "probability" if answer.criterion.on_host else answer.criterion.name
    add_certainty(
        part,
        probabilities,
        answer.classes,
        name=CONFIDENCE,
        criterion=criterion,
        weights=weights,
    )
    given = {"logits": scores, "probabilities": probabilities}.get(answer.form, "")
    if answer.form == "log-probabilities":
        given = part.add("LogSoftmax", [scores], names.get(answer.form, ""), axis=-1)
    _in_its_type(part, given, answer, dtype)


def end_labels(part: PartBuilder, scores: str, answer: Answer, dtype: str, share: float) -> None:
    """Add an answer of yes or no for each label from logits [b, labels], and its confidence."""
    named = answer.output if dtype == "float32" and answer.form == "probabilities" else ""
    chance = part.add("Sigmoid", [scores], named)
    sure = _bounded(part, _decided(part, chance))  # NaN becomes the least confidence
    add_confidence(part, sure, share, places=answer.classes)
    given = chance if answer.form == "probabilities" else scores
    _in_its_type(part, given, answer, dtype)


def end_values(part: PartBuilder, scores: str, answer: Answer, dtype: str) -> None:
    """Add an answer of values from scores [b, values + 1]; the last score is a confidence logit."""
    last = answer.classes
    sizes = part.weight("sizes", np.array([last, 1], np.int64))
    named = answer.output if dtype == "float32" else ""
    values, sure = part.add_all("Split", [scores, sizes], [named, ""], axis=1)
    chance = part.add("Sigmoid", [sure])
    part.add("Reshape", [chance, part.weight("flat", np.array([-1], np.int64))], CONFIDENCE)
    _in_its_type(part, values, answer, dtype)


def _in_its_type(part: PartBuilder, given: str, answer: Answer, dtype: str) -> None:
    if dtype != "float32":
        onnx_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        part.add("Cast", [given], answer.output, to=onnx_type)


def add_principal(
    part: PartBuilder, scores: str, answer: Answer, shape: tuple[int | str, ...]
) -> tuple[str, int | None]:
    """Add the principal values [b, n] of an answer; return their name, and n if it is fixed.

    ``scores`` are float32 of one of these shapes: [b, classes], [b, labels], [b, tokens, classes],
    [b, classes, height, width] or heat maps [b, key points, height, width]. The scores are the
    answer itself, or the tensor that the answer's classes are picked from.
    """
    soft = answer.form == "probabilities"
    match answer.task.kind:
        case "classification":
            largest = _largest(part, scores, 1, soft=soft)
            column = part.weight("column", np.array([-1, 1], np.int64))
            return _bounded(part, part.add("Reshape", [largest, column])), 1
        case "multi-label":
            chance = scores if soft else part.add("Sigmoid", [scores])
            return _bounded(part, _decided(part, chance)), answer.classes
        case "token-classification":
            tokens = shape[1]
            largest = _largest(part, scores, 2, soft=soft)
            return _bounded(part, largest), tokens if isinstance(tokens, int) else None
        case "segmentation":
            height, width = shape[2:]
            count = None
            if isinstance(height, int) and isinstance(width, int):
                step = stride_of(height, width)
                count = math.ceil(height / step) * math.ceil(width / step)
                if step > 1:
                    scores = part.add("Slice", [scores, *_every(part, step)])
            largest = _largest(part, scores, 1, soft=soft)
            return _bounded(part, _flattened(part, largest)), count
        case "pose":
            maps = part.weight("maps", np.array([0, 0, -1], np.int64))
            places = part.add("Reshape", [scores, maps])
            highest = part.weight("highest", np.array([HIGHEST], np.int64))
            values, _ = part.add_all("TopK", [places, highest], ["", ""], axis=2)
            count = answer.classes * HIGHEST
            return _bounded(part, _flattened(part, values)), count
        case kind:
            raise ValueError(f"answers of {kind} have no confidence")


def add_confidence(
    part: PartBuilder, principal: str, share: float, *, places: int | None, mask: str | None = None
) -> str:
    """Add the confidence [b]: the value that a share of the principal values [b, n] reach.

    The confidence's name is ``CONFIDENCE``. ``places`` is n if n is fixed; ``mask`` [b, n], a
    float32 tensor, marks the values that count.
    """
    if mask is None and share == 1:
        smallest = part.reduce("ReduceMin", principal, 1)
        zero = _number(part, "zero", 0)
        return part.add("Max", [smallest, zero], CONFIDENCE)
    flat = part.weight("flat", np.array([-1], np.int64))
    if mask is None and places is not None:
        taken = max(math.ceil(share * places - ROUNDING), 1)
        from_below = places - taken + 1
        # Sort as few values as possible, from the nearer end.
        from_above = taken <= from_below
        sorted_ = taken if from_above else from_below
        count = part.weight("count", np.array([sorted_], np.int64))
        names = ["", ""]
        ordered, _ = part.add_all(
            "TopK", [principal, count], names, axis=1, largest=int(from_above)
        )
        last = part.weight("last", np.array([sorted_ - 1], np.int64))
        return part.add("Reshape", [part.add("Gather", [ordered, last], axis=1), flat], CONFIDENCE)
    size = part.add("Shape", [principal])
    width = part.add("Gather", [size, part.weight("second", np.array([1], np.int64))], axis=0)
    one = _number(part, "one", 1)
    if mask is None:
        counted = part.add("Cast", [width], to=TensorProto.FLOAT)  # [1]
        rows = part.add("Gather", [size, part.weight("first", np.array([0], np.int64))], axis=0)
        counted = part.add("Expand", [counted, rows])
        counted = part.add("Reshape", [counted, part.weight("column", np.array([-1, 1], np.int64))])
    else:
        axis = part.weight("axis", np.array([1], np.int64))
        counted = part.add("ReduceSum", [mask, axis], keepdims=1)
        # Values that do not count are below all that count.
        absent = part.add("Sub", [mask, one])
        principal = part.add("Add", [part.add("Mul", [principal, mask]), absent])
    wanted = part.add("Mul", [counted, _number(part, "share", share)])
    wanted = part.add("Sub", [wanted, _number(part, "rounding", _STEP)])
    wanted = part.add("Max", [part.add("Ceil", [wanted]), one])
    position = part.add("Cast", [part.add("Sub", [wanted, one])], to=TensorProto.INT64)
    ordered, _ = part.add_all("TopK", [principal, width], ["", ""], axis=1)
    taken_value = part.add("GatherElements", [ordered, position], axis=1)
    bounded = part.add("Max", [taken_value, _number(part, "zero", 0)])
    return part.add("Reshape", [bounded, flat], CONFIDENCE)


def add_counts(part: PartBuilder, mask: TensorSpec) -> str:
    """Add float32 [b, tokens] with 1 for each token that a mask marks, and 0 for other tokens."""
    zero = part.weight("nothing", np.array(0, mask.dtype))
    counts = part.add("Not", [part.add("Equal", [mask.name, zero])])
    return part.add("Cast", [counts], to=TensorProto.FLOAT)


def add_certainty(
    part: PartBuilder,
    probabilities: str,
    classes: int,
    *,
    name: str,
    criterion: str,
    weights: Sequence[float] = (),
) -> None:
    """Add the certainty [b] of probabilities [b, classes] by a criterion, named ``name``.

    With ``probability`` NaN stays NaN, and with other criteria NaN becomes 0: in both cases the
    sample does not leave. ``weights`` are for the criterion ``learned``.
    """
    if criterion == "probability":
        part.reduce("ReduceMax", probabilities, 1, name)
    elif criterion == "margin":
        _bounded(part, _margin(part, probabilities, classes), name)
    elif criterion == "entropy":
        _bounded(part, _certainty(part, probabilities, classes), name)
    else:
        assert len(weights) == LEARNED_WEIGHTS, f"{criterion} with {len(weights)} weights"
        _learned(part, probabilities, classes, weights, name)


def with_certainty(
    graph: bytes, exits: Mapping[str, str], answer: Answer, dtype: str, criterion: str
) -> bytes:
    """Replace the confidences in a graph of exits by confidences of another criterion.

    ``exits`` maps the names of answers [b, classes], which have the form of ``answer`` and element
    type ``dtype``, to the names of their confidences. All outputs keep their names, and outputs
    other than confidences keep their values. The criterion ``learned`` is not possible, because its
    weights are not in the graph.
    """
    proto = onnx.ModelProto.FromString(graph)
    renamed = {old: f"{old}/before" for old in exits.values()}
    for node in proto.graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    outputs = [output.name for output in proto.graph.output]
    refill(proto.graph.output, [o for o in proto.graph.output if o.name not in renamed])
    parts = [proto.SerializeToString()]
    for given, confidence in exits.items():
        prefix = f"{confidence}/by/"  # a prefix that the exit itself does not use
        part = PartBuilder(prefix, default_opset(proto), proto.ir_version)
        scores = given if dtype == "float32" else part.add("Cast", [given], to=TensorProto.FLOAT)
        if answer.form != "probabilities":
            scores = part.add("Softmax", [scores], axis=-1)
        add_certainty(part, scores, answer.classes, name=criterion, criterion=criterion)
        inputs = [(given, dtype, ("batch", answer.classes))]
        built = part.build(inputs, [(prefix + criterion, "float32", ("batch",))])
        parts.append(_renamed(built, prefix + criterion, confidence))
    return assemble(parts, outputs)


def _renamed(graph: bytes, old: str, new: str) -> bytes:
    """Rename the only output of a graph."""
    proto = onnx.ModelProto.FromString(graph)
    (output,) = proto.graph.output
    output.name = new
    for node in proto.graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    return proto.SerializeToString()


def _learned(
    part: PartBuilder, probabilities: str, classes: int, weights: Sequence[float], name: str
) -> None:
    largest = part.reduce("ReduceMax", probabilities, 1)
    statistics = (
        largest,
        _margin(part, probabilities, classes),
        _certainty(part, probabilities, classes),
    )
    sum_ = _number(part, "constant", weights[-1])
    one = _number(part, "one", 1)
    for value, weight in zip(statistics, weights[:-1], strict=True):
        bounds = [_number(part, "bound", bound) for bound in (LEAST, 1 - LEAST)]
        bounded = part.add("Clip", [value, *bounds])
        odds = [part.add("Log", [bounded]), part.add("Log", [part.add("Sub", [one, bounded])])]
        weighed = part.add("Mul", [part.add("Sub", odds), _number(part, "weight", weight)])
        sum_ = part.add("Add", [sum_, weighed])
    sure = part.add("Sigmoid", [sum_])
    # Clipping may have replaced NaN; the largest probability shows whether there was one.
    there = part.add("Greater", [largest, _number(part, "zero", 0)])
    part.add("Where", [there, sure, _number(part, "zero", 0)], name)


def _margin(part: PartBuilder, probabilities: str, classes: int) -> str:
    if classes == 1:
        return part.reduce("ReduceMax", probabilities, 1)
    count = part.weight("two", np.array([2], np.int64))
    largest, _ = part.add_all("TopK", [probabilities, count], ["", ""], axis=1)
    signs = part.weight("signs", np.array([[1, -1]], np.float32))
    return _sum(part, part.add("Mul", [largest, signs]))


def _certainty(part: PartBuilder, probabilities: str, classes: int) -> str:
    """Add the certainty 1 − entropy / log(classes); log(classes) is the largest entropy."""
    if classes == 1:
        return part.reduce("ReduceMax", probabilities, 1)
    least = _number(part, "least", SMALLEST)
    logs = part.add("Log", [part.add("Max", [probabilities, least])])
    negative = _sum(part, part.add("Mul", [probabilities, logs]))
    relative = part.add("Div", [negative, _number(part, "most", math.log(classes))])
    return part.add("Add", [relative, _number(part, "one", 1)])


def _largest(part: PartBuilder, scores: str, axis: int, *, soft: bool) -> str:
    """Add the largest probability along an axis.

    For logits it is exp(0) / sum exp(x − max): ONNX Runtime's Softmax is slow along any axis but
    the last, and took a fifth of the time of a small bridge.
    """
    if soft:
        return part.reduce("ReduceMax", scores, axis)
    largest = part.reduce("ReduceMax", scores, axis, keepdims=True)
    axes = part.weight("axes", np.array([axis], np.int64))
    shares = part.add("Exp", [part.add("Sub", [scores, largest])])
    return part.add("Reciprocal", [part.add("ReduceSum", [shares, axes], keepdims=0)])


def _decided(part: PartBuilder, chance: str) -> str:
    """Add the probability of a yes-or-no decision, from the probability of yes."""
    one = _number(part, "one", 1)
    return part.add("Max", [chance, part.add("Sub", [one, chance])])


def _bounded(part: PartBuilder, values: str, name: str = "") -> str:
    """Replace NaN in a tensor by 0, and clip its values to [0, 1]."""
    zero, one = _number(part, "zero", 0), _number(part, "one", 1)
    valid = part.add("Where", [part.add("IsNaN", [values]), zero, values])
    return part.add("Clip", [valid, zero, one], name)


def _flattened(part: PartBuilder, values: str) -> str:
    return part.add("Reshape", [values, part.weight("rows", np.array([0, -1], np.int64))])


def _every(part: PartBuilder, step: int) -> list[str]:
    """Return the inputs of a Slice of every ``step``-th row and column of [b, c, height, width]."""
    ends = [np.iinfo(np.int64).max] * 2
    numbers = {"starts": [0, 0], "ends": ends, "axes": [2, 3], "steps": [step, step]}
    return [part.weight(name, np.array(v, np.int64)) for name, v in numbers.items()]


def _sum(part: PartBuilder, values: str) -> str:
    axis = part.weight("axis", np.array([1], np.int64))
    return part.add("ReduceSum", [values, axis], keepdims=0)


def _number(part: PartBuilder, name: str, value: float | np.floating) -> str:
    return part.weight(name, np.array(value, np.float32))
