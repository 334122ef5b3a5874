"""Scheduling mechanism of one generating model, under any policy: queue, slots, steps, retries.

Sans I/O and deterministic; the caller serialises the calls, and runs one step at a time. Guarantees
for any policy: every sequence ends exactly once, with a cause; every token of an answer is emitted
once, in order; a step has at most ``limits.rows`` rows, of equal lengths if the backend is not
ragged; a slot is closed before it is reopened; memory is bounded by the queue and the slots; while
there is a sequence, there is a step to run.

Deadlines and cancellations take effect at the next token at the latest: a sequence in the running
step ends with that step, any other sequence ends immediately.

Each sequence of a failed step starts again, at most once, and runs alone until it has passed the
failed stage (:class:`SequenceState` describes how their tokens are replayed). So if one sequence
makes its batch fail, it later fails alone: a sequence that fails again ends as ``FAILED``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from offramp.generation.scheduling.groups import WaitingGroups, WaitingText
from offramp.generation.scheduling.policies import START, StepPolicy
from offramp.generation.scheduling.sequence_queue import SequenceQueue
from offramp.generation.scheduling.sequence_state import SequenceState
from offramp.generation.scheduling.steps import (
    NEVER_S,
    NOTHING_FOLLOWS,
    AcceptedToken,
    EndedSequence,
    GivenToken,
    NeverFitsError,
    NewSequence,
    PrefillStep,
    SequenceEnd,
    TextDecision,
    TextLimits,
    TextOutcome,
    TokenStep,
)
from offramp.generation.scheduling.thresholds import TokenThresholds

MOST_FAILURES = 2
"""Number of failed steps after which a sequence ends as ``FAILED``."""


class TextScheduler:
    """Scheduler of one generating model; it decides what the backend runs."""

    def __init__(
        self,
        limits: TextLimits,
        policy: StepPolicy,
        thresholds: TokenThresholds,
        *,
        queue: int,
    ) -> None:
        """Create a scheduler; at most ``queue`` sequences wait for a slot."""
        self.limits = limits
        self._policy = policy
        self._queue = SequenceQueue(queue)
        self._groups = WaitingGroups(limits)
        self._sequences: dict[int, SequenceState] = {}
        """Sequences that have not ended, by number."""
        self._free = list(range(limits.slots - 1, -1, -1))
        """Free slots; the last in the list is assigned first."""
        self._held: dict[int, SequenceState] = {}
        """Sequence in each slot in use."""
        self._held_background: dict[int, SequenceState] = {}
        """Background sequences in ``_held``."""
        self._running: list[SequenceState] = []
        """Sequences of the step that is running, one per row."""
        self._step = 0
        """Number of the last step."""
        self._off = TokenThresholds.off(limits.stages, version=-1)
        self._first_deadline_s = NEVER_S
        """Lower bound of all deadlines: no sequence expires before this time."""
        self._closed: list[int] = []
        self._ended: list[EndedSequence] = []
        self.retried = 0
        """Number of restarts after a failure."""
        self.yielded = 0
        """Number of times that a background sequence lost its slot."""
        self._thresholds = thresholds
        self.swap(thresholds)

    @property
    def thresholds(self) -> TokenThresholds:
        """Thresholds of sequences that start from now on."""
        return self._thresholds

    @property
    def queued(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._queue)

    @property
    def slots_in_use(self) -> int:
        """Number of slots that hold a sequence."""
        return len(self._held)

    @property
    def sequences(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._sequences)

    def swap(self, thresholds: TokenThresholds) -> None:
        """Use other thresholds for sequences that start from now on."""
        if thresholds.stages != self.limits.stages:
            raise ValueError(
                f"the thresholds are for {thresholds.stages} stages, and the model has "
                f"{self.limits.stages}: pass one for each stage but the last"
            )
        self._thresholds = thresholds

    def submit(self, new: NewSequence, now_s: float) -> TextOutcome:
        """Queue a sequence.

        Raises:
            NeverFitsError: The sequence requests less than one token, or its prompt leaves no space
                for a token.
            TextQueueFullError: The queue is full.
        """
        self._check(new)
        self._expire(now_s)
        key = self._queue.key(new, now_s)
        begin = self.limits.begin(new.prompt_tokens)
        state = SequenceState(new, key, begin, room=self.limits.length - begin)
        self._sequences[new.number] = state
        self._queue.push(state)
        self._first_deadline_s = min(self._first_deadline_s, new.deadline_s)
        self._expire(now_s)
        return self._report()

    def cancel(self, number: int) -> TextOutcome:
        """End a sequence that has not ended: now, or with the running step if the step runs it."""
        state = self._sequences.get(number)
        if state is not None and state.ending is None:
            self._end(state, SequenceEnd.CANCELLED)
        return self._report()

    def next(self, now_s: float) -> TextDecision:
        """Decide which step to run."""
        assert not self._running, "next() was called while a step runs"
        self._expire(now_s)
        step = self._choose(now_s) if self._sequences else None
        if step is not None:
            self._step += 1
            self._running = [self._sequences[number] for number in step.sequences]
            for state in self._running:
                state.running = True
        return TextDecision(step, self._report())

    def prefilled(self, now_s: float) -> TextOutcome:
        """Record that the prefill ended: its sequences continue with stage 0."""
        for state in self._take_running():
            state.passed()
            if state.ending is None:
                state.stage = 0
                self._groups.add(state, self._step)
            else:
                self._end(state, state.ending)
        self._expire(now_s)
        return self._report()

    def update(
        self, tokens: Sequence[int], confidences: Sequence[float], now_s: float
    ) -> TextOutcome:
        """Record the tokens and confidences of the stage that ran, and decide what follows."""
        accepted: list[AcceptedToken] = []
        given: list[GivenToken] = []
        running = self._take_running()
        stage = running[0].stage
        for state, token, confidence in zip(running, tokens, confidences, strict=True):
            state.passed()
            if state.ending is not None:
                self._end(state, state.ending)
                continue
            if not state.leaves(confidence):
                state.stage += 1
                self._groups.add(state, self._step)
                continue
            replayed = state.replays
            taken = state.take(token)
            if not replayed:
                given.append(state.given(stage, confidence))
            if (end := state.end_with(taken, now_s)) is not None:
                self._end(state, end)
                continue
            assert state.slot is not None
            accepted.append(AcceptedToken(state.new.number, state.slot, taken))
            self._groups.add(state, self._step)
        self._expire(now_s)
        left_at = stage if stage < self.limits.stages - 1 else None
        return self._report(TextOutcome((), left_at, tuple(accepted), tuple(given)))

    def failed(self, numbers: Iterable[int], now_s: float) -> TextOutcome:
        """Record that sequences failed, in the running step or in a backend call that followed it.

        If a step is running, it ends with this call, and ``numbers`` are its sequences. Sequences
        that have already ended are skipped.
        """
        numbers = list(numbers)
        running = {state.new.number for state in self._take_running()}
        assert running <= set(numbers), "a step fails whole"
        for number in numbers:
            state = self._sequences.get(number)
            if state is not None:
                self._fail(state)
        self._expire(now_s)
        return self._report()

    def _check(self, new: NewSequence) -> None:
        """Reject sequences that can never run."""
        if new.number in self._sequences:
            raise ValueError(f"sequence {new.number} exists already: numbers are never reused")
        if new.prompt_tokens < 1 or new.most_tokens < 1:
            raise NeverFitsError(
                f"a prompt of {new.prompt_tokens} tokens and an answer of at most "
                f"{new.most_tokens}: both must be at least 1"
            )
        longest = self.limits.most_prompt_tokens
        if new.prompt_tokens > longest:
            raise NeverFitsError(
                f"a prompt of {new.prompt_tokens} tokens does not fit a slot of "
                f"{self.limits.length} tokens: send at most {longest}"
            )

    def _choose(self, now_s: float) -> PrefillStep | TokenStep:
        """Let the policy choose, and take the rows of its choice."""
        waiting = self._queue.first()
        wanted = bool(waiting) and not waiting[0].new.background
        yielding = self._yielding() if wanted else []
        choice = self._policy.choose(
            WaitingText(
                groups=self._groups.candidates(wanted=wanted),
                startable=min(len(waiting), len(self._free) + len(yielding)),
                holding=len(self._held) - len(yielding),
                rows=self.limits.rows,
                step=self._step,
            ),
            now_s,
        )
        if choice == START:
            return self._start(waiting, yielding)
        rows = choice.most_urgent(self.limits.rows)
        for state in rows:
            self._groups.discard(state)
        limits = tuple(state.limit for state in rows)
        return TokenStep(choice.stage, _numbers(rows), _slots(rows), limits)

    def _start(self, waiting: list[SequenceState], yielding: list[SequenceState]) -> PrefillStep:
        """Assign slots to the first sequences of the queue that may share a prefill."""
        first = waiting[0]
        most = min(self.limits.rows, len(self._free) + len(yielding))
        rows = [first]
        if not first.alone:
            mates = (s for s in waiting if self._may_share(first, s))
            rows = list(islice(mates, most))
        while len(self._free) < len(rows):
            self._restart(yielding.pop())
            self.yielded += 1
        for state in rows:
            self._queue.remove(state)
            state.slot = self._free.pop()
            self._held[state.slot] = state
            if state.new.background:
                self._held_background[state.slot] = state
            if state.thresholds is None:
                state.thresholds = self._off if state.new.background else self._thresholds
        return PrefillStep(_numbers(rows), _slots(rows))

    def _may_share(self, first: SequenceState, other: SequenceState) -> bool:
        """Return True if both sequences may be in one prefill; ``first`` may share a step."""
        return not other.alone and (self.limits.ragged or other.begin == first.begin)

    def _yielding(self) -> list[SequenceState]:
        """Return the background sequences in slots; the last in the list loses its slot first."""
        return sorted(self._held_background.values(), key=lambda state: -state.at)

    def _take_running(self) -> list[SequenceState]:
        running, self._running = self._running, []
        for state in running:
            state.running = False
            self._first_deadline_s = min(self._first_deadline_s, state.new.deadline_s)
        return running

    def _fail(self, state: SequenceState) -> None:
        """Restart a failed sequence, or end it."""
        state.failures += 1
        if state.ending is not None or state.failures >= MOST_FAILURES:
            self._end(state, state.ending or SequenceEnd.FAILED)
            return
        failed_at = (state.at, state.stage)
        self._restart(state)
        state.suspect_until = failed_at
        self.retried += 1

    def _restart(self, state: SequenceState) -> None:
        """Free the slot of a sequence, and queue it again."""
        self._free_slot(state)
        state.restart()
        self._queue.push(state)

    def _end(self, state: SequenceState, end: SequenceEnd) -> None:
        """End a sequence; a running sequence ends with its step."""
        if state.running:
            state.ending = end
            return
        if state.slot is None:
            self._queue.remove(state)
        else:
            self._free_slot(state)
        del self._sequences[state.new.number]
        self._ended.append(state.ended(end))

    def _free_slot(self, state: SequenceState) -> None:
        assert state.slot is not None
        self._groups.discard(state)
        del self._held[state.slot]
        self._held_background.pop(state.slot, None)
        self._closed.append(state.slot)
        self._free.append(state.slot)

    def _expire(self, now_s: float) -> None:
        """End expired sequences; a lower bound of all deadlines avoids most of the searches."""
        if now_s < self._first_deadline_s:
            return
        waiting = [state for state in self._sequences.values() if not state.running]
        late = [state for state in waiting if state.new.deadline_s <= now_s]
        for state in late:
            self._end(state, SequenceEnd.EXPIRED)
        # Running sequences are checked when their step has ended.
        deadlines = (s.new.deadline_s for s in waiting if s.new.deadline_s > now_s)
        self._first_deadline_s = min(deadlines, default=NEVER_S)

    def _report(self, outcome: TextOutcome = NOTHING_FOLLOWS) -> TextOutcome:
        """Return an outcome with the ended sequences and the slots to close added."""
        if self._closed or self._ended:
            outcome = outcome._replace(closed=tuple(self._closed), ended=tuple(self._ended))
            self._closed, self._ended = [], []
        return outcome


def _numbers(states: Iterable[SequenceState]) -> tuple[int, ...]:
    return tuple(state.new.number for state in states)


def _slots(states: Iterable[SequenceState]) -> tuple[int, ...]:
    return tuple(state.slot for state in states if state.slot is not None)
