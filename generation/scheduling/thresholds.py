"""Thresholds by stage and by index of a token in its answer (CALM 3.4).

A wrong token at the beginning of an answer changes more of the later tokens than a wrong token near
the end. So thresholds may decay with the index t of the token, from 0:

    threshold(λ, t) = min(1, 0.9 λ + 0.1 exp(-τ t / N))

where λ is the stage's threshold, N the largest number of tokens in an answer and τ the speed of the
decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

OFF: Final = 2.0
"""Threshold above any confidence; it does not decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenThresholds:
    """Thresholds at which tokens leave; replaced as a whole, never changed."""

    version: int
    by_stage: tuple[float, ...]
    """λ of each stage except the last, where all tokens leave; above 1, no token leaves."""
    decay: float | None = None
    """τ, at least 0; ``None`` for no decay: the threshold is λ for all tokens."""
    most_tokens: int = 1
    """N, the largest number of tokens in an answer; used only with decay."""

    def __post_init__(self) -> None:
        """Check that thresholds and decay are numbers from 0."""
        if any(math.isnan(value) or value < 0.0 for value in self.by_stage):
            raise ValueError(f"thresholds must be numbers from 0, got {self.by_stage}")
        if self.decay is not None and not 0.0 <= self.decay < math.inf:
            raise ValueError(f"the decay must be a number from 0, got {self.decay}")
        if self.most_tokens < 1:
            raise ValueError(f"most_tokens must be at least 1, got {self.most_tokens}")

    @classmethod
    def off(cls, stages: int, version: int = 0) -> TokenThresholds:
        """Return thresholds that make every token run all ``stages``."""
        return cls(version=version, by_stage=(OFF,) * (stages - 1))

    @property
    def stages(self) -> int:
        """Number of stages, including the model's end."""
        return len(self.by_stage) + 1

    def at(self, stage: int, token: int) -> float:
        """Return the threshold of a stage for the token at an index; 0 at the last stage."""
        if stage == len(self.by_stage):
            return 0.0
        value = self.by_stage[stage]
        if self.decay is None or value > 1.0:
            return value
        return min(1.0, 0.9 * value + 0.1 * math.exp(-self.decay * token / self.most_tokens))

    def leaves(self, stage: int, token: int, confidence: float) -> bool:
        """Return True if a token leaves at a stage; always at the last stage, never with NaN."""
        return stage == len(self.by_stage) or confidence >= self.at(stage, token)

    def table(self, tokens: int) -> NDArray[np.float64]:
        """Return the thresholds of the first tokens, float64[stages - 1, tokens]."""
        rows = [[self.at(stage, t) for t in range(tokens)] for stage in range(len(self.by_stage))]
        return np.array(rows, np.float64).reshape(len(self.by_stage), tokens)
