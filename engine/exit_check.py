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


def confidence_of(answer: NDArray[Any], form: AnswerForm) -> NDArray[np.float32]:
    """Confidence of answers: the largest probability.

    Args:
        answer: [b, classes], logits or probabilities, floating.
        form: Which of the two.

    Returns:
        [b], 0 to 1. An answer with NaN has confidence 0, so it never exits early.
    """
    if answer.dtype != np.float32:
        answer = answer.astype(np.float32)
    if form == "probabilities":
        confidence = answer.max(axis=1)
    else:
        # Largest softmax = exp(0) / sum exp(x − max): no need for the whole softmax.
        shifted = answer - answer.max(axis=1, keepdims=True)
        confidence = 1.0 / np.exp(shifted, out=shifted).sum(axis=1)
    sane: NDArray[np.float32] = np.nan_to_num(confidence, copy=False, nan=0.0)
    return sane


def exits(confidence: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    """Which samples exit; compared in float32, as the kernels do."""
    return confidence >= np.float32(threshold)
