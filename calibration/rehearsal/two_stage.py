"""The inference time matrix: times of a batch that goes on with fewer rows (PAME 6.3.1).

Entry [i, j] is the time of the first stage, up to and including exit i, on all rows of a batch,
plus the time of the second stage, from there to the model's end, on ``columns[j]`` rows. If it
exceeds the time of the batch without exit i, the configuration violates latency.

PAME runs both stages for every entry. Here the entries are computed from a profile, as scheduling
predicts its stages: the parts were measured, the two stages were not. The profile's cost of ending
a stage includes the exit check, moving rows and starting the second graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.bundle import Manifest, Profile
from offramp.certify import MODEL_END, BoolArray, FloatArray, IntArray
from offramp.engine.scheduling.latency import stage_seconds


def is_late(ms: FloatArray, limit_ms: float) -> BoolArray:
    """Return whether times exceed a limit by more than the rounding of their sums explains."""
    return np.asarray(ms > limit_ms * (1 + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeMatrix:
    """Two-stage times with one more exit, for each of some exits and batches of one size."""

    columns: IntArray
    """int64[h + 1]: rows of the second stage, from 0 to the batch's size."""
    ms: FloatArray
    """Two-stage times, float64[exits, h + 1]; column 0 is the time of the first stage alone."""
    limit_ms: float
    """Time of the same batch without a further exit; no entry may exceed it."""

    @property
    def violated(self) -> BoolArray:
        """bool[exits, h + 1]: true where the entry is longer than the time without the exit."""
        return is_late(self.ms, self.limit_ms)

    @property
    def allowed_rows(self) -> IntArray:
        """int64[exits]: largest allowed number of rows that go on (n_i); −1 if even 0 is late."""
        return np.asarray(np.where(self.violated, -1, self.columns).max(axis=1))

    def column_of(self, rows: IntArray) -> IntArray:
        """Return the column for numbers of rows: the next larger one, so that no time is too short.

        The paper does not define the column of a count between two columns. Batches that have more
        rows than allowed belong to the last column.
        """
        return np.minimum(np.searchsorted(self.columns, rows), len(self.columns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Predicted times of all stages that are possible with a bundle's exits."""

    profile: Profile
    after_segment: tuple[int, ...]
    """Index of the segment before each exit."""
    source_begins: int = 0
    """Index of the segment that the source model begins with; above 0 in a cascade."""

    def __post_init__(self) -> None:
        if (known := len(self.profile.exits_ms)) != self.exits:
            raise ValueError(f"the profile has {known} exits, but after_segment names {self.exits}")

    @classmethod
    def of(cls, manifest: Manifest, profile: Profile) -> StageTimes:
        """Return the times for all exits of a bundle."""
        return cls(
            profile=profile,
            after_segment=tuple(e.after_segment for e in manifest.exits),
            source_begins=manifest.source_begins,
        )

    @property
    def exits(self) -> int:
        """Number of exits, the model's end not counted."""
        return len(self.after_segment)

    def stages_ms(self, exits: Sequence[int], rows: int) -> FloatArray:
        """Return times of a plan's stages for 0 to ``rows`` rows: float64[exits + 1, rows + 1]."""
        return self._spans_ms([None, *exits], [*exits, MODEL_END], rows)

    def matrix(
        self, *, after: int | None, candidates: Sequence[int], rows: int, interval: int = 1
    ) -> TimeMatrix:
        """Return times of a batch that begins after an exit, with one more exit attached.

        The first stage begins after exit ``after``, or at the model's start, with ``rows`` rows;
        ``candidates`` are exits after that, which are attached one at a time. Columns are
        ``interval`` rows (the paper's v) apart.
        """
        if rows < 1 or interval < 1:
            raise ValueError(f"rows and interval must be at least 1, got {rows}, {interval}")
        columns = np.append(np.arange(0, rows, interval), rows)
        ms = np.empty((len(candidates), len(columns)))
        for place, exit_ in enumerate(candidates):
            head, rest = self._spans_ms([after, exit_], [exit_, MODEL_END], rows)
            ms[place] = head[rows] + rest[columns]
        (without,) = self._spans_ms([after], [MODEL_END], rows)
        return TimeMatrix(columns=columns, ms=ms, limit_ms=float(without[rows]))

    def source_ms(self, rows: int) -> float:
        """Return the time of the unmodified model."""
        return float(self.stages_ms([], rows)[0, rows])

    def _spans_ms(self, after: Sequence[int | None], exits: Sequence[int], rows: int) -> FloatArray:
        """Return times of stages from after some exits (None: the start) to others, by rows."""
        last = len(self.profile.segments_ms) - 1
        spans = []
        for before, exit_ in zip(after, exits, strict=True):
            begins = 0 if before is None else self.after_segment[before] + 1
            if exit_ == MODEL_END:
                spans.append((max(begins, self.source_begins), last, exit_))
            else:
                spans.append((begins, self.after_segment[exit_], exit_))
        return 1e3 * np.asarray(stage_seconds(self.profile, spans, rows))
