"""The inference time matrix: how long a batch takes that goes on with fewer rows (PAME 6.3.1).

Entry [i, j] is the time of the first stage, up to and with exit i, on all rows of a batch, and of
the second stage, from there to the model's end, on ``columns[j]`` rows. Where it exceeds what the
batch takes without exit i, the configuration is latency violated.

PAME runs both stages for every entry. Here the entries are put together from a profile, as
scheduling predicts its stages: the parts were measured, the two stages were not. The exit check,
moving rows and starting the second graph are in the profile's price of a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.bundle import Manifest, Profile
from offramp.certify import MODEL_END, BoolArray, FloatArray, IntArray
from offramp.engine.scheduling.latency import stage_seconds


def is_late(ms: FloatArray, limit_ms: float) -> BoolArray:
    """Whether times exceed a limit; sums of the same parts in another order do not."""
    return np.asarray(ms > limit_ms * (1 + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeMatrix:
    """Two-stage times of some exits, for a batch of one size."""

    columns: IntArray
    """int64[h + 1]: rows of the second stage, from 0 to the batch's size."""
    ms: FloatArray
    """float64[exits, h + 1]; column 0 is the first stage alone."""
    limit_ms: float
    """The same batch without another exit: what no entry may exceed."""

    @property
    def violated(self) -> BoolArray:
        """bool[exits, h + 1]: takes longer than without the exit."""
        return is_late(self.ms, self.limit_ms)

    @property
    def allowed_rows(self) -> IntArray:
        """int64[exits]: most rows that may go on (the paper's n_i); -1 if not even none may."""
        return np.asarray(np.where(self.violated, -1, self.columns).max(axis=1))

    def column_of(self, rows: IntArray) -> IntArray:
        """Column that holds so many rows: the next larger one, so that no time is too short.

        The paper does not say to which of two columns a count between them belongs. More rows
        than the batch was to bring go to the last column.
        """
        return np.minimum(np.searchsorted(self.columns, rows), len(self.columns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Predicted times of all stages that a bundle's exits can make."""

    profile: Profile
    after_segment: tuple[int, ...]
    """Per exit."""
    source_begins: int = 0
    """The segment that the source model begins with; above 0 in a cascade."""

    def __post_init__(self) -> None:
        if (known := len(self.profile.exits_ms)) != self.exits:
            raise ValueError(f"the profile has {known} exits, after_segment names {self.exits}")

    @classmethod
    def of(cls, manifest: Manifest, profile: Profile) -> StageTimes:
        """All exits of a bundle."""
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
        """float64[exits + 1, rows + 1]: each stage of a plan with these exits, by rows; 0 of 0."""
        return self._spans_ms([None, *exits], [*exits, MODEL_END], rows)

    def matrix(
        self, *, after: int | None, candidates: Sequence[int], rows: int, interval: int = 1
    ) -> TimeMatrix:
        """Times of a batch that begins behind an exit, with one more exit attached.

        The first stage begins behind exit ``after``, or at the model's start, with ``rows`` rows;
        ``candidates`` are behind it, and attached one at a time. Columns are ``interval`` rows (the
        paper's v) apart.
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
        """The unmodified model."""
        return float(self.stages_ms([], rows)[0, rows])

    def _spans_ms(self, after: Sequence[int | None], exits: Sequence[int], rows: int) -> FloatArray:
        """Stages from behind some exits (None: from the model's start) to others, by rows."""
        last = len(self.profile.segments_ms) - 1
        spans = []
        for before, exit_ in zip(after, exits, strict=True):
            begins = 0 if before is None else self.after_segment[before] + 1
            if exit_ == MODEL_END:
                spans.append((max(begins, self.source_begins), last, exit_))
            else:
                spans.append((begins, self.after_segment[exit_], exit_))
        return 1e3 * np.asarray(stage_seconds(self.profile, spans, rows))
