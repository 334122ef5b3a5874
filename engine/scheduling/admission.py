"""Admission: what would only be given up later is refused before it is queued.

Under overload a policy gives up what it cannot serve in time, and so keeps goodput up as far as the
device is concerned. But by then each such request has cost its arrays, a place in the
queue and an error on its way back, on the very cores that front end and streams live on: at twice
what can be served, most of the work was for nobody. To refuse early costs next to nothing.

The share to refuse is that of adaptive throttling (Beyer et al., Site Reliability Engineering,
2016, chapter 21): where of lately ``arrived`` samples so many were ``kept``, answered, the
probability is max(0, 1 − K · kept / arrived). So K times what can be served is let in, whatever
limits it: the device, the front end or a neighbour. K > 1 keeps the pressure up that policies go by
when they choose faster settings, and that finds out when more can be served. As long as the policy
gives nobody up, nobody is refused.

Nor is a request refused that has no reason to fear the queue: one that can wait for longer than
those before it take at the rate of late. Before it are those of its priority and of higher ones.
"""

from __future__ import annotations

import math
import random
from typing import Final

MEMORY_S: Final = 0.25
"""How long "lately" is: counts fade by 1/e in that time."""
HEADROOM: Final = 1.1
"""K: samples let in for each that is kept."""
PATIENCE: Final = 2.0
"""Times the queue's time that a request can wait for which does not fear it."""
_LEAST: Final = 1e-3
"""Of a sample: fewer lost ones are none."""


class AdmissionControl:
    """What became of the samples of late, and whether to let in more; seeded, so it repeats."""

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - a share, no secret
        self._looked_s = 0.0
        self._kept = 0.0
        self._lost = 0.0
        """Samples that were given up or refused."""

    @property
    def overloaded(self) -> bool:
        """Whether any were lost of late."""
        return self._lost > 0.0

    def keep(self, samples: int, now_s: float) -> None:
        """Count samples that were answered."""
        self._fade(now_s)
        self._kept += samples

    def lose(self, samples: int, now_s: float) -> None:
        """Count samples that were given up for want of time."""
        self._fade(now_s)
        self._lost += samples

    def refuses(self, samples: int, slack_s: float, ahead: int, now_s: float) -> bool:
        """Whether to refuse samples that have ``slack_s`` left, behind ``ahead`` others."""
        if not (self._lost and ahead) or slack_s == math.inf:
            return False
        self._fade(now_s)
        if slack_s * self._kept > PATIENCE * MEMORY_S * ahead:
            return False
        arrived = self._kept + self._lost
        share = 1.0 - HEADROOM * self._kept / arrived if self._lost else 0.0
        if self._random.random() >= share:
            return False
        self._lost += samples
        return True

    def _fade(self, now_s: float) -> None:
        weight = math.exp((self._looked_s - now_s) / MEMORY_S)
        self._looked_s = now_s
        self._kept *= weight
        self._lost = self._lost * weight if self._lost * weight > _LEAST else 0.0
