"""The confidence criteria of exits' graphs, for one class of several, in numpy.

The graphs (:mod:`offramp.compiler.exits.endings`) are compared with these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import AnswerForm
from offramp.bundle.schema.answers import IN_GRAPH, LEARNED_WEIGHTS

Values = NDArray[np.float32]

LEAST: Final = np.float32(1e-7)
"""Smallest distance of statistics from 0 and 1, so that their log-odds are finite."""
SMALLEST: Final = np.finfo(np.float32).tiny
"""Smallest argument of the logarithm: smaller probabilities add nothing to the entropy."""


def statistics_of(answer: NDArray[Any], form: AnswerForm) -> Values:
    """Return largest probability, margin and 1 − relative entropy: float32 [b, 3], from 0 to 1.

    Answers are [b, classes], floating-point numbers. The margin is between the two largest
    probabilities (with one class, the largest alone). The entropy is divided by the logarithm of
    the number of classes (BranchyNet's algorithm 1 and DeeBERT 3.2 bound the entropy itself from
    above). All three are 0 where the answer has NaN, or its logits are infinite.
    """
    answer = answer.astype(np.float32, copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        if form == "probabilities":
            shares = answer
        else:
            shares = np.exp(answer - answer.max(axis=1, keepdims=True))
            shares = shares / shares.sum(axis=1, keepdims=True)
    classes = shares.shape[1]
    found = np.ones((len(shares), 3), np.float32)
    found[:, 0] = shares.max(axis=1)
    found[:, 1] = found[:, 0]
    if classes > 1:
        second, largest = np.partition(shares, classes - 2, axis=1)[:, -2:].T
        found[:, 1] = largest - second
        entropy = -(shares * np.log(np.maximum(shares, SMALLEST))).sum(axis=1)
        found[:, 2] = 1 - entropy / np.float32(np.log(classes))
    found[np.isnan(shares).any(axis=1)] = 0
    return np.clip(found, 0, 1)


def sure_by(statistics: Values, name: str, weights: Sequence[float] = ()) -> Values:
    """Return the confidence by a criterion of :data:`IN_GRAPH` from statistics, float32 [b].

    ``statistics`` are those of :func:`statistics_of`. ``weights`` are those of the criterion
    ``learned``: one for each statistic's log-odds, and the constant. The confidence is 0 where all
    statistics are 0.
    """
    columns = {"probability": 0, "margin": 1, "entropy": 2}
    if name in columns:
        return statistics[:, columns[name]]
    if name not in IN_GRAPH or len(weights) != LEARNED_WEIGHTS:
        raise ValueError(
            f"criterion {name} has {len(weights)} weights, expected the criterion learned with 4"
        )
    logit = log_odds(statistics) @ np.asarray(weights[:-1], np.float32) + np.float32(weights[-1])
    with np.errstate(over="ignore"):
        sure = np.reciprocal(1 + np.exp(-logit))
    return np.where(statistics[:, 0] > 0, sure, np.float32(0)).astype(np.float32)


def log_odds(statistics: Values) -> Values:
    """Return log(x / (1 − x)) of statistics [b, 3]."""
    bounded = np.clip(statistics, LEAST, 1 - LEAST)
    return np.log(bounded) - np.log(1 - bounded)
