"""Counts of what a scheduler decided: for statistics of a server, and of a simulation."""

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
    """Counts since the start; those by stage are in the order of stages."""

    tokens: tuple[int, ...]
    """Tokens that each stage gave, those of background sequences left out."""
    steps: tuple[int, ...]
    """Steps of each stage."""
    rows: tuple[int, ...]
    """Rows of those steps."""
    places: int
    """Rows that a step has room for."""
    prefills: int
    prefilled: int
    """Prompts that were run, those of sequences that start again included."""
    ended: dict[SequenceEnd, int]
    """Sequences by how they ended, background ones left out; all causes are there."""

    @property
    def full_places(self) -> tuple[float, ...]:
        """The share of places that had a row, by stage; 0 for one that never ran."""
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
