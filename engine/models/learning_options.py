"""What is asked of learning, and what it takes at least."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp.certify import samples_needed
from offramp.certify.binomial import least_to_split
from offramp.certify.learn_then_test import level_of_each

DEFAULT_DISAGREEMENT: Final = 0.01
"""The constraint, where none is asked for."""
_MOST_SAMPLES: Final = 2**31 - 1
_MOST_GIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """How models that are served as ONNX files get their exits."""

    samples: int = 10_000
    """Inputs that are recorded before exits are compiled from them."""
    folder: Path | None = None
    """Where each model has its folder ``NAME.learn``; ``None`` is beside the model's file."""
    max_gib: float = 4.0
    """Most that the recorded inputs of a model take on the disk."""
    keep: bool = False
    """Whether recorded inputs are kept once they are compiled."""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise ValueError(f"learning samples {self.samples} is not in 1 to {_MOST_SAMPLES}")
        if not 0 < self.max_gib <= _MOST_GIB:
            raise ValueError(f"learning max_gib {self.max_gib} is not above 0, at most {_MOST_GIB}")

    @property
    def limit_bytes(self) -> int:
        """Most bytes of a recording."""
        return int(self.max_gib * 2**30)


def least_samples(max_disagreement: float, confidence: float) -> int:
    """Return the fewest recorded inputs that a promise can be certified with."""
    return least_to_split(samples_needed(max_disagreement, level_of_each(confidence, copies=True)))
