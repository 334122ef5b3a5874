"""Admission control: requests that would only be dropped later are refused before they are queued.

Under overload a policy drops what it cannot serve in time, which keeps the device's goodput high.
But each dropped request has already cost its arrays, a place in the queue and an error response, on
the CPU cores that the front end and the streams need. At many times the capacity, this work is most
of the load. An early refusal costs almost nothing.

The share to refuse is that of adaptive throttling (Beyer et al., Site Reliability Engineering,
2016, chapter 21): where ``kept`` of the ``arrived`` recent samples were answered, the probability
is max(0, (arrived − K · kept) / (arrived + 1)). So K times the capacity is admitted, whether the
device, the front end or another process limits the capacity. K > 1 admits enough load that policies
choose faster settings, and that a higher capacity is detected. K = 2 is the book's value: with a
smaller one, too few samples wait to fill batches where deadlines are only a few stage times away.

As long as the policy drops no sample that could have been in time alone, without being forced out
early, no request is refused: a client whose requests arrive too late does not shut out others.
Before any recent sample was answered, as after a pause, the rate is unknown, and no request is
refused.

A request is not refused either if the queue does not endanger it: its slack exceeds the time that
the samples before it take at the recent rate. These are the waiting samples of its own priority and
of higher priorities.
"""

from __future__ import annotations

import math
import random
from typing import Final

MEMORY_S: Final = 0.25
"""Length of the recent period: counts decay by 1/e in that time."""
HEADROOM: Final = 2.0
"""K: samples admitted for each answered one."""
PATIENCE: Final = 2.0
"""The queue does not endanger a request whose slack is at least this multiple of the queue's time.
"""
_LEAST: Final = 1e-3
"""If the decayed number of lost samples is below this, no sample counts as lost."""


class AdmissionControl:
    """Counts recent samples, and decides whether to admit more; repeatable, because seeded."""

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - a share, no secret
        self._looked_s = 0.0
        self._kept = 0.0
        self._lost = 0.0
        """Samples that were dropped or refused, with decay."""

    @property
    def overloaded(self) -> bool:
        """True if any samples were dropped or refused recently."""
        return self._lost > 0.0

    def keep(self, samples: int, now_s: float) -> None:
        """Count samples that were answered."""
        self._fade(now_s)
        self._kept += samples

    def lose(self, samples: int, now_s: float) -> None:
        """Count samples that were dropped for lack of time."""
        self._fade(now_s)
        self._lost += samples

    def refuses(self, samples: int, slack_s: float, ahead: int, now_s: float) -> bool:
        """Return whether to refuse samples with ``slack_s`` left and ``ahead`` others in front."""
        if not (self._lost and ahead) or slack_s == math.inf:
            return False
        self._fade(now_s)
        if self._kept < 1.0 or slack_s * self._kept > PATIENCE * MEMORY_S * ahead:
            return False
        arrived = self._kept + self._lost
        share = (arrived - HEADROOM * self._kept) / (arrived + 1) if self._lost else 0.0
        if self._random.random() >= share:
            return False
        self._lost += samples
        return True

    def _fade(self, now_s: float) -> None:
        weight = math.exp((self._looked_s - now_s) / MEMORY_S)
        self._looked_s = now_s
        self._kept *= weight
        self._lost = self._lost * weight if self._lost * weight > _LEAST else 0.0
