"""A random life of a scheduler and its backend, which checks itself at every step.

It has stop tokens, deadlines, priorities, audits, cancellations amid steps, and calls of the
backend that fail.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from offramp.engine.common.errors import BackendError, EngineError
from offramp.generation.scheduling import (
    EndedSequence,
    NewSequence,
    RefillPolicy,
    SequenceEnd,
    TextOutcome,
    TextQueueFullError,
    TextScheduler,
    TogetherPolicy,
    TokenThresholds,
)
from offramp.generation.serving.step_loop import StepLoop, limits_of
from offramp.generation.stages.text_backend import TextBackend
from tests.generation.scripted_backend import ScriptedTextBackend, Tokens

QUEUE = 12
SEQUENCES = 60
"""Sequences of a life, the refused ones included."""
RECENT = 60
"""Newest sequences, of which one is drawn to be cancelled."""
OnCall = Callable[[str, Sequence[int]], None]


class LivedBackend(TextBackend, Protocol):
    """A backend that calls ``on_call`` amid its methods, and knows its answers."""

    on_call: OnCall

    @property
    def used(self) -> set[int]:
        """Slots that were opened and not closed."""
        ...

    def reference(
        self, prompt: Tokens, thresholds: TokenThresholds, most: int, stop: frozenset[int]
    ) -> tuple[Tokens, Tokens]:
        """The answer of one sequence that nothing happens to, and where its tokens leave."""
        ...


def drawn_backend(draw: random.Random, batch: int) -> ScriptedTextBackend:
    return ScriptedTextBackend(
        stages=draw.randint(1, 4),
        slots=draw.randint(1, 12),
        length=draw.randint(4, 20),
        ragged=draw.random() < 0.5,
        prompt_in_slot=draw.random() < 0.5,
        batch=batch,
        judges=draw.random() < 0.5,
    )


class Life:
    """A random life, on virtual time."""

    def __init__(
        self,
        seed: int,
        policy: str,
        backend: LivedBackend | None = None,
        *,
        sequences: int = SEQUENCES,
        fail_share: float | None = None,
    ) -> None:
        """``fail_share`` is the share of calls that fail; it is drawn by default."""
        self.draw = draw = random.Random(f"{seed} {policy}")
        self.sequences = sequences
        self.now_s = 0.0
        drawn = draw.choice([0.0, 0.0, 0.02, 0.1])
        self.fail_share = drawn if fail_share is None else fail_share
        self.busy_share = draw.choice([0.0, 0.2, 0.6])
        batch = draw.randint(1, 6)
        self.backend = backend = backend or drawn_backend(draw, batch)
        backend.on_call = self.call
        self.limits = limits_of(backend, batch=batch)
        refill = RefillPolicy(patience=draw.choice([1, 3, 64]))
        self.scheduler = TextScheduler(
            self.limits,
            refill if policy == "refill" else TogetherPolicy(),
            self.thresholds(0),
            queue=QUEUE,
        )
        self.loop = StepLoop(backend, self.scheduler, self.publish, lambda: self.now_s)
        self.versions = {-1: TokenThresholds.off(backend.stages), 0: self.scheduler.thresholds}
        self.new: dict[int, NewSequence] = {}
        self.prompts: dict[int, Tokens] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.depths: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, EndedSequence] = {}
        self.ended_s: dict[int, float] = {}
        self.cancelled: set[int] = set()
        self.failures: Counter[int] = Counter()
        self.held_most = 0
        self.depth_of_calls = 0

    def thresholds(self, version: int) -> TokenThresholds:
        draw = self.draw
        return TokenThresholds(
            version=version,
            by_stage=tuple(draw.choice([0.3, 0.7, 0.9]) for _ in range(self.backend.stages - 1)),
            decay=draw.choice([None, 4.0]),
            most_tokens=8,
        )

    def publish(self, outcome: TextOutcome, error: EngineError | None) -> None:
        for given in outcome.given:
            number = given.sequence
            assert number not in self.ended, "a token after the end"
            assert number not in self.cancelled, "a token after the cancellation"
            assert given.position == len(self.tokens[number]), "a token twice, or lost"
            self.tokens[number].append(given.token)
            self.depths[number].append(given.stage)
        for ended in outcome.ended:
            assert ended.sequence not in self.ended, "a second end"
            assert (ended.end is SequenceEnd.FAILED) == (error is not None) or error is not None
            assert ended.tokens == len(self.tokens[ended.sequence])
            self.ended[ended.sequence] = ended
            self.ended_s[ended.sequence] = self.now_s

    def call(self, method: str, slots: Sequence[int]) -> None:
        """Amid a call of the backend: time passes, others submit and cancel, it may fail."""
        self.now_s += self.draw.choice([0.0, 0.25, 0.5])
        if self.draw.random() < self.busy_share:
            self.happen()
        if self.draw.random() < self.fail_share:
            raise BackendError("as scripted")

    def happen(self) -> None:
        draw, what = self.draw, self.draw.random()
        if what < 0.7:
            if len(self.prompts) < self.sequences:
                self.submit()
        elif what < 0.95 and self.new:
            number = draw.choice(list(self.new)[-RECENT:])
            was_open = number not in self.ended
            self.loop.cancel(number)
            if was_open:
                self.cancelled.add(number)
        else:
            version = len(self.versions) - 1
            self.versions[version] = self.thresholds(version)
            self.scheduler.swap(self.versions[version])

    def submit(self) -> None:
        draw, number = self.draw, len(self.prompts)
        room = self.backend.length - 1 if self.backend.prompt_in_slot else 6
        count = self.backend.vocabulary
        prompt = tuple(draw.randrange(count) for _ in range(draw.randint(1, room)))
        self.prompts[number] = prompt
        new = NewSequence(
            number=number,
            prompt_tokens=len(prompt),
            most_tokens=draw.randint(1, 24),
            stop=frozenset(draw.sample(range(count), draw.choice([0, 0, 1, 3]))),
            deadline_s=self.now_s + draw.choice([float("inf"), float("inf"), 0.0, 3.0, 20.0]),
            priority=draw.choice([0, 0, 0, 5, -2]),
            background=draw.random() < 0.15,
        )
        self.new[number] = new
        try:
            self.loop.submit(new, np.array(prompt, np.int64))
        except TextQueueFullError:
            del self.new[number]
            assert self.scheduler.queued >= QUEUE

    def run(self) -> None:
        while len(self.prompts) < self.sequences or self.scheduler.sequences:
            if len(self.prompts) < self.sequences and self.draw.random() < 0.4:
                self.happen()
            waited = self.scheduler.sequences
            ran = self.loop.turn()
            assert ran or not self.scheduler.sequences, "idle, and something could run"
            assert not (ran and not waited), "ran nothing"
            self.check_bounds()
            if not ran:
                self.now_s += 1.0
        self.loop.turn()  # closes the last slots
        assert not self.backend.used, "a slot was not closed"
        assert self.scheduler.slots_in_use == self.scheduler.queued == 0

    def check_bounds(self) -> None:
        scheduler, slots = self.scheduler, self.backend.slots
        assert scheduler.queued <= 2 * QUEUE + slots  # background, and those that start again
        assert scheduler.slots_in_use <= slots
        unreported = len(scheduler._ended)  # those that ended as another found the queue full
        assert scheduler.sequences == len(self.new) - len(self.ended) - unreported
        assert len(self.loop._prompts) == scheduler.sequences + unreported
        held = {slot: state.new.number for slot, state in scheduler._held.items()}
        assert len(set(held.values())) == len(held)
        assert sorted([*held, *scheduler._free]) == list(range(slots))
        assert self.cancelled <= self.ended.keys(), "it outlived the step that it was cancelled in"
        # What has no sequence any more is closed before the next step.
        closing = {*self.loop._closes, *scheduler._closed}
        assert self.backend.used - held.keys() <= closing, "a slot was lost"
        waiting = sum(len(group) for group in scheduler._groups._groups.values())
        assert waiting == len(held), "each sequence in a slot waits in one group"

    def check_ends(self) -> None:
        assert self.ended.keys() == self.new.keys()
        for number, ended in self.ended.items():
            new = self.new[number]
            thresholds = self.versions[ended.thresholds]
            room = self.limits.length - self.limits.begin(new.prompt_tokens)
            tokens, depths = self.backend.reference(
                self.prompts[number], thresholds, min(new.most_tokens, room), new.stop
            )
            got = tuple(self.tokens[number])
            assert got == tokens[: len(got)], (number, ended)
            assert tuple(self.depths[number]) == depths[: len(got)]
            self.check_end(new, ended, tokens, room)

    def check_end(self, new: NewSequence, ended: EndedSequence, tokens: Tokens, room: int) -> None:
        whole = len(tokens) == ended.tokens
        match ended.end:
            case SequenceEnd.STOP:
                assert whole and tokens[-1] in new.stop
            case SequenceEnd.MOST_TOKENS:
                assert whole and ended.tokens == new.most_tokens and tokens[-1] not in new.stop
            case SequenceEnd.LENGTH:
                assert whole and ended.tokens == room < new.most_tokens
                assert tokens[-1] not in new.stop
            case SequenceEnd.CANCELLED:
                assert new.number in self.cancelled
            case SequenceEnd.EXPIRED:
                assert not whole and self.ended_s[new.number] >= new.deadline_s
            case SequenceEnd.FAILED:
                assert not whole and self.fail_share
