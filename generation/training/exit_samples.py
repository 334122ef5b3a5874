"""What exits of a generating model learn from, and how; apart from training, so without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExitSamples:
    """What one exit sees of the model's own answers; arrays may be mapped from files."""

    states: NDArray[np.float32]
    """[tokens, width]: the state behind the exit's layer."""
    tokens: NDArray[np.int64]
    """[tokens]: the model's own next token."""

    def __post_init__(self) -> None:
        if self.states.ndim != 2 or len(self.states) != len(self.tokens) or not len(self.tokens):
            raise ValueError(
                f"states {self.states.shape} and tokens {self.tokens.shape} were given, expected "
                "[tokens, width] and [tokens] of at least one token"
            )

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Size of a state."""
        return int(self.states.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTraining:
    """How adapters, heads and judges are trained."""

    epochs: int = 10
    """At most."""
    patience: int = 2
    """Epochs without a smaller loss on the tuning tokens, after which training ends."""
    batch_size: int = 256
    """Tokens of a step."""
    learning_rate: float = 5e-2
    """At its peak, of what begins as nothing; the model's own weights learn at a fiftieth of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 0 or min(self.patience, self.batch_size) < 1:
            raise ValueError(f"{self} must have epochs of 0 or more, patience and batches of 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFit:
    """How an exit answers the tuning tokens."""

    loss: float
    """Mean cross-entropy, in nats."""
    agreement: float
    """Share of tokens that it answers as the model does; of a judge, that it judges rightly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedExit:
    """A graph of an exit with what it learned; its loss is never larger than before."""

    graph: onnx.ModelProto
    before: ExitFit
    """Before training: of an adapter, without it."""
    after: ExitFit
