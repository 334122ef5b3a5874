"""Compiling models that generate text: prompts, choices, the certificate, and the command."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.bundle import BundleExistsError
from offramp.calibration.data.data_sources import NpzSource
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.commands.arguments import Command, command_of
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import CompileError
from offramp.generation.bundle.generating_bundle import GENERATION_HASH, GeneratingBundle
from offramp.generation.bundle.text_model import TextCriterion, TextEvidence
from offramp.generation.bundle.text_tokens import BundleTokenizer
from offramp.generation.compiling import compile_text as steps
from offramp.generation.compiling.choosing import choose_exits, risk_on_records
from offramp.generation.compiling.compile_text import CompiledText, compile_text
from offramp.generation.compiling.costs import TextCosts
from offramp.generation.compiling.decoding import DecodedText, decode, losses_of
from offramp.generation.compiling.exit_states import ExitStates, RecordingBackend
from offramp.generation.compiling.likeness import find_likeness
from offramp.generation.compiling.prompts import read_prompts, split_prompts
from offramp.generation.compiling.text_options import (
    TextCompileOptions,
    TextSettings,
    layers_to_try,
    settle,
)
from offramp.generation.compiling.trained_exits import ExitParts, TrainedExits
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.text_graphs import head_graph, read_export
from offramp.generation.promise.dissimilarity import edit_distance
from offramp.generation.promise.text_promise import TextPromise, TextRisk
from offramp.generation.promise.text_records import TextRecords
from offramp.generation.scheduling import TokenThresholds
from offramp.generation.stages.onnx_text import OnnxTextBackend
from tests.facts import tells
from tests.text_loops import PlainModel
from tests.text_models import (
    LAYERS,
    PLACES,
    START,
    VOCABULARY,
    WIDTH,
    cut_at,
    drawn_prompts,
    exported,
    write,
)
from tests.text_models import (
    backend_of as backend_of_graphs,
)
from tests.unit.compiler.data.making import save_tokenizer

MOST = 8


@pytest.fixture(params=[False, True], ids=["decoder", "encoder-decoder"])
def encodes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def saved_prompts(path: Path, count: int = 160) -> Path:
    """Prompts of different lengths, padded on the left, which a mask tells."""
    prompts = drawn_prompts(count, seed=5)
    longest = max(map(len, prompts))
    ids, mask = (np.zeros((count, longest), np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    np.savez(path, input_ids=ids, attention_mask=mask)
    return path


def asked(folder: Path, *, encodes: bool = False, **more: Any) -> TextCompileOptions:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    defaults: dict[str, Any] = {
        "train": "none",
        "dissimilarity": "edit-distance",
        "max_disagreement": 0.3,
        "most_tokens": MOST,
        "start_token": START,
        "batch": 4,
    }
    return TextCompileOptions(
        model=write(exported(encodes=encodes), source),
        data=NpzSource(saved_prompts(folder / "prompts.npz")),
        output=folder / "text.ee",
        **(defaults | more),
    )


@pytest.fixture
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have no time to save: exits are used all the same."""
    free = TextCosts(layers=np.ones(LAYERS), check=0.0, leaving=np.zeros(LAYERS))
    monkeypatch.setattr(steps, "measure_costs", lambda *_: free)
    monkeypatch.setattr(steps, "_LEAST_GAIN", 0.0)


@pytest.mark.usefixtures("whatever_it_costs")
@pytest.mark.parametrize("promise", ["texts", "tokens"])
def test_a_model_is_compiled_and_keeps_its_promise(
    tmp_path: Path, promise: Any, *, encodes: bool
) -> None:
    options = asked(tmp_path, encodes=encodes, promise=promise)
    done = compile_text(options)
    model = GeneratingBundle.open(tmp_path / "text.ee").model
    evidence = model.evidence
    assert model == done.bundle.model
    assert evidence is not None
    assert (evidence.risk, evidence.bound, evidence.prompts) == (promise, 0.3, 79)
    assert 0 <= evidence.observed < 0.3
    assert 0 < evidence.layers_run < 1, "tokens leave early"
    assert (model.longest_prompt, model.longest_answer) == (12, MOST)
    unseen = drawn_prompts(150, seed=77)
    plain = PlainModel(options.model)
    wanted = [DecodedText(plain.greedy(prompt, MOST)) for prompt in unseen]
    found = decode(backend_of(done), unseen, thresholds_of(done), stop=(), most_tokens=MOST)
    losses = losses_of(found.texts, wanted, TextRisk(promise), edit_distance)
    assert losses.risk(TextRisk(promise)) < 0.3
    early = [depth < LAYERS - 1 for text in found.texts for depth in text.depths]
    assert any(early)


def backend_of(done: CompiledText) -> OnnxTextBackend:
    encodes = bool(done.bundle.model.encoder)
    return OnnxTextBackend.of(
        done.bundle, slots=8, length=PLACES, source_length=PLACES if encodes else 0
    )


def thresholds_of(done: CompiledText) -> TokenThresholds:
    stages = done.bundle.model.stages
    return TokenThresholds(version=0, by_stage=tuple(s.threshold or 0.0 for s in stages[:-1]))


@pytest.mark.usefixtures("whatever_it_costs")
@pytest.mark.parametrize(
    "more",
    [
        {"train": "adapters"},
        {"train": "joint", "minutes": 0.02},
        {"criterion": "learned classifier", "train": "adapters"},
        {"train": "adapters", "head": "subset"},
        {"skipped": "catch-up", "decay": 2.0},
    ],
    ids=lambda more: " ".join(map(str, more.values())),
)
def test_exits_of_all_kinds_are_compiled(tmp_path: Path, more: dict[str, Any]) -> None:
    done = compile_text(asked(tmp_path, exits=(1, 2), max_disagreement=0.6, **more))
    model = done.bundle.model
    if "criterion" in more:
        assert model.criterion == more["criterion"]
        assert all(stage.judge for stage in model.stages[:-1])
    if "head" in more:
        assert all(stage.head and not stage.adapter for stage in model.stages[:-1])
    assert model.decay == more.get("decay")
    assert model.evidence is not None, done.reason
    assert {stage.end for stage in model.stages} <= {1, 2, LAYERS}
    answered = decode(
        backend_of(done), drawn_prompts(5), thresholds_of(done), stop=(), most_tokens=MOST
    )
    assert [len(text.tokens) for text in answered.texts] == [MOST] * 5


@pytest.mark.parametrize("criterion", ["softmax margin", "state similarity"])
def test_what_exits_see_is_recorded(criterion: TextCriterion, *, encodes: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        graphs = cut_at(write(exported(encodes=encodes), Path(name)), (1, 3), criterion=criterion)
    source = PLACES if encodes else 0
    made_with: dict[str, Any] = {"slots": 4, "length": PLACES, "source_length": source}
    backend = RecordingBackend(graphs.model, graphs.graphs.__getitem__, **made_with)
    backend.record()
    prompts = drawn_prompts(9)
    off = TokenThresholds.off(3)
    answered = decode(backend, prompts, off, stop=(), most_tokens=MOST).texts
    seen = ExitStates(backend, prompts, answered)
    assert seen.states.shape == (2, 9 * MOST, WIDTH)
    assert seen.tokens.tolist() == [token for text in answered for token in text.tokens]
    assert ((seen.confidences >= 0) & (seen.confidences <= 1)).all()
    with tempfile.TemporaryDirectory() as name:
        export = read_export(write(exported(encodes=encodes), Path(name)))
    head = head_graph(DecoderCut(export.decoder), "softmax margin")
    exits = TrainedExits(exits=[ExitParts(), ExitParts()], head=head)
    records = exits.records(seen, criterion)
    assert records.starts.tolist() == list(range(0, 9 * MOST + 1, MOST))
    if criterion == "state similarity":
        assert records.confidences.tolist() == seen.confidences.tolist()
    else:
        np.testing.assert_allclose(records.confidences, seen.confidences, atol=1e-5)
    early = decode(
        backend_of_graphs(graphs), prompts[:1], TokenThresholds(version=0, by_stage=(0, 0)),
        stop=(), most_tokens=1,
    )  # fmt: skip
    first = early.texts[0].tokens[0]
    assert records.agrees[0, 0] == (first == answered[0].tokens[0]), "an exit's own token"


def test_without_gain_or_certificate_the_model_is_served_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear = TextCosts(layers=np.ones(LAYERS), check=9.0, leaving=np.zeros(LAYERS))
    monkeypatch.setattr(steps, "measure_costs", lambda *_: dear)
    done = compile_text(asked(tmp_path))
    tells(done.reason, "no exit", "costs")
    assert (done.early, done.speedup, done.bundle.model.evidence) == (None, None, None)
    assert len(done.bundle.model.stages) == 1
    free = replace(dear, check=0.0)
    monkeypatch.setattr(steps, "measure_costs", lambda *_: free)
    done = compile_text(asked(tmp_path, max_disagreement=0.001, overwrite=True))
    tells(done.reason, "79", "prompts", "--max-disagreement")
    assert len(done.bundle.model.stages) == 1


def test_without_exits_in_use_nothing_of_a_copy_that_learned_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear = TextCosts(layers=np.ones(LAYERS), check=9.0, leaving=np.zeros(LAYERS))
    monkeypatch.setattr(steps, "measure_costs", lambda *_: dear)
    made = []
    for more in ({"train": "none"}, {"train": "joint", "minutes": 0.02}):
        done = compile_text(asked(tmp_path, overwrite=True, **more))
        assert done.early is None
        made.append((done.bundle.path / GENERATION_HASH).read_bytes())
    assert made[0] == made[1]


def test_given_answers_are_read_and_recorded() -> None:
    with tempfile.TemporaryDirectory() as name:
        graphs = cut_at(write(exported(), Path(name)), (1, 3))
    backend = RecordingBackend(graphs.model, graphs.graphs.__getitem__, slots=4, length=PLACES)
    prompts, off = drawn_prompts(6), TokenThresholds.off(3)
    backend.record()
    own = decode(backend, prompts, off, stop=(), most_tokens=MOST).texts
    seen = ExitStates(backend, prompts, own)
    backend.record()
    told = [[(token + 1) % VOCABULARY for token in text.tokens[:place]] + [3]
            for place, text in enumerate(own, 1)]  # fmt: skip
    for prompt, tokens in zip(prompts, told, strict=True):
        backend.given[prompt.tobytes()] = tokens
    read = decode(backend, prompts, off, stop=(3,), most_tokens=MOST).texts
    ends = [tokens.index(3) + 1 for tokens in told]
    assert [text.tokens for text in read] == [
        tokens[:end] for tokens, end in zip(told, ends, strict=True)
    ]
    others = ExitStates(backend, prompts, read)
    assert others.states.shape[1] == sum(ends) == len(others.tokens)
    first, second = others.starts[-2], seen.starts[-2]
    np.testing.assert_allclose(others.states[:, first], seen.states[:, second], atol=1e-5)
    assert not np.allclose(others.states[:, first + 1], seen.states[:, second + 1], atol=1e-2)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"stop_tokens": (3, VOCABULARY)}, (str(VOCABULARY), "39", "--stop-tokens")),
        ({"start_token": -4}, ("-4", "39", "--start-token")),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    tmp_path: Path, more: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(CompileError) as refused:
        compile_text(asked(tmp_path, **more))
    tells(str(refused.value), *facts)
    options = asked(tmp_path)
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([[1, 2], [VOCABULARY, 4]]))
    with pytest.raises(DataError) as unknown:
        compile_text(options)
    tells(str(unknown.value), "1 prompts", f"from 4 to {VOCABULARY}", str(VOCABULARY - 1))


def test_prompts_are_read_without_their_padding(tmp_path: Path) -> None:
    source = NpzSource(saved_prompts(tmp_path / "prompts.npz", 50))
    found = read_prompts(source, ScratchSpace())
    wanted = drawn_prompts(50, seed=5)
    assert [prompt.tolist() for prompt in found] == [prompt.tolist() for prompt in wanted]


def test_a_prompt_is_in_one_part_however_often_it_is_there() -> None:
    prompts = [np.array([n]) for n in range(100)] * 3
    parts = split_prompts(prompts, seed=1)
    assert [len(part) for part in parts] == [30, 20, 50]
    assert sorted(int(p[0]) for part in parts for p in part) == list(range(100))
    assert [p[0] for p in split_prompts(prompts, seed=2).train] != [p[0] for p in parts.train]


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"input_ids": np.zeros((40, 3), np.float32)}, ("input_ids", "float32", "--tokenizer")),
        ({"x": np.zeros((40, 3), np.int64)}, ("input_ids", "nothing")),
        ({"input_ids": np.ones((29, 3), np.int64)}, ("1", "30", "prompts")),
        (
            {"input_ids": np.ones((40, 3), np.int64), "attention_mask": np.ones((40, 2), np.int64)},
            ("attention_mask", "[40, 2]", "[40, 3]"),
        ),
    ],
)
def test_data_without_prompts_are_refused(
    tmp_path: Path, arrays: dict[str, Any], facts: tuple[str, ...]
) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(DataError) as refused:
        split_prompts(read_prompts(NpzSource(tmp_path / "data.npz"), ScratchSpace()), 0)
    tells(str(refused.value), *facts)


def test_a_configuration_beside_the_model_fills_in(tmp_path: Path) -> None:
    options = asked(tmp_path, most_tokens=None, start_token=None)
    folder = options.model.parent
    assert settle(options).most_tokens == 128
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": 5, "decoder_start_token_id": 2, "max_length": 30})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [6, 7], "max_new_tokens": 9, "max_length": None})
    )
    assert settle(options) == TextSettings(
        start_token=2, stop_tokens=(6, 7), most_tokens=9, tokenizer=None
    )
    beside = save_tokenizer(folder / "tokenizer.json")
    found = settle(options).tokenizer
    assert found is not None
    assert found.content == beside.read_bytes()
    own = settle(replace(options, start_token=0, stop_tokens=(1,), most_tokens=4))
    assert (own.start_token, own.stop_tokens, own.most_tokens) == (0, (1,), 4)
    (folder / "config.json").write_text('{"decoder_start_token_id": "<s>"}')
    with pytest.raises(CompileError) as wrong:
        settle(options)
    tells(str(wrong.value), "decoder_start_token_id", "'<s>'", "config.json")
    (folder / "config.json").write_text("[]")
    with pytest.raises(CompileError) as refused:
        settle(options)
    tells(str(refused.value), "config.json", "list", "object")


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    options = asked(tmp_path)
    beside = options.model.parent / "tokenizer.json"
    refusals = {}
    beside.write_text("{}")
    refusals["not a tokenizer of Hugging Face"] = settle_refused(options)
    beside.write_bytes(b"\xff")
    refusals["Tokenizer.save"] = settle_refused(options)
    beside.unlink()
    beside.mkdir()
    refusals["Is a directory"] = settle_refused(options)
    beside.rmdir()
    beside.symlink_to("nowhere")
    refusals["No such file"] = settle_refused(options)
    for facts, text in refusals.items():
        tells(text, str(beside), facts)
    beside.unlink()
    absent = tmp_path / "absent.json"
    tells(settle_refused(replace(options, tokenizer=absent)), str(absent), "check the path")


def settle_refused(options: TextCompileOptions) -> str:
    with pytest.raises(CompileError) as refused:
        settle(options)
    return str(refused.value)


def test_prompts_that_the_model_has_no_positions_for_are_refused(
    tmp_path: Path, *, encodes: bool
) -> None:
    options = asked(tmp_path, encodes=encodes)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (40, PLACES + 3))
    mask = np.zeros_like(ids)
    mask[:, :5] = mask[7] = 1
    np.savez(tmp_path / "prompts.npz", input_ids=ids, attention_mask=mask)
    with pytest.raises(DataError) as refused:
        compile_text(options)
    most = PLACES if encodes else PLACES - 1
    tells(str(refused.value), "1 of 40 prompts", f"{PLACES + 3} tokens", f"at most {most}", "cut")


@pytest.mark.parametrize(
    ("head", "size", "whole"), [("subset", VOCABULARY, VOCABULARY), ("low-rank", 1024, WIDTH)]
)
def test_a_head_of_exits_that_is_not_smaller_is_refused(
    tmp_path: Path, head: Any, size: int, whole: int
) -> None:
    with pytest.raises(CompileError) as refused:
        compile_text(asked(tmp_path, train="adapters", head=head, head_size=size))
    tells(str(refused.value), f"--head-size {size}", str(whole), f"1 to {whole - 1}", "--head full")


def test_layers_are_spread_evenly_unless_they_are_named() -> None:
    assert layers_to_try(4, ()) == (1, 2, 3)
    assert layers_to_try(24, ()) == (3, 6, 9, 12, 15, 18, 21)
    assert layers_to_try(24, (5, 2, 5)) == (2, 5)
    with pytest.raises(CompileError) as refused:
        layers_to_try(4, (2, 4, 0))
    tells(str(refused.value), "[4, 0]", "4", "1", "3")


def test_a_function_of_one_s_own_says_how_unlike_texts_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def half(a, b): return 0.5\ndef two(a, b): return 2\n")
    options = asked(tmp_path, dissimilarity=f"{tmp_path / 'own.py'}:half")
    none = TextSettings(start_token=0, stop_tokens=(), most_tokens=4, tokenizer=None)
    assert find_likeness(options, none).dissimilarity([1], [2]) == 0.5
    with pytest.raises(CompileError) as refused:
        find_likeness(
            replace(options, dissimilarity=f"{tmp_path / 'own.py'}:two"), none
        ).dissimilarity([1], [2])
    tells(str(refused.value), "2", "0", "1")
    for wrong, facts in {
        "own": ("own", "edit-distance", "FILE.py:NAME"),
        f"{tmp_path / 'own.py'}:no": ("no", "function"),
    }.items():
        with pytest.raises(CompileError) as refused:
            find_likeness(replace(options, dissimilarity=wrong), none)
        tells(str(refused.value), *facts)
    with pytest.raises(CompileError) as refused:
        find_likeness(replace(options, dissimilarity="differs", exact="[0-9]"), none)
    tells(str(refused.value), "--exact", "tokenizer.json")


def test_parts_that_are_to_be_exact_count_as_a_whole(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "1": 2, "2": 3, "?": 4}, unk_token="?"))
    words.decoder = decoders.Fuse()
    tokenizer = BundleTokenizer(words.to_str().encode())
    settings = TextSettings(start_token=0, stop_tokens=(), most_tokens=4, tokenizer=tokenizer)
    likeness = find_likeness(asked(tmp_path, exact="[0-9]"), settings)
    assert likeness.dissimilarity([0, 2], [1, 2]) == 0.5, "the digit is the same"
    assert likeness.dissimilarity([0, 2], [0, 3]) == 1.0
    assert likeness.name == "edit-distance, exact in [0-9]"


def records(sure: list[list[float]], agrees: list[list[bool]]) -> TextRecords:
    tokens = len(sure[0])
    return TextRecords(
        starts=np.arange(0, tokens + 1, 2),
        confidences=np.array(sure, np.float32),
        agrees=np.array(agrees),
    )


def test_exits_are_chosen_by_what_they_net() -> None:
    """Exit 0 is never sure; exit 1 always right; exit 2 as well, but deeper."""
    rng = np.random.default_rng(0)
    low, high = rng.uniform(0.1, 0.3, 400).tolist(), rng.uniform(0.9, 1, 400).tolist()
    seen = records([low, high, high], [[False] * 400, [True] * 400, [True] * 400])
    costs = TextCosts(layers=np.ones(8), check=0.1, leaving=np.full(8, 0.5))
    promise = TextPromise(risk=TextRisk.TEXTS, bound=0.01)
    best, *others = choose_exits(seen, (1, 2, 4), costs, promise, differing=True, fills=True)
    assert (best.exits, others) == ((1,), []), "it is the best single exit as well"
    assert best.expected == pytest.approx((2 + 0.1 + 0.5) / 8.1)
    assert (np.diff(best.path[:, 0]) < 0).all(), "from conservative to aggressive"
    assert best.path[-1, 0] == 0, "all tokens leave at last"
    dear = replace(costs, leaving=np.full(8, 7.0))
    assert choose_exits(seen, (1, 2, 4), dear, promise, differing=True, fills=True) == ()


def test_the_best_single_exit_is_a_choice_beside_several() -> None:
    """Exit 0 is sure of half of the tokens, exit 1 of all; both are right where they are sure."""
    half = ([0.99, 0.2] * 200, [True, False] * 200)
    seen = records([half[0], [0.99] * 400], [half[1], [True] * 400])
    costs = TextCosts(layers=np.ones(8), check=0.1, leaving=np.zeros(8))
    promise = TextPromise(risk=TextRisk.TEXTS, bound=0.01)
    several, single = choose_exits(seen, (1, 4), costs, promise, differing=True, fills=True)
    assert (several.exits, single.exits) == ((0, 1), (1,))
    assert several.expected < single.expected == pytest.approx(4.1 / 8.1)


def test_risks_follow_from_records() -> None:
    seen = records([[0.9, 0.9, 0.9, 0.9]], [[True, False, True, True]])
    at = seen.answered_at(np.array([0.5]))
    assert risk_on_records(seen, at, TextRisk.TEXTS, differing=True) == 0.5
    assert risk_on_records(seen, at, TextRisk.TEXTS, differing=False) == 0.25
    assert risk_on_records(seen, at, TextRisk.TOKENS, differing=False) == 0.25
    first = records([[0.9, 0.9]], [[False, True]])
    at = first.answered_at(np.array([0.5]))
    assert risk_on_records(first, at, TextRisk.TOKENS, differing=False) == 1.0, "one at the prefix"


def test_commands_run_by_their_task_too() -> None:
    made = Command(lambda: None, lambda *_: 0, "", task=True)  # type: ignore[arg-type, return-value]
    other = made._replace(task=False)
    commands = {"generation": made, "supernet": other}
    assert command_of(["generation", "m"], commands) == (made, ["m"])
    assert command_of(["m", "--task", "generation", "--x"], commands) == (made, ["m", "--x"])
    assert command_of(["--task=generation", "m"], commands) == (made, ["m"])
    for words in (["m", "--task", "supernet"], ["m", "--task"], [], ["m", "--task", "auto"]):
        assert command_of(words, commands) == (None, words)


@pytest.mark.usefixtures("whatever_it_costs")
def test_the_command_writes_a_bundle_and_tells_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = asked(tmp_path)
    words = [str(options.model), "--task", "generation", "--data", str(tmp_path / "prompts.npz"),
             "--output", str(tmp_path / "text.ee"), "--train", "none", "--most-tokens", "8",
             "--max-disagreement", "0.3", "--batch", "4",
             "--dissimilarity", "edit-distance"]  # fmt: skip
    assert main(words) == 0
    printed = capsys.readouterr().out
    evidence = GeneratingBundle.open(tmp_path / "text.ee").model.evidence
    assert isinstance(evidence, TextEvidence)
    tells(printed, f"{evidence.observed:.2%}", "79", "×", "eeserve")
    assert main(words) == 1
    tells(capsys.readouterr().err, "text.ee", "--overwrite")
    tokenizer = save_tokenizer(tmp_path / "own.json")
    assert main([*words, "--overwrite", "--tokenizer", str(tokenizer)]) == 0
    kept = GeneratingBundle.open(tmp_path / "text.ee").tokenizer()
    assert kept == tokenizer.read_bytes(), "although the prompts are token ids"
    assert main([*words, "--overwrite", "--exits", "0"]) == 1
    tells(capsys.readouterr().err, "[0]", "1 to 3")
    with pytest.raises(SystemExit):
        main([*words, "--exits", "1,x"])
    tells(capsys.readouterr().err, "'1,x'", "layers")


def test_a_bundle_that_is_there_is_kept_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "text.ee").mkdir()
    with pytest.raises(BundleExistsError):
        compile_text(asked(tmp_path))
