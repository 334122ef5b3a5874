"""Counts of a scheduler's decisions, for a server's statistics and for simulations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from offramp.generation.scheduling.steps import (
    PrefillStep,
    SequenceEnd,
    TextLimits,
    TextOutcome,
    TokenStep,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCounts:
    """Counts since the start; counts by stage are in the order of stages."""

    tokens: tuple[int, ...]
    """Number of tokens that left at each stage, without those of background sequences."""
    steps: tuple[int, ...]
    """Number of times that each stage ran a batch."""
    rows: tuple[int, ...]
    """Total number of rows in all steps of each stage."""
    places: int
    """Largest number of rows in a step."""
    prefills: int
    prefilled: int
    """Number of prompts that were run; prompts of restarted sequences count again."""
    ended: dict[SequenceEnd, int]
    """Number of ended sequences by reason, without background ones; every reason is a key."""

    @property
    def full_places(self) -> tuple[float, ...]:
        """Mean rows of a step, as a share of the largest number, by stage; 0 without steps."""
        pairs = zip(self.rows, self.steps, strict=True)
        return tuple(rows / (steps * self.places) if steps else 0.0 for rows, steps in pairs)


class TextCounter:
    """Counts decisions and outcomes of one scheduler."""

    def __init__(self, limits: TextLimits) -> None:
        self._places = limits.rows
        self._tokens = [0] * limits.stages
        self._steps = [0] * limits.stages
        self._rows = [0] * limits.stages
        self._prefills = self._prefilled = 0
        self._ended: Counter[SequenceEnd] = Counter()

    def decided(self, step: PrefillStep | TokenStep) -> None:
        """Count a step that the scheduler decided."""
        if isinstance(step, PrefillStep):
            self._prefills += 1
            self._prefilled += len(step.slots)
        else:
            self._steps[step.stage] += 1
            self._rows[step.stage] += len(step.slots)

    def followed(self, outcome: TextOutcome) -> None:
        """Count the tokens and the ended sequences of an outcome."""
        for given in outcome.given:
            self._tokens[given.stage] += not given.background
        for ended in outcome.ended:
            self._ended[ended.end] += not ended.background

    def counts(self) -> TextCounts:
        """Return the counts since the scheduler began."""
        return TextCounts(
            tokens=tuple(self._tokens),
            steps=tuple(self._steps),
            rows=tuple(self._rows),
            places=self._places,
            prefills=self._prefills,
            prefilled=self._prefilled,
            ended={end: self._ended[end] for end in SequenceEnd},
        )
