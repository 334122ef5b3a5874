"""Measured latencies of a bundle's parts on one device: the schema of ``profiles/*.json``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Median milliseconds per batch, by batch size."""

    device: str
    threads: int
    batch_sizes: tuple[int, ...]
    """Rising; the columns of everything below."""
    source_ms: tuple[float, ...]
    """The unmodified model as one graph."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch_sizes]: each segment as its own graph, scaled so that a column sums to
    ``source_ms`` (a border costs more than the stage that will contain it)."""
    exits_ms: tuple[tuple[float, ...], ...]
    """[exits][batch_sizes]: bridge and head, beyond the cost of an empty graph."""
    stage_overhead_ms: float
    """Fixed cost of one more stage: dispatch, exit check, compaction."""

    def __post_init__(self) -> None:
        """Check that the tables have the shape that they claim."""
        width = len(self.batch_sizes)
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)) or not width:
            raise ValueError(f"batch_sizes {self.batch_sizes} must rise")
        if any(len(row) != width for row in (self.source_ms, *self.segments_ms, *self.exits_ms)):
            raise ValueError(f"every row needs {width} columns")

    def column(self, batch_size: int) -> int:
        """Index of the smallest profiled batch size that holds ``batch_size``."""
        return min(bisect_left(self.batch_sizes, batch_size), len(self.batch_sizes) - 1)
