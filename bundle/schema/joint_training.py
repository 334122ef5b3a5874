"""What a bundle says of joint training: backbone, bridges and heads that learned together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from offramp.bundle.schema.serde import check_numbers

Teacher: TypeAlias = Literal["model", "labels"]
"""What answers are learned: the unmodified model's own, or the data's labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEpoch:
    """How the tuning split was answered after an epoch."""

    losses: tuple[float, ...]
    """Of every exit in depth order, and last of the trained model's own answer."""
    agreement: tuple[float, ...]
    """Likewise: the share of samples answered like the unmodified model."""

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.agreement) or not self.losses:
            raise ValueError(
                f"losses: {len(self.losses)} of {len(self.agreement)} answers, expected one each"
            )
        if any(not 0 <= share <= 1 for share in self.agreement):
            raise ValueError(f"agreement: {list(self.agreement)!s:.100} is not within 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTraining:
    """How a copy of the model was trained together with its exits (PAME 5.2)."""

    teacher: Teacher
    learning_rate: float
    """At its peak."""
    epochs: tuple[JointEpoch, ...]
    """First as it was before training."""
    kept: int
    """The epoch whose weights the bundle has; 0 is none."""

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", least=0)
        check_numbers(self, "kept", least=0)
        if self.kept >= len(self.epochs):
            raise ValueError(f"kept: {self.kept}, expected one of {len(self.epochs)} epochs")

    def describe(self) -> str:
        """``by labels, 6 epochs, weights of epoch 4 are kept``, for reports."""
        taught = "the unmodified model's answers" if self.teacher == "model" else "labels"
        return f"by {taught}, {len(self.epochs) - 1} epochs, weights of epoch {self.kept} are kept"
