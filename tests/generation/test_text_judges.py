"""Exits with a head of their own, and exits that are judged by their state (CALM 3.5)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.generation.bundle.generating_bundle import GeneratingBundle
from offramp.generation.bundle.tensor_names import (
    ANSWER,
    CONFIDENCE,
    NEXT_STATE,
    PREVIOUS_STATE,
    STATE,
)
from offramp.generation.bundle.text_model import TextCriterion
from offramp.generation.bundle.writing import write_generating_bundle
from offramp.generation.graphs.heads import state_similarity
from offramp.generation.graphs.text_graphs import (
    TextExit,
    TextGraphs,
    cut_export,
    read_export,
    segment_graph,
)
from offramp.generation.scheduling import TokenThresholds
from offramp.generation.serving import GeneratingModel, TextOptions
from offramp.generation.stages.onnx_text import OnnxTextBackend
from offramp.generation.stages.text_backend import NO_TOKEN
from tests.generation.test_onnx_text import MOST
from tests.generation.test_text_graphs import TOLERANCE, cut_of, run, truth
from tests.text_loops import PlainModel, write_all
from tests.text_models import (
    START,
    WIDTH,
    backend_of,
    drawn_prompts,
    exported,
    graphs_of,
    write,
)

RNG = np.random.default_rng(0)
WEIGHTS = (RNG.standard_normal((WIDTH, 1)) / 50).astype(np.float32)
SLOTS = list(range(8))


def classifier() -> onnx.ModelProto:
    """A linear classifier: the sigmoid of the state times ``WEIGHTS``."""
    return model_of(
        [
            helper.make_node("MatMul", [STATE, "weights"], ["odds"]),
            helper.make_node("Squeeze", ["odds", "axes"], ["flat"]),
            helper.make_node("Sigmoid", ["flat"], [CONFIDENCE]),
        ],
        {"weights": WEIGHTS, "axes": np.array([1, 2])},
        {CONFIDENCE: onnx.TensorProto.FLOAT},
    )


def fixed_head(token: int, confidence: float) -> onnx.ModelProto:
    """A head that says the same of every state."""
    return model_of(
        [
            helper.make_node("Shape", [STATE], ["n"], start=0, end=1),
            helper.make_node("Expand", ["token", "n"], [ANSWER]),
            helper.make_node("Expand", ["sure", "n"], [CONFIDENCE]),
        ],
        {"token": np.array([token]), "sure": np.array([confidence], np.float32)},
        {ANSWER: onnx.TensorProto.INT64, CONFIDENCE: onnx.TensorProto.FLOAT},
    )


def model_of(
    nodes: list[onnx.NodeProto], constants: dict[str, NDArray[Any]], outputs: dict[str, int]
) -> onnx.ModelProto:
    state = helper.make_tensor_value_info(STATE, onnx.TensorProto.FLOAT, ["batch", 1, WIDTH])
    graph = helper.make_graph(
        nodes,
        "exit",
        [state],
        [helper.make_tensor_value_info(name, kind, ["batch"]) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def cut(path: Path, criterion: TextCriterion, *exits: TextExit) -> TextGraphs:
    return cut_export(read_export(path), exits, criterion=criterion, start_token=START)


def judged(path: Path, criterion: TextCriterion) -> TextGraphs:
    """Return a model with exits after layers 1 and 3 that are judged by their states."""
    judge = classifier() if criterion == "learned classifier" else None
    exits = [TextExit(layer=layer, threshold=0.5, judge=judge) for layer in (1, 3)]
    return cut(path, criterion, *exits)


@pytest.fixture(params=["state similarity", "learned classifier"])
def criterion(request: pytest.FixtureRequest) -> Any:
    return request.param


def opened(graphs: TextGraphs) -> OnnxTextBackend:
    """A backend whose slots all have run their prompts."""
    backend = backend_of(graphs, slots=len(SLOTS))
    for slot, prompt in enumerate(drawn_prompts(len(SLOTS), seed=9)):
        backend.open(slot, prompt)
    backend.prefill(SLOTS)
    return backend


def noted_outputs(backend: OnnxTextBackend, stage: int) -> dict[str, NDArray[Any]]:
    """Return a record of the outputs of a stage's layers, filled when they run."""
    graph, noted = backend._segments[stage], {}
    execute = graph._execute

    def noting(names: Any, feeds: Any, options: None) -> list[Any]:
        outputs = execute(names, feeds, options)
        noted.update(zip(names, outputs, strict=True))
        return outputs

    graph._execute = noting
    return noted


def cosine(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    a, b = one[:, 0].astype(np.float64), other[:, 0].astype(np.float64)
    shares: NDArray[np.float64] = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return shares


def test_state_similarity_is_the_cosine_and_never_negative() -> None:
    feeds = {
        name: RNG.standard_normal((50, 1, WIDTH)).astype(np.float32) * 1e3
        for name in (STATE, PREVIOUS_STATE)
    }
    feeds[PREVIOUS_STATE][:3] = feeds[STATE][:3] * [[[1.0]], [[-2.0]], [[1e-3]]]
    right = cosine(feeds[STATE], feeds[PREVIOUS_STATE])
    found = run(state_similarity(WIDTH), feeds)[CONFIDENCE]
    assert (right < 0).any()
    np.testing.assert_allclose(found, np.maximum(right, 0), atol=1e-6)  # float32 sums of 16
    assert found.max() <= 1


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 3), (1, 2), (1, 3)])
def test_a_segment_returns_the_state_before_its_last_layer(
    start: int, end: int, encodes: bool
) -> None:
    made_with = {"encodes": encodes}
    feeds, right = truth(made_with)
    fed = feeds | {STATE: right[f"state {start}"]}
    whole = run(segment_graph(cut_of(made_with), start, end, previous=True), fed)
    plain = run(segment_graph(cut_of(made_with), start, end), fed)
    assert whole.keys() - plain.keys() == {PREVIOUS_STATE}
    for name, array in plain.items():
        np.testing.assert_array_equal(whole[name], array)
    np.testing.assert_allclose(whole[PREVIOUS_STATE], right[f"state {end - 1}"], atol=TOLERANCE)


def test_only_stages_whose_exit_compares_states_return_the_one_before(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    for criterion, times in (("state similarity", 2), ("learned classifier", 0)):
        graphs = judged(path, criterion)  # type: ignore[arg-type]
        files = [graphs.graphs[stage.file] for stage in graphs.model.stages]
        outputs = [{o.name for o in onnx.load_from_string(f).graph.output} for f in files]
        assert [PREVIOUS_STATE in names for names in outputs] == [times > 0] * 2 + [False]
        assert [bool(stage.judge) for stage in graphs.model.stages] == [True, True, False]


@pytest.mark.parametrize("encodes", [False, True])
def test_judges_say_what_numpy_does_and_the_head_runs_for_tokens_that_leave(
    criterion: Any, encodes: bool, tmp_path: Path
) -> None:
    graphs = judged(write(exported(encodes=encodes), tmp_path), criterion)
    backend, all_tokens, plain = (
        opened(graphs), opened(graphs), opened(graphs_of(encodes=encodes)),
    )  # fmt: skip
    headed = 0
    for stage in range(2):
        states = noted_outputs(backend, stage)
        sure = all_tokens.run(stage, SLOTS).confidences
        limits = [float(np.median(sure))] * len(SLOTS)
        limits[0], limits[1] = 2.0, 0.0
        found = backend.run(stage, SLOTS, limits)
        if criterion == "state similarity":
            right = np.maximum(cosine(states[NEXT_STATE], states[PREVIOUS_STATE]), 0)
        else:
            right = 1 / (1 + np.exp(-(states[NEXT_STATE][:, 0] @ WEIGHTS)[:, 0]))
        np.testing.assert_allclose(found.confidences, right, atol=1e-5)
        assert found.confidences.dtype == np.float32
        tokens = plain.run(stage, SLOTS).tokens
        leaving = found.confidences >= np.array(limits)
        assert 1 < leaving.sum() < len(SLOTS) and not leaving[0] and leaving[1]
        assert found.tokens.tolist() == np.where(leaving, tokens, NO_TOKEN).tolist()
        headed += int(leaving.sum())
        assert backend.statistics()["headed"] == headed
    found = backend.run(2, SLOTS, [0.0] * len(SLOTS))
    assert found.confidences.tolist() == [1.0] * len(SLOTS)
    assert found.tokens.tolist() == plain.run(2, SLOTS).tokens.tolist()
    assert backend.statistics()["headed"] == headed + len(SLOTS)


def test_no_head_runs_where_all_tokens_stay(criterion: Any, tmp_path: Path) -> None:
    backend = opened(judged(write(exported(), tmp_path), criterion))
    assert backend.run(0, SLOTS, [2.0] * len(SLOTS)).tokens.tolist() == [NO_TOKEN] * len(SLOTS)
    assert backend.statistics()["headed"] == 0


@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_judged_exits_that_are_off_change_nothing(
    criterion: Any, skipped: Any, tmp_path: Path
) -> None:
    path = write(exported(), tmp_path)
    exits = [
        TextExit(layer=layer, threshold=2.0, judge=classifier() if "learned" in criterion else None)
        for layer in (1, 3)
    ]
    graphs = cut_export(read_export(path), exits, criterion=criterion, skipped=skipped)
    prompts = drawn_prompts(20)
    plain = PlainModel(path)
    found = write_all(backend_of(graphs), prompts, MOST)
    assert [found[n].tokens for n in range(len(prompts))] == [
        plain.greedy(p, MOST) for p in prompts
    ]


@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_what_is_served_is_what_leaves_with_all_tokens_at_hand(
    criterion: Any, skipped: Any, tmp_path: Path
) -> None:
    path = write(exported(encodes=True), tmp_path)
    graphs = judged(path, criterion)
    # About a half leaves at each exit.
    backend = opened(graphs)
    levels = [float(np.median(backend.run(stage, SLOTS).confidences)) for stage in range(2)]
    graphs = cut_export(
        read_export(path),
        [
            TextExit(
                layer=layer, threshold=level, judge=classifier() if "learned" in criterion else None
            )
            for layer, level in zip((1, 3), levels, strict=True)
        ],
        criterion=criterion,
        skipped=skipped,
        start_token=START,
    )
    thresholds = TokenThresholds(version=1, by_stage=tuple(levels), decay=4.0, most_tokens=MOST)
    prompts = drawn_prompts(16, seed=5)

    def leaves(_number: int, token: int, stage: int, sure: float) -> bool:
        return thresholds.leaves(stage, token, sure)

    right = write_all(backend_of(graphs, slots=1), prompts, MOST, leaves)

    async def served() -> list[tuple[list[int], list[int]]]:
        options = TextOptions(batch=4)
        async with GeneratingModel(backend_of(graphs, slots=6), thresholds, options) as model:

            async def one(prompt: NDArray[np.int64]) -> tuple[list[int], list[int]]:
                tokens = [t async for t in model.generate(prompt, most_tokens=MOST)]
                return [t.token for t in tokens], [t.stage for t in tokens]

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    found = asyncio.run(asyncio.wait_for(served(), 60))
    assert found == [(right[n].tokens, right[n].stages) for n in range(len(prompts))]
    assert {stage for _, stages in found for stage in stages} == {0, 1, 2}


def test_an_own_head_answers_in_place_of_adapter_and_shared_head(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    exits = [
        TextExit(layer=1, threshold=0.5, head=fixed_head(7, 0.25), adapter=None),
        TextExit(layer=3, threshold=0.5),
    ]
    graphs = cut(path, "softmax margin", *exits)
    assert [stage.head for stage in graphs.model.stages] == ["head/00.onnx", "", ""]
    backend, plain = opened(graphs), opened(graphs_of())
    first = backend.run(0, SLOTS)
    assert first.tokens.tolist() == [7] * len(SLOTS)
    assert first.confidences.tolist() == [0.25] * len(SLOTS)
    plain.run(0, SLOTS)
    for stage in (1, 2):
        for found, right in zip(backend.run(stage, SLOTS), plain.run(stage, SLOTS), strict=True):
            np.testing.assert_array_equal(found, right)


def test_heads_and_judges_are_part_of_a_bundle(tmp_path: Path) -> None:
    exits = [TextExit(layer=2, threshold=0.5, head=fixed_head(7, 1.0))]
    (tmp_path / "export").mkdir()
    graphs = cut(write(exported(), tmp_path / "export"), "state similarity", *exits)
    write_generating_bundle(tmp_path / "text.ee", graphs.model, graphs.graphs)
    backend = OnnxTextBackend.of(GeneratingBundle.open(tmp_path / "text.ee"), slots=2, length=8)
    backend.open(0, np.array([1, 2]))
    backend.prefill([0])
    found = backend.run(0, [0], [0.0])
    assert found.tokens.tolist() == [7]
    assert 0 <= found.confidences[0] < 1  # the judge's, not the head's


def test_a_criterion_without_its_judge_is_refused(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    with pytest.raises(ModelError, match="after layer 2 has no classifier"):
        cut(path, "learned classifier", TextExit(layer=2, threshold=0.5))
    model = graphs_of().model
    facts = {name: getattr(model, name) for name in type(model).__dataclass_fields__}
    with pytest.raises(ValueError, match="each exit needs the graph of its judge"):
        type(model)(**facts | {"criterion": "state similarity"})
