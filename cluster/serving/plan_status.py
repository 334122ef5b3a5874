"""Status of a split model's plan: workers of splits, predictions and changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStatus:
    """One split of the active plan, and its workers."""

    first_segment: int
    last_segment: int
    devices: tuple[tuple[str, int], ...]
    """Device types, each with the number of devices that run the split."""
    in_service: int
    """Number of the split's workers that are in service."""
    slow: int
    """Number of workers that get less work because they are slower than others of their type (E3
    3.3)."""
    excluded: int
    """Number of workers that only get work that no other worker can run."""

    @property
    def slowed(self) -> int:
        """Number of workers that get less work or almost none."""
        return self.slow + self.excluded

    @property
    def workers(self) -> int:
        """Number of workers that run the split, in service or not."""
        return sum(count for _, count in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """The active plan of a split model."""

    splits: tuple[SplitStatus, ...]
    spare: int
    """Number of workers without a split, which help other workers."""
    batch_size: int
    """Number of rows in a batch, the same at each split."""
    rate_rps: float
    latency_s: float
    """Worst latency in seconds; like the rate, PREDICTED from the last forecast, without queues."""
    shares: tuple[tuple[int, float, float | None], ...]
    """Each exit, with the share of rows that continues after it: as forecast, and as observed in
    the current window (``None`` without decisions)."""
    changes: int
    """Number of completed changes of plans."""
    given_up: int
    """Number of changes that failed, before or after they began."""
    changing: bool
    """``True`` if a change is in progress."""
    reason: str
    """Reason of the last decision to change or keep the plan, in words."""
    changed_s: float | None
    """Seconds since the last change; ``None`` if there was none."""
    changed_for: str = ""
    """Reason of that change, in words."""
