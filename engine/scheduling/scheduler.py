"""The mechanism: queues, batches and retries of one model, under any policy.

Sans I/O and deterministic; the caller serialises the calls. What it promises whatever the policy
chooses: every sample is released exactly once, or dropped with a cause; no sample runs a stage
twice, but after a failure; batches keep within the limit; within a priority the earliest deadline
goes first; memory is bounded by what waits and runs.

A released sample leaves the batch, unless it is to run on for feedback (release and audit mode):
then it goes to the deepest stage with the others, without a deadline, and is the first that a
failure drops.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.base import (
    Decision,
    DropCause,
    Dropped,
    Idle,
    Piece,
    Rows,
    Run,
    Submission,
    Transition,
    Wait,
    wait_until,
)
from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.buffered import BufferedQueue
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.parallel import ParallelLimit
from offramp.engine.scheduling.policy import Fuse, Policy, Shed, Start, Waiting
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.rowset import RowSet

_NO_ROWS: Rows = np.empty(0, np.intp)


class _Batch:
    """A batch on a stream; its samples are narrowed down as they leave."""

    __slots__ = (
        "batch_key",
        "deepest",
        "earliest_s",
        "executing",
        "number",
        "pieces",
        "retry",
        "samples",
        "stage",
        "started_s",
    )

    def __init__(
        self, number: int, stage: int, samples: RowSet, batch_key: Hashable, deepest: int
    ) -> None:
        self.number = number
        self.stage = stage
        self.samples = samples
        self.batch_key = batch_key
        self.deepest = deepest
        self.earliest_s: float = min(samples.deadlines_s.tolist())
        """First deadline among its samples, or earlier."""
        self.pieces: tuple[Piece, ...] = ()
        self.executing = False
        self.retry = False
        self.started_s = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Retry:
    """The samples of one request in a batch that failed."""

    samples: RowSet
    batch_key: Hashable
    deepest: int
    failed_on: int
    """The stream."""


class ModelScheduler:
    """Decides for one model what the streams of its device run."""

    def __init__(
        self,
        policy: Policy,
        latencies: Latencies,
        queue: SampleQueue,
        *,
        streams: int = 1,
        parallel: ParallelLimit | None = None,
        plan: int = 0,
    ) -> None:
        """Start empty.

        Args:
            policy: Chooses.
            latencies: Of the model's stages; told what is observed.
            queue: In front of stage 0, empty.
            streams: Of the device, numbered from 0.
            parallel: The device's limit on batches side by side.
            plan: Which of successive plans it decides about (:attr:`Run.plan`).
        """
        self.plan = plan
        """Which of successive plans it decides about."""
        self._policy = policy
        self._latencies = latencies
        self._last = latencies.stages - 1
        self._queue = queue
        self._waiting = Waiting(queue, tuple(BufferedQueue() for _ in range(latencies.stages)))
        self._buffered = 0
        self._streams = frozenset(range(streams))
        self._suspended: set[int] = set()
        self._parallel = parallel or ParallelLimit(latencies.max_batch_size)
        self._batches: dict[int, _Batch] = {}
        self._retries: deque[_Retry] = deque()
        self._cancelled: dict[int, DropCause] = {}
        """Withdrawn requests of which samples run."""
        self.retried = 0
        """Samples of failed batches that were tried again."""
        self._dropped: list[Dropped] = []
        self._lost: list[RowSet] = []
        self._numbers = itertools.count(1)
        self._all_rows = [_frozen(np.arange(n)) for n in range(latencies.max_batch_size + 1)]
        """By batch size; not made anew for every stage that nobody or everybody leaves."""

    @property
    def latencies(self) -> Latencies:
        """Of the plan's stages, with what was learned of them."""
        return self._latencies

    @property
    def unread(self) -> bool:
        """Whether one of the ``take_…`` methods has something to give."""
        discarded = any(buffered.discarded for buffered in self._waiting.buffered)
        return bool(self._dropped or self._lost or discarded)

    @property
    def queued(self) -> int:
        """Samples waiting for stage 0."""
        return self._queue.size

    @property
    def waiting(self) -> bool:
        """Whether a stream without a batch might have something to do, now or soon."""
        return bool(self._queue.size or self._buffered or self._retries)

    @property
    def busy(self) -> bool:
        """Whether it has samples anywhere."""
        return self.waiting or bool(self._batches)

    @property
    def in_flight(self) -> int:
        """Unanswered samples in running batches, at splits, and waiting to be tried again."""
        return sum(samples.unanswered for samples in self._under_way())

    @property
    def auditing(self) -> int:
        """Answered samples that run on."""
        return sum(len(s.answered) - s.unanswered for s in self._under_way())

    def hand_over(self, plan: int, policy: Policy, latencies: Latencies) -> ModelScheduler:
        """Make the scheduler of the next plan; what waits for stage 0 is its from here on.

        What was started stays here until it is through.
        """
        heir = ModelScheduler(
            policy,
            latencies,
            self._queue,
            streams=len(self._streams),
            parallel=self._parallel,
            plan=plan,
        )
        heir._suspended = set(self._suspended)
        heir._numbers = self._numbers
        self._queue = SampleQueue(0, full=1)
        self._waiting = Waiting(self._queue, self._waiting.buffered)
        return heir

    def submit(self, submission: Submission, now_s: float) -> None:
        """Queue a request's samples.

        Raises:
            SchedulerFullError: There is no room for all of them; none was queued.
        """
        self._expire(now_s)
        self._queue.push(submission, now_s)

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> None:
        """Withdraw a request: what waits leaves now, what runs when its stage is done.

        O(samples in flight): a request does not know where its samples are.
        """
        dropped = self._queue.remove(request, cause)
        if dropped is not None:
            self._dropped.append(dropped)
        if self._buffered:
            self._drop_buffered(lambda buffered: buffered.remove(request), cause)
        for retry in [r for r in self._retries if r.samples.requests[0] == request]:
            self._retries.remove(retry)
            self._lose(retry.samples, cause)
        if any((batch.samples.requests == request).any() for batch in self._batches.values()):
            self._cancelled.setdefault(request, cause)

    def next(self, stream: int, now_s: float) -> Decision:
        """What the idle ``stream`` shall do."""
        self._expire(now_s)
        batch = self._batches.get(stream)
        if batch is None:
            chosen = self._start(stream, now_s)
            if not isinstance(chosen, _Batch):
                return chosen
            batch = self._batches[stream] = chosen
        assert not batch.executing, "next() was called for a stream that is busy"
        batch.executing = True
        batch.started_s = now_s
        samples = batch.samples
        self._parallel.running(stream, len(samples.requests))
        return Run(
            batch.number,
            batch.stage,
            samples.requests,
            samples.rows,
            batch.deepest,
            samples.sample_ids,
            batch.pieces,
            self.plan,
        )

    def done(
        self,
        stream: int,
        exited: NDArray[np.bool_],
        now_s: float,
        runs_on: NDArray[np.bool_] | None = None,
    ) -> Transition:
        """The run of ``stream`` ended.

        Args:
            stream: Which.
            exited: [n]: rows that were sure enough.
            now_s: When.
            runs_on: [n]: rows that run on after they were released; ``None`` is no row.
        """
        batch = self._batches[stream]
        samples, before = batch.samples, len(exited)
        self._observe(batch, before, now_s)
        if samples.answered.any() or (runs_on is not None and runs_on.any()):
            staying = np.zeros(before, np.bool_) if runs_on is None else runs_on
            transition = self._release(batch, exited, staying, now_s)
        else:
            transition = self._shrink(batch, exited, now_s)
        if self._parallel.adapts:
            self._count_late(samples, transition.released, now_s)
        survivors = transition.survivors
        if not len(survivors):
            self._finish(stream)
            return transition
        if len(survivors) < before:
            batch.samples = batch.samples.take(survivors)
        stage, batch.stage = batch.stage, batch.stage + 1
        batch.executing = False
        if batch.retry or self._policy.runs_on(stage, before, len(survivors)):
            self._parallel.running(stream, len(survivors))
            return transition
        self._buffer(batch, now_s)
        self._finish(stream)
        return transition._replace(buffered=batch.number)

    def _shrink(self, batch: _Batch, exited: NDArray[np.bool_], now_s: float) -> Transition:
        """What becomes of the rows where whoever is released leaves."""
        before = len(exited)
        leaving = before
        if batch.stage < batch.deepest:
            leaving = int(np.count_nonzero(exited))
            self._latencies.observe_shrinking(batch.stage, before, before - leaving)
        released, dropped, survivors = _NO_ROWS, _NO_ROWS, _NO_ROWS
        if leaving == before:
            released = self._all_rows[before]
        elif self._cancelled or batch.earliest_s <= now_s:
            staying = ~exited
            dropped = self._drop_lost(batch, staying, now_s)
            staying[dropped] = False
            released, survivors = exited.nonzero()[0], staying.nonzero()[0]
        elif leaving:
            released, survivors = exited.nonzero()[0], (~exited).nonzero()[0]
        else:
            survivors = self._all_rows[before]
        return Transition(released, dropped, survivors)

    def _release(
        self,
        batch: _Batch,
        exited: NDArray[np.bool_],
        runs_on: NDArray[np.bool_],
        now_s: float,
    ) -> Transition:
        """What becomes of the rows where some run on after their answer."""
        samples = batch.samples
        if batch.stage == batch.deepest:
            released, ended = (~samples.answered).nonzero()[0], samples.answered.nonzero()[0]
            return Transition(released, _NO_ROWS, _NO_ROWS, ended=ended)
        newly = exited & ~samples.answered
        staying = ~newly | runs_on
        going_on = int(np.count_nonzero(staying))
        self._latencies.observe_shrinking(batch.stage, len(exited), going_on)
        dropped = _NO_ROWS
        if self._cancelled or batch.earliest_s <= now_s:
            dropped = self._drop_lost(batch, ~(newly | samples.answered), now_s)
            staying[dropped] = False
        released = newly.nonzero()[0]
        if len(released):
            batch.samples = samples.answering(released)
        return Transition(released, dropped, staying.nonzero()[0])

    def failed(self, stream: int, now_s: float) -> None:
        """The batch of ``stream`` failed, if it has one.

        Each of its requests is tried once more from the start: alone, so that one bad request
        fails alone, and on another stream where one is in service. What was tried before, or
        has no time left for it, is dropped as ``FAILED``.
        """
        batch = self._batches.get(stream)
        if batch is None:
            return
        everything = np.ones(len(batch.samples.requests), np.bool_)
        everything[self._drop_lost(batch, everything, now_s)] = False
        if batch.samples.answered.any():  # feedback is not worth a second try
            self._lose(batch.samples.take(np.flatnonzero(batch.samples.answered)))
            everything &= ~batch.samples.answered
        for samples in batch.samples.take(np.flatnonzero(everything)).by_request():
            needed_s = self._latencies.span_s(0, batch.deepest, len(samples.requests))
            if batch.retry or samples.deadlines_s[0] <= now_s + needed_s:
                self._lose(samples, DropCause.FAILED)
            else:
                self._retries.append(_Retry(samples, batch.batch_key, batch.deepest, stream))
                self.retried += len(samples.requests)
        self._finish(stream)

    def suspend(self, stream: int) -> None:
        """Say that a stream, which has no batch, is out of service."""
        self._suspended.add(stream)

    def resume(self, stream: int) -> None:
        """Say that a stream is in service again."""
        self._suspended.discard(stream)

    def flush(self) -> None:
        """Wait for batch mates no longer, from now on: the server is draining."""
        self._queue.flush()

    def take_dropped(self) -> list[Dropped]:
        """Samples dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_lost(self) -> list[RowSet]:
        """Samples that were started and have left before the model's end, since the last call.

        Among them those that were answered: nothing more will be known of any of these.
        """
        lost, self._lost = self._lost, []
        return lost

    def take_discarded(self) -> list[int]:
        """Buffered batches that no :class:`Run` after the last one will ask for."""
        discarded = []
        for buffered in self._waiting.buffered:
            if buffered.discarded:
                discarded += buffered.discarded
                buffered.discarded = []
        return discarded

    def _start(self, stream: int, now_s: float) -> _Batch | Wait | Idle:
        """Form a batch for a stream that has none."""
        if not self._parallel.allows(stream):
            return wait_until(self._queue.next_expiry_s())
        if self._retries and (retry := self._next_retry(stream)) is not None:
            return retry
        while True:
            choice = self._policy.choose(self._waiting, now_s)
            if isinstance(choice, Start):
                return self._form(choice)
            if isinstance(choice, Fuse):
                return self._fuse(choice)
            if not isinstance(choice, Shed):
                return self._keeping_time(choice)
            self._shed(choice.bucket)

    def _keeping_time(self, choice: Wait | Idle) -> Wait | Idle:
        """Wait no longer than a retry that is meant for another stream."""
        if not self._retries:
            return choice
        firsts = [float(retry.samples.deadlines_s[0]) for retry in self._retries]
        return wait_until(min([*firsts, choice.until_s] if isinstance(choice, Wait) else firsts))

    def _form(self, start: Start) -> _Batch:
        samples = self._queue.take(start.bucket, min(start.limit, self._latencies.max_batch_size))
        deepest = self._last if start.deepest is None else start.deepest
        return _Batch(next(self._numbers), 0, samples, start.bucket.batch_key, deepest)

    def _fuse(self, fuse: Fuse) -> _Batch:
        limit = min(fuse.limit, self._latencies.max_batch_size)
        samples, pieces = self._waiting.buffered[fuse.stage].take(fuse.bucket, limit)
        self._buffered -= len(samples.requests)
        batch = _Batch(next(self._numbers), fuse.stage, samples, fuse.bucket.batch_key, self._last)
        batch.pieces = pieces
        return batch

    def _next_retry(self, stream: int) -> _Batch | None:
        """The first that this stream may take: it failed elsewhere, or there is no elsewhere."""
        alone = not self._streams - self._suspended - {stream}
        for retry in list(self._retries):
            if retry.failed_on != stream or alone:
                self._retries.remove(retry)
                samples, batch_key, deepest = retry.samples, retry.batch_key, retry.deepest
                batch = _Batch(next(self._numbers), 0, samples, batch_key, deepest)
                batch.retry = True
                return batch
        return None

    def _shed(self, bucket: Bucket) -> None:
        dropped = self._queue.remove(bucket.most_urgent().request, DropCause.INFEASIBLE)
        assert dropped is not None
        self._dropped.append(dropped)

    def _buffer(self, batch: _Batch, now_s: float) -> None:
        buffered = self._waiting.buffered[batch.stage]
        buffered.buffer(batch.samples, batch.batch_key, batch.number, now_s)
        self._buffered += len(batch.samples.requests)

    def _expire(self, now_s: float) -> None:
        if not (self._buffered or self._retries or now_s >= self._queue.first_deadline_s):
            return
        self._dropped += self._queue.expire(now_s)
        for retry in [r for r in self._retries if r.samples.deadlines_s[0] <= now_s]:
            self._retries.remove(retry)
            self._lose(retry.samples, DropCause.EXPIRED)
        if self._buffered:
            self._drop_buffered(lambda buffered: buffered.expire(now_s), DropCause.EXPIRED)

    def _drop_buffered(
        self, drop: Callable[[BufferedQueue], list[RowSet]], cause: DropCause
    ) -> None:
        for buffered in self._waiting.buffered:
            if buffered.size:
                for samples in drop(buffered):
                    self._lose(samples, cause)
                    self._buffered -= len(samples.requests)

    def _lose(self, samples: RowSet, cause: DropCause = DropCause.FAILED) -> None:
        """Report samples that leave without what they were started for."""
        self._dropped += samples.dropped(cause)
        self._lost.append(samples)

    def _under_way(self) -> Iterator[RowSet]:
        """All samples that were started and have not left."""
        yield from (batch.samples for batch in self._batches.values())
        yield from (retry.samples for retry in self._retries)
        if self._buffered:
            for buffered in self._waiting.buffered:
                for bucket in buffered.buckets.values():
                    yield from (waiting.samples for waiting in bucket.batches)

    def _drop_lost(self, batch: _Batch, staying: NDArray[np.bool_], now_s: float) -> Rows:
        """Report and give the staying rows that were withdrawn or whose deadline has passed."""
        samples = batch.samples
        withdrawn = np.isin(samples.requests, list(self._cancelled))
        late = withdrawn | (samples.deadlines_s <= now_s)
        lost = np.flatnonzero(staying & late & ~samples.answered)
        if len(lost):
            self._lost.append(samples.take(lost))
        for item in samples.take(lost).dropped(DropCause.EXPIRED):
            cause = self._cancelled.get(item.request, item.cause)
            self._dropped.append(Dropped(item.request, item.count, cause))
        return lost

    def _count_late(self, samples: RowSet, released: Rows, now_s: float) -> None:
        deadlines_s = samples.deadlines_s[released]
        bounded = int(np.isfinite(deadlines_s).sum())
        if bounded:
            self._parallel.observe(bounded, int((deadlines_s < now_s).sum()))

    def _observe(self, batch: _Batch, size: int, now_s: float) -> None:
        elapsed_s = now_s - batch.started_s
        if batch.pieces:
            self._latencies.observe_fused(batch.stage, size, elapsed_s)
            batch.pieces = ()
        else:
            self._latencies.observe(batch.stage, size, elapsed_s)

    def _finish(self, stream: int) -> None:
        self._batches.pop(stream, None)
        self._parallel.running(stream, 0)
        if self._cancelled:
            still = {r for b in self._batches.values() for r in b.samples.requests.tolist()}
            self._cancelled = {r: c for r, c in self._cancelled.items() if r in still}


def _frozen(rows: Rows) -> Rows:
    rows.flags.writeable = False
    return rows
