"""The example of generated text: its prompts, its training, its three ONNX files."""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from tokenizers import Tokenizer

from offramp.tools.zoo import text_normaliser
from offramp.tools.zoo.encoder_decoder import (
    END,
    FILES,
    PADDING,
    START,
    UNKNOWN,
    EncoderDecoder,
    export,
    greedy,
    greedy_of_files,
)
from offramp.tools.zoo.messy_text import draw_pairs
from offramp.tools.zoo.small_models import Parts
from offramp.tools.zoo.text_normaliser import (
    CONTROLS,
    TOKENS,
    VOCABULARY,
    draw_parts,
    loss_of_exits,
    loss_of_last,
    make,
    same,
    train,
)

LAYERS, HEADS, SIZE = 2, 2, 8
TINY = functools.partial(EncoderDecoder, width=HEADS * SIZE, heads=HEADS, encoder_depth=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: on a busy machine its threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def drawn() -> tuple[Parts, Tokenizer]:
    return draw_parts(0, trained=1200, calibrated=60, tested=40)


def tiny() -> EncoderDecoder:
    torch.manual_seed(0)
    model = TINY(vocabulary=VOCABULARY, depth=LAYERS).eval()
    for name, weights in model.named_parameters():
        # As they are made, all tokens are nearly as likely; what is read and where is to matter.
        torch.nn.init.normal_(weights, std=2.0 if "places" in name else 0.5)
    torch.nn.init.constant_(model.norm.weight, -1)  # else it repeats the token that it read
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of itself
        export(tiny(), folder)
    return folder


def session(folder: Path, number: int) -> ort.InferenceSession:
    return ort.InferenceSession(folder / FILES[number], providers=["CPUExecutionProvider"])


def test_prompts_are_in_one_part_each(drawn: tuple[Parts, Tokenizer]) -> None:
    parts, _ = drawn
    named = (parts.train, parts.calibration, parts.test)
    assert [len(samples) for samples in named] == [1200, 60, 40]
    assert len({row.tobytes() for part in named for row in part.inputs["input_ids"]}) == 1300
    for samples in named:
        ids, mask = samples.inputs["input_ids"], samples.inputs["attention_mask"]
        assert ids.dtype == mask.dtype == samples.labels.dtype == np.int64
        for rows in (ids, samples.labels):
            assert rows.shape == (len(samples), TOKENS)
            ends = (rows != PADDING).sum(axis=1) - 1
            assert (rows[np.arange(len(rows)), ends] == END).all()
            assert ((rows == PADDING) == (np.arange(TOKENS) > ends[:, None])).all()
        assert ((ids != PADDING) == mask).all()


def test_text_goes_in_and_comes_out(drawn: tuple[Parts, Tokenizer], tmp_path: Path) -> None:
    parts, made = drawn
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "<s>", "</s>", "<unk>")] == [
        PADDING, START, END, UNKNOWN,
    ]  # fmt: skip
    for pair in draw_pairs(1313, seed=0)[-200:]:
        for text in pair:
            ids = tokenizer.encode(text).ids
            assert UNKNOWN not in ids
            assert tokenizer.decode(ids) == text
    tokens = tokenizer.encode("the meeting is on 2021-03-09").tokens
    assert tokens[-12:] == [" ", *"2021-03-09", "</s>"]
    assert len(tokens) < 20  # words are pieces, not characters
    assert UNKNOWN in tokenizer.encode("at 你").ids
    pair = draw_pairs(1, seed=0)[0]
    prompt, label = parts.train.inputs["input_ids"][0], parts.train.labels[0]
    assert tokenizer.decode(prompt.tolist()) == pair.written
    assert tokenizer.decode(label.tolist()) == pair.canonical


def names_and_axes(values: list[ort.NodeArg]) -> dict[str, list[str | int]]:
    return {value.name: value.shape for value in values}


def test_files_are_named_and_shaped_as_promised(exported: Path) -> None:
    batch, source = "batch_size", "encoder_sequence_length"
    tokens, past = "decoder_sequence_length", "past_decoder_sequence_length"
    total = f"{past} + {tokens}"
    assert FILES == ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
    encoder, first, following = (session(exported, number) for number in range(3))

    def caches(head: str, side: str, length: str) -> dict[str, list[str | int]]:
        return {
            f"{head}.{layer}.{side}.{kind}": [batch, HEADS, length, SIZE]
            for layer in range(LAYERS)
            for kind in ("key", "value")
        }

    texts = {"input_ids": [batch, source], "attention_mask": [batch, source]}
    assert names_and_axes(encoder.get_inputs()) == texts
    assert names_and_axes(encoder.get_outputs()) == {
        "last_hidden_state": [batch, source, HEADS * SIZE]
    }
    common = {
        "encoder_attention_mask": [batch, source],
        "input_ids": [batch, tokens],
        "decoder_position_ids": [batch, tokens],
    }
    assert names_and_axes(first.get_inputs()) == common | {
        "encoder_hidden_states": [batch, source, HEADS * SIZE],
        "decoder_attention_mask": [batch, tokens],
    }
    logits = {"logits": [batch, tokens, VOCABULARY]}
    assert names_and_axes(first.get_outputs()) == (
        logits | caches("present", "decoder", tokens) | caches("present", "encoder", source)
    )
    assert names_and_axes(following.get_inputs()) == (
        common
        | {"decoder_attention_mask": [batch, total]}
        | caches("past_key_values", "decoder", past)
        | caches("past_key_values", "encoder", source)
    )
    assert names_and_axes(following.get_outputs()) == logits | caches("present", "decoder", total)


def test_files_write_what_torch_writes(drawn: tuple[Parts, Tokenizer], exported: Path) -> None:
    samples = drawn[0].test[:12]
    found = greedy_of_files(exported, *samples.inputs.values(), most=20)
    wanted = greedy(tiny(), *samples.tensors(), most=20)
    assert found.tolist() == wanted.tolist()
    assert len(np.unique(found)) > 5


def test_greedy_pads_what_has_ended(drawn: tuple[Parts, Tokenizer]) -> None:
    model = tiny()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(model.tokens.weight[END])
        model.tokens.weight[END] *= 10
    outputs = greedy(model, *drawn[0].test[:3].tensors(), most=20)
    assert outputs.tolist() == [[END]] * 3


def test_rows_of_different_lengths_share_a_step(
    drawn: tuple[Parts, Tokenizer], exported: Path
) -> None:
    """Padding after the past, and after the prompt, changes nothing; nor do several tokens per
    step.
    """
    encoder, first, following = (session(exported, number) for number in range(3))
    ids, mask = (array[:2] for array in drawn[0].test.inputs.values())
    lengths = (3, 6)
    alone, pasts = [], []
    for row, length in enumerate(lengths):
        real = int(mask[row].sum())
        own = {"input_ids": ids[row : row + 1, :real], "attention_mask": mask[row : row + 1, :real]}
        (encoded,) = encoder.run(None, own)
        feeds = {
            "encoder_attention_mask": own["attention_mask"],
            "encoder_hidden_states": encoded,
            "input_ids": np.arange(10, 10 + length)[None],
            "decoder_attention_mask": np.ones((1, length), np.int64),
            "decoder_position_ids": np.arange(length)[None],
        }
        names = [output.name for output in first.get_outputs()]
        present = dict(zip(names, first.run(None, feeds), strict=True))
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in present.items()
            if name != "logits"
        }
        pasts.append(past)
        logits = []
        for step in range(2):  # token by token
            feeds = past | {
                "encoder_attention_mask": own["attention_mask"],
                "input_ids": np.array([[30 + step]]),
                "decoder_attention_mask": np.ones((1, length + step + 1), np.int64),
                "decoder_position_ids": np.array([[length + step]]),
            }
            out = following.run(None, feeds)
            logits.append(out[0][:, 0])
            caches = [output.name.replace("present", "past_key_values")
                      for output in following.get_outputs()[1:]]  # fmt: skip
            past = past | dict(zip(caches, out[1:], strict=True))
        alone.append(np.stack(logits, axis=1))

    def joined(name: str) -> np.ndarray:
        rows = [past[name] for past in pasts]
        longest = max(row.shape[2] for row in rows)
        return np.concatenate([
            np.pad(row, ((0, 0), (0, 0), (0, longest - row.shape[2]), (0, 0)), constant_values=9)
            for row in rows
        ])  # fmt: skip

    longest = int(mask.sum(axis=1).max())
    seen = np.array([[1] * n + [0] * (max(lengths) - n) + [1, 1] for n in lengths])
    feeds = {name: joined(name) for name in pasts[0]} | {
        "encoder_attention_mask": mask[:, :longest],
        "input_ids": np.array([[30, 31]] * 2),
        "decoder_attention_mask": seen,
        "decoder_position_ids": np.array([[n, n + 1] for n in lengths]),
    }
    together = following.run(["logits"], feeds)[0]
    # Sums in float32 are rounded otherwise in other shapes.
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-3, atol=1e-3)


def test_the_loss_of_exits_weighs_layers_by_their_number(drawn: tuple[Parts, Tokenizer]) -> None:
    model = tiny()
    wanted = torch.from_numpy(drawn[0].train.labels[:4, :9]).clone()
    wanted[0, 5:] = PADDING
    states = list(torch.randn(LAYERS, *wanted.shape, HEADS * SIZE))
    first, second = (loss_of_last(model, [state], wanted) for state in states)
    assert loss_of_last(model, states, wanted) == second
    torch.testing.assert_close(loss_of_exits(model, states, wanted), (first + 2 * second) / 3)


def test_it_learns(drawn: tuple[Parts, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = TINY(vocabulary=VOCABULARY, depth=LAYERS)
    samples = drawn[0].train

    def loss() -> float:
        ids, mask = samples[:64].tensors()
        wanted = torch.from_numpy(samples.labels[:64])
        tokens = torch.nn.functional.pad(wanted[:, :-1], (1, 0), value=START)
        places = torch.arange(TOKENS).expand_as(tokens)
        with torch.no_grad():
            states, _ = model.decode(
                tokens, places, torch.ones_like(tokens), mask, model.cross(model.encode(ids, mask))
            )
            return float(loss_of_exits(model, states, wanted))

    before = loss()
    monkeypatch.setattr(text_normaliser, "_RATE", 5e-2)
    assert train(model, samples, loss_of_exits, limit_s=60, steps=60) == 60
    assert before > 5.5  # as likely as any other of 384 tokens
    assert loss() < before - 1


def test_training_ends_with_its_time(drawn: tuple[Parts, Tokenizer]) -> None:
    model = TINY(vocabulary=VOCABULARY, depth=LAYERS)
    assert train(model, drawn[0].train, loss_of_last, limit_s=0.3) < 300


@pytest.fixture
def options(
    drawn: tuple[Parts, Tokenizer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> argparse.Namespace:
    """Options of a run that is small in everything."""
    monkeypatch.setattr(text_normaliser, "draw_parts", lambda seed: drawn)
    monkeypatch.setattr(
        text_normaliser,
        "EncoderDecoder",
        lambda *, vocabulary, depth: TINY(vocabulary=vocabulary, depth=min(depth, LAYERS + 1)),
    )
    parser = argparse.ArgumentParser()
    text_normaliser.add_arguments(parser)
    return parser.parse_args(["--output", str(tmp_path), "--steps", "3"])


@pytest.mark.filterwarnings("ignore")  # torch's exporter warns of itself
def test_models_are_written_as_they_are_named(
    drawn: tuple[Parts, Tokenizer], options: argparse.Namespace
) -> None:
    assert options.only == ["joint"]
    options.only = ["joint", "plain"]
    make(options)
    assert sorted(path.name for path in options.output.iterdir()) == ["joint", "plain"]
    for folder in options.output.iterdir():
        assert sorted(path.name for path in folder.iterdir()) == sorted([
            *FILES, "calibration.npz", "generation_config.json", "test.npz", "tokenizer.json",
            "training.json",
        ])  # fmt: skip
        facts = json.loads((folder / "training.json").read_text())
        assert (facts["model"], facts["decoder_layers"], facts["steps"]) == (folder.name, 3, 3)
        assert facts["same_in_onnx_runtime"] >= 0.99
        assert facts["test_accuracy_of_whole_outputs"] == 0  # three steps teach nothing
        assert facts["onnx_bytes"] == {name: (folder / name).stat().st_size for name in FILES}
        config = json.loads((folder / "generation_config.json").read_text())
        assert config == {
            "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": PADDING,
            "max_length": TOKENS,
        }  # fmt: skip
        with np.load(folder / "calibration.npz") as arrays:
            assert set(arrays) == {"input_ids", "attention_mask", "label"}
            assert (arrays["label"] == drawn[0].calibration.labels).all()
    sizes = {(path / FILES[1]).stat().st_size for path in options.output.iterdir()}
    assert len(sizes) == 1  # exits share the norm and the LM head, and add nothing
    options.only = ["layers_3"]
    make(options)
    facts = json.loads((options.output / "layers_3" / "training.json").read_text())
    assert facts["decoder_layers"] == CONTROLS["layers_3"] == 3


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_export_is_refused(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        text_normaliser, "greedy_of_files", lambda folder, ids, mask, most: np.full_like(ids, END)
    )
    with pytest.raises(SystemExit, match=r"100.0% of outputs .* at most 1 % should"):
        make(options)


def test_outputs_are_the_same_only_as_a_whole() -> None:
    outputs = np.array([[5, END, 0], [6, 7, END], [8, END, 0], [9, END, 0]])
    others = outputs.copy()
    others[1, 1] = 9
    assert same(outputs, others) == 0.75
