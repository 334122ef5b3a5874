"""Exits as ONNX graphs: the pooling before a head, and the trained head after it.

The pooling is also available as a separate graph, which records the features that heads are trained
on. So the same operators compute a head's inputs in training and in serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from offramp.bundle import Answer, Head, TensorSpec
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.families import (
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
from offramp.calibration.heads.features import FULL_TENSOR, LAST
from offramp.compiler.exits.endings import (
    CONFIDENCE,
    DescribedTensor,
    PartBuilder,
    add_certainty,
    add_confidence,
    add_counts,
    add_principal,
    end_classes,
    end_labels,
    end_values,
)
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.tail import Tail, giving
from offramp.engine.graphs.assembly import assemble


def build_pooling(
    cut: CutTensor, prefix: str, grids: Sequence[int], *, opset: int, ir_version: int
) -> tuple[bytes, dict[int, str]]:
    """Build the graph that pools a map; return it and, by grid, its outputs [n, features]."""
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
    """Build the graph that selects the last token that counts; return it and its output."""
    part = PartBuilder(prefix, opset, ir_version)
    last = last_token(part, _as_float32(part, cut), cut.mask, "last")
    inputs = _described([cut], [cut])
    return part.build(inputs, [(last, "float32", ("batch", cut.width))]), {LAST: last}


def build_joining(
    cut: CutTensor, prefix: str, *, opset: int, ir_version: int
) -> tuple[bytes, dict[int, str]]:
    """Build the graph that pools and joins a set of tensors; return it and its output."""
    part = PartBuilder(prefix, opset, ir_version)
    joined = join_tensors(part, [_as_float32(part, tensor) for tensor in cut.read], cut)
    inputs = _described(cut.read, masked_tensors(cut, Head(kind="joined")))
    graph = part.build(inputs, [(joined, "float32", ("batch", joined_width(cut)))])
    return graph, {FULL_TENSOR: joined}


def _described(
    read: Sequence[CutTensor], masked: Sequence[CutTensor] = ()
) -> list[DescribedTensor]:
    """Describe the inputs of a head: cut tensors, and masks where there are any."""
    inputs: list[DescribedTensor] = [(cut.name, cut.dtype, cut.shape) for cut in read]
    masks = ((cut, cut.mask) for cut in masked if cut.mask is not None)
    inputs += ((mask, cut.mask_dtype, ("batch", cut.shape[1])) for cut, mask in masks)
    return inputs


def build_exit(
    cut: CutTensor,
    head: Head,
    weights: Mapping[str, NDArray[np.float32]],
    answer: Answer,
    prefix: str,
    *,
    answer_dtype: str,
    share: float = 1.0,
    certainty: Sequence[float] = (),
    opset: int,
    ir_version: int,
) -> bytes:
    """Build an exit: pooling, trained head, the source model's activation, confidence.

    ``answer`` describes the scores that the head imitates: the model's answer, or the input of its
    tail (:meth:`.tail.Tail.end`). The exit's scores are named ``{prefix}{answer.output}``;
    ``answer_dtype`` is numpy's name of their element type. The confidence is the value that a
    ``share`` of their principal values reach. ``certainty`` are the weights of the criterion
    ``learned``.
    """
    part = PartBuilder(prefix, opset, ir_version)
    read = [_as_float32(part, tensor) for tensor in cut.read]
    features = POOLINGS[head.kind].build(part, read, ServedHead(cut, head, weights))
    kind = answer.task.kind
    is_logits = answer.form == "logits" and answer_dtype == "float32"
    scores = _layers(part, features, weights, answer.output if is_logits else "")
    if kind == "multi-label":
        end_labels(part, scores, answer, answer_dtype, share)
    elif kind == "regression":
        end_values(part, scores, answer, answer_dtype)
    else:
        end_classes(part, scores, answer, answer_dtype, certainty)
    inputs = _described(cut.read, masked_tensors(cut, head))
    answered = (prefix + answer.output, answer_dtype, ("batch", answer.classes))
    return part.build(inputs, [answered, (prefix + CONFIDENCE, "float32", ("batch",))])


def build_own(
    cut: CutTensor,
    answer: Answer,
    prefix: str,
    *,
    tail: Tail | None = None,
    share: float = 1.0,
    mask: TensorSpec | None = None,
    opset: int,
    ir_version: int,
) -> bytes:
    """Build the exit that returns a copy's own answer, and its confidence.

    ``cut`` is the copy's answer, and ``mask`` marks the tokens that count; outputs are named as in
    :func:`build_exit`. With a ``tail``, the confidence is computed from the scores before that
    tail. Probabilities are clipped, because quantised ones may be outside of [0, 1] after rounding.
    """
    part = PartBuilder(prefix, opset, ir_version)
    part.add("Identity", [cut.name], answer.output)
    answered = (prefix + answer.output, cut.dtype, cut.shape)
    confidence = (prefix + CONFIDENCE, "float32", ("batch",))
    inputs: list[DescribedTensor] = [(cut.name, cut.dtype, cut.shape)]
    if tail is not None and tail.taught.output != cut.name:
        cut = CutTensor(name=tail.taught.output, dtype=tail.dtype, shape=tail.shape)
        inputs.append((cut.name, cut.dtype, cut.shape))
    answer = answer if tail is None else tail.taught
    scores = _as_float32(part, cut)
    if answer.task.kind != "classification":
        principal, places = add_principal(part, scores, answer, cut.shape)
        counts = None
        if mask is not None:
            inputs.append((mask.name, mask.dtype, mask.shape))
            counts = add_counts(part, mask)
        add_confidence(part, principal, share, places=places, mask=counts)
        return part.build(inputs, [answered, confidence])
    if answer.form == "probabilities":
        bounds = [part.weight("bound", np.array(bound, np.float32)) for bound in (0, 1)]
        probabilities = part.add("Clip", [scores, *bounds])
    else:
        probabilities = part.add("Softmax", [scores], axis=-1)
    criterion = "probability" if answer.criterion.on_host else answer.criterion.name
    add_certainty(part, probabilities, answer.classes, name=CONFIDENCE, criterion=criterion)
    return part.build(inputs, [answered, confidence])


def build_empty(read: Sequence[CutTensor], prefix: str, *, opset: int, ir_version: int) -> bytes:
    """Build a graph that reads cut tensors and does almost nothing, as a baseline for timing."""
    part = PartBuilder(prefix, opset, ir_version)
    shapes = [(part.add("Shape", [cut.name]), "int64", (cut.rank,)) for cut in read]
    return part.build(_described(read), shapes)


def _as_float32(part: PartBuilder, cut: CutTensor) -> str:
    single = cut.dtype == "float32"
    return cut.name if single else part.add("Cast", [cut.name], to=TensorProto.FLOAT)


def _layers(
    part: PartBuilder, features: str, weights: Mapping[str, NDArray[np.float32]], name: str = ""
) -> str:
    """Add one or two dense layers with weights [inputs, outputs]; ``name`` is the last output."""

    def dense(tensor: str, layer: str, name: str = "") -> str:
        terms = [part.weight(kind, weights[f"{layer}{kind}"]) for kind in ("weight", "bias")]
        return part.add("Gemm", [tensor, *terms], name)

    if "hidden_weight" in weights:
        features = part.add("Relu", [dense(features, "hidden_")])
    return dense(features, "", name)


def attach_poolings(
    model: SourceModel, segments: Sequence[bytes], cuts: Sequence[CutTensor]
) -> tuple[bytes, tuple[Mapping[int, str], ...]]:
    """Join segments and poolings into one graph, with which features are recorded.

    Returns the graph, and for each candidate the names of the outputs to record, by grid. Instead
    of a grid, ``FULL_TENSOR`` stands for a tensor that is recorded unchanged, and ``LAST`` for the
    last token. A candidate that no head fits has no outputs. The graph's first output is the scores
    that heads imitate.
    """
    parts: list[bytes] = []
    outputs: list[Mapping[int, str]] = []
    for index, (segment, cut) in enumerate(zip(segments, cuts, strict=False)):
        parts.append(segment)
        kinds = {head.kind for head in family_of(cut)}
        whole = {FULL_TENSOR: cut.name} if kinds and cut.form in ("tokens", "vector") else {}
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
    scores = model.taught.output
    if model.tail is not None:
        parts = [giving(part, scores) for part in parts]
    wanted = [scores, *(name for e in outputs for name in e.values())]
    return assemble(parts, wanted), tuple(outputs)
