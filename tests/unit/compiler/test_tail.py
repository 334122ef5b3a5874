"""Exits end like the model, with any operators between its scores and its output."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tails
from tests.facts import facts
from tests.models import mlp

from offramp.bundle import Head
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.exits.endings import CONFIDENCE
from offramp.compiler.exits.heads import build_exit
from offramp.compiler.exits.scores import resolve_scores
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.tail import giving
from offramp.compiler.samples.checks import check_ranges
from offramp.engine.answers.agreement import agreement_of

SAMPLES = 256


def vectors(samples: int = SAMPLES, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((samples, tails.INPUTS)).astype(np.float32)


def settled(proto: onnx.ModelProto, task: Any = "auto") -> SourceModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(proto, path)
        model = read_model(path, task=TaskOptions(kind=task), simplify=False)
    data = Dataset(inputs={"x": vectors()}, labels=None, sha256="")
    return resolve_scores(model, data, user_requested=task != "auto")


def tensors(model: SourceModel, x: np.ndarray) -> dict[str, np.ndarray]:
    """The model's scores and answers."""
    graph = giving(model.proto.SerializeToString(), model.taught.output)
    return GraphRunner(onnx.ModelProto.FromString(graph)).run({"x": x})


def exit_of(model: SourceModel, weights: dict[str, np.ndarray]) -> GraphRunner:
    """An exit after the first layer, whose head has these weights."""
    assert model.tail is not None
    cut = CutTensor(name="hidden0", dtype="float32", shape=("batch", tails.INPUTS))
    exit_ = build_exit(
        cut, Head(kind="vector"), weights, model.taught, "e/", answer_dtype=model.tail.dtype,
        **model.versions,
    )  # fmt: skip
    ended = model.tail.end(exit_, "e/", ["e/" + model.answer.output, "e/" + CONFIDENCE])
    return GraphRunner(onnx.ModelProto.FromString(ended))


def heads(model: SourceModel, spread: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shape = (tails.INPUTS, model.taught.classes)
    weight = (spread * rng.standard_normal(shape)).astype(np.float32)
    return {"weight": weight, "bias": rng.standard_normal(shape[1]).astype(np.float32)}


def slack_of(values: np.ndarray, share: float) -> float:
    """A share of the range, and single precision where that is next to nothing."""
    return float(share * np.ptp(values) + 1e-6 * np.abs(values).max())


def check(model: SourceModel) -> None:
    """An exit's answers are what the model's own operators make of its head's scores."""
    tail = model.tail
    assert tail is not None
    found = tensors(model, vectors(seed=1))
    wanted = found[model.answer.output]
    again = tail.apply(found[tail.taught.output])
    assert (np.abs(again - wanted) <= slack_of(wanted, 1e-4)).mean() > 0.99
    agreement = agreement_of(model.answer)
    for spread in (0.02, 0.3, 1.0):  # a head that knows nothing, one like the model, a sure one
        weights = heads(model, spread)
        hidden = np.maximum(vectors(seed=2), 0)
        given = exit_of(model, weights).run({"hidden0": hidden})
        scores = hidden @ weights["weight"] + weights["bias"]
        if tail.taught.form != "logits":
            soft = tail.taught.task.kind == "classification"
            chances = np.exp(scores - scores.max(1, keepdims=True)) if soft else np.exp(scores)
            scores = chances / (chances.sum(1, keepdims=True) if soft else 1 + chances)
        said, expected = given["e/" + model.answer.output], tail.apply(scores)
        near = np.abs(said - expected) <= slack_of(expected, 1e-3)
        assert near.all(axis=1).mean() > 0.98  # halves of steps may be rounded either way
        codes = [agreement.codes(agreement.reduce(values)) for values in (said, expected)]
        clear = np.ones(len(said), np.bool_)
        if model.answer.task.kind == "classification":  # rounding decides between equal ones
            most = np.sort(expected, axis=1)[:, -2:]
            clear = np.diff(most)[:, 0] > slack_of(expected, 0)
        assert (codes[0] == codes[1])[clear].sum() >= 0.98 * clear.sum()
        if tail.bounds is not None:
            least, most = tail.bounds
            slack = 1e-3 * (most - least)
            assert said.min() >= least - slack
            assert said.max() <= most + slack
            assert least - slack <= wanted.min()
            assert most + slack >= wanted.max()
        confidence = given["e/" + CONFIDENCE]
        assert ((confidence >= 0) & (confidence <= 1 + 1e-6)).all()


NAMES = st.lists(st.sampled_from(sorted(tails.STEPS)), min_size=1, max_size=3)


def made(activation: str, names: list[str], *, kinds: dict[str, tails.Step]) -> onnx.ModelProto:
    return tails.ending(kinds[activation], [tails.STEPS[name] for name in names])


@settings(max_examples=60)
@given(st.sampled_from(sorted(tails.SOFT)), NAMES)
def test_exits_end_as_a_model_of_classes_does(activation: str, names: list[str]) -> None:
    model = settled(made(activation, names, kinds=tails.SOFT))
    assert model.answer.task.kind == "classification"
    assert model.answer.form != "logits"
    if model.tail is not None:
        assert model.taught.task.kind == "classification"
        check(model)


@settings(max_examples=40)
@given(st.sampled_from(sorted(tails.LABELS)), NAMES)
def test_exits_end_as_a_model_of_labels_does(activation: str, names: list[str]) -> None:
    model = settled(made(activation, names, kinds=tails.LABELS), "multi-label")
    assert (model.answer.task.kind, model.taught.task.kind) == ("multi-label",) * 2 or (
        model.taught.form == "probabilities"  # of a softmax that makes classes of labels
    )
    if model.tail is not None:
        known = model.answer.form == "probabilities"
        assert len(model.answer.thresholds) == (0 if known else model.answer.classes)
        check(model)


@pytest.mark.parametrize("bound", sorted({*tails.BOUNDED} - {"clipped to the unit"}))
def test_logits_that_are_bounded_or_rounded_are_so_at_exits(bound: str) -> None:
    model = settled(tails.ending(tails.BOUNDED[bound]))
    assert (model.answer.form, model.taught.form) == ("logits", "logits")
    check(model)
    given = exit_of(model, heads(model, 3.0)).run({"hidden0": vectors()})["e/p"]
    own = tensors(model, 10 * vectors(4096))["p"]
    assert given.min() >= own.min() - 1e-3
    assert given.max() <= own.max() + 1e-3


def test_the_step_of_a_quantised_answer_is_that_of_exits() -> None:
    model = settled(made("softmax", ["quantised"], kinds=tails.SOFT))
    given = exit_of(model, heads(model, 0.5)).run({"hidden0": vectors()})["e/p"]
    np.testing.assert_allclose(given * 255, np.round(given * 255), atol=1e-3)
    assert len(np.unique(given)) > 100


@pytest.mark.parametrize("ending", [None, "Softmax", "LogSoftmax", "Sigmoid"])
def test_a_model_that_ends_with_its_logits_or_one_activation_has_no_tail(
    ending: str | None,
) -> None:
    model = settled(mlp(ending=ending))
    assert model.tail is None
    assert model.answer.tail == ()
    assert model.taught is model.answer


def test_one_probability_and_its_complement_are_two_classes() -> None:
    model = settled(
        tails.ending(tails.LABELS["sigmoid"], [tails.STEPS["with its complement"]], columns=1)
    )
    assert (model.answer.task.kind, model.answer.classes) == ("classification", 2)
    assert (model.taught.classes, model.answer.form) == (1, "probabilities")
    assert model.answer.tail == ("Sigmoid", "Sub", "Concat")
    check(model)


def test_a_masked_class_is_masked_at_exits_too() -> None:
    masked = -1e9

    def hide(b: tails.Builder, z: tails.Made) -> tails.Made:
        first = b.constant(np.arange(z.width) == 0)
        hidden = b.constant(np.array(masked, np.float32))
        return tails.Made(b.node("Where", first, hidden, z.name), z.width)

    model = settled(tails.ending(hide))
    assert (model.taught.output, model.answer.tail) == ("z", ("Where",))
    given = exit_of(model, heads(model, 3.0)).run({"hidden0": vectors()})["e/p"]
    assert (given[:, 0] == masked).all()
    assert np.isfinite(given[:, 1:]).all()


@pytest.mark.parametrize("pick", sorted(tails.PICKING))
def test_exits_of_a_model_that_picks_a_class_pick_one_too(pick: str) -> None:
    model = settled(tails.ending(tails.PICKING[pick]))
    assert (model.answer.task.kind, model.taught.form) == ("classification", "logits")
    given = exit_of(model, heads(model, 0.3)).run({"hidden0": vectors()})["e/p"]
    assert set(np.unique(given)) == {0.0, 1.0}
    assert (given.sum(axis=1) == 1).all()
    check(model)


@pytest.mark.parametrize("step", ["reversed", "sliced", "halves", "shifted", "halved"])
def test_logits_that_are_only_picked_or_scaled_are_imitated_as_they_are(step: str) -> None:
    model = settled(tails.ending(tails.STEPS[step]))
    assert (model.tail, model.answer.form) == (None, "logits")


def test_logits_of_opposite_signs_are_imitated_as_they_are() -> None:
    def both(b: Any, z: tails.Made) -> tails.Made:
        return tails.Made(b.node("Concat", b.node("Neg", z.name), z.name, axis=1), 2)

    model = settled(tails.ending(both, columns=1))
    assert (model.tail, model.answer.form, model.answer.classes) == (None, "logits", 2)


def test_a_quantised_sigmoid_is_a_set_of_labels() -> None:
    model = settled(made("sigmoid", ["quantised"], kinds=tails.LABELS))
    assert model.answer.task.kind == "multi-label"
    assert (model.answer.form, model.answer.thresholds) == ("probabilities", ())
    check(model)


def test_labels_on_a_scale_of_the_model_have_its_thresholds() -> None:
    steps = [tails.STEPS[name] for name in ("complement", "percent", "quantised")]
    model = settled(tails.ending(tails.LABELS["sigmoid"], steps))
    assert (model.answer.form, model.taught.form) == ("values", "logits")
    assert model.answer.thresholds == pytest.approx([50] * 4, abs=1e-4)
    wanted = tensors(model, vectors())["p"]
    assert (agreement_of(model.answer).reduce(wanted) == (wanted > 50)).all()
    check(model)


@pytest.mark.parametrize("bound", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("left", ["yes or no", "0 below"])
def test_labels_that_the_model_bounds_are_compared_as_it_gives_them(
    bound: float, left: str
) -> None:
    def bounded(b: Any, z: tails.Made) -> tails.Made:
        p = tails.LABELS["sigmoid"](b, z)
        given = b.node("Greater", p.name, b.constant(np.array(bound, np.float32)))
        if left == "yes or no":
            return tails.Made(b.node("Cast", given, to=onnx.TensorProto.FLOAT), z.width)
        none = b.constant(np.array(0, np.float32))
        return tails.Made(b.node("Where", given, p.name, none), z.width)

    model = settled(tails.ending(bounded))
    wanted = tensors(model, vectors())["p"]
    given = agreement_of(model.answer).reduce(wanted)
    assert 0 < given.mean() < 1
    if left == "yes or no" or bound >= 0.5:
        assert (given == (wanted > 0)).all()
    check(model)


def test_logits_of_one_column_are_those_of_a_label() -> None:
    def both(b: Any, z: tails.Made) -> tails.Made:
        sure = b.node("Tanh", z.name)
        return tails.Made(b.node("Concat", b.node("Neg", sure), sure, axis=1), 2)

    model = settled(tails.ending(both, columns=1))
    assert (model.answer.task.kind, model.answer.classes) == ("classification", 2)
    assert (model.taught.task.kind, model.taught.classes) == ("multi-label", 1)
    check(model)


@pytest.mark.parametrize(
    "proto",
    [
        tails.ending(tails.LABELS["sigmoid in parts"]),
        tails.ending(tails.LABELS["sigmoid"], [tails.STEPS["reversed"]]),
        tails.ending(tails.BOUNDED["clipped to the unit"]),
    ],
    ids=["a sigmoid in parts", "a sigmoid whose columns are moved", "no activation at all"],
)
def test_what_may_be_one_class_or_labels_has_to_be_told(proto: onnx.ModelProto) -> None:
    with pytest.raises(ModelError, match="--task classification or --task multi-label"):
        settled(proto)
    for task in ("classification", "multi-label"):
        model = settled(proto, task)
        assert (model.answer.task.kind, model.answer.form) == (task, "probabilities")
        if model.tail is not None:
            assert model.taught.task.kind == "multi-label"


def test_whether_labels_and_their_complements_are_classes_has_to_be_told() -> None:
    proto = tails.ending(tails.LABELS["sigmoid"], [tails.STEPS["with its complement"]])
    with pytest.raises(ModelError, match=facts("8 columns", "probabilities")):
        settled(proto)
    for task in ("classification", "multi-label"):
        model = settled(proto, task)
        assert (model.answer.task.kind, model.taught.task.kind) == (task, "multi-label")


def test_probabilities_of_no_known_activation_are_imitated_as_probabilities() -> None:
    def squared(b: Any, z: tails.Made) -> tails.Made:
        mixing = np.random.default_rng(0).dirichlet(np.ones(z.width), z.width).astype(np.float32)
        soft = tails.SOFT["softmax"](b, z)
        return tails.Made(b.node("MatMul", soft.name, b.constant(mixing)), z.width)

    model = settled(tails.ending(squared))
    assert (model.answer.form, model.tail) == ("probabilities", None)


def test_the_largest_probabilities_in_order_are_of_no_classes() -> None:
    def largest(b: Any, z: tails.Made) -> tails.Made:
        soft = tails.SOFT["softmax"](b, z)
        b.nodes("TopK", soft.name, b.constant([3], np.int64), outs=["largest", "which"])
        return tails.Made("largest", 3)

    with pytest.raises(ModelError, match=r"\(TopK\): end the model before that"):
        settled(tails.ending(largest))


def test_sums_of_a_scale_that_no_operator_explains_are_refused() -> None:
    def scaled(b: Any, z: tails.Made) -> tails.Made:
        mixing = 7 * np.random.default_rng(0).dirichlet(np.ones(z.width), z.width)
        soft = tails.SOFT["softmax"](b, z)
        return tails.Made(b.node("MatMul", soft.name, b.constant(mixing, np.float32)), z.width)

    with pytest.raises(ModelError, match=facts("sum to 7", "probabilities")):
        settled(tails.ending(scaled))


def test_operators_that_a_tail_may_not_cross_stay_before_it() -> None:
    def hidden(b: Any, z: tails.Made) -> tails.Made:
        return tails.Made(b.linear(b.node("Sigmoid", z.name), z.width, z.width), z.width)

    model = settled(tails.ending(hidden))
    assert (model.tail, model.answer.form, model.answer.task.kind) == (
        None, "logits", "classification",
    )  # fmt: skip
    assert Dataflow(model.proto.graph).producers["p"].kind == "Identity"


def test_exits_beyond_the_scale_of_the_model_are_refused() -> None:
    model = settled(made("softmax", ["percent"], kinds=tails.SOFT))
    ranges = np.array([[0.1, 99.0], [-1.85, 1.66], [0.0, 100.0]])
    check_ranges(model, ranges, [0], slack=0)
    with pytest.raises(Exception, match=facts("from -1.85 to 99", "0 to 100")):
        check_ranges(model, ranges, [0, 1], slack=0)


def test_pixels_and_tokens_have_scores_before_what_follows_their_softmax() -> None:
    b = tails.Builder()
    pixels = b.conv(b.input("x", ["batch", 3, 8, 8]), (3, 5))
    soft = b.node("Softmax", pixels, axis=1, out="soft")
    b.node("Mul", soft, b.constant(np.array(100, np.float32)), out="p")
    b.output("p", ["batch", 5, 8, 8])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(b.build(), path)
        model = read_model(path, simplify=False)
    assert model.answer.task.kind == "segmentation"
    assert (model.taught.output, model.taught.form) == ("soft", "probabilities")
    assert model.tail is not None
    assert model.tail.kinds == ("Mul",)


def test_quantised_answers_may_be_of_operators_of_onnx_runtime_itself() -> None:
    proto = made("softmax", ["quantised"], kinds=tails.SOFT)
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.domain = "com.microsoft"
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    model = settled(proto)
    assert model.answer.tail == ("Softmax", "QuantizeLinear", "DequantizeLinear")
    check(model)
