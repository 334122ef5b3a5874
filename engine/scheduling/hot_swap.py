"""One model under successive plans: nothing waits for a change, and no batch is torn by it.

A policy is put in force for batches that start from then on. What runs or waits at a split keeps
the stages and thresholds that it was started with, under the scheduler that started it; what waits
for stage 0 goes over to the new one. So a sample is always answered under one policy, which is what
evidence about that policy takes for granted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.base import (
    DropCause,
    Dropped,
    Idle,
    Run,
    Submission,
    Transition,
    Wait,
    wait_until,
)
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.policy import Policy
from offramp.engine.scheduling.rowset import RowSet
from offramp.engine.scheduling.scheduler import ModelScheduler


class SuccessiveScheduler:
    """A :class:`ModelScheduler` that can be succeeded; the caller serialises the calls."""

    def __init__(self, first: ModelScheduler) -> None:
        """Start with a scheduler, which is owned from here on."""
        self._current = first
        self._retiring: list[ModelScheduler] = []
        self._running: dict[int, ModelScheduler] = {}
        """Whose batch is on a stream."""
        self._retried = 0
        """Of those that are gone."""

    @property
    def plan(self) -> int:
        """Of what starts from now on."""
        return self._current.plan

    @property
    def plans(self) -> frozenset[int]:
        """That something still runs or waits under, the current one included."""
        return frozenset(scheduler.plan for scheduler in self._all())

    @property
    def latencies(self) -> Latencies:
        """Of the current plan, with what was learned of them."""
        return self._current.latencies

    @property
    def queued(self) -> int:
        """Samples waiting for stage 0."""
        return self._current.queued

    @property
    def waiting(self) -> bool:
        """Whether a stream without a batch might have something to do, now or soon."""
        return any(scheduler.waiting for scheduler in self._all())

    @property
    def busy(self) -> bool:
        """Whether there are samples anywhere."""
        return any(scheduler.busy for scheduler in self._all())

    @property
    def in_flight(self) -> int:
        """Unanswered samples that were started."""
        return sum(scheduler.in_flight for scheduler in self._all())

    @property
    def auditing(self) -> int:
        """Answered samples that run on."""
        return sum(scheduler.auditing for scheduler in self._all())

    @property
    def retried(self) -> int:
        """Samples of failed batches that were tried again."""
        return self._retried + sum(scheduler.retried for scheduler in self._all())

    def succeed(self, plan: int, policy: Policy, latencies: Latencies) -> None:
        """Start whatever starts from now on under another plan.

        Args:
            plan: Its number, never used before.
            policy: Chooses for it.
            latencies: Of its stages.
        """
        heir = self._current.hand_over(plan, policy, latencies)
        self._retiring.append(self._current)
        self._current = heir
        self._prune()

    def submit(self, submission: Submission, now_s: float) -> None:
        """Queue a request's samples; see :meth:`ModelScheduler.submit`."""
        self._current.submit(submission, now_s)

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> None:
        """Withdraw a request; see :meth:`ModelScheduler.cancel`."""
        for scheduler in self._all():
            scheduler.cancel(request, cause)

    def next(self, stream: int, now_s: float) -> Run | Wait | Idle:
        """What the idle ``stream`` shall do: what is left of the oldest plan first."""
        mine = self._running.get(stream)
        if mine is not None:
            return mine.next(stream, now_s)
        until_s = float("inf")
        for scheduler in self._all():
            decision = scheduler.next(stream, now_s)
            if isinstance(decision, Run):
                self._running[stream] = scheduler
                return decision
            if isinstance(decision, Wait):
                until_s = min(until_s, decision.until_s)
        return wait_until(until_s)

    def done(
        self,
        stream: int,
        exited: NDArray[np.bool_],
        now_s: float,
        runs_on: NDArray[np.bool_] | None = None,
    ) -> Transition:
        """The run of ``stream`` ended; see :meth:`ModelScheduler.done`."""
        transition = self._running[stream].done(stream, exited, now_s, runs_on)
        if not len(transition.survivors) or transition.buffered is not None:
            del self._running[stream]
        return transition

    def failed(self, stream: int, now_s: float) -> None:
        """The batch of ``stream`` failed, if it has one; see :meth:`ModelScheduler.failed`."""
        mine = self._running.pop(stream, None)
        if mine is not None:
            mine.failed(stream, now_s)

    def suspend(self, stream: int) -> None:
        """Say that a stream, which has no batch, is out of service."""
        for scheduler in self._all():
            scheduler.suspend(stream)

    def resume(self, stream: int) -> None:
        """Say that a stream is in service again."""
        for scheduler in self._all():
            scheduler.resume(stream)

    def flush(self) -> None:
        """Wait for batch mates no longer, from now on."""
        self._current.flush()

    def take_dropped(self) -> list[Dropped]:
        """Samples dropped since the last call."""
        return [item for scheduler in self._all() for item in scheduler.take_dropped()]

    def take_lost(self) -> list[RowSet]:
        """Samples of which nothing more will be known, since the last call."""
        return [item for scheduler in self._all() for item in scheduler.take_lost()]

    def take_discarded(self) -> list[int]:
        """Buffered batches that nothing will ask for; the numbers are unique over all plans.

        What is left of an old plan is looked after here, as this is asked for all the time.
        """
        discarded = [item for scheduler in self._all() for item in scheduler.take_discarded()]
        self._prune()
        return discarded

    def _all(self) -> tuple[ModelScheduler, ...]:
        """Oldest first."""
        return (*self._retiring, self._current)

    def _prune(self) -> None:
        """Forget plans that are through."""
        if not self._retiring:
            return
        for scheduler in [s for s in self._retiring if not s.busy and not s.unread]:
            self._retiring.remove(scheduler)
            self._retried += scheduler.retried
