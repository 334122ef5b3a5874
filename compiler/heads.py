"""Exits as ONNX graphs: the pooling before a head, and the trained head after it.

The pooling is a graph of its own too, because it is what features are recorded with: what a head
was trained on and what it is served with are computed by the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle import Answer, Head
from offramp.calibration.cut_tensors import CutTensor
from offramp.calibration.families import (
    POOLINGS,
    ServedHead,
    family_of,
    grids_of,
    join_tensors,
    joined_width,
    last_token,
    masked_tensors,
    pool_map,
)
from offramp.calibration.features import LAST, WHOLE
from offramp.compiler.model import SourceModel
from offramp.engine.assembly import assemble

CONFIDENCE = "confidence"
"""Name of the output with the largest probability, after the exit's prefix."""
_Tensor = tuple[str, str, Sequence[int | str]]
"""Name, numpy's name of the element type, shape."""


class PartBuilder:
    """Collects nodes and weights under a prefix of their own, so that parts can be joined."""

    def __init__(self, prefix: str, opset: int, ir_version: int) -> None:
        self.prefix = prefix
        self.opset = opset
        self._ir_version = ir_version
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """Add a node with one output; gives the output's name."""
        output = self.prefix + (name or f"{op.lower()}_{len(self._nodes)}")
        self._nodes.append(
            helper.make_node(op, list(inputs), [output], name=f"{output}:{op}", **attributes)
        )
        return output

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer; gives its name."""
        full = f"{self.prefix}{name}_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value, order="C"), full))
        return full

    def reduce(self, op: str, tensor: str, axis: int, name: str = "") -> str:
        """Add ReduceMax or ReduceMean; their axes became an input with opset 18."""
        if self.opset >= 18:
            axes = self.weight("axes", np.array([axis], np.int64))
            return self.add(op, [tensor, axes], name, keepdims=0)
        return self.add(op, [tensor], name, axes=[axis], keepdims=0)

    def build(self, inputs: Sequence[_Tensor], outputs: Sequence[_Tensor]) -> bytes:
        """Give the checked, serialised model."""
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


def build_pooling(
    cut: CutTensor, prefix: str, grids: Sequence[int], *, opset: int, ir_version: int
) -> tuple[bytes, dict[int, str]]:
    """Build the graph that pools a map; gives it, and by grid its output [n, features]."""
    assert cut.width is not None
    part = PartBuilder(prefix, opset, ir_version)
    tensor = _as_float32(part, cut)
    names = {
        grid: part.add("Flatten", [pool_map(part, cut, tensor, grid)], f"grid{grid}", axis=1)
        for grid in grids
    }
    outputs = [(names[g], "float32", ("batch", cut.width * g ** len(cut.sides))) for g in grids]
    return part.build([(cut.name, cut.dtype, cut.shape)], outputs), names


def build_last(
    cut: CutTensor, prefix: str, *, opset: int, ir_version: int
) -> tuple[bytes, dict[int, str]]:
    """Build the graph that gives tokens' last one that counts; gives it, and its output."""
    assert cut.width is not None
    part = PartBuilder(prefix, opset, ir_version)
    last = last_token(part, _as_float32(part, cut), cut.mask, "last")
    inputs = _described([cut], [cut] if cut.mask else [])
    return part.build(inputs, [(last, "float32", ("batch", cut.width))]), {LAST: last}


def build_joining(
    cut: CutTensor, prefix: str, *, opset: int, ir_version: int
) -> tuple[bytes, dict[int, str]]:
    """Build the graph that pools and joins a set of tensors; gives it, and its output."""
    part = PartBuilder(prefix, opset, ir_version)
    joined = join_tensors(part, [_as_float32(part, tensor) for tensor in cut.read], cut)
    inputs = _described(cut.read, masked_tensors(cut, Head(kind="joined")))
    graph = part.build(inputs, [(joined, "float32", ("batch", joined_width(cut)))])
    return graph, {WHOLE: joined}


def _described(read: Sequence[CutTensor], masked: Sequence[CutTensor] = ()) -> list[_Tensor]:
    """Describe what a head reads: cut tensors, and the masks of some."""
    inputs: list[_Tensor] = [(cut.name, cut.dtype, cut.shape) for cut in read]
    for cut in masked:
        assert cut.mask is not None
        inputs.append((cut.mask, cut.mask_dtype, ("batch", cut.shape[1])))
    return inputs


def build_exit(
    cut: CutTensor,
    head: Head,
    weights: Mapping[str, NDArray[np.float32]],
    answer: Answer,
    prefix: str,
    *,
    answer_dtype: str,
    opset: int,
    ir_version: int,
) -> bytes:
    """Build an exit: pooling, trained head, the source model's post-processing, confidence.

    The largest probability is computed in the graph too: a few operators there cost a tenth of as
    many calls of numpy between two stages. The answer, in the source model's form, is named
    ``{prefix}{answer.output}``; ``answer_dtype`` is numpy's name of its element type.
    """
    part = PartBuilder(prefix, opset, ir_version)
    read = [_as_float32(part, tensor) for tensor in cut.read]
    features = POOLINGS[head.kind].build(part, read, ServedHead(cut, head, weights))
    # Whatever has the answer's type gets its name: a Cast to the same type would be carried out.
    names = {answer.form: answer.output} if answer_dtype == "float32" else {}
    logits = _layers(part, features, weights, names.get("logits", ""))
    probabilities = part.add("Softmax", [logits], names.get("probabilities", ""), axis=-1)
    part.reduce("ReduceMax", probabilities, 1, CONFIDENCE)
    given = {"logits": logits, "probabilities": probabilities}.get(answer.form, "")
    if answer.form == "log-probabilities":
        given = part.add("LogSoftmax", [logits], names.get(answer.form, ""), axis=-1)
    if not names:
        onnx_type = helper.np_dtype_to_tensor_dtype(np.dtype(answer_dtype))
        part.add("Cast", [given], answer.output, to=onnx_type)
    inputs = _described(cut.read, masked_tensors(cut, head))
    answered = (prefix + answer.output, answer_dtype, ("batch", answer.classes))
    return part.build(inputs, [answered, (prefix + CONFIDENCE, "float32", ("batch",))])


def build_own(cut: CutTensor, answer: Answer, prefix: str, *, opset: int, ir_version: int) -> bytes:
    """Build the exit that a quantised model's own answer is: the answer, and its confidence.

    ``cut`` is that answer; names are as :func:`build_exit` gives them. Rounding may take the
    largest of quantised probabilities out of [0, 1].
    """
    part = PartBuilder(prefix, opset, ir_version)
    part.add("Identity", [cut.name], answer.output)
    scores = _as_float32(part, cut)
    if answer.form == "probabilities":
        bounds = [part.weight("bound", np.array(bound, np.float32)) for bound in (0, 1)]
        probabilities = part.add("Clip", [scores, *bounds])
    else:
        probabilities = part.add("Softmax", [scores], axis=-1)
    part.reduce("ReduceMax", probabilities, 1, CONFIDENCE)
    answered = (prefix + answer.output, cut.dtype, cut.shape)
    confidence = (prefix + CONFIDENCE, "float32", ("batch",))
    return part.build([(cut.name, cut.dtype, cut.shape)], [answered, confidence])


def build_empty(read: Sequence[CutTensor], prefix: str, *, opset: int, ir_version: int) -> bytes:
    """Build a graph that reads cut tensors and does next to nothing, to be timed against."""
    part = PartBuilder(prefix, opset, ir_version)
    shapes = [(part.add("Shape", [cut.name]), "int64", (cut.rank,)) for cut in read]
    return part.build(_described(read), shapes)


def _as_float32(part: PartBuilder, cut: CutTensor) -> str:
    single = cut.dtype == "float32"
    return cut.name if single else part.add("Cast", [cut.name], to=TensorProto.FLOAT)


def _layers(
    part: PartBuilder, features: str, weights: Mapping[str, NDArray[np.float32]], name: str = ""
) -> str:
    """One or two dense layers, of which the last is named; weights as [inputs, outputs]."""

    def dense(tensor: str, layer: str, name: str = "") -> str:
        terms = [part.weight(kind, weights[f"{layer}{kind}"]) for kind in ("weight", "bias")]
        return part.add("Gemm", [tensor, *terms], name)

    if "hidden_weight" in weights:
        features = part.add("Relu", [dense(features, "hidden_")])
    return dense(features, "", name)


def attach_poolings(
    model: SourceModel, segments: Sequence[bytes], cuts: Sequence[CutTensor]
) -> tuple[bytes, tuple[Mapping[int, str], ...]]:
    """Join segments and poolings into one graph: what features are recorded with.

    Gives the model, whose first output is the answer, and per candidate the names of its outputs
    by grid (``WHOLE`` for tensors that are recorded as they are, ``LAST`` for the last token; none
    where no head fits).
    """
    parts: list[bytes] = []
    outputs: list[Mapping[int, str]] = []
    for index, (segment, cut) in enumerate(zip(segments, cuts, strict=False)):
        parts.append(segment)
        kinds = {head.kind for head in family_of(cut)}
        whole = {WHOLE: cut.name} if kinds and cut.form in ("tokens", "vector") else {}
        prefix, pooled = f"offramp_pool_{index:02d}/", dict[int, str]()
        if "joined" in kinds:
            pooling, pooled = build_joining(cut, prefix, **model.versions)
        elif "grid" in kinds:
            pooling, pooled = build_pooling(cut, prefix, grids_of(cut), **model.versions)
        elif "last" in kinds:
            pooling, pooled = build_last(cut, prefix, **model.versions)
        parts += [pooling] if pooled else []
        outputs.append(whole | pooled)
    parts.extend(segments[len(cuts) :])
    wanted = [model.answer.output, *(name for e in outputs for name in e.values())]
    return assemble(parts, wanted), tuple(outputs)
