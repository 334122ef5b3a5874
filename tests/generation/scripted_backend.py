"""A text backend without a model, which answers by script and finds misuse.

What a stage says follows from the slot's prompt, the tokens that it was given, and where each of
them left: as keys and values that were propagated do. So a slot that is mixed up with another, a
token that is lost, or a replay that leaves elsewhere shows in the answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.generation.scheduling import TokenThresholds
from offramp.generation.stages.text_backend import NO_TOKEN, TokenAnswers

VOCABULARY = 12
Tokens = tuple[int, ...]


@dataclass(slots=True)
class ScriptedSlot:
    prompt: Tokens
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Where each token left."""
    ready: bool = False
    """The prompt has run."""
    stage: int = 0
    """The stage that its token comes to next."""
    answered: TokenAnswers | None = None
    """What the last stage that it ran said, if it may leave there."""
    broken: bool = False
    """A call failed: it may only be closed."""


@dataclass(slots=True, kw_only=True)
class ScriptedTextBackend:
    stages: int = 3
    slots: int = 8
    length: int = 32
    ragged: bool = True
    prompt_in_slot: bool = True
    longest_prompt: int = 64
    vocabulary: int = VOCABULARY
    batch: int = 4
    """Rows that a call must not exceed."""
    judges: bool = False
    """Whether tokens below their limits are left out."""
    propagates: bool = True
    """Whether where tokens left changes what follows."""
    on_call: Callable[[str, Sequence[int]], None] = lambda _method, _slots: None
    """Called with the method's name and the slots in every call that may fail; raises for that."""
    opened: dict[int, ScriptedSlot] = field(default_factory=dict)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    """Method, stage (-1: none) and rows of prefill and run."""
    closed: bool = False
    sure: float = 0.6
    """About the share of stages that are sure."""

    @property
    def used(self) -> set[int]:
        """Slots that were opened and not closed."""
        return set(self.opened)

    def say(self, prompt: Tokens, tokens: Tokens, depths: Tokens, stage: int) -> tuple[int, float]:
        """What a stage says after a prompt and an answer's beginning: token and confidence."""
        context = (prompt, tokens, depths if self.propagates else ())
        last = self.stages - 1
        draw = zlib.crc32(repr((context, stage)).encode())
        token = zlib.crc32(repr(context).encode()) % VOCABULARY
        if stage == last:
            return token, 1.0
        if draw % 11 == 0:  # an exit that is wrong
            token = (token + 1) % VOCABULARY
        confidence = (draw // 11 % 1000) / 1000
        return token, float(np.float32(confidence ** (1.0 - self.sure)))

    def reference(
        self, prompt: Tokens, thresholds: TokenThresholds, most: int, stop: frozenset[int]
    ) -> tuple[Tokens, Tokens]:
        """The answer of one sequence that nothing happens to, and where its tokens leave."""
        tokens: Tokens = ()
        depths: Tokens = ()
        while len(tokens) < most and not (tokens and tokens[-1] in stop):
            for stage in range(self.stages):
                token, confidence = self.say(prompt, tokens, depths, stage)
                if stage == self.stages - 1 or confidence >= thresholds.at(stage, len(tokens)):
                    break
            tokens, depths = (*tokens, token), (*depths, stage)
        return tokens, depths

    def open(self, slot: int, inputs: NDArray[np.int64]) -> None:
        assert 0 <= slot < self.slots and slot not in self.opened, slot
        assert inputs.dtype == np.int64 and inputs.ndim == 1 and inputs.size
        self.opened[slot] = ScriptedSlot(tuple(inputs.tolist()))
        self._may_fail("open", [slot])

    def prefill(self, slots: Sequence[int]) -> None:
        rows = self._rows(slots)
        assert not any(row.ready for row in rows)
        self._equal(len(row.prompt) if self.prompt_in_slot else 0 for row in rows)
        self._may_fail("prefill", slots)
        self.calls.append(("prefill", -1, len(slots)))
        for row in rows:
            row.ready = True

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        rows = self._rows(slots)
        for row in rows:
            assert row.ready and row.stage == stage, (row, stage)
            assert len(row.depths) == len(row.tokens), "accept() is owed"
            room = self.length - (len(row.prompt) if self.prompt_in_slot else 0)
            assert len(row.tokens) < room, "beyond the slot's length"
        self._equal(len(row.tokens) + len(row.prompt) * self.prompt_in_slot for row in rows)
        self._may_fail("run", slots)
        self.calls.append(("run", stage, len(slots)))
        said = [self.say(row.prompt, tuple(row.tokens), tuple(row.depths), stage) for row in rows]
        if self.judges and limits is not None:
            said = [
                (token if confidence >= limit else NO_TOKEN, confidence)
                for (token, confidence), limit in zip(said, limits, strict=True)
            ]
        for row, (token, confidence) in zip(rows, said, strict=True):
            row.stage = stage + 1
            row.answered = TokenAnswers(np.array([token]), np.array([confidence], np.float32))
        return TokenAnswers(
            np.array([token for token, _ in said], np.int64),
            np.array([confidence for _, confidence in said], np.float32),
        )

    def leave(self, stage: int, slots: Sequence[int]) -> None:
        assert 0 <= stage < self.stages - 1
        rows = self._rows(slots)
        for row in rows:
            assert row.stage == stage + 1 and row.answered is not None
        self._may_fail("leave", slots)
        for row in rows:
            row.depths.append(stage)
            row.stage = 0

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        rows = self._rows(slots)
        assert len(tokens) == len(slots)
        assert NO_TOKEN not in tokens, "a token that was not computed"
        for row in rows:
            assert row.answered is not None
        self._may_fail("accept", slots)
        for row, token in zip(rows, tokens, strict=True):
            if row.stage == self.stages:
                row.depths.append(self.stages - 1)
            assert len(row.depths) == len(row.tokens) + 1, "leave() is owed"
            row.tokens.append(token)
            row.stage, row.answered = 0, None

    def close_slot(self, slot: int) -> None:
        del self.opened[slot]

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def statistics(self) -> dict[str, Any]:
        return {"opened": len(self.opened)}

    def _rows(self, slots: Sequence[int]) -> list[ScriptedSlot]:
        assert 0 < len(slots) <= self.batch and len(set(slots)) == len(slots), slots
        rows = [self.opened[slot] for slot in slots]
        assert not any(row.broken for row in rows), "a slot that failed was used again"
        return rows

    def _equal(self, lengths: Any) -> None:
        assert self.ragged or len(set(lengths)) == 1

    def _may_fail(self, method: str, slots: Sequence[int]) -> None:
        try:
            self.on_call(method, slots)
        except BackendError:
            for slot in slots:
                self.opened[slot].broken = True
            raise
