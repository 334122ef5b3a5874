"""Train a small model that answers with more than one class: pixels, key points, words, and so on.

It writes into ``--output``: ``model.onnx``, ``calibration.npz`` and ``test.npz`` (neither was
trained on, not even its garments or sentences), and ``training.json`` with the training settings
and the share of the test's pixels, key points, words, label sets or values that are right.

``segmentation``, ``pose``, ``labels`` and ``values`` draw scenes of Fashion-MNIST's garments, which
need Debian's ``dataset-fashion-mnist``, unpacked anywhere (``--images``):
:mod:`offramp.tools.zoo.garments`.
``tokens`` draws sentences of a small grammar and needs no data: :mod:`offramp.tools.zoo.sentences`.

It is not needed to use Offramp. On one core it takes about five minutes::

    python -m offramp.tools.zoo.task_models --task segmentation --output demo/segmentation
    eecompile demo/segmentation/model.onnx --data demo/segmentation/calibration.npz

The compiler would take heat maps of ``pose`` for a segmentation, and ``values`` for classes: pass
``--task pose`` and ``--task regression``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offramp.tools.zoo.fashion_resnet import DATASET
from offramp.tools.zoo.garments import (
    CANVAS,
    draw_label_sets,
    draw_measures,
    draw_poses,
    draw_scenes,
    read_garments,
    share_out,
)
from offramp.tools.zoo.sentences import NO_CLASS, PADDING, draw_sentences
from offramp.tools.zoo.small_models import (
    Parts,
    Recipe,
    Samples,
    export,
    trained,
    write_parts,
)
from offramp.tools.zoo.task_networks import (
    KeyPointNet,
    Labeller,
    Measurer,
    Segmenter,
    WordTagger,
    heat_maps,
)

CALIBRATION, TEST = 8_000, 4_000
NEAR = 0.05
"""A key point is right if its distance is at most this share of the map's side."""
CLOSE = 0.02
"""A value is right if its error is at most this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTask:
    """A task, and how to make a small model for it."""

    recipe: Recipe
    output: str
    """Name of the answer in the graph."""
    symbolic: Mapping[int, str]
    """Dimensions of inputs and answer that have a free size, with their symbols."""


def read_scenes(options: argparse.Namespace) -> Parts:
    """Draw scenes of several garments, 20,000 of them for training."""
    return _draw_of_garments(draw_scenes, 20_000, options)


def read_poses(options: argparse.Namespace) -> Parts:
    """Draw scenes of one garment with key points, 20,000 of them for training."""
    return _draw_of_garments(draw_poses, 20_000, options)


def read_label_sets(options: argparse.Namespace) -> Parts:
    """Draw scenes of several garments with sets of labels, 20,000 of them for training."""
    return _draw_of_garments(draw_label_sets, 20_000, options)


def read_measures(options: argparse.Namespace) -> Parts:
    """Draw scenes of one garment with measures, 20,000 of them for training."""
    return _draw_of_garments(draw_measures, 20_000, options)


_Draw = Callable[..., tuple[NDArray[np.uint8], NDArray[Any]]]
"""Function that draws images and labels of garments, such as :func:`draw_scenes`."""


def _draw_of_garments(draw: _Draw, train: int, options: argparse.Namespace) -> Parts:
    shared = share_out(read_garments(options.images), seed=options.seed)
    found = []
    for place, (garments, count) in enumerate(zip(shared, (train, CALIBRATION, TEST), strict=True)):
        images, labels = draw(garments, count, seed=3 * options.seed + place)
        found.append(Samples(inputs={"image": images}, labels=labels))
    return Parts(train=found[0], calibration=found[1], test=found[2])


def read_sentences(options: argparse.Namespace) -> Parts:
    """Draw sentences, 30,000 of them for training."""
    train = 30_000
    ids, classes = draw_sentences(train + CALIBRATION + TEST, seed=options.seed)
    mask = (ids != PADDING).astype(np.int64)
    every = Samples(inputs={"input_ids": ids, "attention_mask": mask}, labels=classes)
    ends = train, train + CALIBRATION
    return Parts(train=every[: ends[0]], calibration=every[slice(*ends)], test=every[ends[1] :])


def pixel_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross entropy of logits [b, classes, h, w]."""
    return functional.cross_entropy(logits, classes)


def word_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross entropy of logits [b, words, classes]; words without a class are ignored."""
    return functional.cross_entropy(logits.transpose(1, 2), classes, ignore_index=NO_CLASS)


def map_loss(maps: Tensor, points: Tensor) -> Tensor:
    """Return the squared error of heat maps [b, points, s, s]; targets are bells around points."""
    return 100 * functional.mse_loss(maps, heat_maps(points, maps.shape[2]))


def label_loss(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of probabilities [b, labels]; each target is 0 or 1."""
    return functional.binary_cross_entropy(probabilities, labels.float())


def value_loss(values: Tensor, measures: Tensor) -> Tensor:
    """Return the squared error of values [b, values], in hundredths."""
    return 100 * functional.mse_loss(values, measures)


@torch.no_grad()
def _answers(model: nn.Module, samples: Samples) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield a model's answers and the labels, batch by batch."""
    for start in range(0, len(samples), 100):
        batch = samples[start : start + 100]
        yield model(*batch.tensors()).numpy(), batch.labels


def right_places(model: nn.Module, samples: Samples) -> float:
    """Return the share of labelled pixels or words that are classified as labelled."""
    right = places = 0
    for answer, labels in _answers(model, samples):
        right += int((answer.argmax(2 if answer.ndim == 3 else 1) == labels).sum())
        places += int((labels != NO_CLASS).sum())
    return right / places


def right_points(model: nn.Module, samples: Samples) -> float:
    """Return the share of key points whose map has its maximum within :data:`NEAR` of them."""
    right = 0
    for maps, labels in _answers(model, samples):
        side = maps.shape[-1]
        rows, columns = np.divmod(maps.reshape(*maps.shape[:2], -1).argmax(2), side)
        true = (labels + 0.5) * (side / CANVAS) - 0.5
        apart = np.hypot(rows - true[..., 0], columns - true[..., 1])
        right += int((apart <= NEAR * side).sum())
    return right / samples.labels[..., 0].size


def right_label_sets(model: nn.Module, samples: Samples) -> float:
    """Return the share of samples for which every label is right."""
    right = 0
    for answer, labels in _answers(model, samples):
        right += int(((answer >= 0.5) == labels).all(axis=1).sum())
    return right / len(samples)


def right_values(model: nn.Module, samples: Samples) -> float:
    """Return the share of values within :data:`CLOSE` of the true ones."""
    right = 0
    for answer, labels in _answers(model, samples):
        right += int((np.abs(answer - labels) <= CLOSE).sum())
    return right / samples.labels.size


TASKS = {
    "segmentation": SmallTask(
        recipe=Recipe(
            make=Segmenter,
            read=read_scenes,
            epochs=6,
            learning_rate=6e-3,
            batch_size=64,
            loss=pixel_loss,
            test=right_places,
            channels_last=True,
            bfloat16=True,
        ),
        output="logits",
        symbolic={0: "batch"},
    ),
    "pose": SmallTask(
        recipe=Recipe(
            make=KeyPointNet,
            read=read_poses,
            epochs=5,
            learning_rate=6e-3,
            batch_size=64,
            loss=map_loss,
            test=right_points,
            channels_last=True,
            bfloat16=True,
        ),
        output="heat_maps",
        symbolic={0: "batch"},
    ),
    "tokens": SmallTask(
        recipe=Recipe(
            make=WordTagger,
            read=read_sentences,
            epochs=4,
            learning_rate=1.5e-3,
            batch_size=64,
            loss=word_loss,
            test=right_places,
            bfloat16=True,
        ),
        output="logits",
        symbolic={0: "batch", 1: "sequence"},
    ),
    "labels": SmallTask(
        recipe=Recipe(
            make=Labeller,
            read=read_label_sets,
            epochs=8,
            learning_rate=6e-3,
            batch_size=64,
            loss=label_loss,
            test=right_label_sets,
            channels_last=True,
            bfloat16=True,
        ),
        output="probabilities",
        symbolic={0: "batch"},
    ),
    "values": SmallTask(
        recipe=Recipe(
            make=Measurer,
            read=read_measures,
            epochs=6,
            learning_rate=6e-3,
            batch_size=64,
            loss=value_loss,
            test=right_values,
            channels_last=True,
            bfloat16=True,
        ),
        output="values",
        symbolic={0: "batch"},
    ),
}


def make(name: str, options: argparse.Namespace) -> Path:
    """Train a model for a task, and write it with its data; return the folder."""
    task, folder = TASKS[name], Path(options.output)
    parts = task.recipe.read(options)
    model, facts = trained(name, task.recipe, parts, options)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    export(model, path, parts.test, output=task.output, symbolic=task.symbolic)
    write_parts(folder, parts, facts)
    return folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of training, except the task and the folder."""
    parser.add_argument("--images", type=Path, default=DATASET, help="folder of Fashion-MNIST")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of torch during training"
    )
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Train, export, and write the splits."""
    parser = argparse.ArgumentParser(
        description="Train a small model that answers with more than one class."
    )
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    add_arguments(parser)
    options = parser.parse_args()
    make(options.task, options)


if __name__ == "__main__":
    main()
