"""Rows alone are compared with rows together, and what mixes them is named."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tests import models
from tests.facts import facts, tells

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.row_mixing import check_rows, compare_batches, scaled_by_batch
from offramp.compiler.graphs.shapes import annotate


def normalised(*, training: bool):
    b = models.Builder()
    x = b.conv(b.input("image", ["batch", 3, 8, 8]), (3, 4))
    ones, zeros = b.constant(np.ones(4, np.float32)), b.constant(np.zeros(4, np.float32))
    outputs = ["norm", "mean", "variance"] if training else ["norm"]
    node = models.helper.make_node(
        "BatchNormalization",
        [x, ones, zeros, zeros, ones],
        outputs,
        name="bn1",
        training_mode=int(training),
    )
    b._nodes.append(node)
    b.linear(b.node("Flatten", b.node("Relu", "norm"), axis=1), 256, 3, out="logits")
    b.output("logits", ["batch", 3])
    return annotated(b)


def centred(axis: int):
    """Return a model that subtracts a mean, over the features or over the batch."""
    b = models.Builder()
    x = b.node("Relu", b.linear(b.input("x", ["batch", 8]), 8, 8))
    mean = b.node("ReduceMean", x, out="mean", axes=[axis], keepdims=1)
    b.linear(b.node("Sub", x, mean), 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return annotated(b)


def quantised(*, mean: bool = False):
    proto = models.dynamically_quantised(mean=mean)
    annotate(proto)
    return proto


def annotated(b: models.Builder):
    proto = b.build(opset=17)
    annotate(proto)
    return proto


@pytest.mark.parametrize(
    "proto", [normalised(training=False), centred(1), quantised()], ids=range(3)
)
def test_rows_that_go_their_own_ways_pass(proto):
    check_rows(proto)


@pytest.mark.parametrize(
    ("proto", "node", "remedy"),
    [
        (
            normalised(training=True),
            "'bn1' (BatchNormalization)",
            ("normalises by the batch", "model.eval()", "export"),
        ),
        (
            centred(0),
            "'mean' (ReduceMean)",
            ("reduces over the samples", "other dimensions than the first"),
        ),
        (quantised(mean=True), "'mean' (ReduceMean)", ("reduces over the samples",)),
    ],
    ids=["training", "mean", "quantised"],
)
def test_what_mixes_rows_is_named_with_the_remedy(proto, node, remedy):
    with pytest.raises(ModelError) as caught:
        check_rows(proto)

    tells(str(caught.value), "other samples of its batch", "3 rows")
    tells(str(caught.value), f"It enters at {node}:", *remedy)


def test_one_row_where_samples_are_many():
    b = models.Builder()
    x = b.node("ReduceMax", b.input("x", ["batch", 8]), out="largest", axes=[0], keepdims=1)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    with pytest.raises(ModelError, match=r"enters at 'largest' \(ReduceMax\): it reduces over"):
        check_rows(annotated(b))


def test_a_batch_that_is_dynamic_by_name_alone():
    b = models.Builder()
    x = b.node("Reshape", b.input("x", ["batch", 8]), b.constant([1, 8], np.int64))
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])

    with pytest.raises(ModelError, match=facts("one sample", "3 in a batch")):
        check_rows(annotated(b))


def test_a_model_that_random_inputs_do_not_fit_is_compared_later(caplog):
    b = models.Builder()
    picked = b.node("Gather", b.input("x", ["batch", 8]), b.constant([9], np.int64), axis=1)
    b.linear(picked, 1, 3, out="logits")
    b.output("logits", ["batch", 3])

    with caplog.at_level(logging.WARNING):
        check_rows(annotated(b))
    tells(caplog.text, "not compared", "x [1, 8]", "fail")


def test_operators_that_round_by_the_batch_are_found():
    assert [op.name for op in scaled_by_batch(quantised())] == ["round0", "round1", "round2"]
    assert scaled_by_batch(centred(0)) == ()


def test_answers_to_the_same_rows_are_compared_across_batch_sizes():
    x = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    few, many = x[3:4, :3], x[:7, :3]
    compare_batches(centred(1), {"x": x}, {1: few, 7: many})
    compare_batches(quantised(), {"x": x}, {1: few + 1, 7: many})

    told = r"1 samples in a batch of 7 have other answers .* allowed are 1e-04 \(single"
    with pytest.raises(ModelError, match=told):
        compare_batches(centred(1), {"x": x}, {1: few + 0.01, 7: many})
    with pytest.raises(ModelError, match=r"enters at 'mean' \(ReduceMean\)"):
        compare_batches(centred(0), {"x": x}, {1: few + 0.01, 7: many})
