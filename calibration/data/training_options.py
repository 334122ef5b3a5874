"""How heads are trained; apart from training, so that who only passes it on needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of training."""

    epochs: int = 8
    batch_size: int = 512
    """At most."""
    learning_rate: float = 4e-3
    """At its peak; it rises over the first tenth of the steps, then falls along a cosine."""
    weight_decay: float = 1e-4
    dropout: float = 0.1
    """On the hidden layer, or on the features of a linear head."""
    threads: int = 1
    """Exits that are trained at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, expected at least 1")


def rate_after(progress: float) -> float:
    """Give the factor on the learning rate after a share of the steps: a rise, then a cosine."""
    if progress < _WARM_UP:
        return (progress + 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min((progress - _WARM_UP) / (1 - _WARM_UP), 1)))
