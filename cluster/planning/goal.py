"""What is asked of a plan, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from offramp.bundle.schema.serde import check_numbers
from offramp.cluster.planning.cluster_plan import ClusterPlan

SLACK: Final = 0.2
"""Share of the objective that is left for queues and bursts; 20 % in the paper's section 4."""
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)


class RefusedSegments(NamedTuple):
    """Neighbouring segments that devices of a type could not load: no split may have them."""

    device_type: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningGoal:
    """What is asked of a plan."""

    slo_s: float = math.inf
    slack: float = SLACK
    rate_rps: float | None = None
    """Rows a second to be served at the least cost; ``None`` is as many as can be."""
    cost_factor: float = 1.0
    """The paper's alpha: most of the cost of all devices that a plan may take."""
    wrapper: bool = True
    """Whether exits that earn nothing inside a split may be off (3.4)."""
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    refused: tuple[RefusedSegments, ...] = ()
    """What no plan may have, though memory is said to hold it."""

    def __post_init__(self) -> None:
        if not self.slo_s > 0:
            raise ValueError(f"slo_s {self.slo_s}: expected seconds, more than 0")
        check_numbers(self, "slack", least=0, below=1)
        check_numbers(self, "rate_rps", "cost_factor", above=0)
        check_numbers(self, "batch_sizes", least=1)

    @property
    def latency_s(self) -> float:
        """Most that a plan may take."""
        return self.slo_s * (1 - self.slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """A plan, and the model as it is beside it."""

    plan: ClusterPlan
    baseline: ClusterPlan | None
    """The model without exits, whole, on all devices that pay; ``None`` if it meets no
    constraint."""
    arrival_rps: float
    """The rate that waits for batches were predicted at: the one asked for, or the baseline's."""


class Limits(NamedTuple):
    """What a plan may take, with room for rounding."""

    latency_s: float
    cost: float
