"""What there is to see of a split model's plan: who runs what, what was expected, what changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStatus:
    """One split of the plan in force, and its workers."""

    first_segment: int
    last_segment: int
    devices: tuple[tuple[str, int], ...]
    """Type of device, and how many of it run the split."""
    in_service: int
    """How many of them are there."""
    slow: int
    """Those that get less work, as they are slower than others of their type (E3 3.3)."""
    excluded: int
    """Those that get only what none else can run."""

    @property
    def slowed(self) -> int:
        """Those that get less work or nearly none."""
        return self.slow + self.excluded

    @property
    def workers(self) -> int:
        """How many run the split, there or not."""
        return sum(count for _, count in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """The plan that a split model is served by."""

    splits: tuple[SplitStatus, ...]
    spare: int
    """Workers without a split, which help where they can."""
    batch_size: int
    """Rows of a batch at each split."""
    rate_rps: float
    latency_s: float
    """Both PREDICTED, without queues, under the last forecast; the latency at worst."""
    shares: tuple[tuple[int, float, float | None], ...]
    """By exit: share of the rows that goes on behind it, as forecast and as observed in the window
    that runs; ``None`` if nothing was decided there."""
    changes: int
    """Changes of plans that are over and were made."""
    given_up: int
    """Changes that were begun, or were to be, and given up."""
    changing: bool
    """Whether one is under way."""
    reason: str
    """Why the plan was changed or kept when it was last looked at, in words."""
    changed_s: float | None
    """Seconds since the last change; ``None`` if there was none."""
    changed_for: str = ""
    """Why that was made, in words."""
