"""The vocabulary of scheduling text: sequences, steps and outcomes, without clocks or tensors.

A *sequence* is a prompt and its answer. A *step* is one call of a backend: a prefill, or a stage
for one token of each of some sequences. All times are absolute seconds of one monotonic clock.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

NEVER_S = float("inf")


class SequenceEnd(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"
    """The last token is a stop token."""
    MOST_TOKENS = "most_tokens"
    """The answer has as many tokens as were asked for."""
    LENGTH = "length"
    """The slot is full."""
    CANCELLED = "cancelled"
    """The caller left."""
    EXPIRED = "expired"
    """The deadline passed."""
    FAILED = "backend_error"
    """Steps failed that it was part of: in a batch, and again alone."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer has all tokens that there were to come."""
        return self in {SequenceEnd.STOP, SequenceEnd.MOST_TOKENS, SequenceEnd.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """Capacity of a backend, and rules for what may run together."""

    stages: int
    """Exits in use, and the model's end."""
    slots: int
    """Sequences that have room at a time."""
    length: int
    """Tokens that a slot has room for."""
    batch: int
    """Most rows of a step."""
    ragged: bool = True
    """Whether sequences of different lengths may share a step."""
    longest_prompt: int | None = None
    """Tokens that a prompt may have; ``None`` if only the slot limits it."""
    prompt_in_slot: bool = True
    """Whether the prompt's tokens take room in the slot; an encoder-decoder's do not."""

    def __post_init__(self) -> None:
        """Check that all counts are positive."""
        for name in ("stages", "slots", "length", "batch"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")

    @property
    def rows(self) -> int:
        """Most rows that a step can have."""
        return min(self.batch, self.slots)

    @property
    def most_prompt_tokens(self) -> int:
        """Most tokens of a prompt; if it is in the slot, with room for one of the answer."""
        limits = [] if self.longest_prompt is None else [self.longest_prompt]
        limits += [self.length - 1] if self.prompt_in_slot else []
        return min(limits, default=sys.maxsize)

    def begin(self, prompt_tokens: int) -> int:
        """Return the tokens that a slot holds before the answer's first."""
        return prompt_tokens if self.prompt_in_slot else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence as it is submitted."""

    number: int
    """Unique; never reused."""
    prompt_tokens: int
    most_tokens: int
    stop: frozenset[int] = frozenset()
    """Tokens that end the answer; such a token is part of it."""
    deadline_s: float = NEVER_S
    priority: int = 0
    """Higher goes first."""
    background: bool = False
    """Whether no caller waits for it. It then has a slot only while no other sequence wants one,
    runs all stages for every token, and starts again if it loses its slot."""


class GivenToken(NamedTuple):
    """A token of a sequence's answer."""

    sequence: int
    position: int
    """Number of the token in the answer, from 0."""
    token: int
    stage: int
    """The stage that gave it."""
    confidence: float
    background: bool


class EndedSequence(NamedTuple):
    """The report that a sequence ended; it is the last of that sequence."""

    sequence: int
    end: SequenceEnd
    tokens: int
    """Tokens that were given."""
    thresholds: int
    """Version of the thresholds that they left under; -1 if it never started."""
    background: bool


class AcceptedToken(NamedTuple):
    """The next token of a sequence that goes on."""

    sequence: int
    slot: int
    token: int


class TextOutcome(NamedTuple):
    """All that follows from one call of the scheduler.

    The caller tells the backend that the tokens of ``accepted`` left, if they did, then gives it
    these tokens; it closes slots before it opens any, and reports tokens and ends.
    """

    closed: tuple[int, ...] = ()
    """Slots to close before the next step."""
    left_at: int | None = None
    """The stage where ``accepted`` left early; ``None`` if they ran to the model's end."""
    accepted: tuple[AcceptedToken, ...] = ()
    """Next tokens of the sequences that go on."""
    given: tuple[GivenToken, ...] = ()
    """New tokens, at most one a sequence."""
    ended: tuple[EndedSequence, ...] = ()


NOTHING_FOLLOWS = TextOutcome()


class PrefillStep(NamedTuple):
    """The decision to open slots and to run the prompts of sequences."""

    sequences: tuple[int, ...]
    slots: tuple[int, ...]


class TokenStep(NamedTuple):
    """The decision to run a stage for one token of each of some sequences."""

    stage: int
    sequences: tuple[int, ...]
    slots: tuple[int, ...]
    limits: tuple[float, ...]
    """Least confidence that each token leaves with, 0 at the model's end; above 1 it stays."""


class TextDecision(NamedTuple):
    """The step to run next, and what has to be done before."""

    step: PrefillStep | TokenStep | None
    """``None`` if there is nothing to run: then there is no sequence at all."""
    outcome: TextOutcome = NOTHING_FOLLOWS
    """Sequences that ended while it was decided, and the slots to close first."""


class TextQueueFullError(Exception):
    """The bounded queue has no room for a sequence now."""


class NeverFitsError(ValueError):
    """A sequence can never run, however long it waits."""
