"""Cut points of each topology, and the messages about other places."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests import models

from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.graphs.shapes import declared_types

LAYERS = ["layer0/attended", "layer0/out", "layer1/attended", "layer1/out", "layer2/attended"]


@pytest.mark.parametrize("simplify", [True, False])
@pytest.mark.parametrize(
    ("proto", "cuts"),
    [
        (models.residual_cnn(), ["stem", "block0", "block1"]),
        (models.residual_cnn(batch=2), ["stem", "block0", "block1"]),
        (models.vgg_chain(), ["relu0", "pool1", "relu2", "pool3"]),
        (models.vgg_chain(batch=1, opset=9), ["relu0", "pool1", "relu2", "pool3"]),
        (models.bert_like(), LAYERS),
        (models.bert_like(token_types=True), LAYERS),
        (models.bert_like(mask=False), LAYERS),
        (models.bert_like(padding=True), LAYERS),
        (models.rotary(), LAYERS),
        (
            models.batch_second(),
            ["stem/batch_first", "layer0/batch_first", "layer1/batch_first"],
        ),
        (models.recurrent(), ["states0/batch_first", "states1/batch_first"]),
        (models.mlp(), ["hidden0", "hidden1", "hidden2"]),
        (models.dense_net(), ["stem", "joined0", "joined1"]),
        (models.inception(), ["stem", "module0", "module1"]),
        (models.conditional(), ["hidden0", "hidden1", "hidden2"]),
        (models.crossing_size(), ["hidden0"]),
    ],
    ids=lambda value: "" if isinstance(value, onnx.ModelProto) else value[-1],
)
def test_cut_tensors(read, proto, cuts, simplify):
    analysis = find_cuts(read(proto, simplify=simplify), max_tensors=1)

    assert [cut.tensor for cut in analysis.cuts] == cuts
    assert [cut.index for cut in analysis.cuts] == list(range(len(cuts)))


def test_towers_meet_before_the_first_cut(read):
    analysis = find_cuts(read(models.two_tower()))

    assert [cut.operator for cut in analysis.cuts] == ["Concat", "Relu", "Relu"]
    assert [cut.tensor for cut in analysis.cuts[1:]] == ["merged0", "merged1"]
    assert analysis.main_inputs == ("left", "right")


def test_cut_point_facts(read):
    stem, block0, block1 = find_cuts(read(models.residual_cnn())).cuts

    assert (stem.shape, stem.dtype) == (("batch", 8, 16, 16), "float32")
    assert block1.shape == ("batch", 16, 8, 8)
    assert {cut.operator for cut in (stem, block0, block1)} == {"Relu"}
    assert {cut.side_inputs for cut in (stem, block0, block1)} == {()}
    assert 0 < stem.flops_share_before < block0.flops_share_before < block1.flops_share_before < 1


def test_mask_is_side_and_shrinks_away_after_its_last_use(read):
    analysis = find_cuts(read(models.bert_like(token_types=True)))

    assert analysis.main_inputs == ("input_ids",)
    assert [cut.side_inputs for cut in analysis.cuts] == [("attention_mask",)] * 4 + [()]


def test_ids_that_a_mask_is_made_of_are_taken_along_to_its_last_use(read):
    analysis = find_cuts(read(models.bert_like(padding=True)))

    assert analysis.main_inputs == ("input_ids",)
    assert {cut.side_inputs for cut in analysis.cuts} == {("input_ids",)}


def test_what_rotary_embeddings_are_made_of_is_taken_along(read):
    analysis = find_cuts(read(models.rotary()))

    assert analysis.main_inputs == ("input_ids",)
    sides = [cut.side_inputs for cut in analysis.cuts]
    assert sides == [("input_ids", "position_ids")] * 4 + [()]


def test_inputs_are_read_again_only_where_that_gives_more_cuts(read):
    """The skip past the first block could carry the image along; other cuts need none of it."""
    for proto in (models.residual_cnn(), models.bert_like(), models.two_tower()):
        assert not find_cuts(read(proto)).rereads


def test_a_causal_mask_that_is_a_constant_is_there_again_in_later_segments(read):
    """The mask is as large as the tensor it is combined with, which is recomputed as well."""
    b = models.Builder()
    ids = b.input("ids", ["batch", 32], TensorProto.INT64)
    x = b.node("Gather", b.weight(50, 16), ids)
    there = b.node("Greater", ids, b.constant(0, np.int64))
    causal = b.constant(np.tril(np.ones((1, 32, 32), bool)))
    kept = b.node("And", causal, b.node("Unsqueeze", there, b.constant([1], np.int64)))
    low, zero = b.constant(-1e4, np.float32), b.constant(0.0, np.float32)
    bias = b.node("Where", kept, zero, low)
    for i in range(3):
        scores = b.node("MatMul", b.matmul(x, 16, 16), b.node("Transpose", x, perm=[0, 2, 1]))
        mixed = b.node("MatMul", b.node("Softmax", b.node("Add", scores, bias), axis=-1), x)
        x = b.node("Add", x, b.matmul(mixed, 16, 16), out=f"layer{i}")
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 16, 3, out="logits")
    b.output("logits", ["batch", 3])

    cuts = [cut.tensor for cut in find_cuts(read(b.build())).cuts]

    assert cuts[:2] == ["layer0", "layer1"]


@pytest.mark.parametrize("what", ["table", "work"])
def test_what_is_dear_is_not_computed_again(read, what):
    """Ids embedded again in the end, or multiplied by a large weight, hold all cuts back."""
    b = models.Builder()
    ids = b.input("ids", ["batch", 8], TensorProto.INT64)
    x = b.node("Gather", b.weight(50, 32), ids)
    for i in range(3):
        x = b.node("Relu", b.matmul(x, 32, 32), out=f"hidden{i}")
    if what == "table":
        again = b.node("Gather", b.weight(50, 32), ids)
    else:
        again = b.node("Unsqueeze", b.node("Cast", ids, to=TensorProto.FLOAT), b.constant([2]))
        again = b.matmul(again, 1, 32)
    x = b.node("ReduceMean", b.node("Add", x, again), axes=[1], keepdims=0)
    b.linear(x, 32, 3, out="logits")
    b.output("logits", ["batch", 3])

    analysis = find_cuts(read(b.build()), max_tensors=1)

    assert not {cut.tensor for cut in analysis.cuts} & {"hidden0", "hidden1"}


def test_without_a_mask_shapes_are_anchored_to_the_ids(read):
    model = read(models.bert_like(mask=False))
    measured = {n.input[0] for n in model.proto.graph.node if n.op_type == "Shape"}

    assert measured == {"input_ids"}
    assert find_cuts(model).cuts[0].side_inputs == ("input_ids",)


def test_shape_within_one_segment_is_left_alone(read):
    """Anchoring ``Shape`` of the last map to the image would carry the image everywhere."""
    b = models.Builder()
    x = b.input("image", ["batch", 3, 8, 8])
    x = b.node("Relu", b.conv(x, (3, 8)), out="stem")
    x = b.node("Relu", b.conv(x, (8, 8)), out="last")
    rows = b.node("Gather", b.node("Shape", x), b.constant([0], np.int64))
    target = b.node("Concat", rows, b.constant([512], np.int64), axis=0)
    b.linear(b.node("Reshape", x, target), 512, 3, out="logits")
    b.output("logits", ["batch", 3])

    model = read(b.build(), simplify=False)

    assert [n.input[0] for n in model.proto.graph.node if n.op_type == "Shape"] == ["last"]
    assert {cut.side_inputs for cut in find_cuts(model).cuts} == {()}


def test_a_tensor_of_which_only_sizes_are_used_holds_no_cut_back(read):
    """T5 measures a tensor of its first layer, for the position biases of all layers."""
    b = models.Builder()
    x = b.input("x", ["batch", "sequence", 8])
    x = b.node("Relu", b.matmul(x, 8, 8), out="hidden0")
    turned = b.node("Transpose", x, perm=[0, 2, 1])
    size = b.node("Gather", b.node("Shape", turned), b.constant([2], np.int64))
    bias = b.node("Cast", size, to=TensorProto.FLOAT)
    for i in (1, 2, 3):
        x = b.node("Relu", b.node("Div", b.matmul(x, 8, 8), bias), out=f"hidden{i}")
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    cuts = [(cut.tensor, cut.side_inputs) for cut in find_cuts(read(b.build())).cuts]

    assert cuts == [(f"hidden{i}", ("x",)) for i in range(3)], "the size is that of the input"


def test_rejections_name_what_bypasses(read):
    rejected = find_cuts(read(models.residual_cnn())).rejected
    reasons = [place.reason for place in rejected]

    assert reasons[0] == "inside a block: `stem` also carries data past this place"
    assert "0.5% of the work is left" in reasons[-1]
    assert len(rejected) == 4  # three blocks and the tail


def test_shape_that_crosses_is_rejected_with_that_reason(read):
    analysis = find_cuts(read(models.crossing_size()), max_tensors=1)

    (place,) = [r for r in analysis.rejected if r.tensor == "hidden1"]
    assert "a shape that is measured before this place is used after it" in place.reason


def test_embeddings_are_rejected_because_nothing_is_known_yet(read):
    analysis = find_cuts(read(models.bert_like()))

    assert "no work is done yet" in analysis.rejected[0].reason
    assert "embedded" not in [cut.tensor for cut in analysis.cuts]


def test_heavy_side_part_is_rejected(read):
    """The right tower joins only at the end, so every cut of the left one would redo it."""
    b = models.Builder()
    x = b.input("left", ["batch", 16])
    side = b.node("Relu", b.linear(b.input("right", ["batch", 16]), 16, 16))
    for i in range(3):
        x = b.node("Relu", b.linear(x, 16, 16), out=f"left{i}")
    joined = b.node("Relu", b.linear(b.node("Add", x, side), 16, 16), out="joined")
    b.linear(joined, 16, 3, out="logits")
    b.output("logits", ["batch", 3])

    analysis = find_cuts(read(b.build()), max_tensors=1)

    cuts = [cut.tensor for cut in analysis.cuts]
    assert cuts[-1] == "joined"
    assert not {"left0", "left1", "left2"} & set(cuts)


def test_the_batch_is_turned_to_the_front(read):
    """[sequence, batch, width] in the middle: rows could not leave along dimension 0."""
    b = models.Builder()
    x = b.input("x", ["batch", 4, 8])
    x = b.node("Transpose", b.node("Relu", b.matmul(x, 8, 8), out="first"), perm=[1, 0, 2])
    x = b.node("Relu", b.matmul(x, 8, 8), out="turned")
    x = b.node("Transpose", b.matmul(x, 8, 8), perm=[1, 0, 2], out="back")
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    cuts = find_cuts(read(b.build())).cuts

    assert [cut.tensor for cut in cuts][:2] == ["first", "turned/batch_first"]
    assert {cut.shape for cut in cuts[:2]} == {("batch", 4, 8)}


def test_a_batch_that_is_one_with_another_dimension_cannot_be_turned(read):
    b = models.Builder()
    x = b.input("x", ["batch", 4, 8])
    x = b.node("Relu", b.matmul(x, 8, 8), out="first")
    x = b.node("Reshape", x, b.constant([-1, 8], np.int64))
    x = b.node("Relu", b.linear(x, 8, 8), out="rows")
    x = b.node("Reshape", b.linear(x, 8, 8), b.constant([-1, 4, 8], np.int64))
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    analysis = find_cuts(read(b.build(), simplify=False))

    wanted = (
        "its shape is [4*batch, 8], and the first dimension has to be the batch; let the "
        "model keep it as a separate dimension there"
    )
    assert wanted in [place.reason for place in analysis.rejected]


def test_symbolic_sizes_survive_reshapes_by_computed_vectors(read):
    types = declared_types(read(models.bert_like(), simplify=False).proto)

    assert types["layer1/out"].shape == ("batch", "sequence", 16)
    assert types["layer1/out"].elem_type == TensorProto.FLOAT


def test_a_place_is_rejected_for_what_its_last_tensor_lacks(read):
    """Three neighbours of two shapes: what could be cut last is what the remedy is about."""
    b = models.Builder()
    x = b.input("x", ["batch", 4, 8])
    x = b.node("Relu", b.matmul(x, 8, 8), out="first")
    x = b.node("Relu", b.linear(b.node("Reshape", x, b.constant([-1, 8])), 8, 8))
    x = b.node("Reshape", x, b.constant([-1, 4]), out="halves")
    x = b.node("Reshape", b.linear(x, 4, 4), b.constant([-1, 4, 8], np.int64))
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    analysis = find_cuts(read(b.build(), simplify=False))

    reasons = [(place.operator, place.places, place.reason) for place in analysis.rejected]
    wanted = (
        "its shape is [8*batch, 4], and the first dimension has to be the batch; let the "
        "model keep it as a separate dimension there"
    )
    assert ("Gemm", 3, wanted) in reasons


def test_sizes_that_are_products_of_symbols_are_named(read):
    b = models.Builder()
    x = b.input("x", ["batch", "sequence", 8])
    y = b.node("Transpose", x, perm=[0, 2, 1])
    y = b.node("MatMul", x, y)
    y = b.node("ReduceMean", y, axes=[2], keepdims=1)
    x = b.node("Mul", x, y)
    shape = b.node("Shape", x)
    x = b.node("Reshape", x, b.constant([-1, 8], np.int64))
    x = b.node("Relu", b.linear(x, 8, 8), out="rows")
    x = b.node("Reshape", x, shape)
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    types = declared_types(read(b.build(), simplify=False).proto)

    assert types["rows"].shape == ("batch*sequence", 8)
