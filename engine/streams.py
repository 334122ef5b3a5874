"""The health of streams: which are in service, and when one that failed is tried again."""

from __future__ import annotations

from collections.abc import Iterable

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
GIVE_UP_AFTER = 5
"""Failed starts in a row, of every stream, until what waits is told that nothing can be run."""


class StreamHealth:
    """Counts the failures in a row of each stream; not locked.

    A single failure is most often a request's own fault: it is tried again, alone, and fails
    again. From the second in a row on the stream itself is suspected: it has to run a batch that
    is known to be good, anew on the CPU, as it is on a device, where a start takes long. Only a
    stream that fails at that is taken out of service, and tried again after a pause that doubles
    each time. One that passes stays in service, so that bad requests, however many, never stop a
    stream; but it is tried no more often than once in ``FIRST_PAUSE_S`` while none of its batches
    succeeds. One whose worker process was lost is out of service until it has another.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._failures = [0] * streams
        self._failed_starts = [0] * streams
        self._fruitless = [0] * streams
        """Starts in a row after which no batch succeeded."""
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

    def failed(self, stream: int) -> bool:
        """Count a batch that failed; says whether the stream itself is suspected."""
        self._failures[stream] += 1
        return self._failures[stream] > 1

    def lost(self, stream: int) -> None:
        """Count a worker that was lost: the stream has to start anew."""
        self._lost[stream] = True
        self.losses += 1

    def succeeded(self, stream: int) -> None:
        """Forget a stream's failures: it has just run a batch."""
        self._failures[stream] = self._fruitless[stream] = 0

    def rest_s(self, stream: int) -> float:
        """Seconds to rest before a suspected stream is started anew."""
        return FIRST_PAUSE_S if self._fruitless[stream] > 1 else 0.0

    def start_failed(self, stream: int) -> float:
        """Count a start that failed; gives the seconds to pause before the next one."""
        pause_s = FIRST_PAUSE_S * 2.0 ** min(self._failed_starts[stream], 32)
        self._failed_starts[stream] += 1
        self.restarts += 1
        return min(pause_s, LONGEST_PAUSE_S)

    def passed(self, stream: int) -> None:
        """Forget a stream's failures: it has run a batch that is good, as it was."""
        self._failures[stream] = 0
        self._fruitless[stream] += 1

    def started(self, stream: int, *, anew: bool) -> None:
        """Forget all failures of a stream: it has started, and run a batch that is good."""
        self._failures[stream] = self._failed_starts[stream] = 0
        self._lost[stream] = False
        self._fruitless[stream] += anew
        self.restarts += anew
