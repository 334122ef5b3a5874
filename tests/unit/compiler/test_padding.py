"""Padding samples into one batch: found exact by running the model, or refused with the reason."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests import models
from tests.facts import Told, tells
from tests.padded import HEADS, answers, padded_bundle, paddings_of, sentences
from tests.quantised import quantised
from tests.sliced import slice_proto, sliced

from offramp.bundle import Bundle, Head, LengthRange, Padding, TensorSpec
from offramp.calibration.data.dataset import Dataset
from offramp.compiler.blueprints.cascade import slice_cascade
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.rounding import SINGLE
from offramp.compiler.samples.padding import length_ranges

TOKENS = 12
TABLE = 64
"""Positions that the models of tests/models.py know."""


def test_a_masked_encoder_may_be_padded() -> None:
    (found,) = paddings_of(sliced("bert"), sentences(40, TOKENS))
    assert (found.size, found.mask) == ("sequence", "attention_mask")
    assert found.fills == {"input_ids": 0.0, "attention_mask": 0.0}
    assert found.longest == 4 * TOKENS
    assert found.limit == TABLE
    assert 0 < found.difference <= SINGLE.batches


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return padded_bundle(sliced("bert"), tmp_path_factory.mktemp("bert"), sentences(40, TOKENS))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4 * TOKENS), min_size=2, max_size=6), st.integers(0, 5))
def test_what_is_padded_is_answered_as_alone_by_all_exits(
    bert: Bundle, lengths: list[int], seed: int
) -> None:
    """The claim itself, of lengths up to the longest that was tried, by an independent way."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(1, 50, length) for length in lengths]
    longest = max(lengths)
    ids, mask = np.zeros((2, len(words), longest), np.int64)
    for row, sentence in enumerate(words):
        ids[row, : len(sentence)], mask[row, : len(sentence)] = sentence, 1
    together = answers(bert, {"input_ids": ids, "attention_mask": mask})
    assert len(together) == 2 * len(HEADS) + 1
    for row, sentence in enumerate(words):
        single = {"input_ids": sentence[None], "attention_mask": np.ones_like(sentence)[None]}
        for name, alone in answers(bert, single).items():
            # Sums over more positions, all but the first of which are exact zeros.
            allowed = SINGLE.batches * max(float(np.abs(together[name]).max()), 1e-3)
            assert np.abs(together[name][row] - alone[0]).max() <= allowed, name


def read_out(kind: str) -> onnx.ModelProto:
    """An encoder that answers by another token than the first: the last, or the mean of all."""
    proto = models.bert_like()
    place = next(
        i
        for i, node in enumerate(proto.graph.node)
        if node.op_type == "Gather" and any(a.name == "axis" and a.i == 1 for a in node.attribute)
    )
    node = proto.graph.node[place]
    if kind == "last":
        weight = next(w for w in proto.graph.initializer if w.name == node.input[1])
        weight.CopyFrom(onnx.numpy_helper.from_array(np.array(-1, np.int64), weight.name))
        return proto
    mean = helper.make_node("ReduceMean", [node.input[0]], [node.output[0]], axes=[1], keepdims=0)
    node.CopyFrom(mean)
    return proto


def only_counted() -> onnx.ModelProto:
    """A mask that tokens are counted by, and embeddings that padding has zeros in: not hidden."""
    b = models.Builder()
    ids = b.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    mask = b.input("attention_mask", ["batch", "sequence"], TensorProto.INT64)
    table = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    table[0] = 0
    x = b.node("Gather", b.constant(table), ids, out="words")
    x = b.node("Relu", b.matmul(x, 16, 16), out="inner")
    total = b.node("ReduceSum", x, b.constant([1], np.int64), keepdims=0)
    count = b.node("ReduceSum", b.node("Cast", mask, to=1), b.constant([1], np.int64), keepdims=1)
    mean = b.node("Div", total, count, out="mean")
    x = b.node("Relu", b.linear(mean, 16, 16), out="hidden")
    b.linear(x, 16, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def rounding_by_batch() -> onnx.ModelProto:
    """An encoder whose embeddings are quantised dynamically."""
    proto = models.bert_like()
    nodes = list(proto.graph.node)
    place = next(i for i, node in enumerate(nodes) if "embedded" in node.output)
    nodes[place].output[0] = "plain"
    steps = ["steps", "scale", "zero"]
    quantise = helper.make_node("DynamicQuantizeLinear", ["plain"], steps, name="quantise")
    back = helper.make_node("DequantizeLinear", steps, ["embedded"], name="back")
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes[: place + 1], quantise, back, *nodes[place + 1 :]])
    return proto


@pytest.mark.parametrize(
    ("make", "heads", "said"),
    [
        (lambda: models.bert_like(mask=False), 1, ("[batch, sequence]", "mask")),
        (lambda: models.bert_like(padding=True), 1, ("[batch, sequence]", "mask")),
        (lambda: read_out("last"), 1, ("padded to 12", "`logits` differs")),
        (lambda: read_out("mean"), 1, ("padded to 12", "`logits` differs")),
        (only_counted, 0, ("'attention_mask'", "not hide")),
        (rounding_by_batch, 1, ("rounds", "range", "batch")),
    ],
    ids=["no mask", "mask in the ids", "last token", "mean", "hidden by zeros", "dynamic int8"],
)
def test_what_is_not_exact_is_not_padded(
    make: Callable[[], onnx.ModelProto], heads: int, said: Told, caplog: pytest.LogCaptureFixture
) -> None:
    pieces, data = slice_proto(make()), sentences(40, TOKENS)
    data = {spec.name: data[spec.name] for spec in pieces.model.inputs}
    with caplog.at_level(logging.INFO):
        assert paddings_of(pieces, data, HEADS[:heads]) == ()
    tells(caplog.text, "`sequence`", "not padded")
    tells(caplog.text, *said)


def test_an_exit_that_averages_over_padding_forbids_it(caplog: pytest.LogCaptureFixture) -> None:
    """The model itself keeps to its mask, but under another name no head finds it."""
    proto = models.bert_like()
    mask = proto.graph.input[1]
    for node in proto.graph.node:
        node.input[:] = ["counts" if read == mask.name else read for read in node.input]
    mask.name = "counts"
    pieces, data = slice_proto(proto), sentences(40, TOKENS)
    data["counts"] = data.pop("attention_mask")
    with caplog.at_level(logging.INFO):
        assert paddings_of(pieces, data, (Head(kind="mean"),), mask="counts") == ()
    assert "padded to 12, `offramp_exit_00/" in caplog.text
    (found,) = paddings_of(pieces, data, (Head(kind="first"),), mask="counts")
    assert found.mask == "counts"


def test_two_sequences_are_padded_each_by_its_own_mask() -> None:
    pieces = sliced("two sequences")
    assert {cut.mask for cut in pieces.cuts} == {"attention_mask"}
    other = {
        name.replace("input_ids", "context_ids").replace("attention", "context"): array
        for name, array in sentences(40, 7, seed=1).items()
    }
    first, second = paddings_of(pieces, {**sentences(40, TOKENS), **other})
    assert (first.size, first.mask, sorted(first.fills)) == (
        "sequence",
        "attention_mask",
        ["attention_mask", "input_ids"],
    )
    assert (second.size, second.mask, sorted(second.fills)) == (
        "context",
        "context_mask",
        ["context_ids", "context_mask"],
    )
    # Neither has a table of positions.
    assert (first.longest, first.limit) == (4 * TOKENS, None)
    assert (second.longest, second.limit) == (4 * 7, None)


def test_a_cascade_is_tried_with_the_exits_of_its_quantised_copy() -> None:
    plain, data = sliced("bert"), sentences(40, TOKENS)
    copy = quantised(plain.model, Dataset(inputs=data, labels=None, sha256="0"))
    place = Path("model.onnx")
    options = CompileOptions.of(
        model=place, data=place, output=place, precision="int8", candidates=99
    )
    (found,) = paddings_of(slice_cascade(plain, copy, options), data)
    assert found.difference <= SINGLE.batches


def test_what_is_added_is_what_calibration_saw() -> None:
    data = sentences(40, TOKENS, shortest=TOKENS)
    data["input_ids"] = data["input_ids"] % 30 + 10
    (found,) = paddings_of(sliced("bert"), data)
    assert found.fills == {"input_ids": float(data["input_ids"].min()), "attention_mask": 0.0}


def test_samples_that_are_masked_wholly_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    data = sentences(40, TOKENS)
    data["attention_mask"][1:] = 0
    with caplog.at_level(logging.INFO):
        assert paddings_of(sliced("bert"), data) == ()
    assert "too few samples that count" in caplog.text


def test_a_length_is_what_counts_where_samples_may_be_padded_else_the_size() -> None:
    pieces, data = sliced("bert"), sentences(40, TOKENS, shortest=3)
    dataset = Dataset(inputs=data, labels=None, sha256="0")
    halves = [dataset.subset(np.arange(i, 40, 2)) for i in range(2)]
    padding = Padding(
        size="sequence", mask="attention_mask", fills={}, longest=TOKENS, difference=0.0
    )
    assert length_ranges(pieces.model.inputs, (padding,), halves) == (
        LengthRange(size="sequence", mask="attention_mask", shortest=3, longest=TOKENS),
    )
    assert length_ranges(pieces.model.inputs, (), halves) == (
        LengthRange(size="sequence", shortest=TOKENS, longest=TOKENS),
    )
    images = sliced("residual").model.inputs
    assert length_ranges(images, (), halves) == ()


def test_lengths_are_counted_without_all_masks_in_memory() -> None:
    mask = np.ones((20_000, 100), np.int64)
    mask[777, 5:] = 0
    whole = Dataset(inputs={"attention_mask": mask}, labels=None, sha256="0")
    part = whole.subset(np.arange(1, 20_000))
    specs = (TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "sequence")),)
    fills = {"attention_mask": 0.0}
    padding = Padding(
        size="sequence", mask="attention_mask", fills=fills, longest=100, difference=0.0
    )
    tracemalloc.start()
    try:
        (found,) = length_ranges(specs, (padding,), [part])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.shortest, found.longest) == (5, 100)
    assert peak < mask.nbytes / 4
