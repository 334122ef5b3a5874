"""The ranges of activations for uint8 or int8 scales that are fixed before serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.calibration.data.activations import activations
from offramp.calibration.data.dataset import DataError, Dataset

_BINS = 2048
_VALUES = 2**16
"""Most values of a tensor in a batch that are counted, at even distances: the rest would not move
the limits, and counting all of them took longer than running the model."""
_SHARES = np.linspace(1 / 16, 1, 61)
"""Shares of the whole range that are tried as limits."""


class Range(NamedTuple):
    """The values that the lowest and the highest step stand for; 0 is between them."""

    low: float
    high: float


def activation_ranges(
    proto: onnx.ModelProto, tensors: Sequence[str], dataset: Dataset, *, threads: int
) -> Mapping[str, Range]:
    """Find the ranges of some tensors: those with the least squared error on their histograms.

    All samples are run, twice, and a histogram of some values is all that is kept of a tensor. A
    ``DataError`` where there are no samples, or the model fails on one or computes no finite
    numbers.
    """
    if not len(dataset):
        raise DataError("no samples to measure the ranges of activations on; give some hundreds")
    widest = dict.fromkeys(tensors, Range(0.0, 0.0))
    for name, values, where in activations(proto, tensors, dataset, threads=threads):
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        if not np.isfinite([low, high]).all():
            raise DataError(
                f"tensor {name!r} holds values from {low} to {high} for one of samples {where}, "
                "so it has no range; correct or remove that sample, or stay with float32"
            )
        known = widest[name]
        widest[name] = Range(min(known.low, low), max(known.high, high))
    counts = {name: np.zeros(_BINS, np.int64) for name in tensors}
    for name, values, _ in activations(proto, tensors, dataset, threads=threads):
        low, high = widest[name]
        some = values.reshape(-1)[:: -(-values.size // _VALUES) or 1]
        counts[name] += np.histogram(some, _BINS, (low, high if high > low else low + 1))[0]
    return {name: _least_error(counts[name], widest[name]) for name in tensors}


def _least_error(counts: NDArray[np.int64], widest: Range) -> Range:
    """Find the range with the least squared error of rounding to 255 steps, and of clipping.

    ``counts`` [bins] are between the limits of ``widest``.
    """
    low, high = widest
    if not high > low:
        return Range(0.0, 1.0)
    centers = low + (np.arange(len(counts)) + 0.5) * (high - low) / len(counts)
    best = widest
    for _ in range(2):  # one limit after the other: what the first can be depends on the second
        best = min(
            (Range(low * a, best.high) for a in _SHARES), key=partial(_error, counts, centers)
        )
        best = min(
            (Range(best.low, high * b) for b in _SHARES), key=partial(_error, counts, centers)
        )
    return best


def _error(counts: NDArray[np.int64], centers: NDArray[np.float64], limits: Range) -> float:
    clipped = np.clip(centers, *limits)
    step = (limits.high - limits.low) / 255
    beyond = centers != clipped
    return float(counts @ (centers - clipped) ** 2 + counts[~beyond].sum() * step**2 / 12)
