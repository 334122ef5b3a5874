"""The exit decision: a sample leaves at the first exit whose confidence reaches its threshold.

Records, threshold paths, operating points, the simulator and the server all decide with these
functions, so that the decision that is certified is the decision that is served.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float32Array: TypeAlias = NDArray[np.float32]
ConfidenceArray: TypeAlias = NDArray[np.floating[Any]]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]

NEVER: Final = 2.0
"""A threshold that no confidence reaches: it switches an exit off."""
MODEL_END: Final = -1
"""Index of the model's end in arrays of exit indices; as a row index, it selects the last row."""


def leaves(confidence: ConfidenceArray, threshold: FloatArray | np.floating[Any]) -> BoolArray:
    """Return whether samples exit: bool, of the shape that confidence and threshold broadcast to.

    A confidence equal to the threshold exits, NaN never does. float32 confidences are compared in
    float32 with a float32 threshold, and in float64 with float64 ones; the results are equal for
    thresholds that are float32 values.
    """
    return np.greater_equal(confidence, threshold)


def first_exit(confidence: ConfidenceArray, thresholds: ArrayLike) -> IntArray:
    """Return the first exit that answers each sample, int64[samples]; :data:`MODEL_END` if none.

    Confidences are float[exits, samples] in [0, 1], NaN where a sample did not pass an exit.
    Thresholds are float[exits] without NaN, or float[exits, samples] if they differ by sample.
    """
    exits, samples = confidence.shape
    limits = np.asarray(thresholds, dtype=np.float64)
    if limits.shape not in {(exits,), (exits, samples)} or np.isnan(limits).any():
        raise ValueError(f"thresholds must be {exits} numbers without NaN, got {limits}")
    left = np.ones((exits + 1, samples), dtype=np.bool_)
    left[:-1] = leaves(confidence, limits if limits.ndim > 1 else limits[:, None])
    first: IntArray = left.argmax(axis=0)
    first[first == exits] = MODEL_END
    return first


def count_answers(answered_at: IntArray, exits: int) -> IntArray:
    """Count samples answered at each exit, and last at the model's end: int64[exits + 1].

    ``answered_at`` is int64[samples]: an exit, or :data:`MODEL_END`.
    """
    return np.bincount(np.where(answered_at == MODEL_END, exits, answered_at), minlength=exits + 1)


def reaches(answered_at: IntArray, exits: ArrayLike) -> BoolArray:
    """Return whether each sample came as far as each of ``exits``: bool[exits, samples]."""
    return np.asarray((answered_at == MODEL_END) | (answered_at >= np.asarray(exits)[:, None]))
