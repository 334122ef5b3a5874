"""The vocabulary of scheduling: plain decisions, no clock, no thread, no tensors.

The executor, the simulator and the tests ask ``next(stream, now)`` whenever a stream is idle and
tell ``done`` what came of it. All times are absolute seconds of one monotonic clock. Samples are
named by the request that they belong to and their row in it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.intp]
"""Positions in a batch, rising."""


class DropCause(StrEnum):
    """Why a sample leaves without an answer."""

    EXPIRED = "expired"
    """Its deadline passed."""
    INFEASIBLE = "hopeless"
    """Its deadline was still ahead, but could not be met, or only at the cost of others'."""
    CANCELLED = "cancelled"
    """Its caller left."""
    FAILED = "backend_error"
    """Its execution failed, twice or with no time left, or another part of its request did."""


class SchedulerFullError(Exception):
    """The bounded queue has no room."""


class Submission(NamedTuple):
    """A request of some samples, all wanting stage 0. A tuple: one is made every request."""

    request: int
    """Unique; never reused."""
    samples: int = 1
    deadline_s: float = float("inf")
    priority: int = 0
    """Higher goes first."""
    batch_key: Hashable = None
    """Samples batch only with samples of equal batch key (their shapes, say)."""


class Piece(NamedTuple):
    """Rows of a batch that was buffered at a split, now part of a fused one."""

    number: int
    """Names the buffered batch: :attr:`Transition.buffered`."""
    positions: Rows
    """Which of its rows, as they were numbered when it was buffered."""


class Run(NamedTuple):
    """Run ``stage`` on these samples, as rows of one batch, in this order."""

    batch: int
    """Names the batch from stage to stage."""
    stage: int
    requests: NDArray[np.int64]
    """[n]: the request of each row; rows of one request are neighbours, but in fused batches."""
    rows: NDArray[np.int64]
    """[n]: the row within its request."""
    deepest: int
    """The stage where all that are still here must leave; beyond it none of them runs."""
    sample_ids: NDArray[np.int64]
    """[n]: numbers of the samples, in the order in which they were started."""
    pieces: tuple[Piece, ...] = ()
    """Of which buffered batches this one is fused, in the order of its rows; empty where it is
    new (stage 0) or goes on from the stage before."""
    plan: int = 0
    """Under which of successive plans."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run before this time, unless something is submitted or done."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until something is submitted or done."""


IDLE = Idle()

Decision: TypeAlias = Run | Wait | Idle


def wait_until(until_s: float) -> Wait | Idle:
    """Wait, or idle if that is for ever."""
    return IDLE if until_s == float("inf") else Wait(until_s)


class Transition(NamedTuple):
    """What becomes of the rows of a run.

    A row leaves (``released``, ``dropped`` or ``ended``) or survives; one that is released may
    survive too, and end later.
    """

    released: Rows
    """Rows that have their answer now, forced or not."""
    dropped: Rows
    """Rows that leave without: reported by ``take_dropped`` too."""
    survivors: Rows
    """Rows that go on to the next stage, those among them that run on for feedback only."""
    buffered: int | None = None
    """If the survivors wait at the split: the number to keep their tensors under, until
    ``take_discarded`` names it."""
    ended: Rows = np.empty(0, np.intp)
    """Rows that were released at an earlier stage and have run to the deepest."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Samples that left without an answer."""

    request: int
    count: int
    cause: DropCause
