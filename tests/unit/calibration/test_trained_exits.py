"""An exit's graph answers as the head that was trained, for every head, opset, dtype and form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.unit.calibration.heads_to_try import TOKENS, Problem, answer, problem

from offramp.bundle import AnswerForm, Head
from offramp.calibration.heads import families
from offramp.calibration.heads.families import masks_of
from offramp.calibration.heads.head_training import TrainedHead
from offramp.compiler.exits.heads import build_exit
from offramp.engine.answers.exit_check import confidence_of

KINDS = (
    "map",
    "map with channels last",
    "signal",
    "video",
    "tokens",
    "masked tokens",
    "projected tokens",
    "masked projected tokens",
    "vector",
)

TOLERANCE = 2e-3
"""Tolerance of a confidence: pooled maps are rounded to float16 (1/2048 relative) when they are
recorded, and standardised, which amplifies that; a wrong mask, axis or scale has ten times the
effect."""


@functools.cache
def trained(kind: str, dtype: str = "float32") -> tuple[Problem, tuple[TrainedHead, ...]]:
    made = problem(kind, dtype=dtype)
    return made, tuple(made.train())


def run_exit(
    made: Problem,
    head: TrainedHead,
    *,
    opset: int,
    form: AnswerForm = "probabilities",
    answer_dtype: str = "float32",
) -> np.ndarray:
    model = build_exit(
        made.cut,
        head.head,
        head.weights,
        answer(form),
        "exit/",
        answer_dtype=answer_dtype,
        opset=opset,
        ir_version=10 if opset > 18 else 8,
    )
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    expected = ["cut"] + ["mask"] * len(masks_of(made.cut, head.head))
    assert [i.name for i in session.get_inputs()] == expected
    rows = slice(len(made.answers) * 2 // 3, None)
    given = {"cut": made.values[rows], **{k: v[rows] for k, v in made.inputs.items()}}
    (answers,) = session.run(["exit/answer"], {name: given[name] for name in expected})
    return answers


def check(head: TrainedHead, answers: np.ndarray, form: AnswerForm) -> None:
    confidence = confidence_of(answers, form)
    np.testing.assert_allclose(confidence, head.confidence, rtol=0, atol=TOLERANCE)
    clear = np.sort(answers, axis=1)[:, -1] - np.sort(answers, axis=1)[:, -2] > TOLERANCE
    assert clear.mean() > 0.9  # the comparison means something
    predictions = answers.argmax(axis=1)
    np.testing.assert_array_equal(predictions[clear], head.said[clear])


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_answers_like_the_trained_head(kind: str, opset: int) -> None:
    made, heads = trained(kind)
    assert [head.head for head in heads] == list(made.heads)
    for head in heads:
        answers = run_exit(made, head, opset=opset)
        np.testing.assert_allclose(answers.sum(axis=1), 1, atol=1e-5)  # float32 softmax
        check(head, answers, "probabilities")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_where_the_model_ends_in_logits(kind: str) -> None:
    made, heads = trained(kind)
    for head in heads:
        logits = run_exit(made, head, opset=17, form="logits")
        assert abs(logits.sum(axis=1) - 1).max() > 0.1  # no softmax at the end
        check(head, logits, "logits")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_where_the_model_ends_in_them(kind: str, dtype: str) -> None:
    made, heads = trained(kind, dtype)
    for head in heads:
        answers = run_exit(made, head, opset=17, form="log-probabilities", answer_dtype=dtype)
        assert answers.dtype == np.dtype(dtype)
        chances = np.exp(answers.astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(chances, 1, atol=1e-5 if dtype == "float32" else 1e-2)
        if dtype == "float32":
            check(head, answers, "log-probabilities")


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_models(kind: str) -> None:
    made, heads = trained(kind, "float16")
    for head in heads:
        answers = run_exit(made, head, opset=17, answer_dtype="float16")
        assert answers.dtype == np.float16
        check(head, answers, "probabilities")


def test_padding_does_not_matter_where_there_is_a_mask() -> None:
    made, heads = trained("masked tokens")
    disturbed = made.values + (1000 * (1 - made.inputs["mask"]))[..., None].astype(np.float32)
    other = Problem(**{**vars(made), "values": disturbed})
    assert made.inputs["mask"].sum() < made.inputs["mask"].size
    for head in heads:
        before, after = run_exit(made, head, opset=17), run_exit(other, head, opset=17)
        # sums in another order, and attention weights that underflow to 0 either way
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


def test_a_row_that_is_all_padding_has_a_number_for_an_answer() -> None:
    made, heads = trained("masked tokens")
    nothing = Problem(**{**vars(made), "inputs": {"mask": 0 * made.inputs["mask"]}})
    for head in heads:
        assert np.isfinite(run_exit(nothing, head, opset=17)).all(), head.head


def test_masks_of_other_types_are_understood() -> None:
    made, heads = trained("masked tokens")
    for dtype in ("bool", "float32", "int32"):
        cut = type(made.cut)(
            name="cut", dtype="float32", shape=made.cut.shape, mask="mask", mask_dtype=dtype
        )
        other = Problem(
            **{**vars(made), "cut": cut, "inputs": {"mask": made.inputs["mask"].astype(dtype)}}
        )
        np.testing.assert_array_equal(
            run_exit(other, heads[2], opset=17), run_exit(made, heads[2], opset=17)
        )


def test_names_are_the_exits_own_so_that_graphs_can_be_joined() -> None:
    made, heads = trained("masked tokens")
    model = onnx.load_from_string(
        build_exit(
            made.cut, heads[4].head, heads[4].weights, answer(), "exit/",
            answer_dtype="float32", opset=17, ir_version=8,
        )
    )  # fmt: skip
    graph = model.graph
    names = [name for node in graph.node for name in node.output]
    names += [weight.name for weight in graph.initializer] + [node.name for node in graph.node]
    assert all(name.startswith("exit/") for name in names)
    assert len(names) == len(set(names))
    dims = [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch", "sequence", made.cut.width]
    assert TOKENS not in dims


class LastToken(families.Pooling):
    """The last token: a kind of head that there is not, written as a new one would be."""

    kind, form = "last", "tokens"
    tried = (Head(kind="last"), Head(kind="last", hidden=5))

    def features(self, tokens: np.ndarray, keep: np.ndarray) -> np.ndarray:
        return tokens[:, -1]

    def build(
        self, part: families.GraphPart, tensors: Sequence[str], served: families.ServedHead
    ) -> str:
        (tensor,) = tensors
        return part.add("Gather", [tensor, part.weight("last", np.array(-1, np.int64))], axis=1)


@pytest.mark.parametrize("kind", ["tokens", "projected tokens"])
def test_a_new_kind_of_head_is_one_class(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.POOLINGS, "last", LastToken())
    made = problem(kind)
    assert set(LastToken.tried) <= set(families.family_of(made.cut))
    part = len(made.answers) * 2 // 3
    for head in replace(made, heads=LastToken.tried).train():
        graph = build_exit(
            *(made.cut, head.head, head.weights, answer(), "exit/"),
            answer_dtype="float32",
            opset=17,
            ir_version=8,
        )
        served, confidence = ort.InferenceSession(graph).run(None, {"cut": made.values[part:]})
        np.testing.assert_array_equal(served.argmax(axis=1), head.said)
        np.testing.assert_allclose(confidence, head.confidence, rtol=0, atol=TOLERANCE)
