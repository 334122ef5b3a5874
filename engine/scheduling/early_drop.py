"""Early drop: the most urgent sample is given up so that those behind it are served in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.queue import SampleQueue

_HORIZON = 4.0
"""Times the slowest setting, beyond which nobody's patience counts."""
_SHORTEST_S = 1e-6
_ENOUGH = 0.9
"""Share of the best rate that is good enough: nobody is given up for the last tenth."""


class EarlyDrop:
    """The rule that drops a sample whose small slack costs the others theirs (Nexus 6.3).

    Slack bounds the batch, and small batches waste the device. A queue that was late once is all
    heads with little slack, each served in a batch of one, and so stays late: with batches that
    pay, earliest deadline first collapses at loads that it could well carry. So the first sample
    is given up if the settings that its slack allows cannot keep up with the queue, and those
    that the slack of the last one allows could, or would at least be faster by more than a tenth.
    Keeping up means to serve all that waits before the last deadline among it, or within a few
    times the slowest setting if that is sooner: a request that can wait for an hour does not make
    the others patient. Where batches bring nothing (latency linear in their size) nobody is given
    up by this rule, and nobody ever is for others of lower priority.
    """

    def __init__(self, settings: Sequence[tuple[float, float]], streams: int) -> None:
        """Take what a policy may choose: each one's seconds, and rows a second of a stream."""
        ranked = sorted(settings)
        self.horizon_s = _HORIZON * ranked[-1][0] if ranked else 0.0
        """Seconds beyond which nobody's patience counts, as if predictions were right."""
        self._seconds = [seconds for seconds, _ in ranked]
        self._rates = [0.0, *accumulate((rate * streams for _, rate in ranked), max)]
        """Best rows a second of the settings that take at most so long; the first of none."""

    def wanted_rate(
        self, queue: SampleQueue, bucket: Bucket, now_s: float, latency_margin: float
    ) -> float:
        """Rows a second that serve all that waits in time, as if ``latency_margin`` were 1.

        ``bucket`` is served next; ``latency_margin`` is what predictions are multiplied by.
        """
        return queue.size / self._longest_slack_s(bucket, now_s, latency_margin)

    def gives_up(
        self, queue: SampleQueue, bucket: Bucket, now_s: float, latency_margin: float
    ) -> bool:
        """Whether the most urgent sample of a bucket had better be dropped; arguments as above."""
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
        """Most rows a second of all streams that a slack allows, as if predictions were right."""
        return self._rates[bisect_right(self._seconds, slack_s)]
