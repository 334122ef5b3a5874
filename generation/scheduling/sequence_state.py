"""A sequence from its submission to its end, as the scheduler keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from offramp.generation.scheduling.steps import EndedSequence, GivenToken, NewSequence, SequenceEnd
from offramp.generation.scheduling.thresholds import OFF, TokenThresholds

PREFILL = -1
"""The "stage" of a prompt's prefill."""

Key: TypeAlias = tuple[Any, ...]
"""Compared as tuples, smallest first; the last element is unique."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence, what it has given, and where it is.

    One that lost its slot starts again, and *replays* the tokens that it has already given: each
    runs the stages that it ran before and leaves where it left, whatever the stages say of it now.
    So its caches become what they were, and its caller sees no token twice.
    """

    new: NewSequence
    key: Key
    """Order in the queue."""
    begin: int
    """Tokens in its slot before the answer's first."""
    room: int
    """Most tokens that its slot has room for in the answer."""
    thresholds: TokenThresholds | None = None
    """The thresholds that it began under."""
    slot: int | None = None
    stage: int = PREFILL
    """The stage that its token runs or waits for."""
    at: int = 0
    """Number of that token in the answer."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that were given."""
    depths: list[int] = field(default_factory=list)
    """The stage that gave each."""
    group: tuple[int, int, int] | None = None
    """The key of the group that it waits in, if it does."""
    since: int = 0
    """Number of the step after which it began to wait at its stage."""
    running: bool = False
    ending: SequenceEnd | None = None
    """The reason why it ends with the step that it is part of, if it does."""
    failures: int = 0
    suspect_until: tuple[int, int] | None = None
    """The token and stage that failed: the sequence runs alone until it has passed them."""

    @property
    def length(self) -> int:
        """Tokens in its slot before the next one."""
        return self.begin + self.at

    @property
    def replays(self) -> bool:
        """Whether its token was given before."""
        return self.at < len(self.tokens)

    @property
    def alone(self) -> bool:
        """Whether it shares no step."""
        return self.suspect_until is not None

    def passed(self) -> None:
        """Note that its step succeeded."""
        if self.suspect_until is not None and (self.at, self.stage) >= self.suspect_until:
            self.suspect_until = None

    @property
    def limit(self) -> float:
        """The least confidence with which its token leaves at the stage that it runs next."""
        if self.replays:
            return 0.0 if self.stage == self.depths[self.at] else OFF
        assert self.thresholds is not None
        return self.thresholds.at(self.stage, self.at)

    def leaves(self, confidence: float) -> bool:
        """Whether its token leaves at the stage that it has just run."""
        if self.replays:
            return self.stage == self.depths[self.at]
        assert self.thresholds is not None
        return self.thresholds.leaves(self.stage, self.at, confidence)

    def take(self, token: int) -> int:
        """Record that its token leaves; return the token, in a replay that of the first time."""
        if self.replays:
            token = self.tokens[self.at]
        else:
            self.tokens.append(token)
            self.depths.append(self.stage)
        self.at += 1
        self.stage = 0
        return token

    def given(self, stage: int, confidence: float) -> GivenToken:
        """Report its last token."""
        new, last = self.new, len(self.tokens) - 1
        return GivenToken(new.number, last, self.tokens[last], stage, confidence, new.background)

    def end_with(self, token: int, now_s: float) -> SequenceEnd | None:
        """Return the reason why it ends with a token that was taken just now, if it does."""
        if token in self.new.stop:
            return SequenceEnd.STOP
        if len(self.tokens) >= self.new.most_tokens:
            return SequenceEnd.MOST_TOKENS
        if len(self.tokens) >= self.room:
            return SequenceEnd.LENGTH
        return SequenceEnd.EXPIRED if self.new.deadline_s <= now_s else None

    def restart(self) -> None:
        """Reset it to the beginning, without a slot; tokens that were given are replayed."""
        self.slot, self.stage, self.at, self.running = None, PREFILL, 0, False

    def ended(self, end: SequenceEnd) -> EndedSequence:
        """Report its end."""
        version = -1 if self.thresholds is None else self.thresholds.version
        new = self.new
        return EndedSequence(new.number, end, len(self.tokens), version, new.background)
