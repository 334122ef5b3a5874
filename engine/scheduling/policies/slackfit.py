"""SlackFit as published, and our version: they choose the batch size and depth by the slack."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.points import OperatingPoints
from offramp.engine.scheduling.policies.slack import Setting, SlackPolicy
from offramp.engine.scheduling.queue import SampleQueue

BARE_BUCKETS: Final = 6
"""Number of latency buckets of the published rule. The paper states that buckets are evenly sized,
but not how many there are; here it is the number of subnets in figure 6. With few buckets, each
contains a setting with a large batch. With 64, most contain a single setting: for a medium slack
the rule then chooses a slow setting with a *small* batch, and stays late
(``benchmarks.superserve``)."""
BUCKETS: Final = 64
"""Number of latency buckets of our rule, which uses a lower bucket if one does not keep up."""


class BareSlackFit(SlackPolicy):
    """The largest batch of the bucket of settings that just fits the slack (SuperServe 4.2, A.5).

    All settings (batch size: a power of two or the limit; operating point) are sorted into evenly
    sized buckets by the latency of a batch that no sample leaves early. The rule takes the highest
    bucket that is entirely within the slack, and its setting with the largest batch. Our choices
    where the paper leaves it open: among equal batch sizes, the setting with the higher agreement
    is used; instead of an empty bucket, the next lower bucket that is not empty is used; and for a
    slack below the upper end of the lowest bucket, the fastest setting is used if it fits. The
    choice of every bucket is computed in advance.
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
        """Setting and its rows per second: first for slack below all buckets, then for each
        bucket."""
        for choice in best:
            self._chosen.append(choice[2:] if choice else self._chosen[-1])

    def setting(self, slack_s: float, wanted_rate: float = 0.0) -> Setting | None:  # noqa: ARG002
        """Return the setting of the bucket for this slack."""
        bucket = self._bucket(slack_s)
        return None if bucket is None else self._chosen[bucket][0]

    def _bucket(self, slack_s: float) -> int | None:
        """Return the index into ``_chosen``; ``None`` if there is no time."""
        slack_s /= self._points.latencies.latency_margin
        if slack_s < self._fastest_s:
            return None
        return int(min((slack_s - self._fastest_s) / self._width_s, len(self._chosen) - 1))


class SlackFit(BareSlackFit):
    """SlackFit that keeps up with the queue, and uses the best point that leaves enough time.

    Three things differ from the published rule. First, the number of buckets determines which
    settings compete, and the best number differs between latency tables (see :data:`BARE_BUCKETS`).
    So there are many buckets, and if a bucket's setting cannot keep up with the queue, the next
    lower bucket that can is used, or the bucket that comes closest. Second, the setting's batch
    size is not a limit: all rows that fit the slack at its point run together, because the
    remaining rows would need their own batch. Third, the queue may be shorter than the largest
    batch: the published rule then stops a single sample early, as if 32 were waiting. So the
    setting's point is only the start of a search for the best point at which the waiting rows are
    in time and no other sample becomes late (:meth:`for_queue`). ``benchmarks.depth`` compares this
    policy with the deepest setting that would have met the same deadlines.
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
        """Return the setting of the bucket, or of a lower one that keeps up."""
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
        """Return a better point where the bucket's batch leaves enough time for all others.

        After the batch, the best rate must serve all remaining samples, and samples that arrive in
        the meantime, before the first of them is due. Then it must serve the samples that arrive
        during that time before the first of these is due. If not all rows of the bucket have enough
        time, fewer rows may run, but only if that keeps up with the queue: otherwise the queue
        would be split into small batches.
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
        """Return the time for a batch of these rows, and for a smaller one, at a margin of 1.

        Later arrivals are assumed to have the time limit of the bucket's first sample.
        """
        early_drop, head = self._early_drop, bucket.most_urgent()
        assert early_drop is not None, "choose() sets it"
        latency_margin = self._points.latencies.latency_margin
        patience_s = (head.deadline_s - head.submitted_s) / latency_margin
        patience_s = min(patience_s, early_drop.horizon_s)
        best_rate = early_drop.best_rate(patience_s)
        arrival_rate = self._arrivals.rate * latency_margin
        if arrival_rate >= best_rate:
            return 0.0, 0.0
        spare = 1.0 - arrival_rate / best_rate  # share of the time, at the best rate
        first_s, others = (head.deadline_s - now_s) / latency_margin, queue.size - rows
        if others or head.priority > bucket.lowest_priority:  # another sample may be due earlier
            first_s = min(first_s, (queue.next_expiry_s() - now_s) / latency_margin)
        first_s = min(first_s, early_drop.horizon_s)
        whole_s = min(first_s, patience_s * spare) - others / best_rate
        return whole_s, first_s * spare - queue.size / best_rate


def _batch_sizes(max_batch_size: int) -> list[int]:
    powers = [2**i for i in range(max_batch_size.bit_length())]
    return sorted({*powers, max_batch_size})
