"""SlackFit as published, and ours: which batch size and depth a slack, and a queue, allow."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.points import OperatingPoints
from offramp.engine.scheduling.policies.slack import Setting, SlackPolicy
from offramp.engine.scheduling.queue import SampleQueue

BARE_BUCKETS: Final = 6
"""Latency buckets of the published rule, which says evenly sized and not how many: here as many as
figure 6 has subnets. With a few, each holds a setting of a large batch. With 64, most hold a single
one, and the rule answers a middling slack by a setting that is slow *and* small, and falls behind
for good (``benchmarks.superserve``)."""
BUCKETS: Final = 64
"""Of ours, which goes down from a bucket that does not keep up."""


class BareSlackFit(SlackPolicy):
    """The largest batch of the bucket of settings that just fits the slack (SuperServe 4.2, A.5).

    All settings (a power of two or the limit as batch size, an operating point) are sorted into
    evenly sized buckets by latency, that of a batch that nobody leaves early. The bucket is the
    highest that lies within the slack as a whole; of its settings the one with the largest batch
    is taken. What the paper leaves open: among equal batch sizes the higher agreement wins; an
    empty bucket gives way to the next lower one that is not; and below the lowest bucket's
    upper end the fastest setting stands, as long as it fits itself. The choice of every bucket
    is made beforehand.
    """

    name = "slackfit-bare"

    def __init__(
        self,
        points: OperatingPoints,
        max_batch_size: int,
        streams: int = 1,
        *,
        buckets: int = BARE_BUCKETS,
    ) -> None:
        super().__init__(points, max_batch_size, streams)
        ranked = []
        for point in points.points:
            seconds = self._until_s(point)
            for size in _batch_sizes(max_batch_size):
                setting = Setting.at(point, size)
                ranked.append((seconds[size], size, point.agreement, setting))
        ranked.sort(key=lambda item: (item[0], -item[2]))
        self._fastest_s, fastest = ranked[0][0], ranked[0][-1]
        self._width_s = (ranked[-1][0] - self._fastest_s) / buckets or self._fastest_s or 1.0
        best: list[tuple[int, float, Setting, float] | None] = [None] * buckets
        for seconds_, size, agreement, setting in ranked:
            bucket = min(int((seconds_ - self._fastest_s) / self._width_s), buckets - 1)
            held = best[bucket]
            if held is None or (size, agreement) > held[:2]:
                best[bucket] = (size, agreement, setting, self._rate(setting))
        self._chosen = [(fastest, self._rate(fastest))]
        """Below the first bucket, then by bucket: its choice, and rows a second."""
        for choice in best:
            self._chosen.append(choice[2:] if choice else self._chosen[-1])

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:  # noqa: ARG002
        """Look into the bucket."""
        bucket = self._bucket(slack_s)
        return None if bucket is None else self._chosen[bucket][0]

    def _bucket(self, slack_s: float) -> int | None:
        """The index into ``_chosen``; ``None`` if there is no time."""
        slack_s /= self._points.latencies.latency_margin
        if slack_s < self._fastest_s:
            return None
        return int(min((slack_s - self._fastest_s) / self._width_s, len(self._chosen) - 1))


class SlackFit(BareSlackFit):
    """SlackFit that keeps up with the queue, and takes the best point that it leaves time for.

    Three things are ours. How many buckets there are decides which settings compete, and which
    number is right differs from table to table (see :data:`BARE_BUCKETS`). So there are many, and
    a bucket whose choice cannot keep up with the queue gives way to the next lower one that can,
    or to the one that comes closest. Nor is its batch size a limit: whatever fits the slack at its
    point goes along, for what is left behind needs a batch of its own.

    And that largest batch may not be there: bare, the rule cuts a lone sample short to fit 32. So
    its point is where the search begins, and the best one is taken at which the rows that do wait
    are in time and nobody else is made late (:meth:`for_queue`). How that compares with the
    deepest setting that would have met the same deadlines: ``benchmarks.depth``.
    """

    name = "slackfit"

    def __init__(
        self,
        points: OperatingPoints,
        max_batch_size: int,
        streams: int = 1,
        *,
        buckets: int = BUCKETS,
    ) -> None:
        super().__init__(points, max_batch_size, streams, buckets=buckets)

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:
        """Look into the bucket, and down from there for one that keeps up."""
        bucket = self._bucket(slack_s)
        if bucket is None:
            return None
        best, best_rate = self._chosen[bucket]
        wanted_rate /= self._in_service
        while best_rate < wanted_rate and bucket:
            bucket -= 1
            setting, rate = self._chosen[bucket]
            if rate > best_rate:
                best, best_rate = setting, rate
        size = max(best.batch_size, self._largest_batch(best, slack_s))
        return best._replace(batch_size=size)

    def for_queue(
        self,
        setting: Setting,
        queue: SampleQueue,
        bucket: Bucket,
        now_s: float,
        wanted_rate: float,
    ) -> Setting:
        """Take a better point where the bucket's batch leaves time enough for everybody else.

        After it the best rate must serve all that is left before the first of that is due, and
        the arrivals meanwhile, and those that come while these are served, before the first of
        them is. Where not all rows of the bucket find the time, fewer may, as long as that keeps
        up: else it would tear the queue into small batches.
        """
        points = self._points.points
        if setting.runs(points[-1]):
            return setting
        rows = min(bucket.size, self._max_batch_size)
        whole_s, part_s = self._time_for(rows, queue, bucket, now_s)
        for point in reversed(points):
            if setting.runs(point):
                break
            seconds = self._until_s(point)
            if seconds[rows] <= whole_s:
                return Setting.at(point, rows)
            part = Setting.at(point, bisect_right(seconds, part_s, 0, rows) - 1)
            if part.batch_size > 0 and self._rate(part) * self._in_service >= wanted_rate:
                return part
        return setting

    def _time_for(
        self, rows: int, queue: SampleQueue, bucket: Bucket, now_s: float
    ) -> tuple[float, float]:
        """Seconds that a batch of these rows may take, and one of fewer, if predictions are right.

        Whoever arrives next is taken to be as patient as the head of the bucket was.
        """
        early_drop, head = self._early_drop, bucket.most_urgent()
        assert early_drop is not None, "choose() made it"
        latency_margin = self._points.latencies.latency_margin
        patience_s = (head.deadline_s - head.submitted_s) / latency_margin
        patience_s = min(patience_s, early_drop.horizon_s)
        best_rate = early_drop.best_rate(patience_s)
        arrival_rate = self._arrivals.rate * latency_margin
        if arrival_rate >= best_rate:
            return 0.0, 0.0
        spare = 1.0 - arrival_rate / best_rate  # of the time, at the best rate
        first_s, others = (head.deadline_s - now_s) / latency_margin, queue.size - rows
        if others or head.priority > bucket.lowest_priority:  # somebody may be due before it
            first_s = min(first_s, (queue.next_expiry_s() - now_s) / latency_margin)
        first_s = min(first_s, early_drop.horizon_s)
        whole_s = min(first_s, patience_s * spare) - others / best_rate
        return whole_s, first_s * spare - queue.size / best_rate


def _batch_sizes(max_batch_size: int) -> list[int]:
    powers = [2**i for i in range(max_batch_size.bit_length())]
    return sorted({*powers, max_batch_size})
