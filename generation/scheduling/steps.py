"""Data types of text scheduling: sequences, steps and outcomes, without clocks or tensors.

A *sequence* is a prompt and its answer. A *step* is one call of a backend: a prefill, or one stage
for some sequences, one token of each. All times are absolute seconds of one monotonic clock.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

NEVER_S = float("inf")


class SequenceEnd(StrEnum):
    """Reason why a sequence ended."""

    STOP = "stop"
    """The last token is a stop token."""
    MOST_TOKENS = "most_tokens"
    """The answer has as many tokens as requested."""
    LENGTH = "length"
    """The sequence fills its cache slot."""
    CANCELLED = "cancelled"
    """The caller cancelled the sequence."""
    EXPIRED = "expired"
    """The deadline of the sequence passed."""
    FAILED = "backend_error"
    """A step of the sequence failed: in a batch, and again alone."""

    @property
    def is_whole(self) -> bool:
        """True if the answer is complete."""
        return self in {SequenceEnd.STOP, SequenceEnd.MOST_TOKENS, SequenceEnd.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """Capacity of a backend, and rules for what may run together."""

    stages: int
    """Number of stages: the exits in use, and the model's end."""
    slots: int
    """Number of sequences with cache memory at a time."""
    length: int
    """Number of tokens that fit in a slot."""
    batch: int
    """Largest number of rows in a step."""
    ragged: bool = True
    """True if sequences of different lengths may share a step."""
    longest_prompt: int | None = None
    """Largest number of tokens in a prompt; ``None`` if only the slot limits it."""
    prompt_in_slot: bool = True
    """True if the prompt's tokens are in the slot; false for an encoder-decoder."""

    def __post_init__(self) -> None:
        """Check that all counts are positive."""
        for name in ("stages", "slots", "length", "batch"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")

    @property
    def rows(self) -> int:
        """Largest number of rows in a step, limited by the number of slots."""
        return min(self.batch, self.slots)

    @property
    def most_prompt_tokens(self) -> int:
        """Largest number of tokens in a prompt; one answer token must fit in the slot, too."""
        limits = [] if self.longest_prompt is None else [self.longest_prompt]
        limits += [self.length - 1] if self.prompt_in_slot else []
        return min(limits, default=sys.maxsize)

    def begin(self, prompt_tokens: int) -> int:
        """Return the number of tokens in a slot before the first token of the answer."""
        return prompt_tokens if self.prompt_in_slot else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that a caller submits: prompt, limits and deadline."""

    number: int
    """Number of the sequence; it is unique, and never reused."""
    prompt_tokens: int
    most_tokens: int
    stop: frozenset[int] = frozenset()
    """Stop tokens; the answer includes the stop token that ends it."""
    deadline_s: float = NEVER_S
    priority: int = 0
    """Higher values go first."""
    background: bool = False
    """True if no caller waits for the sequence. A background sequence has a slot only while no
    other sequence needs the slot. It runs all stages for every token, and starts again if it loses
    its slot."""


class GivenToken(NamedTuple):
    """A token of a sequence's answer."""

    sequence: int
    position: int
    """Index of the token in the answer, from 0."""
    token: int
    stage: int
    """Stage at which the token left."""
    confidence: float
    background: bool


class EndedSequence(NamedTuple):
    """Final report of a sequence that ended."""

    sequence: int
    end: SequenceEnd
    tokens: int
    """Number of tokens of the answer, until the sequence ended."""
    thresholds: int
    """Version of the thresholds of the sequence; -1 if the sequence never started."""
    background: bool


class AcceptedToken(NamedTuple):
    """The next token of a sequence that continues."""

    sequence: int
    slot: int
    token: int


class TextOutcome(NamedTuple):
    """Results of one call of the scheduler.

    If the tokens of ``accepted`` left early, the caller calls ``leave`` of the backend for them.
    Then it calls ``accept`` of the backend with all of them. It closes slots before it opens any,
    and reports new tokens and ended sequences.
    """

    closed: tuple[int, ...] = ()
    """Slots to close before the next step."""
    left_at: int | None = None
    """Stage at which ``accepted`` left early; ``None`` at the model's end."""
    accepted: tuple[AcceptedToken, ...] = ()
    """Next tokens of the sequences that continue."""
    given: tuple[GivenToken, ...] = ()
    """New tokens, at most one per sequence."""
    ended: tuple[EndedSequence, ...] = ()


NOTHING_FOLLOWS = TextOutcome()


class PrefillStep(NamedTuple):
    """Decision to open slots and to run the prompts of sequences."""

    sequences: tuple[int, ...]
    slots: tuple[int, ...]


class TokenStep(NamedTuple):
    """Decision to run a stage for some sequences, for one token of each sequence."""

    stage: int
    sequences: tuple[int, ...]
    slots: tuple[int, ...]
    limits: tuple[float, ...]
    """Lowest confidence at which each token leaves: 0 at the model's end; above 1, the token cannot
    leave."""


class TextDecision(NamedTuple):
    """The next step, and the work to do before it."""

    step: PrefillStep | TokenStep | None
    """Next step; ``None`` if no sequence is left to run."""
    outcome: TextOutcome = NOTHING_FOLLOWS
    """Sequences that ended during the decision, and slots to close before the step runs."""


class TextQueueFullError(Exception):
    """The scheduler has no place for another waiting sequence."""


class NeverFitsError(ValueError):
    """The sequence can never run, however long it waits."""
