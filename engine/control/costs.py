"""The cost model: time until each exit's answer and until the model's end, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.bundle import Manifest, Profile
from offramp.certify import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The milliseconds that parts of a model take for a batch of one size; only ratios matter.

    Latency counts from the batch's start. In a cascade (``source_begins`` above 0), a sample that
    takes no exit runs through the quantised model up to the last exit in use, then through the
    whole source model.
    """

    source_ms: float
    """Time of the unmodified model for one batch."""
    segments_ms: tuple[float, ...]
    """Time of each segment. The sum is ``source_ms``; in a cascade, segments of the quantised model
    come first, in addition."""
    stages_ms: tuple[float, ...]
    """Time per exit for its border (the cost of the cut between two stages), dispatch and check."""
    after_segment: tuple[int, ...]
    """Index of the segment before each exit."""
    exits_ms: tuple[float, ...]
    """Time per exit for bridge and head."""
    unsure: float = 0.0
    """Half-width of the interval of the time that all exits add, as a share of ``source_ms``."""
    source_begins: int = 0
    """First segment of the source model (:func:`.manifest.last_beginning`)."""

    @classmethod
    def at(
        cls,
        profile: Profile,
        batch_size: int,
        after: Sequence[int],
        exits_ms: Sequence[float],
        *,
        source_begins: int = 0,
    ) -> CostModel:
        """Make a model from one column of a profile; ``exits_ms`` are at the same batch size."""
        column = profile.column(batch_size)
        return cls(
            source_ms=profile.source_ms[column],
            segments_ms=tuple(row[column] for row in profile.segments_ms),
            stages_ms=tuple(row[column] for row in profile.stages_ms),
            after_segment=tuple(after),
            exits_ms=tuple(exits_ms),
            unsure=profile.spread.added[column] if profile.spread else 0.0,
            source_begins=source_begins,
        )

    @classmethod
    def of(cls, manifest: Manifest, profile: Profile, batch_size: int) -> CostModel:
        """Make a model with all exits of a bundle, at one batch size."""
        column = profile.column(batch_size)
        return cls.at(
            profile,
            batch_size,
            after=[exit_.after_segment for exit_ in manifest.exits],
            exits_ms=[row[column] for row in profile.exits_ms],
            source_begins=manifest.source_begins,
        )

    @property
    def exits(self) -> int:
        """Number of exits, without the model's end."""
        return len(self.after_segment)

    @property
    def front_ms(self) -> float:
        """Time of the segments before the source model in a cascade; 0 in other bundles."""
        return float(sum(self.segments_ms[: self.source_begins]))

    def overhead(self, active: Sequence[int]) -> float:
        """Return the delay of the model's end compared with no exits, as a share.

        In a cascade this includes the quantised model.
        """
        return float(self.latency_ms(active)[-1]) / self.source_ms - 1

    def sure_overhead(self, active: Sequence[int]) -> float:
        """Return the lower bound of :meth:`overhead`, by the spread of the measurement."""
        everything = sum(self.exits_ms) + sum(self.stages_ms)
        before = self._before_source_ms(active) / self.source_ms
        if not everything:
            return before
        share = self.overhead(active) - before
        return before + max(share * (1 - self.unsure * self.source_ms / everything), 0.0)

    def until_ms(self) -> FloatArray:
        """Return the model's own time up to each exit, without the cost of exits: [exits]."""
        return np.asarray(np.cumsum(self.segments_ms)[list(self.after_segment)])

    def latency_ms(self, active: Sequence[int]) -> FloatArray:
        """Return the time until each active exit's answer, and the model's end: [active + 1].

        Apparate 3.3: the model's own time up to the exit, and the cost of every active exit up to
        it. In a cascade, the source model runs from its beginning after the last active exit.
        """
        until = np.cumsum(self.segments_ms)
        times, exits_so_far = [], 0.0
        for index in active:
            exits_so_far += self.exits_ms[index] + self.stages_ms[index]
            times.append(until[self.after_segment[index]] + exits_so_far)
        end = self._before_source_ms(active) + self.source_ms
        return np.array([*times, end + exits_so_far])

    def avoided_ms(self, active: Sequence[int]) -> FloatArray:
        """Return the time that a sample avoids by leaving at each exit: [active].

        This is the model's own time after the exit, without the cost of exits. In a cascade, the
        segments between the last two exits run because of the last exit, also for samples that
        leave there.
        """
        until = self.until_ms()[list(active)]
        if not self.source_begins:
            return self.source_ms - until
        left = np.full(len(until), self.source_ms)
        left[:-1] += until[-1:] - until[:-1]
        left[-1:] -= self._last_alone_ms(active)
        return left

    def added_ms(self, active: Sequence[int]) -> FloatArray:
        """Return the time that each exit costs a sample that passes it: [active].

        It includes bridge, head and border. In a cascade, the last exit also costs the segments
        between the exit before it and itself.
        """
        rows = list(active)
        added = np.add(self.exits_ms, self.stages_ms, dtype=np.float64)[rows]
        if self.source_begins:
            added[-1:] += self._last_alone_ms(active)
        return added

    def _before_source_ms(self, active: Sequence[int]) -> float:
        """Return the time of segments that run for these exits only, not for the source model."""
        if not self.source_begins or not active:
            return 0.0
        return float(self.until_ms()[active[-1]])

    def _last_alone_ms(self, active: Sequence[int]) -> float:
        """Return the time of a cascade's segments that run only for the last of these exits."""
        return self._before_source_ms(active) - self._before_source_ms(active[:-1])
