"""What answers a tail can give, found by trying it on scores of all kinds."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.compiler.graphs.tail import Tail

_CERTAIN: Final = 200.0
"""Logit of a class that is certain."""
_DRAWN: Final = 2048
"""Scores within the corners that a tail is tried with."""
_ROUNDING: Final = frozenset({"Cast", "Ceil", "Floor", "QuantizeLinear", "Round"})


def find_bounds(tail: Tail, wanted: NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and largest value of answers that are made of probabilities.

    ``wanted`` [n, …] are answers of the model.
    """
    ends = np.concatenate([_tried(tail).ravel(), wanted.ravel()])
    ends = ends[np.isfinite(ends)]
    return float(ends.min()), float(ends.max())


def find_thresholds(tail: Tail, wanted: NDArray[Any]) -> tuple[float, ...]:
    """Return the values from which on labels are given, [labels]: those as likely as not.

    Where they are between two steps of a rounded answer, the middle of both is taken. ``wanted``
    [n, labels] are answers of the model. No answer of a label is below its smallest one, as the
    model may give for all that is less sure: there the label is given to all that is above.
    """
    taught = tail.taught
    neutral, near = (0.0, 0.02) if taught.form == "logits" else (0.5, 0.005)
    around = np.array([-near, near]) if _ROUNDING.intersection(tail.kinds) else np.zeros(1)
    scores = np.repeat(neutral + around[:, None], taught.classes, axis=1)
    if taught.form == "log-probabilities":
        scores = np.log(scores)
    middle = tail.apply(scores).astype(np.float64).mean(axis=0)
    tried = np.concatenate([_tried(tail), wanted]).astype(np.float64)
    columns = zip(middle.tolist(), tried.T, strict=True)
    return tuple(_above_smallest(threshold, column) for threshold, column in columns)


def _tried(tail: Tail) -> NDArray[Any]:
    """Return answers at every corner (each class certain, and each impossible) and within."""
    k, rng = tail.taught.classes, np.random.default_rng(0)
    inner = rng.random((_DRAWN, k))
    corners = np.concatenate([np.eye(k), 1 - np.eye(k), np.zeros((1, k)), np.ones((1, k)), inner])
    if tail.taught.form == "logits":
        corners = np.concatenate([_CERTAIN * (2 * corners - 1), 10 * (2 * inner - 1)])
    elif tail.taught.task.kind == "classification":
        corners = corners[corners.sum(axis=1) > 0]
        corners /= corners.sum(axis=1, keepdims=True)
        if tail.taught.form == "log-probabilities":
            corners = np.log(np.maximum(corners, np.finfo(np.float32).tiny))
    return tail.apply(corners)


def _above_smallest(threshold: float, values: NDArray[np.float64]) -> float:
    """Return the threshold, or a larger one where all values are at least as large."""
    steps = np.unique(values[np.isfinite(values)])
    if len(steps) < 2 or threshold > steps[0]:
        return threshold
    return float(steps[:2].mean())
