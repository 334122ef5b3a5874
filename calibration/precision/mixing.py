"""Which segments of a model are worth quantising, exits beside them: a search over measured costs.

A segment that is slower in int8 than in float32 is better left alone, above all an early one,
which every sample runs. So a copy may be float32 in its first segments, or in its last; and what
each such mix would save follows from times that were measured of both, and from what exits
answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from offramp.calibration.choose.selection import Candidates
from offramp.engine.control.costs import CostModel

LEAST_GAIN = 0.01
"""Share of the source model's time that a mix must be predicted to save beyond the copy that is
quantised throughout: predictions add up times that were measured apart."""
_TRIED = 3
"""Mixes that exits are chosen anew for."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The segments that are quantised: from the first to before the end; the others are float32."""

    first: int
    end: int

    def __contains__(self, segment: int) -> bool:
        """Whether a segment is quantised."""
        return self.first <= segment < self.end

    def describe(self, segments: int) -> str:
        """Say it in words, of a copy in so many segments."""
        if (self.first, self.end) == (0, segments):
            return "int8 throughout"
        last = self.end - 1
        which = f"segment {last}" if last == self.first else f"segments {self.first} to {last}"
        return f"int8 in {which}, float32 in the others"


def mixed_cost(float32: CostModel, int8: CostModel, mix: Mix) -> CostModel:
    """Put together the costs of a copy that is quantised in part.

    ``float32`` is of the exits on the source model, ``int8`` of the same exits on a copy of as many
    segments that is quantised throughout, whose own answer is its last exit. A border costs what it
    does behind a segment of its precision.
    """
    pace = int8.source_ms / float32.source_ms
    segments = [
        int8_ms if index in mix else float32_ms * pace
        for index, (float32_ms, int8_ms) in enumerate(
            zip(float32.segments_ms, int8.segments_ms[:-1], strict=True)
        )
    ]
    stages = [
        int8_ms if after in mix else float32_ms * pace
        for after, float32_ms, int8_ms in zip(
            float32.after_segment, float32.stages_ms, int8.stages_ms[:-1], strict=True
        )
    ]
    return replace(
        int8,
        segments_ms=(*segments, int8.segments_ms[-1]),
        stages_ms=(*stages, int8.stages_ms[-1]),
    )


def best_mix(
    candidates: Candidates,
    active: tuple[int, ...],
    float32: CostModel,
    int8: CostModel,
    *,
    max_overhead: float | None = None,
) -> Mix | None:
    """Find the mix that is predicted to save most; ``None`` if all in int8 is as good.

    ``candidates`` are the exits of the copy that is quantised throughout, with their answers on the
    tuning split, which stand for those of every mix; ``active`` those that it would use.
    """
    whole = candidates.savings(active, int8)
    used = active or tuple(range(candidates.exits))
    costs = {mix: mixed_cost(float32, int8, mix) for mix in _mixes(len(float32.segments_ms))}
    ranked = sorted(costs, key=lambda mix: -candidates.savings(used, costs[mix]))[:_TRIED]
    best: list[tuple[float, Mix]] = []
    for mix in ranked:
        chosen = candidates.choose(costs[mix], max_overhead=max_overhead)
        best.append((candidates.savings(chosen, costs[mix]), mix))
    saved, mix = max(best, key=itemgetter(0))
    return mix if saved >= whole + LEAST_GAIN else None


def _mixes(segments: int) -> Iterator[Mix]:
    for first in range(segments):
        for end in range(first + 1, segments + 1):
            yield Mix(first, end)
