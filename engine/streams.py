"""The health of streams: which are in service, and when one that failed is tried again."""

from __future__ import annotations

import math
from collections.abc import Iterable

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
TRUST_S = 1.0
"""Time for which a stream that passed is not suspected, unless nothing at all succeeds."""
MOST_IN_A_ROW = 16
"""Failures in a row after which it is suspected all the same."""
GIVE_UP_AFTER = 5
"""Failed starts in a row, of every stream, until what waits is told that nothing can be run."""


class StreamHealth:
    """Counts the failures in a row of each stream; not locked.

    A failure is most often a request's own fault. From the second in a row on the stream itself is
    suspected: it has to run a batch that is known to be good. Only a stream that fails at that is
    started anew, and taken out of service while it cannot start; it is tried again after a pause
    that doubles each time. One that passes is trusted for :data:`TRUST_S`, so that bad requests,
    however many, neither stop a stream nor keep it busy with good ones. One whose worker process
    was lost is out of service until it has another.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._failures = [0] * streams
        self._failed_starts = [0] * streams
        self._trusted_until_s = [-math.inf] * streams
        """Until when a stream that has run what is known to be good is not suspected."""
        self._proven = [False] * streams
        """Whether a batch succeeded, or what is known to be good, since the stream started."""
        self._lost = [False] * streams
        """Streams that have no worker."""
        self.losses = 0
        """Workers that were lost amid a stage."""
        self.restarts = 0
        """Times that a stream was started anew."""

    @property
    def in_service(self) -> int:
        """How many streams can run something."""
        return sum(map(self.serves, range(self.streams)))

    def serves(self, stream: int) -> bool:
        """Whether a stream can run something."""
        return not self._failed_starts[stream] and not self._lost[stream]

    def given_up(self, streams: Iterable[int]) -> bool:
        """Whether all of these have failed to start so often that nobody should wait for them."""
        return all(self._failed_starts[stream] >= GIVE_UP_AFTER for stream in streams)

    def failed(self, stream: int, now_s: float) -> bool:
        """Count a batch that failed; says whether the stream itself is suspected."""
        self._failures[stream] += 1
        trusted = now_s < self._trusted_until_s[stream]
        return self._failures[stream] > (MOST_IN_A_ROW if trusted else 1)

    def vouches(self, stream: int, now_s: float) -> bool:
        """Whether what failed last on a stream is to blame itself: others run there."""
        alone = self._failures[stream] == 1 and self._proven[stream]
        return alone or now_s < self._trusted_until_s[stream]

    def lost(self, stream: int) -> None:
        """Count a worker that was lost: the stream has to start anew."""
        self._lost[stream] = True
        self.losses += 1

    def succeeded(self, stream: int) -> None:
        """Forget a stream's failures: it has just run a batch."""
        self._failures[stream] = 0
        self._proven[stream] = True

    def start_failed(self, stream: int) -> float:
        """Count a start that failed; gives the seconds to pause before the next one."""
        pause_s = FIRST_PAUSE_S * 2.0 ** min(self._failed_starts[stream], 32)
        self._failed_starts[stream] += 1
        self.restarts += 1
        return min(pause_s, LONGEST_PAUSE_S)

    def passed(self, stream: int, now_s: float) -> None:
        """Forget a stream's failures: it has run a batch that is known to be good."""
        self.succeeded(stream)
        self._trusted_until_s[stream] = now_s + TRUST_S

    def started(self, stream: int, now_s: float, *, anew: bool) -> None:
        """Forget all failures of a stream; if it was started anew it has passed, too."""
        self._failures[stream] = self._failed_starts[stream] = 0
        self._lost[stream] = self._proven[stream] = False
        if anew:
            self.passed(stream, now_s)
            self.restarts += 1
