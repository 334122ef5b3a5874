"""Orders in which a load sends its samples: at random, like a video, like reviews (Apparate 5.1).

Consecutive frames of a video are similar, since objects move little between them. Consecutive
reviews are not, but they come category by category, so that the mix of classes changes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SCENE: Final = 64
"""Samples until a video cuts to another scene."""
_DIMENSIONS: Final = 64
"""Number of dimensions of the random projection in which samples are compared."""


def random_order(samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return int64[samples], a permutation: every sample is independent of the one before."""
    return rng.permutation(samples)


def video_order(
    array: NDArray[Any], rng: np.random.Generator, *, scene: int = SCENE
) -> NDArray[np.int64]:
    """Return int64[samples], a permutation with similar consecutive samples of [samples, …].

    A scene begins with a sample drawn at random. Each next one is the unused sample nearest to the
    one before, by Euclidean distance.
    """
    points = _projected(array, rng)
    squares = (points**2).sum(axis=1)
    unused = np.ones(len(points), np.bool_)
    order: list[int] = []
    while unused.any():
        current = int(rng.choice(np.flatnonzero(unused)))
        for _ in range(min(scene, int(unused.sum()))):
            order.append(current)
            unused[current] = False
            distance = squares - 2 * points @ points[current]
            current = int(np.where(unused, distance, np.inf).argmin())
    return np.array(order, np.int64)


def review_order(classes: NDArray[Any], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return int64[samples], a permutation that sends one class of [samples] after another.

    The classes come in random order, and so do the samples of each.
    """
    kinds = rng.permutation(np.unique(classes))
    return np.concatenate([rng.permutation(np.flatnonzero(classes == kind)) for kind in kinds])


def _projected(array: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return float32[samples, dimensions], a projection that nearly keeps distances."""
    size = int(np.prod(array.shape[1:]))
    directions = rng.standard_normal((size, _DIMENSIONS), np.float32) / np.sqrt(_DIMENSIONS)
    parts = np.array_split(array, max(1, len(array) // 256))
    flat = [part.reshape(len(part), size).astype(np.float32) for part in parts]
    return np.concatenate([part @ directions for part in flat])
