"""PAME's run-through policy (PAME 4.2): a batch stays on its stream and shrinks.

A batch is formed when it is full, or when its oldest sample has waited ``max_delay_s``; it then
runs stage after stage on one stream, while samples leave it. With several streams a new batch
may start beside a running one once that holds fewer than ``parallel_below`` samples (PAME's
τ_b), since a small batch leaves the device half empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.base import (
    Decision,
    DropCause,
    Dropped,
    Idle,
    Run,
    Submission,
    Transition,
    Wait,
)
from offramp.engine.scheduling.queue import Lane, SampleQueue, Taken


@dataclass(slots=True)
class _Batch:
    """A running batch; its arrays are compacted when samples leave."""

    number: int
    stage: int
    requests: NDArray[np.int64]
    rows: NDArray[np.int64]
    deadlines_s: NDArray[np.float64]
    executing: bool = False

    def keep(self, survivors: NDArray[np.intp]) -> None:
        self.requests = self.requests[survivors]
        self.rows = self.rows[survivors]
        self.deadlines_s = self.deadlines_s[survivors]


class RunThroughScheduler:
    """Dynamic batching by size and delay, earliest deadline first, run-through stages."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_delay_s: float = 0.0,
        max_queue: int = 4096,
        parallel_below: int | None = None,
    ) -> None:
        """Set the limits.

        Args:
            max_batch_size: Most rows of a batch.
            max_delay_s: Longest time that a sample waits for batch mates while a stream idles.
            max_queue: Most samples that wait; more are refused.
            parallel_below: PAME's τ_b; ``None`` starts a batch on any idle stream.
        """
        self._max_batch_size = max_batch_size
        self._max_delay_s = max_delay_s
        self._parallel_below = parallel_below
        self._queue = SampleQueue(max_queue)
        self._batches: dict[int, _Batch] = {}
        self._cancelled: dict[int, DropCause] = {}
        self._dropped: list[Dropped] = []
        self._next_batch = 0

    @property
    def queued(self) -> int:
        """Samples waiting for stage 0."""
        return self._queue.size

    @property
    def in_flight(self) -> int:
        """Samples in running batches."""
        return sum(len(batch.requests) for batch in self._batches.values())

    def submit(self, submission: Submission, now_s: float) -> None:
        """Queue a request's samples; see :class:`Scheduler`."""
        self._dropped.extend(self._queue.expire(now_s))
        self._queue.push(submission, now_s)

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> None:
        """Withdraw a request; see :class:`Scheduler`."""
        dropped = self._queue.remove(request, cause)
        if dropped is not None:
            self._dropped.append(dropped)
        if any((batch.requests == request).any() for batch in self._batches.values()):
            self._cancelled.setdefault(request, cause)

    def next(self, stream: int, now_s: float) -> Decision:
        """Continue the stream's batch, or form a new one; see :class:`Scheduler`."""
        self._dropped.extend(self._queue.expire(now_s))
        batch = self._batches.get(stream)
        if batch is None:
            if not self._queue.size or self._held_back():
                return Idle()
            starts = {s: self._start_s(lane, now_s) for s, lane in self._queue.lanes()}
            ripe = [lane for lane in self._queue.lanes() if starts[lane[0]] <= now_s]
            if not ripe:
                return Wait(min(*starts.values(), self._queue.next_expiry_s()))
            signature, _ = min(ripe, key=lambda item: item[1].urgency())
            batch = self._form(self._queue.take(signature, self._max_batch_size))
            self._batches[stream] = batch
        assert not batch.executing, "next() was called for a stream that is busy"
        batch.executing = True
        return Run(batch.number, batch.stage, batch.requests, batch.rows)

    def done(self, stream: int, exited: NDArray[np.bool_], now_s: float) -> Transition:
        """Part the rows into released, dropped and survivors; see :class:`Scheduler`."""
        batch = self._batches[stream]
        lost = self._lost(batch, ~exited, now_s)
        transition = Transition(
            np.flatnonzero(exited), np.flatnonzero(lost), np.flatnonzero(~exited & ~lost)
        )
        if len(transition.survivors):
            batch.keep(transition.survivors)
            batch.stage += 1
            batch.executing = False
        else:
            self._finish(stream)
        return transition

    def failed(self, stream: int) -> None:
        """Forget the stream's batch; see :class:`Scheduler`."""
        self._finish(stream)

    def flush(self) -> None:
        """Wait for batch mates no longer; see :class:`Scheduler`."""
        self._max_delay_s = 0.0

    def take_dropped(self) -> list[Dropped]:
        """Samples dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _held_back(self) -> bool:
        """Whether a running batch is still too large for another beside it (PAME's τ_b)."""
        limit = self._parallel_below
        running = self._batches.values()
        return limit is not None and any(len(batch.requests) >= limit for batch in running)

    def _start_s(self, lane: Lane, now_s: float) -> float:
        """When a batch of the lane may start: once it is full, or its oldest waited enough."""
        if self._max_delay_s <= 0.0 or lane.size >= self._max_batch_size:
            return now_s
        return lane.oldest_s() + self._max_delay_s

    def _form(self, parts: list[Taken]) -> _Batch:
        counts = [part.count for part in parts]
        number, self._next_batch = self._next_batch, self._next_batch + 1
        return _Batch(
            number=number,
            stage=0,
            requests=np.repeat(np.array([p.submission.request for p in parts], np.int64), counts),
            rows=np.concatenate([np.arange(p.first, p.first + p.count) for p in parts]),
            deadlines_s=np.repeat([p.submission.deadline_s for p in parts], counts),
        )

    def _lost(self, batch: _Batch, staying: NDArray[np.bool_], now_s: float) -> NDArray[np.bool_]:
        """Staying rows whose request was withdrawn or whose deadline has passed; reports them."""
        lost: NDArray[np.bool_] = batch.deadlines_s <= now_s
        if self._cancelled:
            lost = lost | np.isin(batch.requests, list(self._cancelled))
        lost = staying & lost
        if lost.any():
            requests, counts = np.unique(batch.requests[lost], return_counts=True)
            self._dropped.extend(
                Dropped(r, c, self._cancelled.get(r, DropCause.EXPIRED))
                for r, c in zip(requests.tolist(), counts.tolist(), strict=True)
            )
        return lost

    def _finish(self, stream: int) -> None:
        self._batches.pop(stream, None)
        if self._cancelled:
            still = {r for b in self._batches.values() for r in b.requests.tolist()}
            self._cancelled = {r: c for r, c in self._cancelled.items() if r in still}
