"""Policies that choose batch size and operating point by the slack of the most urgent sample.

All of these policies serve the earliest deadline first and never wait for fuller batches. They drop
a sample that would be late even alone at the fastest point that the policy may use: samples that
cannot be in time must not delay others (SuperServe 4.2 and appendix B, Clockwork, E3 4). They also
drop samples early (:class:`~offramp.engine.scheduling.early_drop.EarlyDrop`); the papers leave this
open.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.early_drop import EarlyDrop
from offramp.engine.scheduling.points import OperatingPoint, OperatingPoints
from offramp.engine.scheduling.policy_protocol import (
    Choice,
    LoadShedding,
    NeverBuffers,
    Start,
    Waiting,
)
from offramp.engine.scheduling.queue import SampleQueue


class Setting(NamedTuple):
    """A batch size, a variant and its deepest stage: SuperServe's control tuple."""

    batch_size: int
    deepest: int
    """Stage where all samples must leave."""
    variant: int = 0

    @classmethod
    def at(cls, point: OperatingPoint, batch_size: int) -> Setting:
        """Return the setting for a batch size at an operating point."""
        return cls(batch_size, point.deepest, point.variant)

    def runs(self, point: OperatingPoint) -> bool:
        """Return whether the setting is at this operating point."""
        return (self.variant, self.deepest) == (point.variant, point.deepest)


class ArrivalRate:
    """The rate of arrivals, in samples per second, over about the last ``MEMORY_S`` seconds."""

    MEMORY_S = 0.1
    _SHORTEST_LOOK_S = 0.005

    def __init__(self) -> None:
        self.rate = 0.0
        self._count = 0
        self._looked_s = self._since_s = -math.inf

    def update(self, arrived: int, now_s: float) -> None:
        """Record how many samples have arrived by now."""
        elapsed_s = now_s - self._looked_s
        if elapsed_s < self._SHORTEST_LOOK_S:
            return
        if elapsed_s == math.inf:
            self._count, self._looked_s, self._since_s = arrived, now_s, now_s
            return
        # Before MEMORY_S has passed, the rate is the mean since the start: earlier time does not
        # count as a rate of 0.
        known = math.expm1(-(now_s - self._since_s) / self.MEMORY_S)
        weight = math.expm1(-elapsed_s / self.MEMORY_S) / known
        self.rate += weight * ((arrived - self._count) / elapsed_s - self.rate)
        self._count, self._looked_s = arrived, now_s


class SlackPolicy(NeverBuffers, ABC):
    """The base of policies that choose batch size and point by the most urgent slack."""

    name: str

    def __init__(self, points: OperatingPoints, max_batch_size: int, streams: int = 1) -> None:
        self._points = points
        self._max_batch_size = max_batch_size
        self._streams = self._in_service = streams
        self._busy_s = [table.shrinking.busy_s for table in points.latencies.variants]
        self._early_drop: EarlyDrop | None = None
        self._arrivals = ArrivalRate()

    @abstractmethod
    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:
        """Return the setting for a slack; ``None`` if no setting fits it.

        ``slack_s`` is the slack of the most urgent sample, and may be infinite. ``wanted_rate`` is
        the required rows per second at a margin of 1: the arrival rate, or the rate that serves all
        waiting samples by their last deadline, if that is higher.
        """

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Start the most urgent bucket with a setting for its first sample, or drop this sample."""
        bucket = waiting.ready(now_s)
        if not isinstance(bucket, Bucket):
            return bucket
        in_service = max(self._streams - len(waiting.suspended), 1)
        if self._early_drop is None or in_service != self._in_service:
            self._in_service = in_service
            self._early_drop = EarlyDrop(list(self._settings()), in_service)
        latency_margin = self._points.latencies.latency_margin
        queue = waiting.queue
        self._arrivals.update(queue.arrived, now_s)
        wanted_rate = max(
            self._early_drop.wanted_rate(queue, bucket, now_s, latency_margin),
            self._arrivals.rate * latency_margin,
        )
        setting = self.setting(bucket.most_urgent().deadline_s - now_s, wanted_rate)
        if setting is None or self._early_drop.gives_up(queue, bucket, now_s, latency_margin):
            self._points.latencies.invalidate()
            return LoadShedding(bucket)
        setting = self.for_queue(setting, queue, bucket, now_s, wanted_rate)
        return Start(bucket, setting.batch_size, setting.deepest, setting.variant)

    def for_queue(
        self,
        setting: Setting,
        queue: SampleQueue,  # noqa: ARG002
        bucket: Bucket,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        wanted_rate: float,  # noqa: ARG002
    ) -> Setting:
        """Return a better setting than ``setting``, given the samples of this queue."""
        return setting

    def _settings(self) -> Iterator[tuple[float, float]]:
        """Yield seconds and rows per second of every setting that the policy may choose."""
        latencies = self._points.latencies
        slacks = {
            seconds
            for point in self._points.points
            for seconds in self._until_s(point)[1 : self._max_batch_size + 1]
        }
        for slack_s in slacks:
            setting = self.setting(slack_s * latencies.latency_margin)
            if setting is not None:
                yield self._until_s(setting)[setting.batch_size], self._rate(setting)

    def _rate(self, setting: Setting) -> float:
        """Return rows per second of one stream, if samples leave at exits as at calibration."""
        busy_s = self._busy_s[setting.variant][setting.deepest][setting.batch_size]
        return setting.batch_size / busy_s if busy_s else math.inf

    def _until_s(self, where: OperatingPoint | Setting) -> Sequence[float]:
        """Return the profiled seconds to the deepest stage's end: [max_batch_size + 1]."""
        return self._points.latencies.until_s(where.deepest, where.variant)

    def _largest_batch(self, where: OperatingPoint | Setting, slack_s: float) -> int:
        """Return the largest batch that ends within ``slack_s`` if no row leaves; may be 0."""
        largest = self._points.latencies.largest_batch(where.deepest, slack_s, where.variant)
        return min(largest, self._max_batch_size)


class MaxBatch(SlackPolicy):
    """Policy: largest batch at the fastest point, then this batch's best point (SuperServe A.5)."""

    name = "max-batch"

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:  # noqa: ARG002
        """Choose the size first, then the point."""
        size = self._largest_batch(self._points.points[0], slack_s)
        if not size:
            return None
        best_first = reversed(self._points.points)
        fits = (point for point in best_first if self._largest_batch(point, slack_s) >= size)
        return Setting.at(next(fits), size)


class MaxAccuracy(SlackPolicy):
    """Policy: best point that fits one sample, then this point's largest batch (SuperServe A.5)."""

    name = "max-accuracy"

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:  # noqa: ARG002
        """Choose the point first, then the size."""
        for point in reversed(self._points.points):
            size = self._largest_batch(point, slack_s)
            if size:
                return Setting.at(point, size)
        return None


class Fixed(SlackPolicy):
    """Policy: one point for all, with the largest batch in time (Clipper+, SuperServe 6.1)."""

    name = "fixed"

    def __init__(
        self,
        points: OperatingPoints,
        max_batch_size: int,
        streams: int = 1,
        *,
        point: OperatingPoint | None = None,
    ) -> None:
        super().__init__(points, max_batch_size, streams)
        self._point = points.points[-1] if point is None else point

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:  # noqa: ARG002
        """Choose the size only."""
        size = self._largest_batch(self._point, slack_s)
        return Setting.at(self._point, size) if size else None


class Cheapest(Fixed):
    """Policy: always the fastest point (INFaaS without an accuracy target, SuperServe 6.1)."""

    name = "cheapest"

    def __init__(self, points: OperatingPoints, max_batch_size: int, streams: int = 1) -> None:
        super().__init__(points, max_batch_size, streams, point=points.points[0])


class Clockwork(Fixed):
    """Policy: the whole model, in the largest batch that meets every deadline (Apparate 2.1).

    Times are predicted from the profile, as in Clockwork: with earliest deadline first, a batch
    within the most urgent sample's slack is in time for all others of its priority. A sample that
    is in time only if it leaves early is tried alone: most samples do leave early, and with exits
    the model's end is reached later than without.
    """

    name = "clockwork"

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:
        """Choose the size by the time to the end."""
        chosen = super().setting(slack_s, wanted_rate)
        if chosen is None and self._points.latencies.largest_shrinking_batch(slack_s):
            return Setting.at(self._point, 1)
        return chosen
