"""The cost model: by a profile, the time until each exit's answer and the model's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.bundle import Manifest, Profile
from offramp.certify import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The milliseconds that parts of a model take for a batch of one size; only ratios matter."""

    source_ms: float
    """The unmodified model."""
    segments_ms: tuple[float, ...]
    stages_ms: tuple[float, ...]
    """Per exit: border, dispatch, exit check."""
    after_segment: tuple[int, ...]
    """Per exit."""
    exits_ms: tuple[float, ...]
    """Per exit: bridge and head."""
    unsure: float = 0.0
    """Half of the interval of what all exits add, as a share of ``source_ms``."""

    @classmethod
    def at(
        cls, profile: Profile, batch_size: int, after: Sequence[int], exits_ms: Sequence[float]
    ) -> CostModel:
        """Take a column of a profile; ``exits_ms`` at the same batch size."""
        column = profile.column(batch_size)
        return cls(
            source_ms=profile.source_ms[column],
            segments_ms=tuple(row[column] for row in profile.segments_ms),
            stages_ms=tuple(row[column] for row in profile.stages_ms),
            after_segment=tuple(after),
            exits_ms=tuple(exits_ms),
            unsure=profile.spread.added[column] if profile.spread else 0.0,
        )

    @classmethod
    def of(cls, manifest: Manifest, profile: Profile, batch_size: int) -> CostModel:
        """All exits of a bundle, at one batch size."""
        column = profile.column(batch_size)
        return cls.at(
            profile,
            batch_size,
            after=[exit_.after_segment for exit_ in manifest.exits],
            exits_ms=[row[column] for row in profile.exits_ms],
        )

    @property
    def exits(self) -> int:
        """Number of exits, the model's end not counted."""
        return len(self.after_segment)

    def overhead(self, active: Sequence[int]) -> float:
        """How much later the model's end comes than without exits, as a share."""
        return float(self.latency_ms(active)[-1]) / self.source_ms - 1

    def sure_overhead(self, active: Sequence[int]) -> float:
        """The least that :meth:`overhead` may be, by the spread of what was measured."""
        everything = sum(self.exits_ms) + sum(self.stages_ms)
        if not everything:
            return 0.0
        share = self.overhead(active)
        return max(share * (1 - self.unsure * self.source_ms / everything), 0.0)

    def until_ms(self) -> FloatArray:
        """[exits]: time of the model itself up to each exit, no exit's own cost counted."""
        return np.asarray(np.cumsum(self.segments_ms)[list(self.after_segment)])

    def latency_ms(self, active: Sequence[int]) -> FloatArray:
        """[active + 1]: time until each active exit's answer, and until the model's end.

        Apparate 3.3: the model's own time up to it, and the cost of every active exit up to it.
        """
        until = np.cumsum(self.segments_ms)
        times, exits_so_far = [], 0.0
        for index in active:
            exits_so_far += self.exits_ms[index] + self.stages_ms[index]
            times.append(until[self.after_segment[index]] + exits_so_far)
        return np.array([*times, self.source_ms + exits_so_far])
