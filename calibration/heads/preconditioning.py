"""Preconditioning: features as coordinates in which heads learn fast (partly whitened PCA).

Neighbouring cells of a pooled map have nearly the same values, so a head on the plain features
spends its epochs on a few directions. On the Fashion-MNIST example heads on these coordinates
reached in five epochs what took eight without, in a quarter of the time, and the first exit agreed
more often (90.3 % instead of 89.5 %).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.npz import copy_rows

FloatArray = NDArray[np.float32]

COMPONENTS = 512
"""Largest number of principal components that are kept."""
LARGEST = 2048
"""Largest number of features that are decomposed, as the time grows with its cube; more features
are only standardised."""
SAMPLES = 4096
"""Largest number of samples from which moments and components are estimated."""
LEAST_DEVIATION = 0.05
"""Smallest standard deviation of a component that is kept, relative to a feature's: smaller ones
are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preconditioner:
    """An affine map of features [n, f] to coordinates [n, k], on which heads are trained."""

    mean: FloatArray
    """Mean of each feature over the fitted samples, [f]."""
    matrix: FloatArray
    """Matrix from centred features to coordinates, [f, k]; [f] if features are only scaled."""

    @classmethod
    def fit(cls, features: NDArray[np.floating], *, components: int = COMPONENTS) -> Preconditioner:
        """Fit to features [n, f], keeping at most ``components`` components.

        A component of standard deviation s is scaled by s^-1/2, half way between no change and
        whitening: full whitening gave the many weak components too much weight (3 points less time
        saved).
        """
        step = -(-len(features) // SAMPLES)
        sample = copy_rows(features, slice(None, None, step)).astype(np.float32)
        # A model may output NaN where it is masked; such samples are left out.
        sample = sample[np.isfinite(sample).all(axis=1)]
        if not len(sample):
            width = features.shape[1]
            return cls(mean=np.zeros(width, np.float32), matrix=np.ones(width, np.float32))
        mean, scale = moments(sample)
        if features.shape[1] > LARGEST:
            return cls(mean=mean, matrix=np.reciprocal(scale))
        standard = (sample - mean) / scale
        variance, directions = np.linalg.eigh(standard.T @ standard / len(standard))
        deviation = np.sqrt(np.maximum(variance, 0))
        kept = np.flatnonzero(deviation >= min(LEAST_DEVIATION, deviation.max()))[-components:]
        matrix = directions[:, kept] / np.sqrt(np.maximum(deviation[kept], LEAST_DEVIATION))
        return cls(mean=mean, matrix=(matrix / scale[:, None]).astype(np.float32))

    @property
    def width(self) -> int:
        """Number of coordinates, k."""
        return int(self.matrix.shape[-1])

    def apply(self, features: NDArray[np.floating]) -> FloatArray:
        """Return the coordinates [n, k] of features [n, f], float32."""
        result = np.empty((len(features), self.width), np.float32)
        for start in range(0, len(features), SAMPLES):
            rows = slice(start, start + SAMPLES)
            centred = copy_rows(features, rows).astype(np.float32) - self.mean
            result[rows] = centred * self.matrix if self.matrix.ndim == 1 else centred @ self.matrix
        return result

    def fold(
        self, weight: NDArray[np.floating], bias: NDArray[np.floating]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Fold this map into a layer: return weight and bias that act on plain features.

        ``weight`` [j·k, m] and ``bias`` [m] act on the coordinates of j consecutive vectors. The
        result is float64, as large terms may cancel.
        """
        exact = self.matrix.astype(np.float64)
        blocks = weight.astype(np.float64).reshape(-1, self.width, weight.shape[1])
        plain = exact[:, None] * blocks if exact.ndim == 1 else exact @ blocks
        shift = self.mean.astype(np.float64) @ plain.sum(axis=0)
        return plain.reshape(-1, weight.shape[1]), bias - shift


def moments(features: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and scale to standardise [samples, features].

    A feature that hardly varies keeps a scale of 1/256 of its mean, as features are recorded in
    float16 (steps of 1/1024 and less): rounding must not become a signal.
    """
    mean = features.mean(0)
    scale = np.maximum(features.std(0), np.maximum(1e-3, np.abs(mean) / 256))
    return mean, scale.astype(np.float32)
