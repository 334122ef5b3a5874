"""Data sets whose rows depend on each other in a known way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset


def dataset_of(group: NDArray[np.int64] | None = None, **inputs: NDArray) -> Dataset:
    return Dataset(inputs=inputs, labels=None, group=group, sha256="0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Rows that were made of others."""

    x: NDArray[np.float32]
    origin: NDArray[np.int64]
    """[rows]: the sample that each row was made of."""


def copied(rng: np.random.Generator, copies: NDArray[np.int64], width: int, noise: float) -> Copied:
    """Return each of some random samples as often as ``copies`` says, shuffled, with noise."""
    origin = rng.permutation(np.repeat(np.arange(len(copies)), copies))
    x = rng.standard_normal((len(copies), width))[origin]
    x += noise * rng.standard_normal(x.shape)
    return Copied(x=x.astype(np.float32), origin=origin)


def series(rng: np.random.Generator, length: int, memory: float) -> NDArray[np.float32]:
    """Return an autoregressive series of variance 1."""
    steps = rng.standard_normal(length) * np.sqrt(1 - memory**2)
    for place in range(1, length):
        steps[place] += memory * steps[place - 1]
    return steps.astype(np.float32)


def windows(of: NDArray[np.float32], width: int, stride: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(of, width)[::stride])


def film(rng: np.random.Generator, frames: int, width: int, memory: float) -> NDArray[np.float32]:
    """Return frames of which each resembles the one before."""
    return np.stack([series(rng, frames, memory) for _ in range(width)], axis=1)
