"""When the most urgent sample is given up so that those behind it can be served in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_ENOUGH = 0.9
"""Share of the best rate that is good enough: nobody is given up for the last tenth."""


class EarlyDrop:
    """Early drop (after Nexus, SOSP 2019, 6.3): what a sample with little slack costs the others.

    Slack bounds the batch, and small batches waste the device. A queue that was late once is all
    heads with little slack, each served in a batch of one, and so stays late: with batches that
    pay, earliest deadline first collapses at loads that it could well carry. So the first sample
    is given up if the settings that its slack allows cannot keep up with the queue, and those
    that the slack of the last one allows could, or would at least be faster by more than a tenth.
    Keeping up means to serve all that waits before the last deadline among it. Where batches
    bring nothing (latency linear in their size) nobody is given up by this rule.
    """

    def __init__(self, settings: Sequence[tuple[float, float]], streams: int) -> None:
        """Take the settings that a policy may choose.

        Args:
            settings: Of each, the seconds that it needs, and rows a second of a stream.
            streams: That serve side by side.
        """
        ranked = sorted(settings)
        self._seconds = [seconds for seconds, _ in ranked]
        self._rates = [0.0, *accumulate((rate * streams for _, rate in ranked), max)]
        """Best rows a second of the settings that take at most so long; the first of none."""

    def gives_up(self, slack_s: float, *, waiting: int, longest_slack_s: float) -> bool:
        """Whether the most urgent of the samples that wait had better not be served.

        Args:
            slack_s: Its own.
            waiting: How many there are.
            longest_slack_s: Of the least urgent, maybe more.
        """
        if longest_slack_s <= slack_s:
            return False
        wanted = min(waiting / longest_slack_s, _ENOUGH * self._best(longest_slack_s))
        return self._best(slack_s) < wanted

    def _best(self, slack_s: float) -> float:
        return self._rates[bisect_right(self._seconds, slack_s)]
