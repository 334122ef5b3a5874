"""Measured models with random weights, cut where PAME found exits, and their samples.

Latency does not depend on weights. Exits do, so they are replayed: see
:mod:`offramp.tools.gpu.staged`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle
from offramp.calibration.data.dataset import Dataset
from offramp.tools.gpu import berts, resnets
from offramp.tools.gpu.staged import REPLAY, CutModel, plain_bundle

Tensors = Mapping[str, NDArray[Any]]

LEAVES, GOES_ON, THRESHOLD = 0.75, 0.25, 0.5
"""Replayed confidences, and the threshold of exits: exact in any precision."""
LATER_CONTINUE_SHARE: Final = 0.5
"""Share of the samples that reach a later exit and continue after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model to measure: its graph, places of exits, and inputs."""

    name: str
    make: Callable[[int], onnx.ModelProto]
    """Function that makes the model from the seed of its weights."""
    cuts: tuple[str, ...]
    """Tensors after which there are exits."""
    rows: Callable[[np.random.Generator, int], Tensors]
    """Function that makes a given number of rows of its inputs."""

    def bundle(self, folder: Path, seed: int) -> Bundle:
        """Make its bundle, with one segment per stage, unless the folder has it already."""
        path = folder / f"{self.name}-{seed}.ee"
        if path.is_dir():
            return Bundle.open(path)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.onnx"
            onnx.save(self.make(seed), file)
            pieces = CutModel.at(file, self.cuts)
        exits = range(len(self.cuts))
        return plain_bundle(
            pieces,
            path,
            self.rows(np.random.default_rng(seed), 1),
            exits_after=exits,
            active=[ActiveExit(exit=index, threshold=THRESHOLD) for index in exits],
            replayed=True,
        )

    def samples(self, count: int, go_on: float | Recorded, *, seed: int, pool: int = 64) -> Samples:
        """Make samples, and decide where each of them leaves.

        Args:
            count: Number of samples.
            go_on: Share that continues after the first exit (after each later exit, half of the
                rest), or recorded confidences.
            seed: Seed of the samples and of their exits.
            pool: Number of distinct rows, apart from replayed confidences.
        """
        rng = np.random.default_rng(seed)
        inputs = dict(self.rows(rng, min(pool, count)))
        if isinstance(go_on, Recorded):
            inputs[REPLAY] = go_on.draw(rng, count, len(self.cuts))
        else:
            inputs[REPLAY] = drawn(
                rng, count, [go_on] + [LATER_CONTINUE_SHARE] * (len(self.cuts) - 1)
            )
        return Samples(inputs=inputs, labels=None, sha256="", count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Recorded confidences of a trained model's exits, and its thresholds."""

    confidence: NDArray[np.float32]
    """[n, exits]: recorded confidences."""
    thresholds: NDArray[np.float32]
    """[exits]: threshold of each exit."""

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Read them from an npz of ``confidence`` and ``thresholds``.

        Raises:
            ValueError: One of both is missing, or they do not fit each other.
        """
        with np.load(path) as archive:
            lacking = {"confidence", "thresholds"} - set(archive.files)
            if lacking:
                raise ValueError(f"{path} lacks {sorted(lacking)}, but it has {archive.files}")
            made = cls(confidence=archive["confidence"], thresholds=archive["thresholds"])
        if made.confidence.shape[1:] != made.thresholds.shape:
            raise ValueError(
                f"{path}: confidence is {list(made.confidence.shape)}, expected a column for each "
                f"of the {len(made.thresholds)} exits of thresholds"
            )
        return made

    def draw(self, rng: np.random.Generator, count: int, exits: int) -> NDArray[np.float32]:
        """Return [count, exits]: recorded confidences of some samples at the first exits."""
        if len(self.thresholds) < exits:
            raise ValueError(
                f"the recording has {len(self.thresholds)} exits, but {exits} are needed"
            )
        rows = rng.integers(0, len(self.confidence), count)
        leaves = self.confidence[rows, :exits] >= self.thresholds[:exits]
        return np.where(leaves, np.float32(LEAVES), np.float32(GOES_ON))


def drawn(rng: np.random.Generator, count: int, go_on: Sequence[float]) -> NDArray[np.float32]:
    """Return [count, exits]: confidences with which given shares continue after each exit."""
    stays = rng.random((count, len(go_on))) < np.asarray(go_on)
    return np.where(stays, np.float32(GOES_ON), np.float32(LEAVES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(Dataset):
    """``count`` samples, for which the rows of shorter inputs are repeated."""

    count: int
    """Number of samples."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def take(self, rows: slice | NDArray[np.intp]) -> dict[str, NDArray[Any]]:
        """Return the inputs of some samples."""
        chosen = np.arange(self.count)[rows]
        return {name: array[chosen % len(array)] for name, array in self.inputs.items()}


def _images(rng: np.random.Generator, count: int) -> Tensors:
    return {resnets.INPUT: rng.integers(0, 256, (count, *resnets.INPUT_SHAPE), np.uint8)}


def tokens(rng: np.random.Generator, count: int, *, size: berts.BertSize) -> Tensors:
    """Return padded token sequences, from a quarter of the full length to all of it."""
    ids = rng.integers(0, size.vocabulary, (count, size.tokens))
    lengths = rng.integers(size.tokens // 4, size.tokens + 1, (count, 1))
    mask = (np.arange(size.tokens) < lengths).astype(np.int64)
    return {berts.IDS: ids * mask, berts.MASK: mask}


def bert_model(name: str, size: berts.BertSize, cuts: tuple[str, ...]) -> BenchModel:
    """A BERT to be measured."""
    return BenchModel(
        name=name,
        make=lambda seed: berts.bert(size, seed),
        cuts=cuts,
        rows=partial(tokens, size=size),
    )


def _resnet(name: str, cut: str) -> BenchModel:
    return BenchModel(
        name=name,
        make=lambda seed: resnets.of_pixels(name, seed),
        cuts=(cut,),
        rows=_images,
    )


_MODELS: Final = (
    # ResNet-101's exit; in ResNet-50, the end of its second layer is at the same share of the work.
    _resnet("resnet50", "layer2.3.relu"),
    # PAME 7.4 finds exit candidate H13, after block 13 of 33, best for Imagenet.
    _resnet("resnet101", "layer3.5.relu"),
    # Figure 10 has two exits for most language tasks, in the first half.
    bert_model("bert-base", berts.BertSize(), ("layer2.out", "layer5.out")),
)
MODELS: Final[Mapping[str, BenchModel]] = {model.name: model for model in _MODELS}
"""Models that can be measured, by name."""
