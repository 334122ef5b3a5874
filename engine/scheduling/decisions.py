"""The vocabulary of scheduling: plain decisions, without clock, threads or tensors.

The executor, the simulator and the tests call ``next(stream, now)`` whenever a stream is idle, and
pass to ``update`` the rows whose confidence reached the threshold. All consequences are in a
:class:`StepOutcome`. All times are absolute seconds of one monotonic clock. A sample is identified
by its request and its row in the request.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Key: TypeAlias = tuple[Any, ...]
"""Sort key, compared as a tuple, smallest first; the last element is unique."""

Rows: TypeAlias = NDArray[np.intp]
"""Positions of rows in a batch, in ascending order."""
_NO_ROWS: Rows = np.empty(0, np.intp)


@lru_cache(maxsize=1024)
def all_rows(count: int) -> Rows:
    """Return the positions of a whole batch, read-only, cached across stages."""
    return _read_only(np.arange(count, dtype=np.intp))


@lru_cache(maxsize=1024, typed=True)
def uniform(count: int, *, value: bool | int) -> NDArray[Any]:
    """Return [count] equal bools or int64, read-only."""
    return _read_only(np.full(count, value))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


class DropCause(StrEnum):
    """Reason why a sample leaves without an answer."""

    EXPIRED = "expired"
    """The request's deadline passed."""
    INFEASIBLE = "hopeless"
    """The deadline had not passed, but could not be met, or only by making others late."""
    CANCELLED = "cancelled"
    """The caller cancelled the request."""
    FAILED = "backend_error"
    """The sample's execution failed, alone or without time for a retry; or another part of its
    request failed."""


@dataclass(slots=True, eq=False)
class Submission:
    """A request of some samples for stage 0, and the number of samples that still wait."""

    request: int
    """Unique; never reused."""
    samples: int = 1
    deadline_s: float = float("inf")
    priority: int = 0
    """Priority; higher is served first."""
    batch_key: Hashable = None
    """Samples share a batch only with samples of equal batch key (for example their shapes)."""
    left: int = field(init=False, default=0)
    """Samples that still wait; the queue sets it."""
    submitted_s: float = field(init=False, default=0.0)
    """Time at which it was queued."""
    feasible: bool = field(init=False, default=True)
    """False if it was sent too late to be answered in time even alone; the scheduler sets it."""
    key: Key = field(init=False, default=())
    """Priority (negated), deadline, order of arrival: the smallest is served first."""


class RowSet(NamedTuple):
    """The samples of a batch, as arrays [n] of their properties; never modified in place."""

    requests: NDArray[np.int64]
    """Request of each row; rows of one request are adjacent, except in merged batches."""
    rows: NDArray[np.int64]
    """[n]: index of each sample in its request."""
    deadlines_s: NDArray[np.float64]
    """Deadlines; infinity without one."""
    priorities: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    """Numbers of the samples in the order in which they were started; unique within a model."""
    answered: NDArray[np.bool_]
    """True for samples that have their answer and run on for feedback only."""
    feasible: NDArray[np.bool_]
    """:attr:`Submission.feasible` of each sample's request."""

    def take(self, rows: Rows) -> RowSet:
        """Return the rows with these indices."""
        return RowSet._make([array[rows] for array in self])

    def answering(self, rows: Rows) -> RowSet:
        """Mark some rows as answered; they have no deadline any more."""
        deadlines_s, answered = self.deadlines_s.copy(), self.answered.copy()
        deadlines_s[rows], answered[rows] = float("inf"), True
        return self._replace(deadlines_s=deadlines_s, answered=answered)

    @property
    def unanswered(self) -> int:
        """Number of samples without an answer yet."""
        return len(self.answered) - int(np.count_nonzero(self.answered))

    def by_request(self) -> Iterator[RowSet]:
        """Yield one row set for each request."""
        for request in dict.fromkeys(self.requests.tolist()):
            yield self.take(np.flatnonzero(self.requests == request))

    @property
    def alone(self) -> bool:
        """True if all rows are of one request."""
        return bool((self.requests == self.requests[0]).all())

    def dropped(self, cause: DropCause) -> list[Dropped]:
        """Return reports that all rows leave unanswered; answered rows are not reported."""
        waiting = ~self.answered
        requests, firsts, counts = np.unique(
            self.requests[waiting], return_index=True, return_counts=True
        )
        feasible = self.feasible[waiting][firsts]
        columns = (requests.tolist(), counts.tolist(), feasible.tolist())
        return [
            Dropped(request, count, cause, feasible=in_time)
            for request, count, in_time in zip(*columns, strict=True)
        ]


def concatenate(parts: Sequence[RowSet]) -> RowSet:
    """Return one set of several sets, in order."""
    return RowSet(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Piece(NamedTuple):
    """Rows of a buffered batch that are now part of a merged batch."""

    number: int
    """Number of the buffered batch: :attr:`StepOutcome.buffered`."""
    positions: Rows
    """Positions of the rows in the buffered batch when it was buffered."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The report that samples of a request left without an answer."""

    request: int
    count: int
    cause: DropCause
    feasible: bool = field(default=True, compare=False)
    """False if the request was sent too late to be answered in time even alone."""


class StepOutcome(NamedTuple):
    """All consequences of one call of a scheduler, for the caller to carry out.

    Rows are positions in the batch that ended a stage: the whole batch for ``update``, empty for
    other calls. A row leaves (``released``, ``given_up`` or ``ended``) or survives; a released row
    may also survive, and end later.
    """

    released: Rows = _NO_ROWS
    """Rows that have their answer now, forced or not."""
    given_up: Rows = _NO_ROWS
    """Rows that leave without an answer, late or withdrawn; also reported in ``dropped`` and
    ``lost``."""
    survivors: Rows = _NO_ROWS
    """Rows that go on to the next stage, including answered rows that run on for feedback."""
    buffered: int | None = None
    """Number under which to keep tensors until ``discarded`` contains this number. The tensors are
    those of survivors that wait at a split, or the stage inputs of an interrupted batch."""
    ended: Rows = _NO_ROWS
    """Rows that were released at an earlier stage and have run to the deepest stage."""
    dropped: Sequence[Dropped] = ()
    """Samples that left without an answer, whether they were started or not."""
    lost: Sequence[RowSet] = ()
    """Started samples that left before the model's end and produce no more results; some of them
    may have an answer."""
    discarded: Sequence[int] = ()
    """Numbers of kept tensors that are not needed after the run that was just decided."""
    model: str = ""
    """Model of the samples, where a device's ``next`` reports them."""

    def released_survive(self, rows: int) -> bool:
        """Return whether any released row of a batch runs on as well."""
        return (
            len(self.released) + len(self.given_up) + len(self.survivors) + len(self.ended) > rows
        )


NOTHING = StepOutcome()


class SchedulerFullError(Exception):
    """The bounded queue has no space for a request."""

    outcome: StepOutcome = NOTHING
    """Samples that left before the request was refused."""


class Run(NamedTuple):
    """The decision to run ``stage`` on some samples: the rows of one batch, in this order."""

    batch: int
    """Number of the batch, the same at all its stages."""
    stage: int
    samples: RowSet
    deepest: int
    """Stage where all remaining samples must leave; none of them runs beyond it."""
    pieces: tuple[Piece, ...] = ()
    """Parts of buffered batches from which this batch is merged, in the order of its rows. Empty
    for a new batch (stage 0), and for a batch that continues from the previous stage."""
    plan: int = 0
    """Number of the stage plan with which the batch was started."""
    variant: int = 0
    """Variant of the model that the batch runs, from start to end; 0 is the full model."""
    outcomes: tuple[StepOutcome, ...] = ()
    """Samples that left during the decision, by model; nearly always empty."""
    model: str = ""
    """Model of the samples, where several models share the streams."""

    @property
    def requests(self) -> NDArray[np.int64]:
        """[n]: request of each row."""
        return self.samples.requests

    @property
    def rows(self) -> NDArray[np.int64]:
        """[n]: row within its request."""
        return self.samples.rows

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """[n]: numbers of the samples, in the order in which they were started."""
        return self.samples.sample_ids


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision to run nothing before this time, unless a request arrives or a run ends."""

    until_s: float
    outcomes: tuple[StepOutcome, ...] = field(default=(), compare=False)
    """Samples that left during the decision, by model."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The decision to run nothing until a request arrives or a run ends."""

    outcomes: tuple[StepOutcome, ...] = field(default=(), compare=False)
    """Samples that left during the decision, by model."""


IDLE = Idle()

Decision: TypeAlias = Run | Wait | Idle


def wait_until(until_s: float) -> Wait | Idle:
    """Decide to wait, or to idle if the time is infinite."""
    return IDLE if until_s == float("inf") else Wait(until_s)
