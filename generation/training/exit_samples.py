"""Training samples and options of exits of generating models; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExitSamples:
    """States at one exit for the model's own answers; arrays may be memory-mapped."""

    states: NDArray[np.float32]
    """[tokens, width]: output of the exit's layer."""
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
        """Size of a decoder state, the input of an exit."""
        return int(self.states.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTraining:
    """Options of training adapters, heads and judges."""

    epochs: int = 10
    """Largest number of epochs."""
    patience: int = 2
    """Epochs without a smaller loss on the tuning tokens after which training ends."""
    batch_size: int = 256
    """Number of tokens in a training step."""
    learning_rate: float = 5e-2
    """Peak rate of new weights; the model's own weights learn at a fiftieth of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 0 or min(self.patience, self.batch_size) < 1:
            raise ValueError(
                f"{self} must have 0 epochs or more, and patience and batches of 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFit:
    """Fit of an exit to the tuning tokens."""

    loss: float
    """Mean cross-entropy, in nats."""
    agreement: float
    """Share of tokens on which exit and model agree; for a judge, the share of right judgements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedExit:
    """A trained graph of an exit; its loss is never larger than its loss before training."""

    graph: onnx.ModelProto
    before: ExitFit
    """Fit before training; for an adapter, the fit without an adapter."""
    after: ExitFit
