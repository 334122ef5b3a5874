"""Samples as a struct of arrays: what a scheduler knows of the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.base import DropCause, Dropped, Rows


class RowSet(NamedTuple):
    """Of n samples; never changed in place."""

    requests: NDArray[np.int64]
    rows: NDArray[np.int64]
    """Within their requests."""
    deadlines_s: NDArray[np.float64]
    """Infinity where there is none."""
    priorities: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    """Numbers of the samples in the order in which they were started; unique for a model."""
    answered: NDArray[np.bool_]
    """Whether it has its answer already, and runs on for feedback: nobody waits for it."""

    def take(self, rows: Rows) -> RowSet:
        """Some of the rows."""
        return RowSet(
            self.requests[rows],
            self.rows[rows],
            self.deadlines_s[rows],
            self.priorities[rows],
            self.sample_ids[rows],
            self.answered[rows],
        )

    def answering(self, rows: Rows) -> RowSet:
        """The same, with some rows answered: nothing is late for them any more."""
        deadlines_s, answered = self.deadlines_s.copy(), self.answered.copy()
        deadlines_s[rows], answered[rows] = float("inf"), True
        return self._replace(deadlines_s=deadlines_s, answered=answered)

    @property
    def unanswered(self) -> int:
        """How many somebody waits for."""
        return len(self.answered) - int(np.count_nonzero(self.answered))

    def by_request(self) -> Iterator[RowSet]:
        """The rows of each request."""
        for request in dict.fromkeys(self.requests.tolist()):
            yield self.take(np.flatnonzero(self.requests == request))

    def dropped(self, cause: DropCause) -> list[Dropped]:
        """The report that all of them leave; of those who have their answer there is none."""
        requests, counts = np.unique(self.requests[~self.answered], return_counts=True)
        pairs = zip(requests.tolist(), counts.tolist(), strict=True)
        return [Dropped(request, count, cause) for request, count in pairs]


def concatenate(parts: Sequence[RowSet]) -> RowSet:
    """Join some sets, in order."""
    return RowSet(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
