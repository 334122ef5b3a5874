"""The principal values of an answer, and the one that is its confidence (PAME 5.3).

PAME lets a sample leave when at least n of its principal values reach the confidence threshold t.
Equivalently, the n-th largest of them reaches t: so this one number is the confidence, and no
decision or promise needs a second threshold. n is a share of the values, since the number of tokens
varies.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import AnswerForm, AnswerTask

HIGHEST: Final = 5
"""Number of values used of each heat map (PAME 5.3)."""
MOST_PLACES: Final = 1024
"""Largest number of pixels used; larger maps are sampled on a coarser grid."""

Values = NDArray[np.float32]


def principal_values(answer: NDArray[Any], form: AnswerForm, task: AnswerTask) -> Values:
    """Reduce answers [b, …] to their principal values [b, n], from 0 to 1; NaN counts as 0.

    One class of several: the largest probability. Labels: the probability of each decision, yes or
    no. Tokens and pixels: the largest probability of each. Heat maps: the highest values of each.
    Class numbers, values of a regression, and scores on the model's own scale contain no
    confidence: one value of 1.
    """
    count = len(answer)
    if form == "values" and task.kind != "pose":
        return np.ones((count, 1), np.float32)
    match task.kind:
        case "classification":
            found = _largest(answer, form, axis=1)[:, None]
        case "multi-label":
            chance = _single(answer)
            if form == "logits":
                with np.errstate(over="ignore"):
                    chance = np.reciprocal(1 + np.exp(-chance))
            found = np.maximum(chance, 1 - chance)
        case "token-classification" if form != "classes":
            found = _largest(answer, form, axis=2)
        case "segmentation" if form != "classes":
            step = stride_of(answer.shape[2], answer.shape[3])
            found = _largest(answer[:, :, ::step, ::step], form, axis=1).reshape(count, -1)
        case "pose":
            maps = _single(answer).reshape(*answer.shape[:2], math.prod(answer.shape[2:]))
            maps = np.fmax(maps, np.float32(0))
            found = np.sort(maps, axis=2)[:, :, -HIGHEST:].reshape(count, -1)
        case _:
            found = np.ones((count, 1), np.float32)
    bounded: Values = np.minimum(np.fmax(found, np.float32(0)), np.float32(1))
    return bounded


def sure_of(principal: Values, share: float, mask: NDArray[Any] | None = None) -> Values:
    """Return the largest value [b] that at least a share of the principal values [b, n] reach.

    With a ``mask`` [b, n], only values where it is not 0 count; if it is all 0, the result is 0.
    """
    count, places = principal.shape
    if mask is None:
        counted = np.full(count, places)
    else:
        counted = np.count_nonzero(mask, axis=1)
        principal = np.where(mask != 0, principal, np.float32(-1))
    position = np.maximum(np.ceil(share * counted - ROUNDING).astype(np.intp) - 1, 0)
    ordered = np.sort(principal, axis=1)[:, ::-1]
    taken = np.take_along_axis(ordered, position[:, None], axis=1)[:, 0]
    found: Values = np.fmax(taken, np.float32(0))
    return found


ROUNDING: Final = 1e-6
"""Tolerance with which the required number of values is rounded up to a whole number."""


def stride_of(height: int, width: int) -> int:
    """Return the step of the grid of pixels that are used."""
    step = 1
    while math.ceil(height / step) * math.ceil(width / step) > MOST_PLACES:
        step += 1
    return step


def _largest(scores: NDArray[Any], form: AnswerForm, *, axis: int) -> Values:
    """Return the largest probability along an axis; for logits, that of their softmax."""
    scores = _single(scores)
    largest: Values = scores.max(axis=axis)
    if form == "probabilities":
        return largest
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = np.exp(scores - np.expand_dims(largest, axis))
        return np.asarray(np.reciprocal(shifted.sum(axis=axis)), np.float32)


def _single(values: NDArray[Any]) -> Values:
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)
