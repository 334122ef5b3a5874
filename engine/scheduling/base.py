"""What a scheduler is: plain decisions, no clock, no thread, no tensors.

The executor (and the simulator, and the tests) ask ``next(stream, now)`` whenever a stream is
idle and tell ``done`` what came of it. All times are absolute seconds of one monotonic clock.
Samples are named by the request that they belong to and their row in it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class DropCause(StrEnum):
    """Why a sample leaves without an answer."""

    EXPIRED = "expired"
    """Its deadline passed."""
    CANCELLED = "cancelled"
    """Its caller left."""
    FAILED = "backend_error"
    """Another part of its request failed."""


class SchedulerFullError(Exception):
    """The bounded queue has no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request of ``count`` samples, all wanting stage 0."""

    request: int
    """Unique; never reused."""
    count: int
    signature: Hashable = None
    """Samples batch only with samples of equal signature (their shapes, say)."""
    deadline_s: float = float("inf")
    priority: int = 0
    """Higher goes first."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run ``stage`` on these samples, as rows of one batch, in this order."""

    batch: int
    """Names the batch from stage to stage."""
    stage: int
    requests: NDArray[np.int64]
    """[n]: the request of each row; rows of one request are neighbours."""
    rows: NDArray[np.int64]
    """[n]: the row within its request."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run before this time, unless something is submitted."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until something is submitted or done."""


Decision: TypeAlias = Run | Wait | Idle


@dataclass(frozen=True, slots=True)
class Transition:
    """What becomes of the rows of a run; the three lists partition them."""

    released: NDArray[np.intp]
    """Rows that leave with their answer."""
    dropped: NDArray[np.intp]
    """Rows that leave without: reported by ``take_dropped`` too."""
    survivors: NDArray[np.intp]
    """Rows that go on to the next stage, in order."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Samples that left without an answer."""

    request: int
    count: int
    cause: DropCause


class Scheduler(Protocol):
    """Deterministic; the caller serialises the calls."""

    def submit(self, submission: Submission, now_s: float) -> None:
        """Queue a request's samples.

        Raises:
            SchedulerFullError: There is no room for all of them; none was queued.
        """
        ...

    def cancel(self, request: int, cause: DropCause = DropCause.CANCELLED) -> None:
        """Withdraw a request: what waits leaves now, what runs when its stage is done."""
        ...

    def next(self, stream: int, now_s: float) -> Decision:
        """What the idle ``stream`` shall do."""
        ...

    def done(self, stream: int, exited: NDArray[np.bool_], now_s: float) -> Transition:
        """The run of ``stream`` ended; ``exited`` [n] says which rows have their answer."""
        ...

    def failed(self, stream: int) -> None:
        """The batch of ``stream`` failed, if it has one; its samples leave the scheduler."""
        ...

    def flush(self) -> None:
        """Wait for batch mates no longer, from now on: the server is draining."""
        ...

    def take_dropped(self) -> list[Dropped]:
        """Samples dropped since the last call."""
        ...

    @property
    def queued(self) -> int:
        """Samples waiting for stage 0."""
        ...

    @property
    def in_flight(self) -> int:
        """Samples in running batches."""
        ...
