"""Counts that every controller keeps: what was seen, and how the policy in force does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offramp.certify.observations import Observations

_KEPT = ("observed", "audited", "disagreed")


class AgreementCounters:
    """Samples seen since the start, and a running estimate for one policy's life.

    The estimate is a plain mean, without any statement about its error. Forced answers are
    outside of it; they are counted as observed, and where they ran on, as audited.
    """

    def __init__(self) -> None:
        self.observed = 0
        """Samples seen."""
        self.audited = 0
        """Of those answered early, the ones that ran to the end."""
        self.disagreed = 0
        """Of those audited, the ones answered unlike the source model."""
        self._begin(None)

    def add(self, seen: Observations, *, version: int) -> None:
        """Count samples; those started under policy ``version`` feed the estimate."""
        if version != self._version:
            self._begin(version)
        loss = seen.loss
        self.observed += len(seen)
        self.audited += int(np.count_nonzero(seen.early & seen.complete))
        self.disagreed += int(np.count_nonzero(loss))
        counts = (seen.policy_version == version) & ~seen.forced
        self._samples += int(np.count_nonzero(counts))
        self._loss += float(loss[counts].sum())

    def estimate(self, version: int) -> float | None:
        """Mean disagreement under policy ``version``; ``None`` before any evidence."""
        if version != self._version or not self._samples:
            return None
        return self._loss / self._samples

    def state(self) -> dict[str, int]:
        """What to keep over a restart: the counts, not the estimate."""
        return {name: getattr(self, name) for name in _KEPT}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a kept state.

        Raises:
            ValueError: A count is missing, or is no count.
        """
        counts = {name: state.get(name) for name in _KEPT}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"state: {name} is {count!r}, expected a count")
        for name, count in counts.items():
            setattr(self, name, count)

    def _begin(self, version: int | None) -> None:
        """Start the estimate of another policy, or of none."""
        self._version, self._samples, self._loss = version, 0, 0.0
