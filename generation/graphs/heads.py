"""The end of every exit: token and confidence from logits, or confidence from states."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp.compiler.graphs.graph import default_opset
from offramp.generation.bundle.tensor_names import (
    ANSWER,
    CONFIDENCE,
    LOGITS,
    PREVIOUS_STATE,
    STATE,
)
from offramp.generation.bundle.text_model import TextCriterion


def with_answer(head: onnx.ModelProto, criterion: TextCriterion) -> onnx.ModelProto:
    """Add token int64 [n] and confidence float32 [n] to a graph with logits [n, 1, v].

    The graph is changed in place, and has these two outputs only. The token is the first of the
    largest logits, as in a greedy loop. Probabilities are computed relative to the largest logit,
    so that none overflows; the margin of the two largest is p1 (1 - exp(l2 - l1)). With a criterion
    that reads states the confidence is the largest probability.
    """
    nodes = _Nodes(head)
    float32 = nodes.add("Cast", [LOGITS], "head/logits", to=onnx.TensorProto.FLOAT)
    last = nodes.add("Squeeze", [float32, nodes.integers("head/one", [1])], "head/last")
    nodes.add("ArgMax", [last], ANSWER, axis=-1, keepdims=0)
    nodes.node("TopK", [last, nodes.integers("head/two", [2])], ["head/top", "head/places"])
    first = nodes.add(
        "Slice",
        ["head/top", nodes.integers("head/zero", [0]), "head/one", "head/one"],
        "head/first",
    )
    below = nodes.add("Sub", [last, first], "head/below")
    parts = nodes.add("Exp", [below], "head/parts")
    total = nodes.add("ReduceSum", [parts, "head/one"], "head/total", keepdims=1)
    largest = nodes.add("Reciprocal", [total], "head/largest")
    if criterion == "softmax margin":
        second = nodes.add("Slice", ["head/top", "head/one", "head/two", "head/one"], "head/second")
        gap = nodes.add("Exp", [nodes.add("Sub", [second, first], "head/gap")], "head/ratio")
        share = nodes.add("Sub", [nodes.float32("head/whole", 1.0), gap], "head/share")
        largest = nodes.add("Mul", [largest, share], "head/margin")
    nodes.add("Squeeze", [largest, "head/one"], CONFIDENCE)
    del head.graph.output[:]
    head.graph.output.extend(
        [
            helper.make_tensor_value_info(ANSWER, onnx.TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info(CONFIDENCE, onnx.TensorProto.FLOAT, ["batch"]),
        ]
    )
    return head


def state_similarity(width: int) -> onnx.ModelProto:
    """Return the judge of "state similarity" (CALM 3.5), the cosine of two states.

    The states are the input and the output of the last layer before the exit.
    """
    model = helper.make_model(
        helper.make_graph(
            [],
            "state similarity",
            [
                helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 1, width])
                for name in (STATE, PREVIOUS_STATE)
            ],
            [helper.make_tensor_value_info(CONFIDENCE, onnx.TensorProto.FLOAT, ["batch"])],
        ),
        producer_name="offramp",
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    nodes = _Nodes(model)
    axes = nodes.integers("judge/axes", [1, 2])

    def product(one: str, other: str, name: str) -> str:
        both = nodes.add("Mul", [one, other], f"judge/{name}/both")
        return nodes.add("ReduceSum", [both, axes], f"judge/{name}", keepdims=0)

    lengths = [
        nodes.add("Sqrt", [product(state, state, f"{state}/square")], f"judge/{state}/length")
        for state in (STATE, PREVIOUS_STATE)
    ]
    dot = product(STATE, PREVIOUS_STATE, "dot")
    # Divide by one length and then by the other: the product of two large lengths could overflow.
    share = nodes.add("Div", [dot, lengths[0]], "judge/share")
    cosine = nodes.add("Div", [share, lengths[1]], "judge/cosine")
    bounds = [nodes.float32("judge/least", 0.0), nodes.float32("judge/most", 1.0)]
    nodes.add("Clip", [cosine, *bounds], CONFIDENCE)
    return model


def reads_previous(judge: onnx.ModelProto) -> bool:
    """Return True if a judge reads the state before the last layer of its stage."""
    return any(info.name == PREVIOUS_STATE for info in judge.graph.input)


class _Nodes:
    """Operators appended to a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        assert default_opset(model) >= 13, "exports of decoders are newer"
        self._graph = model.graph

    def node(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        self._graph.node.append(
            helper.make_node(kind, inputs, outputs, name=outputs[0], **attributes)
        )

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.node(kind, inputs, [output], **attributes)
        return output

    def integers(self, name: str, values: list[int]) -> str:
        self._graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def float32(self, name: str, value: float) -> str:
        self._graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name
