"""What the scheduling tests share: small tables, a scheduler of any policy, a look inside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import (
    Latencies,
    ModelScheduler,
    OperatingPoint,
    OperatingPoints,
    ParallelLimit,
    Placement,
    Run,
    SampleQueue,
)
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


def scheduler(
    policy: str = "run-through",
    *,
    latencies: Latencies | None = None,
    capacity: int = 64,
    max_delay_s: float = 0.0,
    streams: int = 1,
    parallel: ParallelLimit | None = None,
    placement: Placement | None = None,
) -> ModelScheduler:
    latencies = latencies or table(first_s=0.25, more_s=0.0)
    return make_scheduler(
        PolicyName.parse(policy),
        points_of(latencies),
        max_batch_size=latencies.max_batch_size,
        max_delay_s=max_delay_s,
        max_queue=capacity,
        streams=streams,
        parallel=parallel,
        placement=placement,
    )


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
