"""The health of streams: which are in service, and when one that failed is tried again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
    that doubles each time. Where one model fails and another passes, only the one is left out. A
    stream that passes is trusted for :data:`TRUST_S`, so that bad requests, however many, neither
    stop it nor keep it busy with good ones. One whose worker process was lost is out of service
    until it has another.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._failures: dict[tuple[int, str], int] = {}
        """Batches in a row that failed, by stream and model; none where it is 0."""
        self._failed_starts = [0] * streams
        self._trusted_until_s: dict[tuple[int, str], float] = {}
        """Until when a stream that has run what is known to be good of a model is not suspected."""
        self._proven: set[tuple[int, str]] = set()
        """Where a batch succeeded, or what is known to be good, since the stream started."""
        self._lost = [False] * streams
        """Streams that have no worker."""
        self._faults: dict[tuple[int, str], _Fault] = {}
        """Of models that fail on a stream at what is known to be good, while others run there."""
        self.losses = 0
        """Workers that were lost amid a stage."""
        self.restarts = 0
        """Times that a stream was started anew."""

    @property
    def in_service(self) -> int:
        """How many streams can run something."""
        return sum(map(self.serves, range(self.streams)))

    def serves(self, stream: int, model: str = "") -> bool:
        """Whether a stream can run something, of a model if one is named."""
        here = not self._failed_starts[stream] and not self._lost[stream]
        return here and (stream, model) not in self._faults

    def given_up(self, streams: Iterable[int], model: str = "") -> bool:
        """Whether a model, or any, failed on all of these so often that nobody should wait."""
        tries = (
            max(self._failed_starts[stream], self._fault(stream, model).tries) for stream in streams
        )
        return all(count >= GIVE_UP_AFTER for count in tries)

    def model_failed(self, stream: int, model: str, now_s: float) -> float:
        """Count that a model failed a stream's check; gives the seconds until its next one."""
        fault = self._faults[stream, model] = self._fault(stream, model)
        pause_s = _pause_s(fault.tries)
        fault.tries, fault.due_s = fault.tries + 1, now_s + pause_s
        return pause_s

    def model_added(self, stream: int, model: str, now_s: float) -> None:
        """Keep a model off a running stream until it was warmed up there, which is due at once."""
        self._faults[stream, model] = _Fault(due_s=now_s, cold=True)

    def is_cold(self, stream: int, model: str, *, tried: bool = False) -> bool:
        """Return whether a stream has yet to warm up a model; ``tried``: even if it failed once."""
        fault = self._fault(stream, model)
        return fault.cold and (tried or not fault.tries)

    def forget(self, model: str) -> None:
        """Forget a model that is served no more."""
        self._failures = {k: count for k, count in self._failures.items() if k[1] != model}
        self._trusted_until_s = {k: s for k, s in self._trusted_until_s.items() if k[1] != model}
        self._proven = {k for k in self._proven if k[1] != model}
        self._faults = {k: fault for k, fault in self._faults.items() if k[1] != model}

    def model_mended(self, stream: int, model: str) -> None:
        """Forget that a model failed on a stream: it has run what is known to be good."""
        self._faults.pop((stream, model), None)

    def broken(self, stream: int) -> list[str]:
        """List the models that a stream does not run for now."""
        return [model for s, model in self._faults if s == stream]

    def due_s(self, stream: int) -> float:
        """When the next model is to be tried again on a stream; infinity if there is none."""
        if not self._faults:
            return math.inf
        return min((f.due_s for (s, _), f in self._faults.items() if s == stream), default=math.inf)

    def due(self, stream: int, now_s: float) -> list[str]:
        """List the models to be tried again on a stream now."""
        return [m for (s, m), f in self._faults.items() if s == stream and f.due_s <= now_s]

    def _fault(self, stream: int, model: str) -> _Fault:
        return self._faults.get((stream, model)) or _Fault()

    def failed(self, stream: int, now_s: float, model: str = "") -> bool:
        """Count a batch that failed; says whether the stream itself is suspected."""
        count = self._failures[stream, model] = self._failures.get((stream, model), 0) + 1
        trusted = now_s < self._trusted_until_s.get((stream, model), -math.inf)
        return count > (MOST_IN_A_ROW if trusted else 1)

    def vouches(self, stream: int, now_s: float, model: str = "") -> bool:
        """Whether what failed last is to blame itself: other batches of the model run there."""
        alone = self._failures.get((stream, model)) == 1 and (stream, model) in self._proven
        return alone or now_s < self._trusted_until_s.get((stream, model), -math.inf)

    def lost(self, stream: int) -> None:
        """Count a worker that was lost: the stream has to start anew."""
        self._lost[stream] = True
        self.losses += 1

    def succeeded(self, stream: int, model: str = "") -> None:
        """Forget a stream's failures at a model: it has just answered samples of it."""
        self._proven.add((stream, model))
        if self._failures:
            self._failures.pop((stream, model), None)

    def start_failed(self, stream: int) -> float:
        """Count a start that failed; gives the seconds to pause before the next one."""
        pause_s = _pause_s(self._failed_starts[stream])
        self._failed_starts[stream] += 1
        self.restarts += 1
        return pause_s

    def passed(self, stream: int, now_s: float, model: str = "") -> None:
        """Forget a stream's failures at a model: it has run what is known to be good of it."""
        self.succeeded(stream, model)
        self._trusted_until_s[stream, model] = now_s + TRUST_S

    def started(self, stream: int, *, anew: bool) -> None:
        """Forget all failures of a stream."""
        self._failures = {k: count for k, count in self._failures.items() if k[0] != stream}
        self._proven = {k for k in self._proven if k[0] != stream}
        self._failed_starts[stream] = 0
        self._lost[stream] = False
        self.restarts += anew


@dataclass(slots=True)
class _Fault:
    """A model that fails on a stream, or has yet to be warmed up there."""

    tries: int = 0
    due_s: float = 0.0
    """When it is tried again."""
    cold: bool = False
    """Whether it was added while the stream ran, and never ran there."""


def _pause_s(failures: int) -> float:
    """Return the pause after some failures in a row: it doubles up to a limit."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures, 32), LONGEST_PAUSE_S)
