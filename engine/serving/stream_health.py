"""The health of streams: which streams are in service, and when failed streams are retried."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
TRUST_S = 1.0
"""Seconds for which a stream that passed a known-good batch is not suspected, unless it fails too
often in a row."""
MOST_IN_A_ROW = 16
"""Number of failures in a row after which a trusted stream is suspected nevertheless."""
GIVE_UP_AFTER = 5
"""Number of failed starts in a row, on every stream, after which waiting requests fail."""


class StreamHealth:
    """Counts the consecutive failures of each stream; not locked.

    A failure is most often caused by the request itself. From the second failure in a row on, the
    stream is suspected: it has to run a known-good batch. Only a stream that fails at this batch is
    restarted. While it cannot start, it is out of service; its start is repeated after a pause that
    doubles each time. If one model fails and another passes, only the failing one is excluded. A
    stream that passes is trusted for :data:`TRUST_S`, so that any number of bad requests neither
    stops it nor keeps it busy with known-good batches. A stream whose worker process was lost is
    out of service until it has a new worker.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._failures: dict[tuple[int, str], int] = {}
        """Number of consecutive failed batches, by stream and model; no entry for 0."""
        self._failed_starts = [0] * streams
        self._trusted_until_s: dict[tuple[int, str], float] = {}
        """Time until which a stream is not suspected, because it passed a model's known-good batch.
        """
        self._proven: set[tuple[int, str]] = set()
        """Pairs of stream and model with a success since the stream started; known-good batches
        count."""
        self._lost = [False] * streams
        """True for streams without a worker."""
        self._faults: dict[tuple[int, str], _Fault] = {}
        """Reason why a stream runs other models but not this one, by stream and model."""
        self.losses = 0
        """Number of workers lost during a stage."""
        self.restarts = 0
        """Number of restarts of all streams, including those that failed."""

    @property
    def in_service(self) -> int:
        """Number of streams that can run any model."""
        return sum(map(self.serves, range(self.streams)))

    def serves(self, stream: int, model: str = "") -> bool:
        """Return whether a stream can run any model, or the named one."""
        here = not self._failed_starts[stream] and not self._lost[stream]
        return here and (stream, model) not in self._faults

    def given_up(self, streams: Iterable[int], model: str = "") -> bool:
        """Return whether a model (or any) failed too often on all streams to wait for it."""
        tries = (
            max(self._failed_starts[stream], self._fault(stream, model).tries) for stream in streams
        )
        return all(count >= GIVE_UP_AFTER for count in tries)

    def model_failed(self, stream: int, model: str, now_s: float) -> float:
        """Count a failed check of a model; return the seconds until the next check."""
        fault = self._faults[stream, model] = self._fault(stream, model)
        pause_s = _pause_s(fault.tries)
        fault.tries, fault.due_s = fault.tries + 1, now_s + pause_s
        return pause_s

    def model_added(self, stream: int, model: str, now_s: float) -> None:
        """Keep a model off a running stream until it is warmed up there, which is due now."""
        self._faults[stream, model] = _Fault(due_s=now_s, cold=True)

    def is_cold(self, stream: int, model: str, *, tried: bool = False) -> bool:
        """Return whether a stream must warm up a model; after a failed try, only with ``tried``."""
        fault = self._fault(stream, model)
        return fault.cold and (tried or not fault.tries)

    def forget(self, model: str) -> None:
        """Remove a model that is not served any more."""
        self._failures = {k: count for k, count in self._failures.items() if k[1] != model}
        self._trusted_until_s = {k: s for k, s in self._trusted_until_s.items() if k[1] != model}
        self._proven = {k for k in self._proven if k[1] != model}
        self._faults = {k: fault for k, fault in self._faults.items() if k[1] != model}

    def model_recovered(self, stream: int, model: str) -> None:
        """Forget that a model failed on a stream: it passed a known-good batch."""
        self._faults.pop((stream, model), None)

    def broken(self, stream: int) -> list[str]:
        """Return the models that a stream does not run at the moment."""
        return [model for s, model in self._faults if s == stream]

    def due_s(self, stream: int) -> float:
        """Return the time of the next retry of a model on a stream; infinity if there is none."""
        if not self._faults:
            return math.inf
        return min((f.due_s for (s, _), f in self._faults.items() if s == stream), default=math.inf)

    def due(self, stream: int, now_s: float) -> list[str]:
        """Return the models that must be retried on a stream now."""
        return [m for (s, m), f in self._faults.items() if s == stream and f.due_s <= now_s]

    def _fault(self, stream: int, model: str) -> _Fault:
        return self._faults.get((stream, model)) or _Fault()

    def failed(self, stream: int, now_s: float, model: str = "") -> bool:
        """Count a failed batch; return whether the stream itself is suspected."""
        count = self._failures[stream, model] = self._failures.get((stream, model), 0) + 1
        trusted = now_s < self._trusted_until_s.get((stream, model), -math.inf)
        return count > (MOST_IN_A_ROW if trusted else 1)

    def is_batch_fault(self, stream: int, now_s: float, model: str = "") -> bool:
        """Return whether the batch itself caused the last failure: others run on the stream."""
        alone = self._failures.get((stream, model)) == 1 and (stream, model) in self._proven
        return alone or now_s < self._trusted_until_s.get((stream, model), -math.inf)

    def lost(self, stream: int) -> None:
        """Count a lost worker: the stream has to restart."""
        self._lost[stream] = True
        self.losses += 1

    def succeeded(self, stream: int, model: str = "") -> None:
        """Reset a stream's failures at a model: it has just answered samples of this model."""
        self._proven.add((stream, model))
        if self._failures:
            self._failures.pop((stream, model), None)

    def start_failed(self, stream: int) -> float:
        """Count a failed start; return the seconds to pause before the next start."""
        pause_s = _pause_s(self._failed_starts[stream])
        self._failed_starts[stream] += 1
        self.restarts += 1
        return pause_s

    def passed(self, stream: int, now_s: float, model: str = "") -> None:
        """Reset a stream's failures at a model: it passed a known-good batch of this model."""
        self.succeeded(stream, model)
        self._trusted_until_s[stream, model] = now_s + TRUST_S

    def started(self, stream: int, *, restarted: bool) -> None:
        """Reset all failures of a stream that has just started."""
        self._failures = {k: count for k, count in self._failures.items() if k[0] != stream}
        self._proven = {k for k in self._proven if k[0] != stream}
        self._failed_starts[stream] = 0
        self._lost[stream] = False
        self.restarts += restarted


@dataclass(slots=True)
class _Fault:
    """Reason why a stream does not run a model: the model failed or is not warmed up there."""

    tries: int = 0
    due_s: float = 0.0
    """Time of the next retry."""
    cold: bool = False
    """True if the model was added while the stream ran, and never ran on the stream."""


def _pause_s(failures: int) -> float:
    """Return the pause in seconds after some failures in a row: it doubles up to a limit."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures, 32), LONGEST_PAUSE_S)
