"""The small models that are trained for minutes: their data, training, export, and cut points."""

from __future__ import annotations

import gzip
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend.model import read_model
from offramp.tools.zoo import small_models
from offramp.tools.zoo.architectures import (
    MobileNet,
    ResidualMlp,
    TextTransformer,
    VisionTransformer,
)
from offramp.tools.zoo.small_models import (
    PADDING,
    RECIPES,
    TOKENS,
    UNKNOWN,
    Parts,
    Samples,
    accuracy,
    encode,
    export,
    make,
    read_images,
    train,
    vocabulary_of,
)

SAMPLES = 96
TINY: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: VisionTransformer(width=16, depth=3, heads=2),
    "mobilenet": lambda: MobileNet(((8, 2, 1), (12, 2, 2)), stem=8, last=16, expansion=2),
    "mlp": lambda: ResidualMlp(width=16, hidden=32, depth=4),
    "text": lambda: TextTransformer(words=50, tokens=TOKENS, width=16, depth=3, heads=2),
}
CUTS = {"vit": 3, "mobilenet": 3, "mlp": 4, "text": 3}
"""Least number of cuts: one after each block that another block follows, and more."""


def bright_or_dark() -> Samples:
    """Images of two classes that a mean tells apart."""
    random = np.random.default_rng(0)
    labels = np.arange(SAMPLES) % 2
    images = random.integers(0, 100, (SAMPLES, 1, 28, 28)) + 150 * labels[:, None, None, None]
    return Samples(inputs={"image": images.astype(np.uint8)}, labels=labels)


def first_or_second_word() -> Samples:
    random = np.random.default_rng(0)
    labels = np.arange(SAMPLES) % 2
    ids = random.integers(4, 50, (SAMPLES, TOKENS))
    ids[:, :4] = 2 + labels[:, None]
    mask = (np.arange(TOKENS) < random.integers(8, TOKENS, (SAMPLES, 1))).astype(np.int64)
    return Samples(inputs={"input_ids": ids * mask, "attention_mask": mask}, labels=labels)


def samples_of(name: str) -> Samples:
    return first_or_second_word() if name == "text" else bright_or_dark()


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_one_learns_and_its_export_answers_alike_and_has_cut_points(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(name)
    parts = Parts(train=samples, calibration=samples[:8], test=samples)
    recipe = replace(
        RECIPES[name], make=TINY[name], read=lambda _: parts, epochs=12, batch_size=16, change=None
    )
    monkeypatch.setitem(RECIPES, name, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of itself
        folder = make(name, Namespace(output=tmp_path, seed=0, threads=1))

    exported = folder / f"{name}.onnx"
    session = ort.InferenceSession(exported, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {k: v[:5] for k, v in samples.inputs.items()})
    assert (logits.argmax(1) == samples.labels[:5]).all()
    assert len(find_cuts(read_model(exported)).cuts) >= CUTS[name]
    with np.load(folder / "calibration.npz") as saved:
        assert {*saved} == {*samples.inputs, "label"}
        assert len(saved["label"]) == 8


@pytest.mark.parametrize("name", ["vit", "mlp"])
def test_the_export_is_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, samples = TINY[name]().eval(), samples_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(model, tmp_path / "model.onnx", samples)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {k: v[:7] for k, v in samples.inputs.items()})
    with torch.no_grad():
        expected = model(*samples[:7].tensors()).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)  # rounding of float32 sums


def test_training_is_the_same_in_every_run() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = TINY["mlp"]()
        train(model, bright_or_dark(), replace(RECIPES["mlp"], epochs=1, batch_size=16), seed=0)
        found.append(torch.cat([weights.flatten() for weights in model.parameters()]))
    assert torch.equal(*found)


def test_accuracy_counts_what_is_right() -> None:
    samples = bright_or_dark()

    class Mean(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            bright = (image.float().mean((1, 2, 3)) > 125).float()
            return torch.stack([1 - bright, bright], 1)

    assert accuracy(Mean(), samples) == 1.0
    wrong = Samples(
        inputs=samples.inputs, labels=np.where(np.arange(SAMPLES) < 24, 9, samples.labels)
    )
    assert accuracy(Mean(), wrong) == 0.75


def _write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


def test_no_image_that_calibrates_or_tests_trains(tmp_path: Path) -> None:
    with np.load(small_models.EXAMPLE / "test.npz") as test:
        used = test["image"][:3, 0]
    fresh = np.full((2, 28, 28), 7, np.uint8)
    images = np.concatenate([used[:2], fresh, used[2:]])
    _write_idx(tmp_path / "train-images-idx3-ubyte.gz", images)
    _write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.arange(5, dtype=np.uint8))

    parts = read_images(Namespace(images=tmp_path))

    np.testing.assert_array_equal(parts.train.inputs["image"][:, 0], fresh)
    assert parts.train.labels.tolist() == [2, 3]
    assert (len(parts.calibration), len(parts.test)) == (20_000, 4_000)


def test_images_that_are_not_there_are_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"dataset-fashion-mnist.*--images"):
        read_images(Namespace(images=tmp_path))


def test_words_are_numbered_by_frequency_and_cut_or_padded() -> None:
    vocabulary = vocabulary_of([["a", "b", "b"], ["b", "c", "c"]])
    assert vocabulary == {"b": 2, "c": 3, "a": 4}
    ids = encode([["c", "new", "b"], ["a"] * (TOKENS + 5)], vocabulary)
    assert ids.shape == (2, TOKENS)
    assert ids[0].tolist() == [3, UNKNOWN, 2] + [PADDING] * (TOKENS - 3)
    assert (ids[1] == 4).all()
