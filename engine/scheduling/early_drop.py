"""Early drop: the most urgent sample is dropped so that the following ones are in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.queue import SampleQueue

_HORIZON = 4.0
"""Largest slack that is considered, as a multiple of the slowest setting's time."""
_SHORTEST_S = 1e-6
_ENOUGH = 0.9
"""Share of the best rate that is good enough: no sample is dropped to gain the last tenth."""


class EarlyDrop:
    """The rule that drops a sample whose small slack makes others late (Nexus 6.3).

    Slack bounds the batch size, and small batches waste the device. After one delay, every sample
    at the front of the queue has little slack and is served in a batch of one, so the queue stays
    late. Where large batches are efficient, serving the earliest deadline first therefore fails at
    loads that the device could serve. The first sample is dropped if the settings within its slack
    cannot keep up with the queue, but settings within the slack of the last sample can, or are at
    least faster by more than a tenth. To keep up means to serve all waiting samples before their
    last deadline, or within :data:`_HORIZON` times the time of the slowest setting if that is
    sooner. So a request that can wait for an hour does not relax the deadlines of others. Where
    batches save nothing (latency linear in their size), this rule drops nothing, and it never drops
    a sample for others of lower priority.
    """

    def __init__(self, settings: Sequence[tuple[float, float]], streams: int) -> None:
        """Take the settings of a policy: (seconds, rows per second on one stream) of each."""
        ranked = sorted(settings)
        self.horizon_s = _HORIZON * ranked[-1][0] if ranked else 0.0
        """Slack, in predicted seconds, beyond which more slack makes no difference."""
        self._seconds = [seconds for seconds, _ in ranked]
        self._rates = [0.0, *accumulate((rate * streams for _, rate in ranked), max)]
        """[settings + 1]: highest rows per second among the 0, 1, 2 … settings with the shortest
        time."""

    def wanted_rate(
        self, queue: SampleQueue, bucket: Bucket, now_s: float, latency_margin: float
    ) -> float:
        """Return the rows per second that serve all waiting samples in time, at a margin of 1.

        ``bucket`` is served next; ``latency_margin`` is the factor on predictions.
        """
        return queue.size / self._longest_slack_s(bucket, now_s, latency_margin)

    def gives_up(
        self, queue: SampleQueue, bucket: Bucket, now_s: float, latency_margin: float
    ) -> bool:
        """Return whether to drop the bucket's first sample; arguments as in :meth:`wanted_rate`."""
        head = bucket.most_urgent()
        slack_s = (head.deadline_s - now_s) / latency_margin
        longest_slack_s = self._longest_slack_s(bucket, now_s, latency_margin)
        if longest_slack_s <= slack_s or head.priority > bucket.lowest_priority:
            return False
        wanted = min(queue.size / longest_slack_s, _ENOUGH * self.best_rate(longest_slack_s))
        return self.best_rate(slack_s) < wanted

    def _longest_slack_s(self, bucket: Bucket, now_s: float, latency_margin: float) -> float:
        return max(min((bucket.latest_s - now_s) / latency_margin, self.horizon_s), _SHORTEST_S)

    def best_rate(self, slack_s: float) -> float:
        """Return the highest rate within a slack, in rows per second of all streams (margin 1)."""
        return self._rates[bisect_right(self._seconds, slack_s)]
