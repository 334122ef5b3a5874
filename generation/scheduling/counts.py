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
    """Tokens that left at each stage, without those of background sequences."""
    steps: tuple[int, ...]
    """Steps of each stage."""
    rows: tuple[int, ...]
    """Total rows of the steps of each stage."""
    places: int
    """Most rows of a step."""
    prefills: int
    prefilled: int
    """Prompts that were run, including those of restarted sequences."""
    ended: dict[SequenceEnd, int]
    """Sequences by how they ended, without background ones; all ends are keys."""

    @property
    def full_places(self) -> tuple[float, ...]:
        """Mean share of a step's places that had a row, by stage; 0 for a stage that never ran."""
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
        """Count a step."""
        if isinstance(step, PrefillStep):
            self._prefills += 1
            self._prefilled += len(step.slots)
        else:
            self._steps[step.stage] += 1
            self._rows[step.stage] += len(step.slots)

    def followed(self, outcome: TextOutcome) -> None:
        """Count tokens and ends."""
        for given in outcome.given:
            self._tokens[given.stage] += not given.background
        for ended in outcome.ended:
            self._ended[ended.end] += not ended.background

    def counts(self) -> TextCounts:
        """Return the counts up to now."""
        return TextCounts(
            tokens=tuple(self._tokens),
            steps=tuple(self._steps),
            rows=tuple(self._rows),
            places=self._places,
            prefills=self._prefills,
            prefilled=self._prefilled,
            ended={end: self._ended[end] for end in SequenceEnd},
        )
