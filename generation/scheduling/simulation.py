"""Simulation of generating text on virtual time, with the server's own scheduler and policies.

The backend is simulated: a step takes a time from a table, and each token leaves at the stage that
was recorded for it. Decisions are not simulated: scheduler and policy are the objects used for
serving. The work of scheduler, threads and clients takes no time. The result is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.generation.scheduling.counts import TextCounter, TextCounts
from offramp.generation.scheduling.policies import StepPolicy
from offramp.generation.scheduling.scheduler import TextScheduler
from offramp.generation.scheduling.steps import (
    NEVER_S,
    NewSequence,
    PrefillStep,
    TextLimits,
    TextOutcome,
    TextQueueFullError,
    TokenStep,
)
from offramp.generation.scheduling.thresholds import TokenThresholds

SIMULATED: Final = "SIMULATED"
"""Label of all results of this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Durations of steps in seconds by number of rows; entry 0 of each table is unused."""

    prefill: tuple[float, ...]
    """[batch + 1]: seconds of a prefill."""
    stages: tuple[tuple[float, ...], ...]
    """[stages][batch + 1]: seconds of a stage and of the work after it, such as propagation."""

    def of(self, step: PrefillStep | TokenStep) -> float:
        """Return the simulated duration of a step, in seconds."""
        table = self.prefill if isinstance(step, PrefillStep) else self.stages[step.stage]
        return table[len(step.slots)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """A recorded sequence to simulate: arrival, prompt, and exits of its tokens."""

    prompt_tokens: int
    depths: tuple[int, ...]
    """Stage at which each token of the answer leaves; at least one."""
    arrives_s: float = 0.0
    slo_s: float = NEVER_S
    """Time from the sequence's arrival to its deadline, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedText:
    """The result of a simulation."""

    counts: TextCounts
    span_s: float
    """Time from the first arrival to the end of the last step."""
    first_token_s: NDArray[np.float64]
    """[sequences with a token]: time from arrival to the first token."""
    between_tokens_s: NDArray[np.float64]
    """[tokens except the first of each sequence]: time since the previous token."""
    refused: int
    """Number of sequences rejected because the queue was full."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all sequences per simulated second."""
        return sum(self.counts.tokens) / self.span_s

    def report(self) -> dict[str, Any]:
        """Return the results with their label, as JSON values; times are in ms."""
        gaps = self.between_tokens_s
        counts = self.counts
        return {
            "label": SIMULATED,
            "tokens_per_s": self.tokens_per_s,
            "token_ms_mean": _ms(gaps, np.mean),
            "token_ms_p99": _ms(gaps, lambda times: np.percentile(times, 99)),
            "first_token_ms_p50": _ms(self.first_token_s, np.median),
            "full_places": list(counts.full_places),
            "tokens_by_stage": list(counts.tokens),
            "steps_by_stage": list(counts.steps),
            "prefills": counts.prefills,
            "ended": {str(end): count for end, count in counts.ended.items()},
            "refused": self.refused,
        }


def _ms(times_s: NDArray[np.float64], statistic: Any) -> float | None:
    return float(statistic(times_s)) * 1e3 if times_s.size else None


def simulate_text(
    limits: TextLimits,
    policy: StepPolicy,
    seconds: StepSeconds,
    texts: Sequence[RecordedText],
    *,
    queue: int | None = None,
) -> SimulatedText:
    """Serve recorded sequences as they arrive; by default the queue has space for all.

    Raises:
        ValueError: A table does not fit the stages and rows of the limits, or a depth is not the
        number of a stage.
    """
    _check(limits, seconds, texts)
    # The confidence is 1 from the recorded stage on and 0 before it.
    half = TokenThresholds(version=0, by_stage=(0.5,) * (limits.stages - 1))
    places = max(len(texts), 1) if queue is None else queue
    scheduler = TextScheduler(limits, policy, half, queue=places)
    return _Simulation(scheduler, seconds, texts).run()


class _Simulation:
    """State of one simulation: its clock, and sequences that arrive."""

    def __init__(
        self, scheduler: TextScheduler, seconds: StepSeconds, texts: Sequence[RecordedText]
    ) -> None:
        self._scheduler, self._seconds, self._texts = scheduler, seconds, texts
        self._counter = TextCounter(scheduler.limits)
        self._order = sorted(range(len(texts)), key=lambda number: texts[number].arrives_s)
        self._following = 0
        """Index in ``_order`` of the next arrival."""
        self._done: dict[int, int] = {}
        """Number of tokens of each open sequence."""
        self._last_s: dict[int, float] = {}
        """Time of the last token of each open sequence."""
        self._first_token_s: list[float] = []
        self._between_s: list[float] = []
        self._refused = 0

    def run(self) -> SimulatedText:
        """Run until no sequence is left."""
        begins_s = now_s = self._next_arrival_s()
        while True:
            self._arrive(now_s)
            decision = self._scheduler.next(now_s)
            self._follow(decision.outcome, now_s)
            if decision.step is not None:
                now_s = self._run(decision.step, now_s)
            elif self._next_arrival_s() < NEVER_S:
                now_s = self._next_arrival_s()
            else:
                break
        return SimulatedText(
            counts=self._counter.counts(),
            span_s=now_s - begins_s,
            first_token_s=np.array(self._first_token_s),
            between_tokens_s=np.array(self._between_s),
            refused=self._refused,
        )

    def _next_arrival_s(self) -> float:
        if self._following == len(self._order):
            return NEVER_S
        return self._texts[self._order[self._following]].arrives_s

    def _arrive(self, now_s: float) -> None:
        """Submit all sequences that have arrived by now, each with its own arrival time."""
        while (arrives_s := self._next_arrival_s()) <= now_s:
            number = self._order[self._following]
            self._following += 1
            text = self._texts[number]
            new = NewSequence(
                number=number,
                prompt_tokens=text.prompt_tokens,
                most_tokens=len(text.depths),
                deadline_s=arrives_s + text.slo_s,
            )
            self._done[number] = 0
            try:
                self._follow(self._scheduler.submit(new, arrives_s), arrives_s)
            except TextQueueFullError:
                self._refused += 1

    def _run(self, step: PrefillStep | TokenStep, now_s: float) -> float:
        """Run a step; return its end time."""
        self._counter.decided(step)
        ends_s = now_s + self._seconds.of(step)
        self._arrive(ends_s)
        if isinstance(step, PrefillStep):
            self._follow(self._scheduler.prefilled(ends_s), ends_s)
            return ends_s
        depths = [self._texts[n].depths[self._done[n]] for n in step.sequences]
        confidences = [float(depth <= step.stage) for depth in depths]
        outcome = self._scheduler.update([0] * len(depths), confidences, ends_s)
        self._follow(outcome, ends_s)
        return ends_s

    def _follow(self, outcome: TextOutcome, now_s: float) -> None:
        """Record tokens and ends."""
        self._counter.followed(outcome)
        for given in outcome.given:
            number = given.sequence
            if given.position == 0:
                self._first_token_s.append(now_s - self._texts[number].arrives_s)
            else:
                self._between_s.append(now_s - self._last_s[number])
            self._done[number] += 1
            self._last_s[number] = now_s
        for ended in outcome.ended:
            self._done.pop(ended.sequence)
            self._last_s.pop(ended.sequence, None)


def _check(limits: TextLimits, seconds: StepSeconds, texts: Sequence[RecordedText]) -> None:
    """Raise ValueError for tables and depths that do not fit the limits."""
    tables = (seconds.prefill, *seconds.stages)
    if len(seconds.stages) != limits.stages or any(len(t) <= limits.rows for t in tables):
        raise ValueError(
            f"seconds must be of {limits.stages} stages and of 1 to {limits.rows} rows, got "
            f"{len(seconds.stages)} stages and tables of {[len(table) for table in tables]} entries"
        )
    for number, text in enumerate(texts):
        if not text.depths or not all(0 <= depth < limits.stages for depth in text.depths):
            raise ValueError(
                f"text {number}: depths must be at least one stage from 0 to "
                f"{limits.stages - 1}, got {text.depths}"
            )
