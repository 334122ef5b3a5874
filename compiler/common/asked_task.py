"""What the user says of the task that a model is for, with what is meant where nothing is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from offramp.bundle import AnswerTask, TaskKind
from offramp.bundle.schema.answers import DENSE
from offramp.compiler.common.errors import ModelError

AskedKind: TypeAlias = TaskKind | Literal["auto"]
SHARES: Final[dict[TaskKind, float]] = {"token-classification": 0.98, "segmentation": 0.95}
"""Least shares of equal tokens and pixels, where none is asked for; of key points it is all.

Pixels at the borders of objects come out one way or the other, however good the model: where two
answers to an image differ in 5 % of its pixels, either is about as right.
"""
WITHIN_SPREAD: Final = 0.1
"""How far values may differ where nothing is asked for: as a share of their standard deviation."""
WITHIN_MAP: Final = 0.05
"""How far key points may be apart, as a share of the map's longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTask:
    """What the user says of the task; ``None`` is as the task has it."""

    kind: AskedKind = "auto"
    share: float | None = None
    within: float | None = None
    class_map: bool = False
    """Answer with the classes of pixels or tokens in place of their scores."""

    def settle(self, kind: TaskKind) -> AnswerTask:
        """Give the task of a kind; ModelError where what is asked for says nothing of it."""
        share, within = self.share, self.within
        if share is not None and kind not in DENSE:
            raise ModelError(
                f"--agree-share {share:g} says nothing of {kind}, whose answers have no tokens, "
                "pixels or key points; leave it out"
            )
        if within is not None and kind not in ("pose", "regression"):
            raise ModelError(
                f"--agree-within {within:g} says nothing of {kind}, where classes are equal or "
                "not; leave it out"
            )
        return AnswerTask(
            kind=kind,
            share=SHARES.get(kind, 1.0) if share is None else share,
            within=(WITHIN_MAP if kind == "pose" else 0.0) if within is None else within,
        )
