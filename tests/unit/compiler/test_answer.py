"""End of a model: the form of its answers, and the handling of models without classes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests import models
from tests.facts import facts, tells

from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.graphs.runtime import GraphRunner


def ending(*kinds: str, classes: int = 4, axis: int = -1):
    b = models.Builder()
    x = b.linear(b.input("x", ["batch", 8]), 8, classes)
    for kind in kinds[:-1]:
        x = b.node(kind, x, **({"axis": axis} if "Softmax" in kind else {}))
    b.node(kinds[-1], x, out="y", **({"axis": axis} if "Softmax" in kinds[-1] else {}))
    b.output("y", ["batch", classes])
    return b.build()


@pytest.mark.parametrize("simplify", [True, False])
@pytest.mark.parametrize(
    ("kinds", "form"),
    [
        (("Softmax",), "probabilities"),
        (("Softmax", "Identity"), "probabilities"),
        (("LogSoftmax",), "log-probabilities"),
        (("LogSoftmax", "Identity"), "log-probabilities"),
        (("Softmax", "Log"), "log-probabilities"),
        (("Softmax", "Relu"), "probabilities"),
        (("Sigmoid", "Log"), "probabilities"),
        (("Identity",), "logits"),
    ],
)
def test_the_form_is_that_of_the_activation_that_all_data_goes_through(read, kinds, form, simplify):
    assert read(ending(*kinds), simplify=simplify).answer.form == form


def test_a_softmax_over_the_batch_is_no_probability_and_is_refused(read):
    with pytest.raises(ModelError, match=r"depends on the other samples .* 'y' \(Softmax\)"):
        read(ending("Softmax", axis=0))


@pytest.mark.parametrize("kinds", [("Sigmoid",), ("Sigmoid", "Identity"), ("HardSigmoid",)])
def test_a_yes_or_no_in_every_column_is_a_set_of_labels(read, kinds):
    answer = read(ending(*kinds, classes=5), simplify=False).answer
    assert (answer.task.kind, answer.classes, answer.form) == ("multi-label", 5, "probabilities")

    with pytest.raises(ModelError) as caught:
        read(ending(*kinds, classes=5), simplify=False, task=TaskOptions(kind="classification"))
    message = str(caught.value)
    tells(message, f"({kinds[0]})", "5 columns", "multi-label", "before the Sigmoid", "logits")


def test_one_column_is_a_label_or_has_to_be_told(read):
    assert read(ending("Sigmoid", classes=1)).answer.classes == 1
    with pytest.raises(ModelError, match=facts("one column", "--task multi-label", "regression")):
        read(ending("Identity", classes=1))
    answer = read(ending("Identity", classes=1), task=TaskOptions(kind="regression")).answer
    assert (answer.task.kind, answer.form) == ("regression", "values")


def dense(shape, *, kind="Identity", dtype=TensorProto.FLOAT, **attributes):
    """A model that answers for every place of a map or sequence."""
    b = models.Builder()
    sizes = shape if kind != "ArgMax" else [shape[0], 5, *shape[1:]]
    x = b.node("Relu", b.input("x", sizes))
    b.node(kind, x, out="y", **attributes)
    b.output("y", shape, dtype)
    return b.build()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (dense(["batch", 5, 8, 8]), ("segmentation", 5, "logits")),
        (dense(["batch", 5, 8, 8], kind="Softmax", axis=1), ("segmentation", 5, "probabilities")),
        (dense(["batch", 5, 8, 8], kind="Softmax", axis=3), ("segmentation", 5, "logits")),
        (dense(["batch", "tokens", 7]), ("token-classification", 7, "logits")),
        (
            dense(["batch", "tokens", 7], kind="LogSoftmax", axis=-1),
            ("token-classification", 7, "log-probabilities"),
        ),
        (
            dense(["batch", 8, 8], kind="ArgMax", dtype=TensorProto.INT64, axis=1, keepdims=0),
            ("segmentation", 5, "classes"),
        ),
    ],
    ids=str,
)
def test_the_task_is_inferred_from_the_shape_and_the_end(read, model, expected):
    answer = read(model, simplify=False).answer
    assert (answer.task.kind, answer.classes, answer.form) == expected


def test_scores_are_reduced_to_a_byte_a_pixel(read):
    model = read(dense(["batch", 5, 8, 8]), simplify=False, task=TaskOptions(class_map=True))
    assert (model.answer.form, model.answer.classes) == ("classes", 5)
    assert [output.describe() for output in model.outputs] == ["y: uint8 [batch, 8, 8]"]
    x = np.random.default_rng(0).standard_normal((3, 5, 8, 8)).astype(np.float32)
    (found,) = GraphRunner(model.proto, 1).run({"x": x}).values()
    np.testing.assert_array_equal(found, np.maximum(x, 0).argmax(axis=1))


def test_tokens_have_their_classes_last_and_many_take_more_than_a_byte(read):
    asked = TaskOptions(kind="token-classification", class_map=True)
    model = read(dense(["batch", "tokens", 300]), simplify=False, task=asked)
    assert [output.describe() for output in model.outputs] == ["y: int32 [batch, tokens]"]


def test_one_class_a_sample_has_no_map(read):
    told = r"--class-map: output 'y' is \[batch, 4\], expected floating-point scores .*leave it out"
    with pytest.raises(ModelError, match=told):
        read(ending("Identity"), task=TaskOptions(class_map=True))


def test_a_task_may_be_asked_for_with_its_own_terms(read):
    asked = TaskOptions(kind="pose", share=0.8, within=0.1)
    task = read(dense(["batch", 5, 8, 8]), task=asked).answer.task
    assert (task.kind, task.share, task.within) == ("pose", 0.8, 0.1)


@pytest.mark.parametrize(
    ("asked", "shape", "told"),
    [
        (TaskOptions(kind="pose"), ["batch", 5], ("float32 [batch, 5]", "expected", "heat maps")),
        (TaskOptions(kind="multi-label"), ["batch", 5, 8], ("floating-point [batch, labels]",)),
        (TaskOptions(kind="segmentation"), ["batch", "c", 8, 8], ("at least 2",)),
        (TaskOptions(kind="regression", share=0.5), ["batch", 5], ("--agree-share 0.5",)),
        (TaskOptions(within=0.1), ["batch", "t", 5], ("--agree-within 0.1", "token")),
        (TaskOptions(kind="classification"), ["batch", 5, 8, 8], ("--task", "pool")),
    ],
)
def test_a_task_that_does_not_fit_is_named_with_what_it_takes(read, asked, shape, told):
    with pytest.raises(ModelError, match=facts(*told)):
        read(dense(shape), task=asked, simplify=False)


def test_a_class_that_is_picked_already(read):
    b = models.Builder()
    b.node("ArgMax", b.linear(b.input("x", ["batch", 8]), 8, 4), out="y", axis=1, keepdims=0)
    b.output("y", ["batch"], TensorProto.INT64)

    told = r"'y' has shape \[batch\] of int64.* ends with '.*y' \(ArgMax\): end the model"
    with pytest.raises(ModelError, match=told):
        read(b.build(), simplify=False)


def trees(*, zipmap: bool = False):
    """A stump as skl2onnx writes it: labels, and probabilities or maps of them."""
    nodes = [
        helper.make_node(
            "TreeEnsembleClassifier",
            ["x"],
            ["label", "chances"],
            name="forest",
            domain="ai.onnx.ml",
            nodes_treeids=[0, 0, 0],
            nodes_nodeids=[0, 1, 2],
            nodes_featureids=[1, 0, 0],
            nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values=[0.0, 0.0, 0.0],
            nodes_truenodeids=[1, 0, 0],
            nodes_falsenodeids=[2, 0, 0],
            nodes_missing_value_tracks_true=[0, 0, 0],
            nodes_hitrates=[1.0, 1.0, 1.0],
            class_treeids=[0, 0],
            class_nodeids=[1, 2],
            class_ids=[0, 1],
            class_weights=[1.0, 1.0],
            classlabels_int64s=[0, 1],
            post_transform="NONE",
        )
    ]
    outputs = [helper.make_tensor_value_info("label", TensorProto.INT64, [None])]
    if zipmap:
        nodes.append(
            helper.make_node(
                "ZipMap", ["chances"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]
            )
        )
        kind = helper.make_map_type_proto(
            TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
        )
        outputs.append(helper.make_value_info("maps", helper.make_sequence_type_proto(kind)))
    else:
        outputs.append(helper.make_tensor_value_info("chances", TensorProto.FLOAT, [None, 2]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph(nodes, "t", [x], outputs), opset_imports=imports)
    model.ir_version = 8
    return model


def test_of_several_outputs_one_that_may_be_the_answer_is_suggested(read):
    b = models.Builder()
    logits = b.linear(b.input("x", ["batch", 8]), 8, 4, out="chances")
    b.node("Unsqueeze", logits, b.constant([2], np.int64), out="maps")
    b.output("chances", ["batch", 4])
    b.output("maps", ["batch", 4, 1])
    told = r"2 outputs \(chances, maps\); name the answer, .* answer='chances'"
    with pytest.raises(ModelError, match=told):
        read(b.build())


def test_scores_beside_labels_made_of_them_are_the_answer(read, caplog):
    b = models.Builder()
    logits = b.linear(b.input("x", ["batch", 8]), 8, 4, out="chances")
    b.node("ArgMax", logits, out="label", axis=1)
    b.output("label", ["batch", 1], TensorProto.INT64)
    b.output("chances", ["batch", 4])
    assert read(b.build()).answer.output == "chances"
    tells(caplog.text, "output 'chances' only", "not served (label)")


def test_outputs_none_of_which_may_be_the_answer(read):
    b = models.Builder()
    logits = b.linear(b.input("x", ["batch", 8]), 8, 4)
    for name in ("best", "label"):
        b.node("ArgMax", logits, out=name, axis=1)
        b.output(name, ["batch", 1], TensorProto.INT64)
    with pytest.raises(ModelError, match=facts("floating-point tensor [batch, classes]")):
        read(b.build())
    with pytest.raises(ModelError, match=facts("'maps'", "sequence_type", "'zipmap': F")):
        read(trees(zipmap=True), answer="maps")


def test_trees_have_nothing_to_cut(read):
    with pytest.raises(ModelError) as caught:
        read(trees(), answer="chances")

    assert "'chances' comes from 'forest' (TreeEnsembleClassifier)" in str(caught.value)
    tells(str(caught.value), "one operator", "cut")


def test_a_network_of_a_pipeline_is_read_whose_label_is_dropped(read):
    b = models.Builder()
    hidden = b.node("Relu", b.linear(b.input("x", ["batch", 8]), 8, 8))
    b.node("Softmax", b.linear(hidden, 8, 3), out="chances", axis=-1)
    b.node("ArgMax", "chances", out="label", axis=1, keepdims=0)
    b.output("label", ["batch"], TensorProto.INT64)
    b.output("chances", ["batch", 3])

    model = read(b.build(), answer="chances")
    assert (model.answer.output, model.answer.form) == ("chances", "probabilities")
    assert np.prod([len(model.outputs), model.answer.classes]) == 3
