"""Segments compute what the source model does, chained, shrunk and united."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from tests import models
from tests.facts import facts

from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint, find_cuts
from offramp.compiler.cuts.slicing import split, verify
from offramp.compiler.frontend import batch
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.differences import relative_difference

BUILDERS = {
    "residual": models.residual_cnn,
    "vgg": models.vgg_chain,
    "bert": functools.partial(models.bert_like, token_types=True),
    "bert without mask": functools.partial(models.bert_like, mask=False),
    "bert of padded ids": functools.partial(models.bert_like, padding=True),
    "rotary": models.rotary,
    "batch second": models.batch_second,
    "recurrent": models.recurrent,
    "towers": models.two_tower,
    "dense": models.dense_net,
    "inception": models.inception,
    "conditional": models.conditional,
}
TOLERANCE = 1e-5
"""float32 sums in another order; the models are a few layers deep."""


@functools.cache
def analysed(name: str) -> tuple[SourceModel, CutAnalysis]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(BUILDERS[name](), path)
        model = read_model(path)
    return model, find_cuts(model)


@given(st.sampled_from(sorted(BUILDERS)), st.data())
@settings(max_examples=60, deadline=None)
def test_any_subset_of_cuts_reassembles_to_the_source(name, data):
    model, analysis = analysed(name)
    chosen = data.draw(st.sets(st.sampled_from(analysis.cuts)))
    cuts = sorted(chosen, key=lambda cut: cut.index)
    segments = split(model, cuts)

    assert [s.output for s in segments] == [*(c.tensor for c in cuts), model.answer.output]
    assert sum(s.flops_share for s in segments) == pytest.approx(1)
    assert verify(model, segments, random_inputs(model.proto, 7)) <= TOLERANCE


@pytest.mark.parametrize("name", BUILDERS)
def test_rows_that_leave_between_segments_do_not_disturb_the_others(name):
    model, analysis = analysed(name)
    segments = split(model, analysis.cuts)
    values = random_inputs(model.proto, len(segments) + 2)
    wanted = GraphRunner(model.proto).run(values)[model.answer.output]
    rows = np.arange(len(wanted))

    for segment in segments:
        values |= GraphRunner(segment.proto).run(values)
        keep = np.delete(np.arange(len(rows)), len(rows) // 2)
        rows = rows[keep]
        values = {
            tensor: values[tensor][keep]
            for tensor in (*(spec.name for spec in model.inputs), segment.output)
        }

    assert len(rows) == 2
    assert relative_difference(values[model.answer.output], wanted[rows]) <= TOLERANCE


@pytest.mark.parametrize("name", BUILDERS)
def test_union_by_name_is_the_source_graph(name):
    """The runtime relies on it when it fuses segments: one name, one operator."""
    model, analysis = analysed(name)
    (whole,) = split(model, ())
    source = {node.name: node for node in whole.proto.graph.node}
    united: dict[str, onnx.NodeProto] = {}
    for segment in split(model, analysis.cuts):
        for node in segment.proto.graph.node:
            assert united.setdefault(node.name, node) == node

    assert united == source
    assert len(source) == len(whole.proto.graph.node)


@pytest.mark.parametrize("name", BUILDERS)
def test_segments_do_no_work_twice(name):
    """Only cheap side operators may occur in two segments."""
    model, analysis = analysed(name)
    seen: set[str] = set()
    for segment in split(model, analysis.cuts):
        heavy = {n.name for n in segment.proto.graph.node if n.op_type in {"Conv", "Gemm"}}
        assert not heavy & seen
        seen |= heavy


def test_inputs_are_the_cut_tensor_then_side_inputs():
    model, analysis = analysed("bert")
    segments = split(model, analysis.cuts)

    assert segments[0].inputs == ("input_ids", "token_type_ids", "attention_mask")
    assert segments[1].inputs == ("layer0/attended",)  # up to layer0/out: no attention
    assert segments[2].inputs == ("layer0/out", "attention_mask")
    assert segments[-1].inputs == ("layer2/attended",)
    for segment in segments:
        assert Dataflow(segment.proto.graph).inputs == segment.inputs


def test_a_main_input_that_is_read_again_is_a_side_input_and_embedded_once():
    model, analysis = analysed("bert of padded ids")
    segments = split(model, analysis.cuts)

    assert [s.inputs for s in segments[:3]] == [
        ("input_ids",),
        ("layer0/attended",),  # up to layer0/out: no attention
        ("layer0/out", "input_ids"),
    ]
    tables = [
        index
        for index, segment in enumerate(segments)
        for weight in segment.proto.graph.initializer
        if list(weight.dims) in ([50, 16], [64, 16])
    ]
    assert tables == [0, 0]


def test_batch_stays_symbolic_in_segments():
    model, analysis = analysed("bert")
    middle = split(model, analysis.cuts)[2].proto.graph

    for info in (*middle.input, *middle.output):
        dims = info.type.tensor_type.shape.dim
        assert [d.dim_param for d in dims][:2] == ["batch", "sequence"]


def trimming(width: int = 256) -> onnx.ModelProto:
    """Return a model that cuts ids to the longest sample of the batch, and reads them in each
    layer.

    Each answer is the same in any batch, but not if others leave in the middle: layers after a
    cut then trim to the longest remaining sample.
    """
    b = models.Builder()
    ids = b.input("ids", ["batch", 12], TensorProto.INT64)
    zero, one = b.constant([0], np.int64), b.constant([1], np.int64)
    lengths = b.node(
        "ReduceSum",
        b.node("Cast", b.node("Greater", ids, zero), to=TensorProto.INT64),
        one,
        keepdims=0,
    )
    longest = b.node("ReduceMax", lengths, axes=[0], keepdims=1)
    trimmed = b.node("Slice", ids, zero, longest, one)
    x = b.node("Gather", b.weight(50, width), trimmed)
    for i in range(3):
        there = b.node("Cast", b.node("Greater", trimmed, zero), to=TensorProto.FLOAT)
        mask = b.node("Unsqueeze", there, b.constant([2], np.int64))
        work = b.node("Add", b.matmul(x, width, width), b.constant([0.5], np.float32))
        x = b.node("Mul", work, mask, out=f"layer{i}")
    b.linear(b.node("ReduceSum", x, one, keepdims=0), width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


@pytest.mark.parametrize("short", [2, 1])
def test_cuts_before_batch_dependent_operators_are_refused(read, monkeypatch, short):
    """With 2 tokens left the mask does not fit; with 1 it fits, and the answer is wrong.

    Where the graph tells that, the model is refused before; an operator of a library hides it.
    """
    with pytest.raises(ModelError, match=facts("whole batch", "data of its samples")):
        read(trimming())
    monkeypatch.setattr(batch, "check_conditions", lambda _: None)
    model = read(trimming())
    cut = CutPoint(
        index=0,
        tensor="layer0",
        dtype="float32",
        shape=("batch", "?", 256),
        operator="Mul",
        flops_share_before=0.3,
        side_inputs=("ids",),
    )
    segments = split(model, [cut])
    ids = np.full((7, 12), 5)
    ids[:6, short:] = 0
    with pytest.raises(ModelError) as caught:
        verify(model, segments, {"ids": ids})
    said = str(caught.value)
    assert "after the cut `layer0` samples 0" in said
    assert ("cannot go on" if short == 2 else "have other answers") in said
    assert "--exits" in said
    # nobody needs the others where all are as long
    assert verify(model, segments, {"ids": np.full((7, 12), 5)}) <= TOLERANCE


def test_verification_names_the_first_segment_that_diverges():
    model, analysis = analysed("residual")
    segments = split(model, analysis.cuts)
    weight = next(t for t in segments[1].proto.graph.initializer if len(t.dims) == 4)
    broken = onnx.numpy_helper.to_array(weight) * np.float32(1.5)
    weight.CopyFrom(onnx.numpy_helper.from_array(broken, weight.name))

    with pytest.raises(VerificationError, match=facts("segment 1", "`block0`")):
        verify(model, segments, random_inputs(model.proto, 3))
