"""Log of failed batches: one line of a kind in some seconds, however many fail."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

INTERVAL_S: Final = 10.0
"""Time between two lines of one kind."""


@dataclass(slots=True)
class _Kind:
    """What was logged of a kind."""

    logged_s: float
    silent: int = 0
    """Failures since, which no line tells."""


class FailureLog:
    """Decides which failures are logged; the owner writes the lines, and gives few kinds."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def since_last(self, kind: Hashable, now_s: float) -> int | None:
        """Return how many were not logged since the last line; ``None`` if this one is not."""
        seen = self._kinds.get(kind)
        if seen is None or now_s >= seen.logged_s + INTERVAL_S:
            self._kinds[kind] = _Kind(now_s)
            return 0 if seen is None else seen.silent
        seen.silent += 1
        return None
