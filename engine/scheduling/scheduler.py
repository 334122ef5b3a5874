"""The scheduler of one model: its queue, batches and retries, under any policy and plan.

It has no I/O and is deterministic; the caller serialises the calls. For all choices of the policy
it guarantees: every sample is released exactly once, or dropped with a cause; no sample runs a
stage twice, except after a failure or an interruption; batches keep within the limit; within a
priority the earliest deadline is served first; memory is proportional to waiting and running
samples.

A batch whose worker is lost is interrupted: it is resumed at its current stage, before all other
batches, on the first stream that asks. The results of its earlier stages are kept. The stage may be
executed more than once; each sample is answered exactly once.

A released sample leaves the batch, unless it is to run on for feedback (release and audit mode).
Then it continues to the deepest stage with the others, without a deadline, and is the first to be
dropped after a failure. A batch with only answered samples yields at the end of a stage to waiting
samples, and continues when nothing else can run; the rows that wait like this are at most as many
as in one batch. Apparate runs such batches to their end first (3.1), so other samples wait longer.

A hot swap activates another plan for batches that start from then on; nothing waits for the swap,
and the swap divides no batch. Samples that run, are buffered at a split or are retried keep the
stages and thresholds with which they were started, and are served before new samples. Samples that
wait for stage 0 start under the new plan. So one policy answers a sample; the evidence about a
policy assumes this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.admission import AdmissionControl
from offramp.engine.scheduling.decisions import (
    NOTHING,
    Decision,
    DropCause,
    Idle,
    Run,
    SchedulerFullError,
    StepOutcome,
    Submission,
    Wait,
    wait_until,
)
from offramp.engine.scheduling.in_flight import InFlight
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.parallel import ParallelLimit
from offramp.engine.scheduling.placed import PlacedPlan
from offramp.engine.scheduling.policy_protocol import LoadShedding, Merge, Policy, Start, Waiting
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.served_plan import ScheduledBatch, ServedPlan

MOST_LOSSES: Final = 5
"""If a batch has lost this number of workers, it counts as the cause, and fails."""


class ModelScheduler:
    """The scheduler of one model: it decides what the streams of its device run, numbered from 0.

    ``parallel`` is the device's limit on parallel batches; ``plan`` is the number of the first plan
    (:attr:`Run.plan`). Where streams differ (:mod:`.placement`), ``placed`` chooses for each
    stream.
    """

    def __init__(
        self,
        policy: Policy,
        latencies: Latencies,
        queue: SampleQueue,
        *,
        streams: int = 1,
        parallel: ParallelLimit | None = None,
        plan: int = 0,
        placed: PlacedPlan | None = None,
    ) -> None:
        self._queue = queue
        self._admission = AdmissionControl()
        self._in_flight = InFlight(streams)
        self._current = self._in_flight.add_plan(plan, policy, latencies, queue, placed)
        self.placed = placed
        """The current plan's placement, where streams differ."""
        self._parallel = parallel or ParallelLimit(latencies.max_batch_size)
        self.retried = 0
        """Number of samples of failed batches that were retried."""
        self.resumed = 0
        """Number of samples of interrupted batches, counted each time."""
        self._numbers = itertools.count(1)

    def hot_swap(
        self, plan: int, policy: Policy, latencies: Latencies, placed: PlacedPlan | None = None
    ) -> None:
        """Start batches under another plan from now on; its number must be new.

        ValueError if this plan is placed and the earlier plans are not, or the reverse, or if it is
        placed on other streams.
        """
        self._current = self._in_flight.add_plan(plan, policy, latencies, self._queue, placed)
        self.placed = placed

    @property
    def plan(self) -> int:
        """Number of the plan with which batches start from now on."""
        return self._current.number

    @property
    def plans(self) -> frozenset[int]:
        """Numbers of the plans with running or waiting samples, including the current one."""
        return frozenset(plan.number for plan in self._in_flight.plans)

    @property
    def latencies(self) -> Latencies:
        """Predictions for the current plan's stages, corrected by observations."""
        return self._current.latencies

    @property
    def _earliest_s(self) -> float:
        """Seconds in which a single sample could leave at its first exit, on the fastest stream."""
        placed = self.placed
        tables = (self.latencies,) if placed is None else placed.latencies.values()
        return min(latencies.earliest_s for latencies in tables)

    @property
    def queued(self) -> int:
        """Number of samples that wait for stage 0."""
        return self._queue.size

    @property
    def waiting(self) -> bool:
        """True if a stream without a batch may find work, now or soon."""
        return bool(self._queue.size or self._in_flight.waiting)

    @property
    def busy(self) -> bool:
        """True if any samples wait or run."""
        return self.waiting or bool(self._in_flight.batches)

    @property
    def in_flight(self) -> int:
        """Number of unanswered samples that were started."""
        return sum(samples.unanswered for samples in self._in_flight.samples())

    @property
    def auditing(self) -> int:
        """Number of answered samples that run on."""
        return sum(len(s.answered) - s.unanswered for s in self._in_flight.samples())

    @property
    def overloaded(self) -> bool:
        """True if samples were recently dropped for lack of time."""
        return self._admission.overloaded

    def admit(self, samples: int, slack_s: float, priority: int, now_s: float) -> None:
        """Raise SchedulerFullError if a request should not be queued: see :mod:`.admission`."""
        if not self.overloaded:
            return
        ahead = self._queue.ahead(priority)
        if self._admission.refuses(samples, slack_s, ahead, now_s):
            raise SchedulerFullError(
                f"samples wait in front ({ahead}), and too many samples were late recently"
            )

    def submit(self, submission: Submission, now_s: float) -> StepOutcome:
        """Queue a request's samples; SchedulerFullError, with none queued, if not all fit."""
        self._expire(now_s)
        submission.feasible = submission.deadline_s - now_s >= self._earliest_s
        try:
            self._queue.push(submission, now_s)
        except SchedulerFullError as error:
            error.outcome = self._in_flight.report()
            raise
        return self._in_flight.report()

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> StepOutcome:
        """Withdraw a request: waiting samples leave now, running samples after their stage.

        This takes O(samples in flight): a request does not know where its samples are.
        """
        dropped = self._queue.remove(request, cause)
        if dropped is not None:
            self._in_flight.drop([dropped])
        self._in_flight.cancel(request, cause)
        return self._in_flight.report()

    def next(self, stream: int, now_s: float) -> Decision:
        """Decide what the idle ``stream`` runs."""
        decision = self._decide(stream, now_s)
        outcome = self._in_flight.report()
        if outcome is NOTHING:
            return decision
        if isinstance(decision, Run):
            return decision._replace(outcomes=(outcome,))
        return replace(decision, outcomes=(outcome,))

    def _decide(self, stream: int, now_s: float) -> Decision:
        self._expire(now_s)
        batch = self._in_flight.batches.get(stream)
        if batch is None:
            started = self._start(stream, now_s)
            if not isinstance(started, ScheduledBatch):
                return started
            batch = self._in_flight.batches[stream] = started
            batch.number = batch.number or next(self._numbers)
        assert not batch.executing, "next() was called for a stream that is busy"
        batch.executing = True
        batch.started_s = now_s
        self._parallel.running(stream, len(batch.samples.requests))
        return batch.as_run()

    def update(
        self,
        stream: int,
        exited: NDArray[np.bool_],
        now_s: float,
        runs_on: NDArray[np.bool_] | None = None,
    ) -> StepOutcome:
        """Record that the run of ``stream`` ended, and decide the next step of each row.

        ``exited`` [n] marks rows whose confidence reached the threshold; ``runs_on`` [n] marks rows
        that run on after they are released, ``None`` if no row does.
        """
        batch = self._in_flight.batches[stream]
        samples, before = batch.samples, len(exited)
        batch.plan.observe(stream, batch, before, now_s)
        batch.pieces = ()
        outcome = self._in_flight.leave(batch, exited, runs_on, now_s)
        self._admission.keep(len(outcome.released), now_s)
        self._in_flight.failures.succeeded(len(outcome.released))
        self._admit_less(now_s)
        if self._parallel.adapts:
            deadlines_s = samples.deadlines_s[outcome.released]
            if bounded := int(np.isfinite(deadlines_s).sum()):
                self._parallel.observe(bounded, int((deadlines_s < now_s).sum()))
        survivors = outcome.survivors
        if not len(survivors):
            if batch.suspect_until_s is not None:
                self._in_flight.failures.record_retry(succeeded=True)
            self._finish(stream)
            return self._in_flight.report(outcome)
        if len(survivors) < before:
            batch.samples = batch.samples.take(survivors)
        batch.stage += 1
        batch.executing = False
        yields = self._yields_to_waiting(batch)
        if not yields and batch.plan.runs_on(stream, batch, before, len(survivors)):
            self._parallel.running(stream, len(survivors))
            return self._in_flight.report(outcome)
        number = batch.number
        if yields or batch.by_itself:  # interrupt, so that no other batch is merged with it
            self._in_flight.interrupt(batch, number, now_s)
        else:
            self._in_flight.buffer(batch, now_s)
        self._finish(stream)
        return self._in_flight.report(outcome._replace(buffered=number))

    def failed(self, stream: int, now_s: float, *, blamed: bool = True) -> StepOutcome:
        """Record that the batch of ``stream`` failed, if it has one.

        The batch's requests are retried from the start, half of them at a time, so that a failing
        request is isolated and fails alone. They are retried on another stream if one is in
        service. A request that failed alone is retried once, when nothing else waits. A request
        that fails alone twice, or has no time left, is dropped as ``FAILED``. If not ``blamed``,
        only the batch's tensors were lost: its requests are retried on any stream, and the failure
        does not count.
        """
        self._fail(stream, now_s, blamed=blamed)
        return self._in_flight.report()

    def _fail(self, stream: int, now_s: float, *, blamed: bool = True) -> None:
        if stream in self._in_flight.batches:
            self.retried += self._in_flight.fail(stream, now_s, blamed=blamed)
            self._finish(stream)

    def interrupted(self, stream: int, now_s: float) -> StepOutcome:
        """Record that the worker of ``stream`` was lost during its run, if it has one.

        The outcome's ``buffered`` is ``None`` if the batch is not resumed: none of its samples is
        needed any more, or it was interrupted :data:`MOST_LOSSES` times and so has failed.
        """
        if (batch := self._in_flight.batches.get(stream)) is None:
            return NOTHING
        batch.losses += 1
        if batch.losses >= MOST_LOSSES:
            self._fail(stream, now_s)
            return self._in_flight.report()
        batch.number = next(self._numbers)
        resumed = self._in_flight.interrupt(batch, batch.number, now_s)
        self.resumed += resumed
        self._finish(stream)
        outcome = StepOutcome(buffered=batch.number) if resumed else NOTHING
        return self._in_flight.report(outcome)

    def suspend(self, stream: int) -> None:
        """Take a stream, which has no batch, out of service."""
        self._in_flight.suspended.add(stream)

    def suspends(self, stream: int) -> bool:
        """Return whether a stream is out of service."""
        return stream in self._in_flight.suspended

    def resume(self, stream: int) -> None:
        """Put a stream into service again."""
        self._in_flight.suspended.discard(stream)

    def flush(self) -> None:
        """Stop waiting for fuller batches, from now on: the server is draining."""
        self._queue.flush()

    def _start(self, stream: int, now_s: float) -> ScheduledBatch | Wait | Idle:
        """Find a batch for a stream without one; batches of the oldest plan go first."""
        if not self._parallel.allows(stream):
            return wait_until(self._queue.next_expiry_s())
        if resumed := self._resume(stream, yielding=False):
            return resumed
        until_s = float("inf")
        for plan in self._in_flight.plans:
            retry = self._next_retry(plan, stream, now_s)
            if retry is not None:
                return retry
            chosen = self._choose(plan, stream, now_s)
            if isinstance(chosen, ScheduledBatch):
                return chosen
            if isinstance(chosen, Wait):
                until_s = min(until_s, chosen.until_s)
        others_wait = self._queue.size or self._in_flight.buffered
        suspect = None if others_wait else self._next_retry(None, stream, float("inf"))
        if left := suspect or self._resume(stream, yielding=True):
            return left
        for batch in (*self._in_flight.retries, *self._in_flight.interrupted):  # left to others
            until_s = min(until_s, float(batch.samples.deadlines_s.min()))
            if (waits_s := batch.suspect_until_s) is not None and self._may_take(batch, stream):
                until_s = min(until_s, waits_s)
        return wait_until(until_s)

    def _resume(self, stream: int, *, yielding: bool) -> ScheduledBatch | None:
        """Take an interrupted batch, if there is one.

        ``yielding`` selects batches that yield to waiting samples; otherwise batches that do not.
        """
        if not self._in_flight.interrupted:
            return None
        return self._in_flight.take_interrupted(
            lambda b: (
                self._yields(b) == yielding and (b.plan.placed is None or self._may_take(b, stream))
            )
        )

    def _yields(self, batch: ScheduledBatch) -> bool:
        """Return whether a batch can wait, because no request and no plan change waits for it."""
        return batch.only_feedback and batch.plan is self._current

    def _yields_to_waiting(self, batch: ScheduledBatch) -> bool:
        """Return whether a batch pauses at this stage because other samples wait for an answer.

        The number of paused rows is at most that of the largest batch: they use memory, and under
        overload their number would grow without limit.
        """
        if not self._queue.size or batch.plan.placed is not None or not self._yields(batch):
            return False
        waiting = sum(len(b.samples.requests) for b in self._in_flight.interrupted)
        return bool(waiting + len(batch.samples.requests) <= self.latencies.max_batch_size)

    def _may_take(self, batch: ScheduledBatch, stream: int) -> bool:
        """Return whether a stream may run a batch; the batch avoids a stream where it failed."""
        placed, able = batch.plan.placed, self._in_flight.others(stream)
        if placed is not None:
            if not placed.holds(stream, batch.stage):
                return False
            able = frozenset(n for n in able if placed.holds(n, batch.stage))
        if (failed_on := batch.failed_on) is None:
            return True
        alike = self._parallel.shares_failures
        return not alike(failed_on, stream) or all(alike(failed_on, other) for other in able)

    def _next_retry(
        self, plan: ServedPlan | None, stream: int, now_s: float
    ) -> ScheduledBatch | None:
        """Take the first retry of a plan (or of any plan) that this stream may run now."""
        for retry in self._in_flight.retries:
            waits = retry.suspect_until_s is not None and retry.suspect_until_s > now_s
            if plan in (None, retry.plan) and not waits and self._may_take(retry, stream):
                self._in_flight.retries.remove(retry)
                return retry
        return None

    def _choose(self, plan: ServedPlan, stream: int, now_s: float) -> ScheduledBatch | Wait | Idle:
        """Choose among waiting samples; in a placed plan, the stream's own stages go first."""
        if (placed := plan.placed) is None:
            choice = self._ask(plan.policy, plan.waiting, now_s)
            if not isinstance(choice, Start | Merge):
                return choice
            return self._in_flight.form(plan, choice)
        others, until_s = self._in_flight.others(stream), placed.wake_s(stream, now_s)
        sheds = partial(placed.may_shed, stream, others)
        fallback: Start | Merge | None = None
        for waiting in placed.views(stream, others, self._in_flight.batches, now_s):
            choice = self._ask(placed.of(stream).policy, waiting, now_s, sheds)
            if isinstance(choice, Start | Merge):
                if not choice.may_grow:
                    return self._in_flight.form(plan, choice)
                fallback = fallback or choice  # full batches of other splits go first
            elif isinstance(choice, Wait):
                until_s = min(until_s, choice.until_s)
        return self._in_flight.form(plan, fallback) if fallback else wait_until(until_s)

    def _ask(
        self,
        policy: Policy,
        waiting: Waiting,
        now_s: float,
        sheds: Callable[[], bool] = lambda: True,
    ) -> Start | Merge | Wait | Idle:
        """Call a policy until it chooses anything except load shedding."""
        while True:
            choice = policy.choose(waiting, now_s)
            if not isinstance(choice, LoadShedding):
                return choice
            if self.overloaded or sheds():
                late = choice.bucket.most_urgent().request
                dropped = self._queue.remove(late, DropCause.INFEASIBLE)
                assert dropped is not None
                self._in_flight.drop([dropped])
            else:  # a faster stream may still be in time
                waiting = waiting.without_queue()

    def _finish(self, stream: int) -> None:
        self._in_flight.finish(stream)
        self._parallel.running(stream, 0)

    def _expire(self, now_s: float) -> None:
        """Drop waiting samples that are too late; nearly always, no sample is."""
        if now_s >= self._queue.first_deadline_s:
            self._in_flight.drop(self._queue.expire(now_s))
        if self._in_flight.waiting:
            self._in_flight.expire(now_s)
        self._admit_less(now_s)

    def _admit_less(self, now_s: float) -> None:
        """Report to admission control the samples that were dropped since the last call."""
        if self._in_flight.late:
            self._admission.lose(self._in_flight.late, now_s)
            self._in_flight.late = 0
