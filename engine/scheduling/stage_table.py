"""The stages of one variant of a model: what they take as profiled, and how batches shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROWS_REMEMBERED = 512
"""Rows over which the share of those that go on is averaged."""
_ALL_GO_ON = 0.999
"""Share from which on an exit is one that nobody takes."""
_REBUILD_EVERY = 64
"""Stages observed between two looks at how long a shrinking batch takes."""


class Shrinking(NamedTuple):
    """The costs of batches that samples leave on the way (PAME's batching pattern, 6.2).

    Uncorrected seconds by batch size.
    """

    answer_s: Sequence[float]
    """[max_batch_size + 1]: until a row has its answer, in the mean over rows; rising."""
    busy_s: Sequence[Sequence[float]]
    """[stages][max_batch_size + 1]: that the stream is busy until the end of a stage."""
    earliest_s: float
    """Until a single row is at the first place where any leave."""


class StageTable:
    """The profiled seconds of one variant's stages, uncorrected.

    ``seconds`` is [stages][max_batch_size + 1] by batch size, rising; ValueError where it is not.
    ``going_on`` is [stages], the share of the rows of a stage that go on to the next one where the
    policy lets them (``None`` is all), corrected by what is observed. ``unanswered`` is the share
    of those without an answer that go on without one; ``None`` is the same, as where nothing runs
    on after its answer.
    """

    def __init__(
        self,
        seconds: Sequence[Sequence[float]],
        going_on: Sequence[float] | None = None,
        unanswered: Sequence[float] | None = None,
    ) -> None:
        table = np.asarray([list(row) for row in seconds], np.float64)
        if table.ndim != 2 or table.shape[1] < 2:
            raise ValueError("a latency table needs a row a stage and a column a batch size")
        if (table < 0).any() or (np.diff(table, axis=1) < 0).any():
            raise ValueError("a stage cannot be faster on a larger batch: latencies must rise")
        self.seconds: list[list[float]] = table.tolist()
        self.until: list[list[float]] = np.cumsum(table, axis=0).tolist()
        """[stages][max_batch_size + 1]: until the end of each stage."""
        self.stages = len(table)
        self.max_batch_size = table.shape[1] - 1
        self._sizes = np.arange(self.max_batch_size + 1)
        self.going_on = list(going_on) if going_on is not None else [1.0] * self.stages
        """[stages]: as observed by now."""
        self.unanswered = list(unanswered) if unanswered is not None else self.going_on.copy()
        """[stages]: as observed by now."""
        self._observed = 0
        self.shrinking = self._shrink()
        """The costs of batches that shrink on their way as batches did lately."""

    def observe(
        self, stage: int, before: int, survivors: int, unanswered: tuple[int, int] | None = None
    ) -> None:
        """Take note of how many rows went on from a stage of their own accord.

        ``unanswered`` are those without an answer before and after it; ``None`` is the same rows.
        """
        self._move(self.going_on, stage, before, survivors)
        self._move(self.unanswered, stage, *(unanswered or (before, survivors)))
        self._observed += 1
        if self._observed >= _REBUILD_EVERY:
            self._observed = 0
            self.shrinking = self._shrink()

    @staticmethod
    def _move(shares: list[float], stage: int, before: int, after: int) -> None:
        """Move the share of a stage towards one that was observed of some rows."""
        if before:
            weight = min(before / _ROWS_REMEMBERED, 1.0)
            shares[stage] += weight * (after / before - shares[stage])

    def _shrink(self) -> Shrinking:
        """Follow batches of every size; each stage sees the rows that are expected there."""
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
        leaving = [stage for stage, share in enumerate(self.unanswered) if share < _ALL_GO_ON]
        first = min([*leaving, self.stages - 1])
        busy_rows: list[list[float]] = np.cumsum(busy_s, axis=0).tolist()
        return Shrinking([0.0, *rising.tolist()], busy_rows, self.until[first][1])
