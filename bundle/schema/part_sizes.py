"""Sizes of a model's parts, as its manifest has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.bundle.schema.parts import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """Bytes of what crosses borders between segments, and of weights."""

    row_bytes: tuple[int, ...]
    """[segments - 1]: of a row that crosses the border behind each segment."""
    weight_bytes: tuple[int, ...]
    """[segments]: of the weights of each, and of the exit that follows it."""

    @staticmethod
    def kept_by(segments: Sequence[Segment]) -> PartSizes | None:
        """Read what a manifest says of its segments; ``None`` if it is older, and does not."""
        rows = [s.row_bytes for s in segments[:-1] if s.row_bytes is not None]
        weights = [s.weight_bytes for s in segments if s.weight_bytes is not None]
        if len(weights) < len(segments) or len(rows) < len(segments) - 1:
            return None
        return PartSizes(row_bytes=tuple(rows), weight_bytes=tuple(weights))
