"""The stages of one variant of a model: their profiled times, and how batches shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROWS_REMEMBERED = 512
"""Number of rows over which the share of rows that go on is averaged."""
_UNUSED_EXIT_SHARE = 0.999
"""An exit counts as unused if at least this share of its rows goes on."""
_REBUILD_EVERY = 64
"""Number of observed stages between two updates of the costs of shrinking batches."""


class Shrinking(NamedTuple):
    """The costs of batches that samples leave at exits (PAME's batching pattern, 6.2).

    All times are uncorrected seconds, by batch size.
    """

    answer_s: Sequence[float]
    """[max_batch_size + 1]: mean time until a row has its answer; it rises with the batch size."""
    busy_s: Sequence[Sequence[float]]
    """[stages][max_batch_size + 1]: busy time of the stream until the end of a stage."""
    earliest_s: float
    """Time of a single row until the first exit where any rows leave."""


class StageTable:
    """The profiled seconds of one variant's stages, uncorrected.

    ``seconds`` is [stages][max_batch_size + 1] and rises with the batch size; otherwise ValueError.
    ``going_on`` [stages] is the share of a stage's rows that go on to the next stage if the policy
    allows it (``None``: all); it is corrected by observations. ``unanswered`` [stages] is the share
    of rows without an answer that go on without an answer; ``None`` sets it to ``going_on``, which
    is right if no row runs on after its answer.
    """

    def __init__(
        self,
        seconds: Sequence[Sequence[float]],
        going_on: Sequence[float] | None = None,
        unanswered: Sequence[float] | None = None,
    ) -> None:
        table = np.asarray([list(row) for row in seconds], np.float64)
        if table.ndim != 2 or table.shape[1] < 2:
            raise ValueError(
                "expected a latency table with a row per stage and a column per batch size"
            )
        if (table < 0).any() or (np.diff(table, axis=1) < 0).any():
            raise ValueError("a stage cannot be faster on a larger batch: latencies must increase")
        self.seconds: list[list[float]] = table.tolist()
        self.until: list[list[float]] = np.cumsum(table, axis=0).tolist()
        """[stages][max_batch_size + 1]: time until the end of each stage."""
        self.stages = len(table)
        self.max_batch_size = table.shape[1] - 1
        self._sizes = np.arange(self.max_batch_size + 1)
        self.going_on = list(going_on) if going_on is not None else [1.0] * self.stages
        """[stages]: share of rows that go on, with the observations so far."""
        self.unanswered = list(unanswered) if unanswered is not None else self.going_on.copy()
        """[stages]: share of unanswered rows that go on, with the observations so far."""
        self._observed = 0
        self.shrinking = self._shrink()
        """Costs of batches that shrink at the recently observed rates."""

    def observe(
        self, stage: int, before: int, survivors: int, unanswered: tuple[int, int] | None = None
    ) -> None:
        """Record how many rows went on after a stage's exit, before late rows are dropped.

        ``unanswered`` is the number of rows without an answer before and after the exit; ``None``
        means ``before`` and ``survivors``.
        """
        self._move(self.going_on, stage, before, survivors)
        self._move(self.unanswered, stage, *(unanswered or (before, survivors)))
        self._observed += 1
        if self._observed >= _REBUILD_EVERY:
            self._observed = 0
            self.shrinking = self._shrink()

    @staticmethod
    def _move(shares: list[float], stage: int, before: int, after: int) -> None:
        """Move the share of a stage towards the observed share."""
        if before:
            weight = min(before / _ROWS_REMEMBERED, 1.0)
            shares[stage] += weight * (after / before - shares[stage])

    def _shrink(self) -> Shrinking:
        """Compute the costs of batches of every size, with the expected rows at each stage."""
        sizes = np.arange(1, self.max_batch_size + 1)
        answer_s, elapsed_s = np.zeros(len(sizes)), np.zeros(len(sizes))
        busy_s = []
        reaching = waiting = 1.0
        for stage, row in enumerate(self.seconds):
            rows = sizes * reaching
            elapsed_s += np.interp(np.maximum(rows, 1.0), self._sizes, row)
            busy_s.append(np.interp([0.0, *rows], self._sizes, row))
            unanswered = self.unanswered[stage] if stage < self.stages - 1 else 0.0
            answer_s += waiting * (1.0 - unanswered) * elapsed_s
            reaching *= self.going_on[stage]
            waiting *= unanswered
        rising = np.maximum.accumulate(answer_s)
        leaving = [
            stage for stage, share in enumerate(self.unanswered) if share < _UNUSED_EXIT_SHARE
        ]
        first = min([*leaving, self.stages - 1])
        busy_rows: list[list[float]] = np.cumsum(busy_s, axis=0).tolist()
        return Shrinking([0.0, *rising.tolist()], busy_rows, self.until[first][1])
