"""Stages of a generating model write the model's tokens, in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp.engine.common.errors import BackendError
from offramp.generation.bundle.tensor_names import KINDS, past_name
from offramp.generation.stages.onnx_text import OnnxTextBackend
from tests.text_loops import PlainModel, write_all
from tests.text_models import (
    LAYERS,
    PLACES,
    VOCABULARY,
    backend_of,
    cut_at,
    drawn_prompts,
    exported,
    graphs_of,
    propagated,
    write,
)

MOST = 8
ENDS = (1, 3, LAYERS)
EXPORTS = {
    "decoder": {},
    "decoder, positions by length": {"positions": False},
    "decoder without mask": {"mask": False, "positions": False},
    "decoder, post-norm": {"post_norm": True},
    "encoder-decoder": {"encodes": True},
    "encoder-decoder without masks": {"encodes": True, "mask": False, "positions": False},
    "encoder-decoder, one token a step": {"encodes": True, "tokens": 1},
    "encoder-decoder as optimum writes it": {
        "encodes": True, "mask": False, "positions": False, "tokens": 1,
    },
}  # fmt: skip
RAGGED = {
    "decoder", "decoder, post-norm", "encoder-decoder", "encoder-decoder, one token a step",
}  # fmt: skip


FEW = ("decoder", "decoder without mask", "encoder-decoder", "encoder-decoder as optimum writes it")
"""Each way of sharing steps once."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two threads of torch would wait for each other where tests share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(EXPORTS))
def export(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def coin(share: float, seed: int = 0) -> Any:
    """Leave at random, but the same for a token whenever it is asked."""

    def leaves(number: int, token: int, stage: int, _: float) -> bool:
        return bool(np.random.default_rng((seed, number, token, stage)).random() < share)

    return leaves


@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_without_exits_tokens_are_those_of_the_plain_loop(
    export: str, skipped: Any, tmp_path: Path
) -> None:
    path = write(exported(**EXPORTS[export]), tmp_path)
    graphs = graphs_of(**EXPORTS[export], skipped=skipped)
    prompts = drawn_prompts(40)
    plain = PlainModel(path)
    told = [plain.greedy(prompt, MOST) for prompt in prompts]
    assert graphs.model.ragged == (export in RAGGED)
    assert graphs.model.several == ("one token" not in export and "optimum" not in export)
    assert len({tuple(answer) for answer in told}) > 5
    found = write_all(backend_of(graphs), prompts, MOST)
    assert [found[number].tokens for number in range(len(prompts))] == told


@pytest.mark.parametrize("export", ["decoder", "encoder-decoder"])
def test_500_prompts_get_the_tokens_of_the_plain_loop(export: str, tmp_path: Path) -> None:
    plain = PlainModel(write(exported(**EXPORTS[export]), tmp_path))
    prompts = drawn_prompts(500, seed=8)
    found = write_all(backend_of(graphs_of(**EXPORTS[export])), prompts, MOST, seed=8)
    for number, prompt in enumerate(prompts):
        assert found[number].tokens == plain.greedy(prompt, MOST), prompt


def test_with_catch_up_deep_tokens_are_those_of_the_model(export: str, tmp_path: Path) -> None:
    path = write(exported(**EXPORTS[export]), tmp_path)
    backend = backend_of(graphs_of(**EXPORTS[export], skipped="catch-up"))
    prompts = drawn_prompts(30, seed=1)
    found = write_all(backend, prompts, MOST, coin(0.6), seed=1)
    plain = PlainModel(path)
    deep = 0
    for one in found.values():
        told = plain.at_prefixes(one.prompt, one.tokens)
        for token, right, stage in zip(one.tokens, told, one.stages, strict=True):
            if stage == backend.stages - 1:
                deep += 1
                assert token == right
    assert deep > 20
    assert backend.statistics()["caught_up"] > 50


@pytest.mark.parametrize("export", FEW)
def test_catching_up_makes_the_true_keys_and_values(export: str, tmp_path: Path) -> None:
    path = write(exported(**EXPORTS[export]), tmp_path)
    backend = backend_of(graphs_of(**EXPORTS[export], skipped="catch-up"), slots=3)
    plain = PlainModel(path)
    prompt = np.array([4, 9, 2])
    backend.open(1, prompt)
    backend.prefill([1])
    answer = []
    for last in (0, 1, 0, 0, 2):  # four tokens leave early, the last one goes to the end
        answers = [backend.run(stage, [1]) for stage in range(last + 1)]
        answer.append(int(answers[-1].tokens[0]))
        if last < 2:
            backend.leave(last, [1])
            backend.accept([1], answer[-1:])
    cache = plain.cache_behind(prompt, answer[:-1])
    side = ".decoder" if plain.encodes else ""
    for layer in range(LAYERS):
        for kind in KINDS:
            right = cache[f"past_key_values.{layer}{side}.{kind}"]
            length = right.shape[2]
            layers = range(layer, layer + 1)
            found = backend._caches.read(layers, np.array([1]), length + 1)[past_name(layer, kind)]
            # Steps of several tokens add up in another order than steps of one.
            np.testing.assert_allclose(found[:, :, :length], right, atol=1e-5)
            assert not found[:, :, length:].any()


def test_with_propagation_skipped_layers_hold_what_they_make_of_the_state(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    prompts = drawn_prompts(12, seed=2)
    found = write_all(backend_of(graphs_of()), prompts, MOST, coin(0.6, seed=2), seed=2)
    plain = PlainModel(path)
    otherwise = 0
    for one in found.values():
        ends = [ENDS[stage] for stage in one.stages]
        assert one.tokens == propagated(one.prompt, one.tokens, ends)
        told = plain.at_prefixes(one.prompt, one.tokens)
        deep = [i for i, stage in enumerate(one.stages) if stage == 2]
        otherwise += sum(one.tokens[i] != told[i] for i in deep)
    assert otherwise > 0  # propagation changes later tokens, or this test would see nothing


@pytest.mark.parametrize("export", FEW)
@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_what_runs_beside_a_sequence_changes_nothing(export: str, skipped: Any) -> None:
    graphs = graphs_of(**EXPORTS[export], skipped=skipped)
    prompts = drawn_prompts(20, seed=3)
    leaves = coin(0.5, seed=3)
    beside = write_all(backend_of(graphs), prompts, MOST, leaves, seed=3)
    alone = write_all(backend_of(graphs, slots=1), prompts, MOST, leaves, seed=4)
    for number in range(len(prompts)):
        assert beside[number].tokens == alone[number].tokens
        assert beside[number].stages == alone[number].stages


@pytest.mark.parametrize("export", FEW)
@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_slots_closed_at_any_time_leave_nothing_behind(export: str, skipped: Any) -> None:
    graphs = graphs_of(**EXPORTS[export], skipped=skipped)
    backend = backend_of(graphs, slots=4)
    leaves = coin(0.5, seed=5)
    prompts = drawn_prompts(60, seed=5)
    found = write_all(backend, prompts, MOST, leaves, seed=5, drop=0.05)
    assert 10 < len(found) < len(prompts)
    alone = write_all(backend_of(graphs), prompts, MOST, leaves, seed=6)
    assert all(found[number].tokens == alone[number].tokens for number in found)
    assert backend.statistics()["slots_used"] == 0
    held = [backend._caches, backend._cross]
    arrays = [array for slots in held for array in slots._held.values()]
    assert not any(array.any() for array in (*arrays, *backend._states))


def test_a_sequence_of_no_numbers_spoils_no_later_one(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    backend = backend_of(graphs_of(skipped="catch-up"), slots=2)
    prompts = drawn_prompts(2, seed=7)
    told = [PlainModel(path).greedy(prompt, MOST) for prompt in prompts]
    backend.open(0, np.arange(10))
    backend.prefill([0])
    for held in backend._caches._held.values():
        held[1::2, 0, :, :9] = np.nan  # values
    answers = backend.run(0, [0])
    assert answers.confidences.tolist() == [0]  # what is no number is never sure
    backend.close_slot(0)
    found = write_all(backend, prompts, MOST)
    assert [found[0].tokens, found[1].tokens] == told


def test_confidence_is_one_at_the_end_and_between_elsewhere() -> None:
    backend = backend_of(graphs_of())
    for slot, prompt in enumerate(drawn_prompts(8)):
        backend.open(slot, prompt)
    slots = list(range(8))
    backend.prefill(slots)
    sure = [backend.run(stage, slots).confidences for stage in range(3)]
    assert [array.dtype for array in sure] == [np.float32] * 3
    assert ((sure[0] > 0) & (sure[0] < 1)).all()
    assert sure[2].tolist() == [1.0] * 8


def test_counts_are_those_of_what_ran() -> None:
    backend = backend_of(graphs_of(skipped="catch-up"))
    backend.open(0, np.arange(5))
    backend.open(1, np.arange(3))
    backend.prefill([0, 1])
    for _ in range(2):  # two tokens leave behind the first stage, the third goes deep
        answers = backend.run(0, [0])
        backend.leave(0, [0])
        backend.accept([0], answers.tokens)
    for stage in range(3):
        backend.run(stage, [0])
    told = backend.statistics()
    assert (told["prefilled"], told["padding"]) == (6, 2)
    assert told["caught_up"] == 4  # two tokens, in each of two stages
    assert told["stage_rows"] == [3, 1, 1]
    assert told["slots_used"] == 2
    assert told["cache_bytes"] == 8 * PLACES * 4 * (2 * LAYERS * 16 + 2 * 16)


@pytest.mark.parametrize(
    ("prompt", "facts"),
    [
        (np.zeros(0, np.int64), r"\[0\], expected 1 to 47"),
        (np.zeros(48, np.int64), r"\[48\], expected 1 to 47"),
        (np.zeros((1, 3), np.int64), r"\[1, 3\]"),
        (np.array([3, VOCABULARY]), "3 to 40, expected 0 to 39"),
        (np.array([-1, 3]), "-1 to 3"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: Any, facts: str) -> None:
    backend = backend_of(graphs_of())
    with pytest.raises(BackendError, match=facts):
        backend.open(0, prompt)
    backend.open(0, np.array([1]))
    with pytest.raises(BackendError, match="slot 0 is not free"):
        backend.open(0, np.array([1]))


def test_a_sequence_beyond_its_room_fails_and_others_do_not(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    backend = backend_of(cut_at(path, ()), slots=2, length=4)
    backend.open(0, np.array([1, 2, 3]))
    backend.open(1, np.array([5]))
    backend.prefill([0, 1])
    for _ in range(2):
        backend.accept([0, 1], backend.run(0, [0, 1]).tokens)
    with pytest.raises(BackendError, match="slot 0 is at place 4, expected 0 to 3"):
        backend.run(0, [0, 1])
    backend.close_slot(0)
    right = PlainModel(path).greedy(np.array([5]), 3)
    assert backend.run(0, [1]).tokens.tolist() == right[2:]


@pytest.mark.parametrize("skipped", ["propagation", "catch-up"])
def test_a_slot_is_no_longer_than_the_models_positions(
    export: str, skipped: Any, tmp_path: Path
) -> None:
    graphs = graphs_of(**EXPORTS[export], skipped=skipped)
    encodes = bool(graphs.model.encoder)
    longer = OnnxTextBackend(
        graphs.model, graphs.graphs.__getitem__, slots=2, length=3 * PLACES,
        source_length=2 * PLACES if encodes else 0,
    )  # fmt: skip
    assert (longer.length, longer.longest_prompt) == (PLACES, PLACES if encodes else PLACES - 1)
    assert longer.statistics() == backend_of(graphs, slots=2).statistics(), "nothing is left"
    prompt = drawn_prompts(1)[0]
    most = PLACES if encodes else PLACES + 1 - len(prompt)
    plain = PlainModel(write(exported(**EXPORTS[export]), tmp_path))
    longer.open(0, prompt)
    longer.prefill([0])
    found: list[int] = []
    while len(found) < most:
        for stage in range(longer.stages):
            tokens = longer.run(stage, [0]).tokens
        found += tokens.tolist()
        longer.accept([0], tokens.tolist())
    assert found == plain.greedy(prompt, most)


def test_a_model_that_takes_no_token_fails_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(OnnxTextBackend, "_step", fail)
    with pytest.raises(BackendError, match="a sequence of 2 tokens failed: no such kernel"):
        backend_of(graphs_of())


def test_a_failing_graph_is_named() -> None:
    graphs = graphs_of()
    broken = dict(graphs.graphs) | {"stages/01.onnx": b"none"}
    with pytest.raises(BackendError, match=r"stages/01\.onnx cannot be loaded"):
        backend_of(type(graphs)(model=graphs.model, graphs=broken))
