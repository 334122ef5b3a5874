"""State of a sequence in the scheduler, from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from offramp.generation.scheduling.steps import EndedSequence, GivenToken, NewSequence, SequenceEnd
from offramp.generation.scheduling.thresholds import OFF, TokenThresholds

PREFILL = -1
"""Stage number of a prompt's prefill."""

Key: TypeAlias = tuple[Any, ...]
"""Sort key, smallest first; the last element is unique."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence, its tokens so far, and the stage that it waits for.

    A sequence that lost its slot starts again, and *replays* its tokens: each token runs the same
    stages and leaves at the same stage as before, even if results differ now. This restores the
    caches, and the caller receives no token twice.
    """

    new: NewSequence
    key: Key
    """Key by which the queue sorts waiting sequences."""
    begin: int
    """Number of tokens in the sequence's slot before the first token of the answer."""
    room: int
    """Largest number of answer tokens that fit in the sequence's slot."""
    thresholds: TokenThresholds | None = None
    """Thresholds that were active when the sequence started."""
    slot: int | None = None
    stage: int = PREFILL
    """Stage that the sequence's next token runs or waits for."""
    at: int = 0
    """Index of the sequence's next token in the answer."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the answer so far."""
    depths: list[int] = field(default_factory=list)
    """Stage at which each token left."""
    group: tuple[int, int, int] | None = None
    """Key of the group that the sequence waits in, if any."""
    since: int = 0
    """Number of the step after which the sequence began to wait for its stage."""
    running: bool = False
    ending: SequenceEnd | None = None
    """Reason why the sequence ends with the running step; ``None`` if it continues."""
    failures: int = 0
    suspect_until: tuple[int, int] | None = None
    """Token index and stage at which the sequence failed; it runs alone until it has passed them.
    """

    @property
    def length(self) -> int:
        """Number of tokens in its slot before its next token."""
        return self.begin + self.at

    @property
    def replays(self) -> bool:
        """True if the sequence's next token is replayed."""
        return self.at < len(self.tokens)

    @property
    def alone(self) -> bool:
        """True if the sequence may not share a step."""
        return self.suspect_until is not None

    def passed(self) -> None:
        """Record that its step succeeded."""
        if self.suspect_until is not None and (self.at, self.stage) >= self.suspect_until:
            self.suspect_until = None

    @property
    def limit(self) -> float:
        """Lowest confidence at which the token leaves at the stage that the sequence runs next."""
        if self.replays:
            return 0.0 if self.stage == self.depths[self.at] else OFF
        assert self.thresholds is not None
        return self.thresholds.at(self.stage, self.at)

    def leaves(self, confidence: float) -> bool:
        """Return True if the token leaves at the stage that the sequence has just run."""
        if self.replays:
            return self.stage == self.depths[self.at]
        assert self.thresholds is not None
        return self.thresholds.leaves(self.stage, self.at, confidence)

    def take(self, token: int) -> int:
        """Record that its token leaves; return the token, or in a replay the original token."""
        if self.replays:
            token = self.tokens[self.at]
        else:
            self.tokens.append(token)
            self.depths.append(self.stage)
        self.at += 1
        self.stage = 0
        return token

    def given(self, stage: int, confidence: float) -> GivenToken:
        """Return the report of its last token."""
        new, last = self.new, len(self.tokens) - 1
        return GivenToken(new.number, last, self.tokens[last], stage, confidence, new.background)

    def end_with(self, token: int, now_s: float) -> SequenceEnd | None:
        """Return why the sequence ends with a token taken now; ``None`` if it continues."""
        if token in self.new.stop:
            return SequenceEnd.STOP
        if len(self.tokens) >= self.new.most_tokens:
            return SequenceEnd.MOST_TOKENS
        if len(self.tokens) >= self.room:
            return SequenceEnd.LENGTH
        return SequenceEnd.EXPIRED if self.new.deadline_s <= now_s else None

    def restart(self) -> None:
        """Reset the sequence to the beginning, without a slot; its tokens will be replayed."""
        self.slot, self.stage, self.at, self.running = None, PREFILL, 0, False

    def ended(self, end: SequenceEnd) -> EndedSequence:
        """Return the report that the sequence ended, and why."""
        version = -1 if self.thresholds is None else self.thresholds.version
        new = self.new
        return EndedSequence(new.number, end, len(self.tokens), version, new.background)
