"""Shared parts of the scheduling tests: small tables, a scheduler of any policy, its internals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Latencies,
    ModelScheduler,
    OperatingPoint,
    OperatingPoints,
    ParallelLimit,
    Placement,
    Run,
    SampleQueue,
    SchedulerFullError,
    StepOutcome,
    Submission,
)
from offramp.engine.scheduling.decisions import Decision, RowSet
from offramp.engine.scheduling.policies import PolicyName, make_scheduler

STAGES = 3
SIZE = 4


def table(stages: int = STAGES, size: int = SIZE, *, first_s: float, more_s: float) -> Latencies:
    """Stages that all take ``first_s`` for one row and ``more_s`` for each further one."""
    row = [0.0, *(first_s + more_s * n for n in range(size))]
    return Latencies([row] * stages)


def points_of(latencies: Latencies, agreements: Sequence[float] | None = None) -> OperatingPoints:
    """An exit after every stage but the last."""
    last = latencies.stages - 1
    worth = agreements or [(stage + 1) / (last + 1) for stage in range(last + 1)]
    return OperatingPoints(
        points=tuple(
            OperatingPoint(deepest=s, exit=MODEL_END if s == last else s, agreement=worth[s])
            for s in range(last + 1)
        ),
        latencies=latencies,
    )


def row_set(
    requests: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    deadlines_s: float | Sequence[float] = float("inf"),
    priorities: int | Sequence[int] = 0,
    sample_ids: Sequence[int] | None = None,
) -> RowSet:
    """Unanswered, feasible rows of ``requests`` [n]; rows and samples count from 0."""
    count = len(requests)
    return RowSet(
        np.array(requests, np.int64),
        np.arange(count) if rows is None else np.array(rows, np.int64),
        np.full(count, deadlines_s, np.float64),
        np.full(count, priorities, np.int64),
        np.arange(count) if sample_ids is None else np.array(sample_ids, np.int64),
        np.zeros(count, np.bool_),
        np.ones(count, np.bool_),
    )


class Watched(ModelScheduler):
    """A scheduler that keeps what its outcomes report until a test asks for it."""

    def __init__(self, made: ModelScheduler) -> None:
        self.__dict__.update(made.__dict__)
        self._seen_dropped: list[Dropped] = []
        self._seen_lost: list[RowSet] = []
        self._seen_discarded: list[int] = []

    def take_dropped(self) -> list[Dropped]:
        """Samples dropped since the last call."""
        seen, self._seen_dropped = self._seen_dropped, []
        return seen

    def take_lost(self) -> list[RowSet]:
        """Samples lost since the last call."""
        seen, self._seen_lost = self._seen_lost, []
        return seen

    def take_discarded(self) -> list[int]:
        """Numbers discarded since the last call."""
        seen, self._seen_discarded = self._seen_discarded, []
        return seen

    def submit(self, submission: Submission, now_s: float) -> StepOutcome:
        try:
            return self._see(super().submit(submission, now_s))
        except SchedulerFullError as error:
            self._see(error.outcome)
            raise

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> StepOutcome:
        return self._see(super().cancel(request, cause))

    def next(self, stream: int, now_s: float) -> Decision:
        decision = super().next(stream, now_s)
        for outcome in decision.outcomes:
            self._see(outcome)
        return decision

    def update(
        self,
        stream: int,
        exited: NDArray[np.bool_],
        now_s: float,
        runs_on: NDArray[np.bool_] | None = None,
    ) -> StepOutcome:
        return self._see(super().update(stream, exited, now_s, runs_on))

    def failed(self, stream: int, now_s: float, *, blamed: bool = True) -> StepOutcome:
        return self._see(super().failed(stream, now_s, blamed=blamed))

    def interrupted(self, stream: int, now_s: float) -> StepOutcome:
        return self._see(super().interrupted(stream, now_s))

    def _see(self, outcome: StepOutcome) -> StepOutcome:
        self._seen_dropped += outcome.dropped
        self._seen_lost += outcome.lost
        self._seen_discarded += outcome.discarded
        return outcome


def scheduler(
    policy: str = "run-through",
    *,
    latencies: Latencies | None = None,
    capacity: int = 64,
    max_delay_s: float = 0.0,
    streams: int = 1,
    parallel: ParallelLimit | None = None,
    placement: Placement | None = None,
) -> Watched:
    latencies = latencies or table(first_s=0.25, more_s=0.0)
    made = make_scheduler(
        PolicyName.parse(policy),
        points_of(latencies),
        max_batch_size=latencies.max_batch_size,
        max_delay_s=max_delay_s,
        max_queue=capacity,
        streams=streams,
        parallel=parallel,
        placement=placement,
    )
    return Watched(made)


def started(decision: object) -> Run:
    assert isinstance(decision, Run), decision
    return decision


def none_exit(run: Run) -> NDArray[np.bool_]:
    return np.zeros(len(run.requests), np.bool_)


def all_exit(run: Run) -> NDArray[np.bool_]:
    return np.ones(len(run.requests), np.bool_)


def pairs(run: Run) -> list[tuple[int, int]]:
    """(request, row) of each row."""
    return list(zip(run.requests.tolist(), run.rows.tolist(), strict=True))


def queue_sizes(queue: SampleQueue) -> dict[str, int]:
    """Entries of everything in a queue that grows."""
    index, deadlines = queue._index, queue._by_deadline
    buckets = queue._buckets.values()
    ordered = [bucket._by_urgency for bucket in buckets]
    ordered += [bucket._by_age for bucket in buckets if bucket._by_age is not None]
    return {
        "buckets": len(queue._buckets),
        "requests": len(queue._by_request),
        "ready": len(index._ready),
        "timers": len(index._timers),
        "deadlines": len(deadlines._in_order) + len(deadlines._heap),
        "bucket entries": sum(len(q._in_order) + len(q._heap) for q in ordered),
    }


def sizes(s: ModelScheduler) -> dict[str, int]:
    """Entries of everything in a scheduler that grows."""
    started = s._in_flight
    buffered = [split for plan in started.plans for split in plan.waiting.buffered]
    return {
        **queue_sizes(s._queue),
        "plans": len(started.plans),
        "batches": len(started.batches),
        "retries": len(started.retries),
        "interrupted": len(started.interrupted),
        "cancelled": len(started._cancelled),
        "dropped": len(started._dropped),
        "lost": len(started._lost),
        "buffered buckets": sum(len(p.buckets) for p in buffered),
        "buffered": sum(p.size for p in buffered),
        "discarded": len(started._discarded),
    }
