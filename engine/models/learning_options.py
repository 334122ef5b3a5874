"""Options of learning, and the smallest number of samples that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp.certify import samples_needed
from offramp.certify.binomial import least_to_split
from offramp.certify.learn_then_test import level_of_each

DEFAULT_DISAGREEMENT: Final = 0.01
"""Default of the largest share of answers that may differ from the unmodified model's."""
_MOST_SAMPLES: Final = 2**31 - 1
_MOST_GIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """Options for models that are served as ONNX files and learn their exits."""

    samples: int = 10_000
    """Number of inputs to record before exits are compiled from them."""
    folder: Path | None = None
    """Parent of each model's folder ``NAME.learn``; ``None`` is the folder of the model's file."""
    max_gib: float = 4.0
    """Largest size of a model's recorded inputs on disk, in GiB."""
    keep: bool = False
    """True to keep recorded inputs once they are compiled."""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise ValueError(f"learning samples {self.samples} is not in 1 to {_MOST_SAMPLES}")
        if not 0 < self.max_gib <= _MOST_GIB:
            raise ValueError(f"learning max_gib {self.max_gib} is not above 0, at most {_MOST_GIB}")

    @property
    def limit_bytes(self) -> int:
        """Largest size of a recording, in bytes."""
        return int(self.max_gib * 2**30)


def least_samples(max_disagreement: float, confidence: float) -> int:
    """Return the smallest number of recorded inputs with which a promise can be certified."""
    return least_to_split(samples_needed(max_disagreement, level_of_each(confidence, copies=True)))
