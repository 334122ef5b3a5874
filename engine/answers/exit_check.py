"""The exit check (PAME 5.3, Apparate 3.1).

Dimension reduction: the principal value of a classification is its largest probability; other tasks
have several (:mod:`.principal_values`). Threshold check: the sample exits when the confidence from
these values reaches the threshold. The backends' kernels are compared with these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import CLASSIFICATION, AnswerForm, AnswerTask
from offramp.certify import leaves
from offramp.engine.answers.principal_values import principal_values, sure_of

_ZERO = np.float32(0)
"""Zero in float32: ``fmax`` with it replaces NaN by 0."""
_ONE = np.float32(1)


def confidence_of(
    answer: NDArray[Any], form: AnswerForm, task: AnswerTask = CLASSIFICATION
) -> NDArray[np.float32]:
    """Return the largest probability of answers [b, classes], which are floating-point numbers.

    The confidence is [b], from 0 to 1. For other tasks it is the largest value that the required
    share of the principal values reaches (:mod:`.principal_values`). Log-probabilities are treated
    as logits: their softmax equals their exponential. An answer with NaN, or with logits of
    +infinity, has confidence 0, so it never exits early; probabilities above 1 count as 1, so that
    none reaches ``NEVER``. Scores on the model's own scale (``values``) have confidence 1: exits
    compute their confidence before they convert to that scale.
    """
    # Runs between any two stages on arrays of a few dozen numbers, where the number of numpy calls
    # matters: bare ufuncs, no methods, no second pass over the data.
    if task.kind != "classification":
        return sure_of(principal_values(answer, form, task), task.share)
    if answer.dtype != np.float32:
        with np.errstate(over="ignore"):
            answer = answer.astype(np.float32)
    largest = np.maximum.reduce(answer, axis=1)
    if form == "values":
        known: NDArray[np.float32] = np.logical_not(np.isnan(largest)).astype(np.float32)
        return known
    if form != "probabilities":
        # Largest softmax = exp(0) / sum exp(x − max): no need for the whole softmax.
        with np.errstate(invalid="ignore", over="ignore"):  # at infinity and near it
            shifted = np.subtract(answer, largest[:, None])
        np.exp(shifted, out=shifted)
        largest = np.reciprocal(np.add.reduce(shifted, axis=1))
    else:
        largest = np.minimum(largest, _ONE)
    confidence: NDArray[np.float32] = np.fmax(largest, _ZERO)
    return confidence


def exits(confidence: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    """Return which samples exit, [b]; the comparison is in float32, as in the kernels."""
    return leaves(confidence, np.float32(threshold))
