"""The exit decision: a sample leaves at the first exit whose confidence reaches its threshold.

Records, threshold paths, operating points, the simulator and the server all decide by the functions
here, so that what is certified is what is served.
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
"""The model's own end, wherever an exit's index may stand; as an index of rows, the last one."""


def leaves(confidence: ConfidenceArray, threshold: FloatArray | np.floating[Any]) -> BoolArray:
    """Whether samples exit: bool, of the shape that confidence and threshold broadcast to.

    A confidence equal to the threshold exits, NaN never does. float32 confidences are compared in
    float32 with a float32 threshold, and in float64 with float64 ones; for thresholds that are
    float32 values that is the same.
    """
    return np.greater_equal(confidence, threshold)


def first_exit(confidence: ConfidenceArray, thresholds: ArrayLike) -> IntArray:
    """The first exit that answers each sample, int64[samples]; :data:`MODEL_END` if none does.

    Of float[exits, samples] confidences in [0, 1], NaN where an exit does not see a sample, and
    float[exits] thresholds without NaN, or float[exits, samples] where each sample has its own.
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
    """Samples answered at each place, int64[exits + 1]: the exits in order, then the model's end.

    ``answered_at`` is int64[samples]: an exit, or :data:`MODEL_END`.
    """
    return np.bincount(np.where(answered_at == MODEL_END, exits, answered_at), minlength=exits + 1)


def reaches(answered_at: IntArray, exits: ArrayLike) -> BoolArray:
    """Whether samples came as far as each of some exits, bool[exits, samples]."""
    return np.asarray((answered_at == MODEL_END) | (answered_at >= np.asarray(exits)[:, None]))
