"""Adapters, small heads and judges learn planted patterns, with equal results in ONNX Runtime."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper

from offramp.calibration.data.errors import UntrainableError
from offramp.generation.bundle.tensor_names import ANSWER, CONFIDENCE, LOGITS, NEXT_STATE, STATE
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.text_graphs import logits_graph, read_export
from offramp.generation.training.adapters import train_adapter
from offramp.generation.training.exit_samples import ExitSamples, ExitTraining
from offramp.generation.training.judges import rank_chance, train_judge
from offramp.generation.training.small_heads import train_small_head
from tests.text_models import VOCABULARY, WIDTH, exported, write

OPTIONS = ExitTraining(epochs=12, batch_size=64)
UNTRAINED = ExitTraining(epochs=0)
TOKENS, TUNED = 1000, 500


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(model: onnx.ModelProto, states: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {STATE: states[:, None]})
    return dict(zip((o.name for o in session.get_outputs()), found, strict=True))


@functools.cache
def head() -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        export = read_export(write(exported(), Path(folder)))
    return logits_graph(DecoderCut(export.decoder))


@functools.cache
def planted(rank: int = WIDTH) -> tuple[ExitSamples, ExitSamples]:
    """States at the model's end, mixed by a matrix that differs from identity by some rank."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((TOKENS + TUNED, WIDTH)).astype(np.float32)
    tokens = run(head(), states)[LOGITS][:, 0].argmax(1)
    mixed = rng.standard_normal((WIDTH, rank)) @ rng.standard_normal((rank, WIDTH)) / rank**0.5
    seen = (states @ (np.eye(WIDTH) + 0.3 * mixed) + 0.5).astype(np.float32)
    return (
        ExitSamples(states=seen[:TOKENS], tokens=tokens[:TOKENS]),
        ExitSamples(states=seen[TOKENS:], tokens=tokens[TOKENS:]),
    )


@pytest.mark.parametrize("hidden", [None, 8])
def test_an_adapter_undoes_what_mixes_states(hidden: int | None) -> None:
    samples, tuning = planted(WIDTH if hidden is None else 2)
    trained = train_adapter(samples, tuning, head(), hidden=hidden, options=OPTIONS)
    assert trained.after.loss < 0.8 * trained.before.loss
    assert trained.after.agreement > trained.before.agreement + 0.15
    told = run(head(), run(trained.graph, tuning.states)[NEXT_STATE][:, 0])[LOGITS][:, 0]
    # Rounding may turn the token where two logits are as large.
    assert (told.argmax(1) == tuning.tokens).mean() == pytest.approx(
        trained.after.agreement, abs=2 / TUNED
    )


@pytest.mark.parametrize("hidden", [None, 4])
def test_an_adapter_begins_as_identity(hidden: int | None) -> None:
    samples, tuning = planted()
    trained = train_adapter(samples, tuning, head(), hidden=hidden, options=UNTRAINED)
    assert trained.after == trained.before
    given = run(trained.graph, tuning.states)[NEXT_STATE][:, 0]
    np.testing.assert_array_equal(given, tuning.states)


def test_training_that_fails_leaves_identity() -> None:
    samples, tuning = planted()
    wild = ExitTraining(learning_rate=1e4, epochs=2)
    trained = train_adapter(samples, tuning, head(), options=wild)
    assert trained.after == trained.before
    given = run(trained.graph, tuning.states)[NEXT_STATE][:, 0]
    np.testing.assert_array_equal(given, tuning.states)


def test_adapters_are_the_same_in_every_run() -> None:
    samples, tuning = planted()
    options = ExitTraining(epochs=1)
    one, two = (train_adapter(samples, tuning, head(), options=options) for _ in range(2))
    assert one.graph.SerializeToString() == two.graph.SerializeToString()


def test_a_number_of_the_state_that_never_changes_does_no_harm() -> None:
    samples, tuning = planted()
    constant = [
        ExitSamples(
            states=np.where(np.arange(WIDTH) == 3, np.float32(7), s.states), tokens=s.tokens
        )
        for s in (samples, tuning)
    ]
    trained = train_adapter(*constant, head(), options=OPTIONS)
    assert trained.after.loss < trained.before.loss
    assert np.isfinite(run(trained.graph, constant[1].states)[NEXT_STATE]).all()


def test_a_small_head_answers_its_tokens_alone() -> None:
    samples, tuning = planted()
    trained = train_small_head(
        samples, tuning, head(), criterion="softmax margin", tokens=8, options=OPTIONS
    )
    found, counts = np.unique(samples.tokens, return_counts=True)
    assert len(trained.answers) == 8
    assert (
        counts[np.isin(found, trained.answers)].min()
        >= counts[~np.isin(found, trained.answers)].max()
    )
    inside = np.isin(tuning.tokens, trained.answers)
    assert trained.covered == inside.mean()
    given = run(trained.graph, tuning.states)
    assert (given[ANSWER].dtype, given[CONFIDENCE].dtype) == (np.int64, np.float32)
    assert given[ANSWER].shape == given[CONFIDENCE].shape == (TUNED,)
    assert np.isin(given[ANSWER], trained.answers).all()
    lost = given[CONFIDENCE] == 0
    right = (given[ANSWER] == tuning.tokens) & ~lost
    assert right.mean() == pytest.approx(trained.after.agreement, abs=2 / TUNED)
    # "Other" wins where the token of the model has no column, more than elsewhere.
    assert lost[~inside].mean() > lost[inside].mean() + 0.25
    assert trained.after.loss < trained.before.loss


def test_a_small_head_begins_with_the_columns_of_the_model() -> None:
    samples, tuning = planted()
    trained = train_small_head(
        samples, tuning, head(), criterion="max probability", tokens=8, options=UNTRAINED
    )
    given = run(trained.graph, tuning.states)
    logits = run(head(), tuning.states)[LOGITS][:, 0, trained.answers]
    sure = given[CONFIDENCE] > 0
    assert 0 < sure.sum() < TUNED
    np.testing.assert_array_equal(given[ANSWER][sure], trained.answers[logits.argmax(1)][sure])


@pytest.mark.parametrize("tokens", [None, 8])
def test_a_head_of_low_rank_learns_what_it_lost(tokens: int | None) -> None:
    samples, tuning = planted()
    trained = train_small_head(
        samples, tuning, head(), criterion="softmax margin", tokens=tokens, rank=6, options=OPTIONS
    )
    assert trained.after.loss < trained.before.loss
    given = run(trained.graph, tuning.states)
    right = (given[ANSWER] == tuning.tokens) & (given[CONFIDENCE] > 0)
    assert right.mean() == pytest.approx(trained.after.agreement, abs=2 / TUNED)
    sizes = [tuple(t.dims) for t in trained.graph.graph.initializer if len(t.dims) == 2]
    assert (VOCABULARY if tokens is None else tokens + 1, 6) in sizes


def test_a_small_head_needs_a_size() -> None:
    with pytest.raises(ValueError, match="tokens and rank are both None"):
        train_small_head(*planted(), head(), criterion="softmax margin", options=OPTIONS)
    with pytest.raises(ValueError, match=f"rank is {WIDTH}, expected 1 to {WIDTH - 1}"):
        train_small_head(
            *planted(), head(), criterion="softmax margin", rank=WIDTH, options=OPTIONS
        )


@pytest.mark.parametrize("size", [{"tokens": 8}, {"rank": 4}])
def test_a_head_that_is_no_product_with_the_vocabulary_is_refused(size: dict[str, int]) -> None:
    """Its logits are concatenated from two halves."""
    split = onnx.ModelProto()
    split.CopyFrom(head())
    graph = split.graph
    for node in graph.node:
        if LOGITS in node.output:
            node.output[0] = "whole"
    halves = [helper.make_node("Split", ["whole"], ["left", "right"], axis=2),
              helper.make_node("Concat", ["right", "left"], [LOGITS], axis=2)]  # fmt: skip
    graph.node.extend(halves)
    if "rank" in size:  # and with two products
        twice = [n for n in graph.node if n.op_type == "MatMul"][-1]
        again = helper.make_node("MatMul", list(twice.input), ["again"])
        graph.node.insert(list(graph.node).index(twice), again)
    with pytest.raises(UntrainableError, match="the LM head cannot be made smaller"):
        train_small_head(*planted(), split, criterion="softmax margin", options=OPTIONS, **size)


def judged(states: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Rare, and seen in the direction of a state, not in its size."""
    normal = (states - states.mean(1, keepdims=True)) / states.std(1, keepdims=True)
    return np.asarray(normal[:, :4].sum(1) > 2.5)


def test_a_judge_learns_what_is_planted() -> None:
    samples, tuning = planted()
    agrees, known = judged(samples.states), judged(tuning.states)
    assert agrees.mean() < 0.25
    trained = train_judge(samples, tuning, agrees=agrees, tuning_agrees=known, options=OPTIONS)
    assert trained.ranked > 0.97
    sure = run(trained.graph, tuning.states)[CONFIDENCE]
    assert (sure.shape, sure.dtype) == ((TUNED,), np.float32)
    assert rank_chance(sure, known) == pytest.approx(trained.ranked, abs=1e-4)
    assert ((sure > 0.5) == known).mean() == pytest.approx(trained.after.agreement, abs=2 / TUNED)
    # Balanced: the rare answer is believed as often as the other one.
    assert sure[known].mean() > 0.6 > 0.4 > sure[~known].mean()
    np.testing.assert_allclose(run(trained.graph, 10 * tuning.states)[CONFIDENCE], sure, atol=1e-3)


def test_a_judge_of_an_exit_that_is_always_right_is_sure() -> None:
    samples, tuning = planted()
    always = np.ones(TOKENS, bool), np.ones(TUNED, bool)
    trained = train_judge(samples, tuning, agrees=always[0], tuning_agrees=always[1],
                          options=OPTIONS)  # fmt: skip
    assert trained.ranked == 0.5
    assert run(trained.graph, tuning.states)[CONFIDENCE].min() > 0.5


def test_ranks_count_pairs() -> None:
    which = np.array([True, False, True, False])
    assert rank_chance(np.array([0.9, 0.1, 0.4, 0.4]), which) == 0.875  # one pair of four is equal
    assert rank_chance(np.array([0.0, 1.0, 0.0, 1.0]), which) == 0.0


def test_samples_must_fit_together() -> None:
    with pytest.raises(ValueError, match=r"states \(3, 2\) and tokens \(2,\) were given"):
        ExitSamples(states=np.zeros((3, 2), np.float32), tokens=np.zeros(2, np.int64))
