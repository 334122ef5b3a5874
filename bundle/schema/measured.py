"""Measurements of the compiling machine: ``profiles/DEVICE.json`` and ``measured.json``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.bundle.schema.serde import check_numbers

MEASURED: Final = "measured.json"
"""File of a bundle with a :class:`Measured`, unless its policy or profile was changed later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time divided by the unmodified model's time for the same batches: a median over rounds."""

    value: float
    half_width: float
    """Half width of the median's 95 % interval."""

    def __post_init__(self) -> None:
        check_numbers(self, "value", above=0)
        check_numbers(self, "half_width", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """Times of the bundle relative to the unmodified model, at one batch size."""

    batch_size: int
    rounds: int
    samples: int
    """Number of samples answered in all rounds together."""
    mean: Ratio
    """Ratio of mean sample latency, from the start of the batch to the sample's answer."""
    median: Ratio
    """Ratio of median sample latency."""
    busy: Ratio
    """Ratio of the time from a batch's start to its last answer; 1 − ``busy`` is the compute
    saved."""
    nothing_exits: Ratio
    """``busy`` with thresholds that no sample reaches."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_size", "rounds", "samples", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A policy compared with the unmodified model, in batches of samples of the certify split."""

    device: str
    threads: int
    samples: int
    """Number of different samples, at all batch sizes together."""
    agreement: float
    """Share of the answers that equal the unmodified model's."""
    sizes: tuple[MeasuredSize, ...]
    disturbed: tuple[str, ...] = ()
    """Disturbances of the machine during the measurement, in words."""

    def __post_init__(self) -> None:
        check_numbers(self, "threads", "samples", least=1)
        check_numbers(self, "agreement", least=0, most=1)
        batch_sizes = [found.batch_size for found in self.sizes]
        if not batch_sizes or batch_sizes != sorted(set(batch_sizes)):
            raise ValueError(
                f"sizes: batch sizes {batch_sizes} must increase, and there must be at least one"
            )

    def nearest(self, batch_size: int) -> MeasuredSize:
        """Return the measurements at the batch size nearest by ratio (in a tie, the larger)."""
        return min(
            reversed(self.sizes),
            key=lambda at: max(at.batch_size / batch_size, batch_size / at.batch_size),
        )


_MOST_BATCH: Final = 2**20
_MOST_MS: Final = 1e9
"""Limit on times in ms, about 12 days: larger times are not real, and their squares would
overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Half widths of a profile's 95 % intervals, relative to the source's time, by batch size."""

    rounds: tuple[int, ...]
    """Smallest number of rounds that an estimate is based on."""
    source: tuple[float, ...]
    """Half width for ``source_ms``. Other load on the machine affects it, but not the next two
    fields."""
    segments: tuple[float, ...]
    """Largest half width of any segment's time."""
    added: tuple[float, ...]
    """Half width for the time that all exits add together: their heads, and the ends of their
    stages."""

    def __post_init__(self) -> None:
        check_numbers(self, "rounds", "source", "segments", "added", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Milliseconds per batch, by batch size: medians of interleaved rounds.

    Parts were compared with the source model in the same round, so their ratios are valid even if
    the machine was busy and all of them were slow.
    """

    device: str
    threads: int
    batch_sizes: tuple[int, ...]
    """Rising batch sizes; in all following fields, each has a column."""
    source_ms: tuple[float, ...]
    """Times of the unmodified model as one graph."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch_sizes]: each segment's part of ``source_ms``, so that each column sums to
    ``source_ms``; the extra cost of ending a stage is in ``stages_ms``. In a cascade the parts of
    the quantised model sum to its time as one graph, and the last row is ``source_ms``."""
    exits_ms: tuple[tuple[float, ...], ...]
    """[exits][batch_sizes]: time of bridge and head, minus that of an empty graph."""
    stages_ms: tuple[tuple[float, ...], ...]
    """[exits][batch_sizes]: extra cost of ending a stage after an exit: a call of the backend, the
    exit check, and layout changes, copies and lost fusion, which grow with the tensors that pass to
    the next stage."""
    spread: Spread | None = None
    """Uncertainty of the times; ``None`` where it was not measured."""
    disturbed: tuple[str, ...] = ()
    """Disturbances of the machine during the measurement, in words."""

    def __post_init__(self) -> None:
        width = len(self.batch_sizes)
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)) or not width:
            raise ValueError(f"batch_sizes {self.batch_sizes} must increase")
        rows = (self.source_ms, *self.segments_ms, *self.exits_ms, *self.stages_ms)
        if any(len(row) != width for row in rows):
            raise ValueError(f"every row needs {width} columns")
        if len(self.stages_ms) != len(self.exits_ms):
            raise ValueError(
                f"stages_ms has {len(self.stages_ms)} rows, expected one for each of the "
                f"{len(self.exits_ms)} exits"
            )
        spread = self.spread
        if spread and any(
            len(row) != width
            for row in (spread.rounds, spread.source, spread.segments, spread.added)
        ):
            raise ValueError(f"spread: every row needs {width} columns")
        check_numbers(self, "threads", least=1)
        check_numbers(self, "batch_sizes", least=1, most=_MOST_BATCH)
        check_numbers(self, "source_ms", above=0, most=_MOST_MS)
        check_numbers(self, "segments_ms", "exits_ms", "stages_ms", least=0, most=_MOST_MS)
        if not np.sum(self.segments_ms, axis=0).all():
            raise ValueError("segments_ms: a column adds up to 0, expected the model's own time")

    def column(self, batch_size: int) -> int:
        """Return the column of the first profiled size >= ``batch_size``, or the last column."""
        return min(bisect_left(self.batch_sizes, batch_size), len(self.batch_sizes) - 1)
