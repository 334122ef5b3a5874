"""The vocabulary of scheduling: plain decisions, with no clock, no thread and no tensors.

The executor, the simulator and the tests ask ``next(stream, now)`` whenever a stream is idle and
tell ``update`` which rows were sure enough; what follows for whom is a :class:`StepOutcome`. All
times are absolute seconds of one monotonic clock. A sample is named by the request that it belongs
to and its row in it.
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
"""Compared as tuples, smallest first; the last element is unique."""

Rows: TypeAlias = NDArray[np.intp]
"""Positions in a batch, rising."""
_NO_ROWS: Rows = np.empty(0, np.intp)


@lru_cache(maxsize=1024)
def all_rows(count: int) -> Rows:
    """Positions of a whole batch, read-only: they are not made anew for every stage."""
    return _read_only(np.arange(count, dtype=np.intp))


@lru_cache(maxsize=1024, typed=True)
def uniform(count: int, *, value: bool | int) -> NDArray[Any]:
    """[count] equal bools or int64, read-only."""
    return _read_only(np.full(count, value))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


class DropCause(StrEnum):
    """The reason why a sample leaves without an answer."""

    EXPIRED = "expired"
    """Its deadline passed."""
    INFEASIBLE = "hopeless"
    """Its deadline was still ahead, but could not be met, or only at the cost of others'."""
    CANCELLED = "cancelled"
    """Its caller left."""
    FAILED = "backend_error"
    """Its execution failed, alone or with no time left, or another part of its request did."""


@dataclass(slots=True, eq=False)
class Submission:
    """A request of some samples, which all want stage 0, and how many of them still wait."""

    request: int
    """Unique; never reused."""
    samples: int = 1
    deadline_s: float = float("inf")
    priority: int = 0
    """Higher goes first."""
    batch_key: Hashable = None
    """Samples batch only with samples of equal batch key (their shapes, say)."""
    left: int = field(init=False, default=0)
    """Samples that still wait in the queue, which counts them."""
    submitted_s: float = field(init=False, default=0.0)
    """When it was queued."""
    key: Key = field(init=False, default=())
    """Priority (negated), deadline, order of arrival: the smallest goes first."""


class RowSet(NamedTuple):
    """The samples of a batch as a struct of arrays [n]; never changed in place."""

    requests: NDArray[np.int64]
    """The request of each row; rows of one request are neighbours, but in merged batches."""
    rows: NDArray[np.int64]
    """The row within its request."""
    deadlines_s: NDArray[np.float64]
    """Infinity where there is none."""
    priorities: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    """Numbers of the samples in the order in which they were started; unique for a model."""
    answered: NDArray[np.bool_]
    """Whether it has its answer already, and runs on for feedback: nobody waits for it."""

    def take(self, rows: Rows) -> RowSet:
        """Select some of the rows."""
        return RowSet._make([array[rows] for array in self])

    def answering(self, rows: Rows) -> RowSet:
        """Mark some rows as answered: nothing is late for them any more."""
        deadlines_s, answered = self.deadlines_s.copy(), self.answered.copy()
        deadlines_s[rows], answered[rows] = float("inf"), True
        return self._replace(deadlines_s=deadlines_s, answered=answered)

    @property
    def unanswered(self) -> int:
        """The number of samples that somebody waits for."""
        return len(self.answered) - int(np.count_nonzero(self.answered))

    def by_request(self) -> Iterator[RowSet]:
        """Split into one set for each request."""
        for request in dict.fromkeys(self.requests.tolist()):
            yield self.take(np.flatnonzero(self.requests == request))

    @property
    def alone(self) -> bool:
        """Whether all are of one request."""
        return bool((self.requests == self.requests[0]).all())

    def dropped(self, cause: DropCause) -> list[Dropped]:
        """Report that all of them leave; of those who have their answer there is no report."""
        requests, counts = np.unique(self.requests[~self.answered], return_counts=True)
        pairs = zip(requests.tolist(), counts.tolist(), strict=True)
        return [Dropped(request, count, cause) for request, count in pairs]


def concatenate(parts: Sequence[RowSet]) -> RowSet:
    """Make one set of some sets, in order."""
    return RowSet(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Piece(NamedTuple):
    """Rows of a batch that was buffered at a split and are now part of a merged one."""

    number: int
    """Names the buffered batch: :attr:`StepOutcome.buffered`."""
    positions: Rows
    """Which of its rows, as they were numbered when it was buffered."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The report that samples of a request left without an answer."""

    request: int
    count: int
    cause: DropCause


class StepOutcome(NamedTuple):
    """All that follows from one call of a scheduler; the caller acts on it, and asks no further.

    The rows are positions in the batch that ended a stage, which is the whole batch where the call
    is ``update`` and empty elsewhere. A row leaves (``released``, ``given_up`` or ``ended``) or
    survives; one that is released may survive too, and end later.
    """

    released: Rows = _NO_ROWS
    """Rows that have their answer now, forced or not."""
    given_up: Rows = _NO_ROWS
    """Rows that leave without an answer: late or withdrawn; ``dropped`` and ``lost`` have them."""
    survivors: Rows = _NO_ROWS
    """Rows that go on to the next stage, those among them that run on for feedback only."""
    buffered: int | None = None
    """The number to keep tensors under until ``discarded`` names it: the survivors', if they wait
    at the split, or those that the stage of an interrupted batch was to run on."""
    ended: Rows = _NO_ROWS
    """Rows that were released at an earlier stage and have run to the deepest."""
    dropped: Sequence[Dropped] = ()
    """Samples, started or not, that left without an answer."""
    lost: Sequence[RowSet] = ()
    """Samples that were started and left before the model's end; those among them that were
    answered too: no more will be known of any of these."""
    discarded: Sequence[int] = ()
    """Numbers of the kept tensors that no run after the one just decided will ask for."""
    model: str = ""
    """Whose samples these are, where a device's ``next`` reports them."""

    def released_survive(self, rows: int) -> bool:
        """Whether any of a batch's rows that is released runs on as well."""
        return (
            len(self.released) + len(self.given_up) + len(self.survivors) + len(self.ended) > rows
        )


NOTHING = StepOutcome()


class SchedulerFullError(Exception):
    """The bounded queue has no room for a request."""

    outcome: StepOutcome = NOTHING
    """What left while room was looked for."""


class Run(NamedTuple):
    """The decision to run ``stage`` on some samples, as rows of one batch, in their order."""

    batch: int
    """Names the batch from stage to stage."""
    stage: int
    samples: RowSet
    deepest: int
    """The stage where all that are still here must leave; beyond it none of them runs."""
    pieces: tuple[Piece, ...] = ()
    """The buffered batches that this one is merged of, in the order of its rows; empty where it
    is new (stage 0) or goes on from the stage before."""
    plan: int = 0
    """The number of the plan that it was started under."""
    variant: int = 0
    """The variant of the model that it runs, from its start to its end; 0 is the full model."""
    outcomes: tuple[StepOutcome, ...] = ()
    """What left while it was decided, by model; nearly always nothing."""
    model: str = ""
    """Whose samples they are, where several models share the streams."""

    @property
    def requests(self) -> NDArray[np.int64]:
        """[n]: the request of each row."""
        return self.samples.requests

    @property
    def rows(self) -> NDArray[np.int64]:
        """[n]: the row within its request."""
        return self.samples.rows

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """[n]: numbers of the samples, in the order in which they were started."""
        return self.samples.sample_ids


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision to run nothing before this time, unless something is submitted or done."""

    until_s: float
    outcomes: tuple[StepOutcome, ...] = field(default=(), compare=False)
    """What left while it was decided, by model."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The decision to run nothing until something is submitted or done."""

    outcomes: tuple[StepOutcome, ...] = field(default=(), compare=False)
    """What left while it was decided, by model."""


IDLE = Idle()

Decision: TypeAlias = Run | Wait | Idle


def wait_until(until_s: float) -> Wait | Idle:
    """Decide to wait, or to idle if that is for ever."""
    return IDLE if until_s == float("inf") else Wait(until_s)
