"""The criteria of answers of one class of several, as operators of an exit's graph.

:mod:`offramp.engine.answers.certainty` has the same in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from offramp.bundle import Answer
from offramp.bundle.schema.answers import LEARNED_WEIGHTS
from offramp.compiler.common.parts import PartBuilder
from offramp.engine.answers.certainty import LEAST, SMALLEST
from offramp.engine.graphs.assembly import assemble


def add_certainty(
    part: PartBuilder,
    probabilities: str,
    classes: int,
    *,
    name: str,
    criterion: str,
    weights: Sequence[float] = (),
) -> None:
    """Add how sure probabilities [b, classes] are by a criterion, named ``name`` [b].

    Of ``probability`` NaN stays NaN, which no sample leaves with; of others it is 0. ``weights``
    are those of ``learned``.
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
    """Have a graph of exits say how sure they are by another criterion than it was built with.

    ``exits`` has the names of their confidences by those of their answers [b, classes], which are
    of the answer's form and ``dtype``; the graph gives the other outputs as before, and all under
    the same names. ``learned`` has weights that no graph can be given afterwards.
    """
    proto = onnx.ModelProto.FromString(graph)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    renamed = {old: f"{old}/before" for old in exits.values()}
    for node in proto.graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    outputs = [output.name for output in proto.graph.output]
    kept = [output for output in proto.graph.output if output.name not in renamed]
    del proto.graph.output[:]
    proto.graph.output.extend(kept)
    parts = [proto.SerializeToString()]
    for given, confidence in exits.items():
        prefix = f"{confidence}/by/"  # of the exit's own names none may come again
        part = PartBuilder(prefix, opset, proto.ir_version)
        scores = given if dtype == "float32" else part.add("Cast", [given], to=TensorProto.FLOAT)
        if answer.form != "probabilities":
            scores = part.add("Softmax", [scores], axis=-1)
        add_certainty(part, scores, answer.classes, name=criterion, criterion=criterion)
        inputs = [(given, dtype, ("batch", answer.classes))]
        built = part.build(inputs, [(prefix + criterion, "float32", ("batch",))])
        parts.append(_renamed(built, prefix + criterion, confidence))
    return assemble(parts, outputs)


def _renamed(graph: bytes, old: str, new: str) -> bytes:
    """Rename the one output of a graph."""
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
    # A bound may have taken the place of NaN: what the largest probability says is not lost.
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
    """Add 1 − the entropy over its largest, log(classes)."""
    if classes == 1:
        return part.reduce("ReduceMax", probabilities, 1)
    least = _number(part, "least", SMALLEST)
    logs = part.add("Log", [part.add("Max", [probabilities, least])])
    negative = _sum(part, part.add("Mul", [probabilities, logs]))
    relative = part.add("Div", [negative, _number(part, "most", math.log(classes))])
    return part.add("Add", [relative, _number(part, "one", 1)])


def _sum(part: PartBuilder, values: str) -> str:
    axis = part.weight("axis", np.array([1], np.int64))
    return part.add("ReduceSum", [values, axis], keepdims=0)


def _number(part: PartBuilder, name: str, value: float | np.floating) -> str:
    return part.weight(name, np.array(value, np.float32))


def _bounded(part: PartBuilder, values: str, name: str) -> None:
    """Take NaN for 0, and bound by 0 and 1."""
    zero, one = _number(part, "zero", 0), _number(part, "one", 1)
    valid = part.add("Where", [part.add("IsNaN", [values]), zero, values])
    part.add("Clip", [valid, zero, one], name)
