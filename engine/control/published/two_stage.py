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
from offramp.engine.scheduling.latency import Span, stage_seconds


def is_late(ms: FloatArray, limit_ms: float) -> BoolArray:
    """Whether times exceed a limit; sums of the same parts in another order do not."""
    return np.asarray(ms > limit_ms * (1 + 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeMatrix:
    """Two-stage times of some exits, for a batch of one size."""

    exits: tuple[int, ...]
    """Rows: indices of the bundle's exits."""
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
        allowed: IntArray = np.where(self.violated, -1, self.columns).max(axis=1)
        return allowed

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

    def __post_init__(self) -> None:
        if len(self.profile.exits_ms) != len(self.after_segment):
            raise ValueError(
                f"the profile has {len(self.profile.exits_ms)} exits, after_segment names "
                f"{len(self.after_segment)}"
            )

    @classmethod
    def of(cls, manifest: Manifest, profile: Profile) -> StageTimes:
        """All exits of a bundle."""
        return cls(
            profile=profile, after_segment=tuple(exit_.after_segment for exit_ in manifest.exits)
        )

    @property
    def exits(self) -> int:
        """Number of exits, the model's end not counted."""
        return len(self.after_segment)

    def stages_ms(self, exits: Sequence[int], rows: int) -> FloatArray:
        """float64[exits + 1, rows + 1]: each stage of a plan with these exits, by rows; 0 of 0."""
        return self._spans_ms(self._starts(exits), [*exits, MODEL_END], rows)

    def matrix(
        self, *, after: int | None, candidates: Sequence[int], rows: int, interval: int = 1
    ) -> TimeMatrix:
        """Times of a batch that begins behind an exit, with one more exit attached.

        Args:
            after: The exit behind which the first stage begins; ``None`` is the model's start.
            candidates: Exits to attach, one at a time; all behind ``after``.
            rows: Rows of the first stage.
            interval: Rows from one column to the next (the paper's v).
        """
        if rows < 1 or interval < 1:
            raise ValueError(f"rows and interval must be at least 1, got {rows}, {interval}")
        columns = np.append(np.arange(0, rows, interval), rows)
        first = self._first_segment(after)
        ms = np.empty((len(candidates), len(columns)))
        for place, exit_ in enumerate(candidates):
            starts = [first, self._first_segment(exit_)]
            head, rest = self._spans_ms(starts, [exit_, MODEL_END], rows)
            ms[place] = head[rows] + rest[columns]
        (without,) = self._spans_ms([first], [MODEL_END], rows)
        return TimeMatrix(
            exits=tuple(candidates), columns=columns, ms=ms, limit_ms=float(without[rows])
        )

    def source_ms(self, rows: int) -> float:
        """The unmodified model."""
        return float(self.stages_ms([], rows)[0, rows])

    def _starts(self, exits: Sequence[int]) -> list[int]:
        return [self._first_segment(after) for after in (None, *exits)]

    def _first_segment(self, after: int | None) -> int:
        return 0 if after is None else self.after_segment[after] + 1

    def _spans_ms(self, starts: Sequence[int], exits: Sequence[int], rows: int) -> FloatArray:
        spans = [
            Span(first_segment=first, last_segment=self._last_segment(exit_), exit=exit_)
            for first, exit_ in zip(starts, exits, strict=True)
        ]
        return 1e3 * np.asarray(stage_seconds(self.profile, spans, rows))

    def _last_segment(self, exit_: int) -> int:
        return (
            len(self.profile.segments_ms) - 1 if exit_ == MODEL_END else self.after_segment[exit_]
        )
