"""Options of training heads, in a separate module, so that passing them on needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of training heads."""

    epochs: int = 8
    batch_size: int = 512
    """Largest number of samples in a training step; small data sets use smaller steps."""
    learning_rate: float = 4e-3
    """Peak learning rate; it rises over the first tenth of the steps, then falls as a cosine."""
    weight_decay: float = 1e-4
    dropout: float = 0.1
    """Dropout rate on the hidden layer, or on the features of a linear head."""
    threads: int = 1
    """Number of exits that are trained in parallel."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, expected at least 1")


def rate_after(progress: float) -> float:
    """Return the learning rate's factor after a share of the steps: a rise, then a cosine."""
    if progress < _WARM_UP:
        return (progress + 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min((progress - _WARM_UP) / (1 - _WARM_UP), 1)))
