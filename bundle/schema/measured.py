"""What was measured where a bundle was compiled: ``profiles/DEVICE.json`` and ``measured.json``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.bundle.schema.serde import check_numbers

MEASURED: Final = "measured.json"
"""File of a bundle that holds a :class:`Measured`, unless its policy or profile is a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time over the unmodified model's for the same batches: a median over rounds."""

    value: float
    half_width: float
    """Half of the median's 95 % interval."""

    def __post_init__(self) -> None:
        check_numbers(self, "value", above=0)
        check_numbers(self, "half_width", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """What was measured at a batch size."""

    batch_size: int
    rounds: int
    samples: int
    """Answered in all rounds."""
    mean: Ratio
    """Of the samples' latencies, from the start of their batch to their own answer."""
    median: Ratio
    """Likewise."""
    busy: Ratio
    """From a batch's start to its last answer: 1 less this is the share of compute saved."""
    nothing_exits: Ratio
    """``busy`` with thresholds that nobody reaches."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_size", "rounds", "samples", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A policy beside the unmodified model, batch by batch on samples of the certify split."""

    device: str
    threads: int
    samples: int
    """Different ones, at all batch sizes together."""
    agreement: float
    """Share of the answers that are those of the unmodified model."""
    sizes: tuple[MeasuredSize, ...]
    disturbed: tuple[str, ...] = ()
    """In what ways the machine was disturbed meanwhile, in words."""

    def __post_init__(self) -> None:
        check_numbers(self, "threads", "samples", least=1)
        check_numbers(self, "agreement", least=0, most=1)
        batch_sizes = [found.batch_size for found in self.sizes]
        if not batch_sizes or batch_sizes != sorted(set(batch_sizes)):
            raise ValueError(f"sizes: batch sizes {batch_sizes} must rise, and there must be one")

    def nearest(self, batch_size: int) -> MeasuredSize:
        """What was measured at the size that is nearest by ratio; the larger one of two."""
        return min(
            reversed(self.sizes),
            key=lambda at: max(at.batch_size / batch_size, batch_size / at.batch_size),
        )


_MOST_BATCH: Final = 2**20
_MOST_MS: Final = 1e9
"""Some days: times beyond are none, and their squares are no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How sure a profile is, by batch size: halves of 95 % intervals, as shares of the source's."""

    rounds: tuple[int, ...]
    """Fewest that an estimate is made of."""
    source: tuple[float, ...]
    """Of ``source_ms``; what else the machine did moves it, and leaves the others be."""
    segments: tuple[float, ...]
    """Of the segment that is known least."""
    added: tuple[float, ...]
    """Of what all exits add together, heads and borders."""

    def __post_init__(self) -> None:
        check_numbers(self, "rounds", "source", "segments", "added", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Milliseconds per batch, by batch size: medians of interleaved rounds.

    Parts were compared with the source model in the same round, so their ratios hold where the
    machine was busy and all of them were slow.
    """

    device: str
    threads: int
    batch_sizes: tuple[int, ...]
    """Rising; the columns of everything below."""
    source_ms: tuple[float, ...]
    """The unmodified model as one graph."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch_sizes]: each segment's part of ``source_ms``, which a column adds up to;
    what a border between stages costs beyond is in ``stages_ms``. In a cascade the parts of the
    quantised model add up to its own time as one graph, and the last row is ``source_ms``."""
    exits_ms: tuple[tuple[float, ...], ...]
    """[exits][batch_sizes]: bridge and head, beyond the cost of an empty graph."""
    stages_ms: tuple[tuple[float, ...], ...]
    """[exits][batch_sizes]: what the border behind an exit costs: layout changes, copies and lost
    fusion, which grow with the tensors that cross, a call of the backend, the exit check."""
    spread: Spread | None = None
    """``None`` where it was not measured."""
    disturbed: tuple[str, ...] = ()
    """In what ways the machine was disturbed while it was measured, in words."""

    def __post_init__(self) -> None:
        width = len(self.batch_sizes)
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)) or not width:
            raise ValueError(f"batch_sizes {self.batch_sizes} must rise")
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
        """Index of the smallest profiled batch size that holds ``batch_size``."""
        return min(bisect_left(self.batch_sizes, batch_size), len(self.batch_sizes) - 1)
