"""The goal of a plan, and the result of planning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from offramp.bundle.schema.serde import check_numbers
from offramp.cluster.planning.cluster_plan import ClusterPlan

SLACK: Final = 0.2
"""Share of the latency objective reserved for queues and bursts; 20 % in E3, section 4."""
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)


class RefusedSegments(NamedTuple):
    """Neighbouring segments that devices of a type could not load; no split may contain them."""

    device_type: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningGoal:
    """Deadline, rate and cost that a plan has to keep, and what it optimises."""

    slo_s: float = math.inf
    slack: float = SLACK
    rate_rps: float | None = None
    """Rows per second to serve at the least cost; ``None`` maximises the rate."""
    cost_factor: float = 1.0
    """Largest cost of a plan, as a share of the cost of all devices: the paper's alpha."""
    wrapper: bool = True
    """``True`` if exits that save no time inside a split may be off (3.4)."""
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    refused: tuple[RefusedSegments, ...] = ()
    """Segments that no split may combine, because devices could not load them together."""

    def __post_init__(self) -> None:
        if not self.slo_s > 0:
            raise ValueError(f"slo_s {self.slo_s}: expected seconds, more than 0")
        check_numbers(self, "slack", least=0, below=1)
        check_numbers(self, "rate_rps", "cost_factor", above=0)
        check_numbers(self, "batch_sizes", least=1)

    @property
    def latency_s(self) -> float:
        """Largest latency of a plan, in seconds."""
        return self.slo_s * (1 - self.slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """A plan, with the unmodified model for comparison."""

    plan: ClusterPlan
    baseline: ClusterPlan | None
    """Plan of the unmodified model: one split without exits, on all devices that reduce the period.
    ``None`` if this plan does not meet the constraints."""
    arrival_rps: float
    """Rate used to predict the time to fill batches: the requested rate, or the baseline's."""


class Limits(NamedTuple):
    """Limits of a plan, with a tolerance for rounding."""

    latency_s: float
    cost: float
