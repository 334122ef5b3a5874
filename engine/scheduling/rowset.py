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

    def take(self, rows: Rows) -> RowSet:
        """Some of the rows."""
        return RowSet(
            self.requests[rows],
            self.rows[rows],
            self.deadlines_s[rows],
            self.priorities[rows],
        )

    def by_request(self) -> Iterator[RowSet]:
        """The rows of each request."""
        for request in dict.fromkeys(self.requests.tolist()):
            yield self.take(np.flatnonzero(self.requests == request))

    def dropped(self, cause: DropCause) -> list[Dropped]:
        """The report that all of them leave without an answer."""
        requests, counts = np.unique(self.requests, return_counts=True)
        pairs = zip(requests.tolist(), counts.tolist(), strict=True)
        return [Dropped(request, count, cause) for request, count in pairs]


def concatenate(parts: Sequence[RowSet]) -> RowSet:
    """Join some sets, in order."""
    return RowSet(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
