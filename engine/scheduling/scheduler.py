"""The mechanism: one model's queue, batches and retries, under any policy and plan.

Sans I/O and deterministic; the caller serialises the calls. What it promises whatever the policy
chooses: every sample is released exactly once, or dropped with a cause; no sample runs a stage
twice, but after a failure or an interruption; batches keep within the limit; within a priority the
earliest deadline goes first; memory is bounded by what waits and runs.

A batch whose worker is lost is interrupted: it is resumed at the stage that it was in, before all
else and on whichever stream asks first, as nothing that it did before is lost. At least once
executed, exactly once answered.

A released sample leaves the batch, unless it is to run on for feedback (release and audit mode):
then it goes to the deepest stage with the others, without a deadline, and is the first that a
failure drops. A batch in which all are answered makes way at the end of a stage for samples that
wait, and goes on when nothing else can run; so do as many rows as a batch may have. Apparate runs
such batches to their end first (3.1), and what waits behind them waits for feedback.

A hot swap puts another plan in force for batches that start from then on; nothing waits for it and
no batch is torn by it. What runs, is buffered at a split or is tried again keeps the stages and
thresholds that it was started with, and goes before anything new; what waits for stage 0 starts
under the new plan. So a sample is always answered under one policy, which is what evidence about
that policy takes for granted.
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
"""Workers that a batch may lose: then it is taken for what ends them, and has failed."""


class ModelScheduler:
    """The scheduler of one model: it decides what the streams of its device run, numbered from 0.

    ``parallel`` is the device's limit on batches side by side; ``plan`` the number of the first
    plan (:attr:`Run.plan`). Where streams differ (:mod:`.placement`), ``placed`` chooses for each.
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
        """The current plan as it is placed, where streams differ."""
        self._parallel = parallel or ParallelLimit(latencies.max_batch_size)
        self.retried = 0
        """Samples of failed batches that were tried again."""
        self.resumed = 0
        """Samples of interrupted batches, once for each time."""
        self._numbers = itertools.count(1)

    def hot_swap(
        self, plan: int, policy: Policy, latencies: Latencies, placed: PlacedPlan | None = None
    ) -> None:
        """Start batches under another plan from now on, whose number was never used before.

        ValueError if its stages are placed and those before were not, or on other streams.
        """
        self._current = self._in_flight.add_plan(plan, policy, latencies, self._queue, placed)
        self.placed = placed

    @property
    def plan(self) -> int:
        """The plan that batches start under from now on."""
        return self._current.number

    @property
    def plans(self) -> frozenset[int]:
        """The plans that something still runs or waits under, the current one included."""
        return frozenset(plan.number for plan in self._in_flight.plans)

    @property
    def latencies(self) -> Latencies:
        """The predictions for the current plan's stages, with what was learned of them."""
        return self._current.latencies

    @property
    def queued(self) -> int:
        """The number of samples that wait for stage 0."""
        return self._queue.size

    @property
    def waiting(self) -> bool:
        """Whether a stream without a batch might have something to do, now or soon."""
        return bool(self._queue.size or self._in_flight.waiting)

    @property
    def busy(self) -> bool:
        """Whether it has samples anywhere."""
        return self.waiting or bool(self._in_flight.batches)

    @property
    def in_flight(self) -> int:
        """The number of unanswered samples that were started, wherever they are."""
        return sum(samples.unanswered for samples in self._in_flight.samples())

    @property
    def auditing(self) -> int:
        """The number of answered samples that run on."""
        return sum(len(s.answered) - s.unanswered for s in self._in_flight.samples())

    @property
    def overloaded(self) -> bool:
        """Whether samples were given up of late for want of time."""
        return self._admission.overloaded

    def admit(self, samples: int, slack_s: float, priority: int, now_s: float) -> None:
        """Refuse, by SchedulerFullError, what had better not be queued: see :mod:`.admission`."""
        if not self.overloaded:
            return
        ahead = self._queue.ahead(priority)
        if self._admission.refuses(samples, slack_s, ahead, now_s):
            raise SchedulerFullError(
                f"{ahead} samples wait before it, and of late too many were late"
            )

    def submit(self, submission: Submission, now_s: float) -> StepOutcome:
        """Queue a request's samples; SchedulerFullError, and none queued, if not all have room."""
        self._expire(now_s)
        try:
            self._queue.push(submission, now_s)
        except SchedulerFullError as error:
            error.outcome = self._in_flight.report()
            raise
        return self._in_flight.report()

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> StepOutcome:
        """Withdraw a request: what waits leaves now, what runs when its stage is done.

        O(samples in flight): a request does not know where its samples are.
        """
        dropped = self._queue.remove(request, cause)
        if dropped is not None:
            self._in_flight.drop([dropped])
        self._in_flight.cancel(request, cause)
        return self._in_flight.report()

    def next(self, stream: int, now_s: float) -> Decision:
        """Decide what the idle ``stream`` shall do."""
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
        """Take note that the run of ``stream`` ended, and decide what follows for its rows.

        ``exited`` [n] are rows that were sure enough, ``runs_on`` [n] rows that run on after they
        were released; ``None`` is no row.
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
                self._in_flight.failures.tried_again(succeeded=True)
            self._finish(stream)
            return self._in_flight.report(outcome)
        if len(survivors) < before:
            batch.samples = batch.samples.take(survivors)
        batch.stage += 1
        batch.executing = False
        makes_way = self._makes_way(batch)
        if not makes_way and batch.plan.runs_on(stream, batch, before, len(survivors)):
            self._parallel.running(stream, len(survivors))
            return self._in_flight.report(outcome)
        number = batch.number
        if makes_way or batch.by_itself:  # by itself, so that nothing fails with it
            self._in_flight.interrupt(batch, number, now_s)
        else:
            self._in_flight.buffer(batch, now_s)
        self._finish(stream)
        return self._in_flight.report(outcome._replace(buffered=number))

    def failed(self, stream: int, now_s: float, *, blamed: bool = True) -> StepOutcome:
        """Take note that the batch of ``stream`` failed, if it has one.

        Its requests are tried again from the start, half of them at a time, so that one that fails
        is found and fails alone; and on another stream where one is in service. A request that
        failed alone is tried once more when nothing else waits. What failed twice like that, or has
        no time left, is dropped as ``FAILED``. Without ``blamed`` only its tensors were lost: its
        requests are tried again on any stream, and may fail as often as before.
        """
        self._fail(stream, now_s, blamed=blamed)
        return self._in_flight.report()

    def _fail(self, stream: int, now_s: float, *, blamed: bool = True) -> None:
        if stream in self._in_flight.batches:
            self.retried += self._in_flight.fail(stream, now_s, blamed=blamed)
            self._finish(stream)

    def interrupted(self, stream: int, now_s: float) -> StepOutcome:
        """Take note that the worker of ``stream`` was lost amid its run, if it has one.

        The outcome's ``buffered`` is ``None`` if nothing is resumed: nobody waits for it any more,
        or it was interrupted :data:`MOST_LOSSES` times, and has failed.
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
        """Say that a stream, which has no batch, is out of service."""
        self._in_flight.suspended.add(stream)

    def suspends(self, stream: int) -> bool:
        """Whether a stream is out of service."""
        return stream in self._in_flight.suspended

    def resume(self, stream: int) -> None:
        """Say that a stream is in service again."""
        self._in_flight.suspended.discard(stream)

    def flush(self) -> None:
        """Wait for batch mates no longer, from now on: the server is draining."""
        self._queue.flush()

    def _start(self, stream: int, now_s: float) -> ScheduledBatch | Wait | Idle:
        """Find a batch for a stream that has none: what is left of the oldest plan goes first."""
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
        """Take a batch that was interrupted: one that yields to samples that wait, or another."""
        if not self._in_flight.interrupted:
            return None
        return self._in_flight.take_interrupted(
            lambda b: (
                self._yields(b) == yielding and (b.plan.placed is None or self._may_take(b, stream))
            )
        )

    def _yields(self, batch: ScheduledBatch) -> bool:
        """Whether nobody waits for a batch, nor for the end of its plan."""
        return batch.only_feedback and batch.plan is self._current

    def _makes_way(self, batch: ScheduledBatch) -> bool:
        """Whether a batch waits from here on, as there are samples that wait for an answer.

        So may as many rows as a batch may have: they hold memory, and in overload there would be
        ever more.
        """
        if not self._queue.size or batch.plan.placed is not None or not self._yields(batch):
            return False
        waiting = sum(len(b.samples.requests) for b in self._in_flight.interrupted)
        return bool(waiting + len(batch.samples.requests) <= self.latencies.max_batch_size)

    def _may_take(self, batch: ScheduledBatch, stream: int) -> bool:
        """Whether a stream can run a batch; not on the device where it failed, if another can."""
        placed, able = batch.plan.placed, self._in_flight.others(stream)
        if placed is not None:
            if not placed.holds(stream, batch.stage):
                return False
            able = frozenset(n for n in able if placed.holds(n, batch.stage))
        if (failed_on := batch.failed_on) is None:
            return True
        alike = self._parallel.may_fail_alike
        return not alike(failed_on, stream) or all(alike(failed_on, other) for other in able)

    def _next_retry(
        self, plan: ServedPlan | None, stream: int, now_s: float
    ) -> ScheduledBatch | None:
        """Take the first batch of a plan, or of any, that this stream may try again by now."""
        for retry in self._in_flight.retries:
            waits = retry.suspect_until_s is not None and retry.suspect_until_s > now_s
            if plan in (None, retry.plan) and not waits and self._may_take(retry, stream):
                self._in_flight.retries.remove(retry)
                return retry
        return None

    def _choose(self, plan: ServedPlan, stream: int, now_s: float) -> ScheduledBatch | Wait | Idle:
        """Choose of all that waits; of a placed plan of the stream's own stages, or steal."""
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
                fallback = fallback or choice  # full ones of other splits go before it
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
        """Ask a policy until it chooses anything but to shed load."""
        while True:
            choice = policy.choose(waiting, now_s)
            if not isinstance(choice, LoadShedding):
                return choice
            if self.overloaded or sheds():
                late = choice.bucket.most_urgent().request
                dropped = self._queue.remove(late, DropCause.INFEASIBLE)
                assert dropped is not None
                self._in_flight.drop([dropped])
            else:  # a faster stream may yet be in time
                waiting = waiting.without_queue()

    def _finish(self, stream: int) -> None:
        self._in_flight.finish(stream)
        self._parallel.running(stream, 0)

    def _expire(self, now_s: float) -> None:
        """Drop what waits and is too late; nearly always nothing can be."""
        if now_s >= self._queue.first_deadline_s:
            self._in_flight.drop(self._queue.expire(now_s))
        if self._in_flight.waiting:
            self._in_flight.expire(now_s)
        self._admit_less(now_s)

    def _admit_less(self, now_s: float) -> None:
        """Tell admission of those that were given up since it was last told."""
        if self._in_flight.late:
            self._admission.lose(self._in_flight.late, now_s)
            self._in_flight.late = 0
