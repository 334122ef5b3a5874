"""Thresholds by stage and by the number of a token in its answer (CALM 3.4).

A wrong token at the beginning of an answer changes more of what follows than one near its end, so
thresholds may decay with the number of the token t (from 0):

    threshold(λ, t) = min(1, 0.9 λ + 0.1 exp(-τ t / N))

where λ is the stage's threshold, N the most tokens of an answer and τ the speed of the decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

OFF: Final = 2.0
"""A threshold that no confidence reaches; it does not decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenThresholds:
    """The thresholds that tokens leave by; replaced whole, never changed."""

    version: int
    by_stage: tuple[float, ...]
    """λ of each stage but the last, where all leave; above 1 nothing leaves there."""
    decay: float | None = None
    """τ, at least 0; ``None`` is no decay: the threshold is λ for all tokens."""
    most_tokens: int = 1
    """N; means something where thresholds decay."""

    def __post_init__(self) -> None:
        """Check that thresholds are numbers from 0 and the decay is one that falls."""
        if any(math.isnan(value) or value < 0.0 for value in self.by_stage):
            raise ValueError(f"thresholds must be numbers from 0, got {self.by_stage}")
        if self.decay is not None and not 0.0 <= self.decay < math.inf:
            raise ValueError(f"the decay must be a number from 0, got {self.decay}")
        if self.most_tokens < 1:
            raise ValueError(f"most_tokens must be at least 1, got {self.most_tokens}")

    @classmethod
    def off(cls, stages: int, version: int = 0) -> TokenThresholds:
        """Return thresholds under which every token runs all ``stages``."""
        return cls(version=version, by_stage=(OFF,) * (stages - 1))

    @property
    def stages(self) -> int:
        """The stages of the model, its end included."""
        return len(self.by_stage) + 1

    def at(self, stage: int, token: int) -> float:
        """Return the threshold of a stage for a token's number in its answer; 0 at the last."""
        if stage == len(self.by_stage):
            return 0.0
        value = self.by_stage[stage]
        if self.decay is None or value > 1.0:
            return value
        return min(1.0, 0.9 * value + 0.1 * math.exp(-self.decay * token / self.most_tokens))

    def leaves(self, stage: int, token: int, confidence: float) -> bool:
        """Whether a token leaves at a stage: always at the last one, never with NaN."""
        return stage == len(self.by_stage) or confidence >= self.at(stage, token)

    def table(self, tokens: int) -> NDArray[np.float64]:
        """Return the thresholds of the first tokens, float64[stages - 1, tokens]."""
        rows = [[self.at(stage, t) for t in range(tokens)] for stage in range(len(self.by_stage))]
        return np.array(rows, np.float64).reshape(len(self.by_stage), tokens)
