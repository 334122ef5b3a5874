"""The exit check for classification (PAME 5.3, Apparate 3.1).

Dimension reduction: the principal value of an answer is its largest probability. Threshold
check: the sample exits when that value reaches the exit's threshold. The backends' kernels are
held against these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import AnswerForm

_ZERO = np.float32(0)
"""``fmax`` with it takes the place of NaN."""
_ONE = np.float32(1)


def confidence_of(answer: NDArray[Any], form: AnswerForm) -> NDArray[np.float32]:
    """Confidence of answers: the largest probability.

    Args:
        answer: [b, classes], logits or probabilities, floating.
        form: Which of the two.

    Returns:
        [b], 0 to 1. An answer with NaN, or logits of +infinity, have confidence 0, so they never
        exit early; probabilities above 1 count as 1, so that none reaches ``NEVER``.
    """
    # Runs between any two stages on arrays of a few dozen numbers, where what counts is the
    # number of numpy calls: bare ufuncs, no methods, no second pass over the data.
    if answer.dtype != np.float32:
        with np.errstate(over="ignore"):
            answer = answer.astype(np.float32)
    largest = np.maximum.reduce(answer, axis=1)
    if form == "logits":
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
    """Which samples exit; compared in float32, as the kernels do."""
    return confidence >= np.float32(threshold)
