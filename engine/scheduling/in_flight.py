"""The started samples of a model: running, or waiting at a split, for a retry or a resumption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.buffered import BufferedQueue
from offramp.engine.scheduling.decisions import (
    NOTHING,
    DropCause,
    Dropped,
    Piece,
    Rows,
    RowSet,
    StepOutcome,
    all_rows,
    concatenate,
)
from offramp.engine.scheduling.failure_history import FailureHistory
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.placed import PlacedPlan
from offramp.engine.scheduling.policy_protocol import Merge, Policy, Start, Waiting
from offramp.engine.scheduling.queue import PATIENCE_S, SampleQueue
from offramp.engine.scheduling.served_plan import ScheduledBatch, ServedPlan

_LATE: Final = frozenset({DropCause.EXPIRED, DropCause.INFEASIBLE})
_NO_ROWS: Rows = np.empty(0, np.intp)
_LOSSES_OF_HALVES: Final = 2
"""Number of workers that each half of a batch may lose, if the batch failed because it lost
workers."""
_MOST_UNBLAMED: Final = 3
"""Number of times that a batch's tensors may be lost; another loss counts as a failure of the
batch."""


class InFlight:
    """Tracks all started samples, and all samples that leave without an answer."""

    def __init__(self, streams: int = 1) -> None:
        self.streams = frozenset(range(streams))
        self.batches: dict[int, ScheduledBatch] = {}
        """Running batches, by stream."""
        self.retries: list[ScheduledBatch] = []
        """Failed batches, or halves of them, to retry from stage 0."""
        self.interrupted: list[ScheduledBatch] = []
        """Batches whose worker was lost, to be resumed at their stage; none is divided while it
        waits."""
        self.plans: list[ServedPlan] = []
        """Plans, oldest first; new batches start under the last."""
        self.failures = FailureHistory()
        self.buffered = 0
        """Number of samples that wait at splits."""
        self.suspended: set[int] = set()
        """Streams that are out of service."""
        self._cancelled: dict[int, DropCause] = {}
        """Withdrawn requests that still have running samples, each with the cause."""
        self.late = 0
        """Number of samples dropped for lack of time; the owner resets it."""
        self._dropped: list[Dropped] = []
        self._lost: list[RowSet] = []
        self._discarded: list[int] = []

    @property
    def waiting(self) -> bool:
        """True if any started samples wait."""
        return bool(self.buffered or self.retries or self.interrupted)

    def add_plan(
        self,
        number: int,
        policy: Policy,
        latencies: Latencies,
        queue: SampleQueue,
        placed: PlacedPlan | None = None,
    ) -> ServedPlan:
        """Start new batches with a plan from now on; the plan takes over the queue."""
        before = self.plans[-1].placed if self.plans else None
        if placed is not None:
            placed.follow(before, len(self.streams))
        if self.plans:
            if (placed is None) != (before is None):
                raise ValueError(
                    f"plan {number}: place its stages if and only if the stages of earlier plans "
                    "were placed"
                )
            old, empty = self.plans[-1], SampleQueue(0, full=1)
            old.waiting = Waiting(empty, old.waiting.buffered, self.suspended)
            if old.placed is not None:
                old.placed.show(old.waiting)
        stages = max(table.stages for table in latencies.variants)
        splits = tuple(BufferedQueue(discarded=self._discarded) for _ in range(stages))
        waiting = Waiting(queue, splits, self.suspended)
        if placed is not None:
            placed.show(waiting)
        plan = ServedPlan(number, policy, latencies, waiting, placed)
        self.plans.append(plan)
        self.forget_old_plans()
        return plan

    def forget_old_plans(self) -> None:
        """Remove old plans without samples."""
        waiting = (*self.retries, *self.interrupted)
        used = {batch.plan.number for batch in (*self.batches.values(), *waiting)}
        used.add(self.plans[-1].number)
        used |= {p.number for p in self.plans if any(b.size for b in p.waiting.buffered)}
        self.plans = [plan for plan in self.plans if plan.number in used]

    def others(self, stream: int) -> frozenset[int]:
        """Return the streams in service, except one."""
        return self.streams - self.suspended - {stream}

    def samples(self) -> Iterator[RowSet]:
        """Yield all samples that were started and have not left."""
        yield from (batch.samples for batch in self.batches.values())
        yield from (retry.samples for retry in self.retries)
        yield from (batch.samples for batch in self.interrupted)
        if self.buffered:
            for buffer in self._buffers():
                for bucket in buffer.buckets.values():
                    yield from (waiting.samples for waiting in bucket.batches)

    def form(self, plan: ServedPlan, choice: Start | Merge) -> ScheduledBatch:
        """Form the batch that a policy chose: of new samples, or of buffered ones at a split."""
        together = self.failures.together
        if isinstance(choice, Start):
            return plan.form(choice, together)
        limit = min(choice.limit, plan.latencies.max_batch_size, together)
        samples, pieces = plan.waiting.buffered[choice.stage].take(choice.bucket, limit)
        self.buffered -= len(samples.requests)
        key, variant = choice.bucket.batch_key, choice.bucket.variant
        last = plan.latencies.last(variant)
        return ScheduledBatch(plan, choice.stage, samples, key, last, variant, pieces)

    def fail(self, stream: int, now_s: float, *, blamed: bool = True) -> int:
        """Queue the batch of a stream for retries, in halves; return the number of their samples.

        After a failure of a shared batch, most of its requests are not the cause, so each half may
        run immediately. A request that failed alone waits for all others, and is not retried after
        its next failure. If not ``blamed``, neither batch nor stream caused the failure: it does
        not count as one, up to :data:`_MOST_UNBLAMED` times.
        """
        batch = self.batches[stream]
        if not blamed:
            batch.losses += 1
            blamed = batch.losses > _MOST_UNBLAMED
        answered, alone = batch.samples.answered, batch.samples.alone
        staying = ~answered
        staying[self.drop_expired(batch, staying, now_s)] = False
        if answered.any():  # no retry for feedback
            self.lose(batch.samples.take(np.flatnonzero(answered)))
        requests = [*batch.samples.take(np.flatnonzero(staying)).by_request()]
        if batch.suspect_until_s is not None and requests and blamed:
            self.failures.record_retry(succeeded=False)
        if alone and requests and blamed and not self._may_try_again(batch):
            self.failures.failed()
            self.lose(requests.pop(), DropCause.FAILED)
        requests = [samples for samples in requests if not self._is_late(batch, samples, now_s)]
        for half in halves(requests):
            # Each half may lose few more workers, as one half likely causes the losses.
            losses = max(batch.losses - _LOSSES_OF_HALVES, 0) if blamed else batch.losses
            retry = replace(
                batch,
                stage=0,
                samples=half,
                pieces=(),
                by_itself=True,
                failed_on=stream if blamed else batch.failed_on,
                suspect_until_s=self._suspect_until_s(batch, now_s) if alone and blamed else None,
                losses=losses,
                number=0,
                wasted_s=0.0,
                executing=False,
            )
            self.retries.append(retry)
        return sum(len(samples.requests) for samples in requests)

    def _suspect_until_s(self, batch: ScheduledBatch, now_s: float) -> float:
        """Return until when a request that failed alone waits: now, if it has queued samples."""
        own = self.plans[-1].waiting.queue.holds(int(batch.samples.requests[0]))
        return now_s if own else now_s + PATIENCE_S

    def _may_try_again(self, batch: ScheduledBatch) -> bool:
        """Return whether a batch of one request may be retried."""
        others = (*self.retries, *self.interrupted, *self.batches.values())
        waiting = any(other.suspect_until_s is not None for other in others)
        return batch.failed_on is None and self.failures.allows_try(waiting=waiting)

    def _is_late(self, batch: ScheduledBatch, samples: RowSet, now_s: float) -> bool:
        """Drop a request without enough time for a retry; return whether it was dropped."""
        latencies, rows = batch.plan.latencies, len(samples.requests)
        needed_s = latencies.span_s(0, batch.deepest, rows, batch.variant)
        late = bool(samples.deadlines_s[0] <= now_s + needed_s)
        if late:
            self.lose(samples, DropCause.FAILED)
        return late

    def buffer(self, batch: ScheduledBatch, now_s: float) -> None:
        """Buffer the survivors of a batch at the split that it has reached."""
        buffer = batch.plan.waiting.buffered[batch.stage]
        buffer.buffer(batch.samples, batch.batch_key, batch.number, now_s, batch.variant)
        self.buffered += len(batch.samples.requests)

    def interrupt(self, batch: ScheduledBatch, number: int, now_s: float) -> int:
        """Queue a batch for its resumption; return how many of its samples are still needed.

        ``number`` is the number under which the tensors of its stage are kept, if any are.
        """
        staying = np.ones(len(batch.samples.requests), np.bool_)
        staying[self.drop_expired(batch, staying, now_s)] = False
        batch.executing = False
        batch.pieces = (Piece(number, all_rows(len(staying))),)
        self.interrupted.append(batch)
        if not staying.all():
            self._shorten(batch, staying)
            if not staying.any():  # no tensors are kept that could be discarded
                self._discarded.remove(number)
        return int(np.count_nonzero(staying))

    def take_interrupted(self, may_run: Callable[[ScheduledBatch], bool]) -> ScheduledBatch | None:
        """Take the interrupted batch that has waited longest among batches that may run, if any."""
        batch = next(filter(may_run, self.interrupted), None)
        if batch is None:
            return None
        self.interrupted.remove(batch)
        self._discarded.append(batch.pieces[0].number)
        batch.number = 0  # if buffered again, it needs a number that was not discarded
        return batch

    def finish(self, stream: int) -> None:
        """Remove the batch of a stream, which has ended."""
        self.batches.pop(stream, None)
        if self._cancelled:
            running = {r for b in self.batches.values() for r in b.samples.requests.tolist()}
            self._cancelled = {r: c for r, c in self._cancelled.items() if r in running}

    def leave(
        self,
        batch: ScheduledBatch,
        exited: NDArray[np.bool_],
        runs_on: NDArray[np.bool_] | None,
        now_s: float,
    ) -> StepOutcome:
        """Decide which rows of a batch are released, dropped or go on; report the dropped ones."""
        if batch.samples.answered.any() or (runs_on is not None and runs_on.any()):
            staying = np.zeros(len(exited), np.bool_) if runs_on is None else runs_on
            return self._release(batch, exited, staying, now_s)
        return self._shrink(batch, exited, now_s)

    def _shrink(
        self, batch: ScheduledBatch, exited: NDArray[np.bool_], now_s: float
    ) -> StepOutcome:
        """Decide about each row of a batch; all released rows leave the batch."""
        before = len(exited)
        leaving = before
        if batch.stage < batch.deepest:
            leaving = int(np.count_nonzero(exited))
            going_on = before - leaving
            batch.plan.observe_shrinking(batch.stage, before, going_on, batch.variant)
        released, dropped, survivors = _NO_ROWS, _NO_ROWS, _NO_ROWS
        if leaving == before:
            released = all_rows(before)
        elif self._cancelled or batch.earliest_s <= now_s:
            staying = ~exited
            dropped = self.drop_expired(batch, staying, now_s)
            staying[dropped] = False
            released, survivors = exited.nonzero()[0], staying.nonzero()[0]
        elif leaving:
            released, survivors = exited.nonzero()[0], (~exited).nonzero()[0]
        else:
            survivors = all_rows(before)
        return StepOutcome(released, dropped, survivors)

    def _release(
        self,
        batch: ScheduledBatch,
        exited: NDArray[np.bool_],
        runs_on: NDArray[np.bool_],
        now_s: float,
    ) -> StepOutcome:
        """Decide about each row of a batch, if some rows run on after their answer."""
        samples = batch.samples
        if batch.stage == batch.deepest:
            released, ended = (~samples.answered).nonzero()[0], samples.answered.nonzero()[0]
            last = batch.plan.latencies.last(batch.variant)
            if batch.variant and batch.stage < last and len(audited := runs_on.nonzero()[0]):
                # A subnet ends at its own answer; the full model runs after it, for audits only.
                batch.deepest = last
                batch.samples = samples.answering(released)
                ended = (samples.answered & ~runs_on).nonzero()[0]
                return StepOutcome(released, _NO_ROWS, audited, ended=ended)
            return StepOutcome(released, _NO_ROWS, _NO_ROWS, ended=ended)
        newly = exited & ~samples.answered
        staying = ~newly | runs_on
        going_on = int(np.count_nonzero(staying))
        waiting = int(np.count_nonzero(~samples.answered))
        unanswered = (waiting, waiting - int(np.count_nonzero(newly)))
        batch.plan.observe_shrinking(batch.stage, len(exited), going_on, batch.variant, unanswered)
        dropped = self.drop_expired(batch, ~(newly | samples.answered), now_s)
        staying[dropped] = False
        released = newly.nonzero()[0]
        if len(released):
            batch.samples = samples.answering(released)
        return StepOutcome(released, dropped, staying.nonzero()[0])

    def cancel(self, request: int, cause: DropCause) -> None:
        """Withdraw a request: waiting samples leave now, running samples after their stage."""
        self._drop_buffered(lambda buffer: buffer.remove(request), cause)
        self._drop_retries(lambda samples: samples.requests == request, cause)
        self._drop_interrupted(lambda samples: samples.requests == request, cause)
        if any((batch.samples.requests == request).any() for batch in self.batches.values()):
            self._cancelled.setdefault(request, cause)

    def expire(self, now_s: float) -> None:
        """Drop waiting samples whose deadline has passed."""
        self._drop_buffered(lambda buffer: buffer.expire(now_s), DropCause.EXPIRED)
        self._drop_retries(lambda samples: samples.deadlines_s <= now_s, DropCause.EXPIRED)
        self._drop_interrupted(lambda samples: samples.deadlines_s <= now_s, DropCause.EXPIRED)

    def drop_expired(self, batch: ScheduledBatch, staying: NDArray[np.bool_], now_s: float) -> Rows:
        """Report and return the staying rows that were withdrawn or are past their deadline."""
        if not self._cancelled and batch.earliest_s > now_s:
            return _NO_ROWS
        samples = batch.samples
        withdrawn = np.isin(samples.requests, list(self._cancelled))
        late = withdrawn | (samples.deadlines_s <= now_s)
        rows = np.flatnonzero(staying & late & ~samples.answered)
        if len(rows):
            lost = samples.take(rows)
            self._lost.append(lost)
            for item in lost.dropped(DropCause.EXPIRED):
                cause = self._cancelled.get(item.request, item.cause)
                self.drop([replace(item, cause=cause)])
        return rows

    def lose(self, samples: RowSet, cause: DropCause = DropCause.FAILED) -> None:
        """Report started samples that leave before the model's end."""
        self.drop(samples.dropped(cause))
        self._lost.append(samples)

    def drop(self, dropped: Iterable[Dropped]) -> None:
        """Report samples that leave without an answer."""
        for item in dropped:
            self._dropped.append(item)
            if item.cause in _LATE and item.feasible:
                self.late += item.count

    def report(self, outcome: StepOutcome = NOTHING) -> StepOutcome:
        """Add everything that left since the last report to an outcome.

        Old plans are removed here, as every call of the scheduler ends here.
        """
        if self._dropped or self._lost or self._discarded:
            outcome = outcome._replace(
                dropped=self._dropped, lost=self._lost, discarded=self._discarded.copy()
            )
            self._dropped, self._lost = [], []
            self._discarded.clear()
        if len(self.plans) > 1:
            self.forget_old_plans()
        return outcome

    def _drop_buffered(
        self, drop: Callable[[BufferedQueue], list[RowSet]], cause: DropCause
    ) -> None:
        for buffer in self._buffers() if self.buffered else ():
            for samples in drop(buffer) if buffer.size else ():
                self.lose(samples, cause)
                self.buffered -= len(samples.requests)

    def _drop_retries(self, which: Callable[[RowSet], NDArray[np.bool_]], cause: DropCause) -> None:
        for retry in self.retries.copy():
            leaving = which(retry.samples)
            if leaving.any():
                self.lose(retry.samples.take(np.flatnonzero(leaving)), cause)
                retry.samples = retry.samples.take(np.flatnonzero(~leaving))
            if leaving.all():
                self.retries.remove(retry)

    def _drop_interrupted(
        self, which: Callable[[RowSet], NDArray[np.bool_]], cause: DropCause
    ) -> None:
        for batch in self.interrupted.copy():
            leaving = which(batch.samples) & ~batch.samples.answered
            if leaving.any():
                self.lose(batch.samples.take(np.flatnonzero(leaving)), cause)
                self._shorten(batch, ~leaving)

    def _shorten(self, batch: ScheduledBatch, staying: NDArray[np.bool_]) -> None:
        """Remove all but the staying rows from an interrupted batch that waits."""
        rows, ((number, positions),) = np.flatnonzero(staying), batch.pieces
        if len(rows):
            batch.samples = batch.samples.take(rows)
            batch.pieces = (Piece(number, positions[rows]),)
        else:
            self.interrupted.remove(batch)
            self._discarded.append(number)

    def _buffers(self) -> Iterator[BufferedQueue]:
        for plan in self.plans:
            yield from plan.waiting.buffered


def halves(requests: Sequence[RowSet]) -> list[RowSet]:
    """Join requests' samples into two batches of equally many requests, or into one batch."""
    middle = (len(requests) + 1) // 2
    return [concatenate(part) for part in (requests[:middle], requests[middle:]) if part]
