"""Measured latencies of a bundle's parts on one device: the schema of ``profiles/*.json``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Milliseconds per batch, by batch size: lower quartiles of interleaved rounds."""

    device: str
    threads: int
    batch_sizes: tuple[int, ...]
    """Rising; the columns of everything below."""
    source_ms: tuple[float, ...]
    """The unmodified model as one graph."""
    segments_ms: tuple[tuple[float, ...], ...]
    """[segments][batch_sizes]: each segment's part of ``source_ms``, which a column adds up to;
    what a border between stages costs beyond is in ``stages_ms``."""
    exits_ms: tuple[tuple[float, ...], ...]
    """[exits][batch_sizes]: bridge and head, beyond the cost of an empty graph."""
    stages_ms: tuple[float, ...]
    """What one more stage costs: the border (layout changes, lost fusion), a call of the
    backend, the exit check."""

    def __post_init__(self) -> None:
        """Check that the tables have the shape that they claim."""
        width = len(self.batch_sizes)
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)) or not width:
            raise ValueError(f"batch_sizes {self.batch_sizes} must rise")
        rows = (self.source_ms, self.stages_ms, *self.segments_ms, *self.exits_ms)
        if any(len(row) != width for row in rows):
            raise ValueError(f"every row needs {width} columns")

    def column(self, batch_size: int) -> int:
        """Index of the smallest profiled batch size that holds ``batch_size``."""
        return min(bisect_left(self.batch_sizes, batch_size), len(self.batch_sizes) - 1)
