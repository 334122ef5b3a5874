"""Stragglers: replicas slower than others of their kind get less work, then none (E3 3.3).

The paper excludes "stragglers" from the next assignment, by "simple monitoring" of execution times;
it states no threshold, no window, and no way for a replica to return. All numbers here are ours.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

FACTOR: Final = 2.0
"""Run time from which a replica is a straggler, as a multiple of the median of its kind."""
WINDOW: Final = 16
"""Number of last runs that are evaluated, and of runs between two status changes of a replica."""
PAUSE_S: Final = 1.0
"""Pause before the probe batch of an excluded replica, in seconds; doubled after each slow probe.
"""
LONGEST_PAUSE_S: Final = 64.0


class ReplicaStatus(IntEnum):
    """Amount of work that a replica gets."""

    USUAL = 0
    REDUCED = 1
    """The replica gets only stages that no idle replica of normal status prefers."""
    EXCLUDED = 2
    """The replica gets only stages that no other replica can run, and occasional probe batches."""


@dataclass(slots=True, eq=False)
class _Replica:
    kind: str
    ratios: deque[float]
    """Observed divided by predicted seconds, for the replica's last runs."""
    since_change: int = 0
    """Number of runs since the replica's status changed."""
    status: ReplicaStatus = ReplicaStatus.USUAL
    pause_s: float = PAUSE_S
    probe_s: float = 0.0
    """Time at which an excluded replica may run a batch again."""

    def change(self, status: ReplicaStatus) -> None:
        self.status, self.since_change = status, 0


class StragglerMonitor:
    """Compares the run times of replicas with others of their kind; without I/O.

    A replica's time is the median, over its last ``window`` runs, of observed divided by predicted
    seconds; so different stages and batch sizes are comparable. A replica is slow if its time is
    more than ``factor`` times the lower median of its kind. The status of a slow replica falls by
    one after every window. An excluded replica is probed after a pause: a batch that is not slow
    restores the reduced status, and a window of such runs restores the normal status.
    """

    def __init__(
        self, kinds: Sequence[str], *, factor: float = FACTOR, window: int = WINDOW
    ) -> None:
        """Monitor streams, numbered from 0, of these ``kinds``."""
        if not factor > 1.0:
            raise ValueError(
                f"factor {factor:g}: expected more than 1, a multiple of the median time of its "
                "kind"
            )
        if window < 1:
            raise ValueError(f"window {window}: expected at least 1 run")
        self._factor, self._window = factor, window
        self._replicas = [_Replica(kind, deque(maxlen=window)) for kind in kinds]

    def status(self, stream: int) -> ReplicaStatus:
        """Return how much work a stream gets."""
        return self._replicas[stream].status

    def probe_s(self, stream: int) -> float:
        """Return when an excluded stream may run a batch; infinity if it is not excluded."""
        replica = self._replicas[stream]
        return replica.probe_s if replica.status is ReplicaStatus.EXCLUDED else math.inf

    def observe(self, stream: int, ratio: float, now_s: float) -> None:
        """Record the ratio of a run's observed seconds to its predicted seconds."""
        replica = self._replicas[stream]
        if replica.status is ReplicaStatus.EXCLUDED:
            self._judge_probe(replica, ratio, now_s)
        else:
            replica.ratios.append(ratio)
            replica.since_change += 1
            if replica.since_change >= self._window:
                self._judge(replica, now_s)

    def _judge(self, replica: _Replica, now_s: float) -> None:
        if not self._slow(replica, statistics.median(replica.ratios)):
            replica.change(ReplicaStatus.USUAL)
            replica.pause_s = PAUSE_S
        elif replica.status is ReplicaStatus.USUAL:
            replica.change(ReplicaStatus.REDUCED)
        else:
            replica.change(ReplicaStatus.EXCLUDED)
            replica.probe_s = now_s + replica.pause_s

    def _judge_probe(self, replica: _Replica, ratio: float, now_s: float) -> None:
        if self._slow(replica, ratio):
            replica.pause_s = min(2 * replica.pause_s, LONGEST_PAUSE_S)
            replica.probe_s = now_s + replica.pause_s
        else:
            replica.change(ReplicaStatus.REDUCED)
            replica.ratios.clear()
            replica.ratios.append(ratio)

    def _slow(self, replica: _Replica, ratio: float) -> bool:
        """Return whether a replica's ratio is slow compared with other replicas of its kind."""
        others = [
            statistics.median(other.ratios)
            for other in self._replicas
            if other is not replica
            and other.kind == replica.kind
            and len(other.ratios) >= self._window
        ]
        return bool(others) and ratio > self._factor * statistics.median_low([*others, ratio])
