"""A plan: devices and batch size of each group of segments, with predicted figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from offramp.bundle.schema.errors import BundleSchemaError
from offramp.bundle.schema.serde import check_numbers, from_plain, to_plain

PLAN_SCHEMA: Final = 1
"""Version of a plan's JSON format."""

Constraint: TypeAlias = Literal["latency", "cost", "memory", "rate"]


class PlanError(ValueError):
    """A goal cannot be planned, or a text is not a plan; the message is one line."""


class InfeasiblePlanError(PlanError):
    """No plan meets all constraints; ``binds`` names the first constraint that cannot be met."""

    def __init__(self, binds: Constraint, message: str) -> None:
        super().__init__(message)
        self.binds: Constraint = binds


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Devices of one type that run the same split."""

    device_type: str
    count: int
    exits: tuple[int, ...]
    """Exits of the split that are on, in depth order. The split's other exits save no time and are
    off (E3 3.4)."""
    stage_s: float
    """Forecast seconds of a batch on one device; the forecast accounts for rows that leave inside
    the split."""
    longest_s: float
    """Seconds of a batch on one device if no row leaves inside the split."""

    def __post_init__(self) -> None:
        check_numbers(self, "count", least=1)
        check_numbers(self, "stage_s", "longest_s", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """Neighbouring segments that run as one stage, on their own replicas (E3 3.2)."""

    first_segment: int
    last_segment: int
    replicas: tuple[Replicas, ...]
    """Replicas of the split. They have one device type, as in E3, or several types if the whole
    model is one split."""
    share: float
    """Forecast share of the rows entering the model that reaches this split."""
    period_s: float
    """Seconds from one row that enters the model to the next, if all replicas of the split are
    busy."""
    fill_s: float
    """Mean time that rows wait until their batch is full, in seconds."""
    link_period_s: float
    """Seconds that the link to this split is busy for each row that enters the model."""
    link_s: float
    """Seconds that a batch takes on the link to this split."""

    def __post_init__(self) -> None:
        check_numbers(self, "first_segment", least=0)
        check_numbers(self, "last_segment", least=self.first_segment)
        if not self.replicas:
            raise ValueError("replicas: empty, expected at least one")
        check_numbers(self, "share", least=0, most=1)
        check_numbers(self, "period_s", "fill_s", "link_period_s", "link_s", least=0)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Name of the device type of each replica."""
        return tuple(replica.device_type for replica in self.replicas)

    @property
    def longest_s(self) -> float:
        """Seconds of a batch on the slowest replica if no row leaves inside the split."""
        return max(replica.longest_s for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Splits of a model on devices of a cluster; all figures are predicted, and ignore queues."""

    batch_size: int
    """Number of rows of each batch, the same at each split, as in E3."""
    splits: tuple[PlannedSplit, ...]
    cost_per_hour: float
    """Cost of the devices that the plan uses, for one hour."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_size", least=1)
        check_numbers(self, "cost_per_hour", least=0)
        ends = [-1, *(split.last_segment for split in self.splits)]
        starts = [split.first_segment for split in self.splits]
        if not starts or starts[1:] != [end + 1 for end in ends[1:-1]]:
            raise ValueError(f"splits: they start at segments {starts}, expected no gaps")
        if not self.period_s > 0:
            raise ValueError("splits: the period is 0, expected more than 0")

    @property
    def period_s(self) -> float:
        """Seconds from one row to the next at full load: the longest period of a split or link."""
        return max(max(split.period_s, split.link_period_s) for split in self.splits)

    @property
    def rate_rps(self) -> float:
        """Rows per second at full load."""
        return 1.0 / self.period_s

    @property
    def latency_s(self) -> float:
        """Worst latency of a row that runs to the end: stages, links, and time to fill batches."""
        return sum(split.longest_s + split.fill_s + split.link_s for split in self.splits)

    def exits(self) -> frozenset[int]:
        """Return the exits that are on in any split."""
        used = [replica.exits for split in self.splits for replica in split.replicas]
        return frozenset().union(*used)

    def devices(self) -> dict[str, int]:
        """Return the number of devices in use, by type."""
        used: dict[str, int] = {}
        for split in self.splits:
            for replica in split.replicas:
                used[replica.device_type] = used.get(replica.device_type, 0) + replica.count
        return used


def dump_plan(plan: ClusterPlan) -> str:
    """Write a plan as JSON."""
    document = {
        "schema": PLAN_SCHEMA,
        "predicted": {
            "period_s": plan.period_s,
            "rate_rps": plan.rate_rps,
            "latency_s": plan.latency_s,
        },
        "plan": to_plain(plan),
    }
    return json.dumps(document, indent=1) + "\n"


def parse_plan(text: str, where: str = "plan") -> ClusterPlan:
    """Read a plan from JSON; PlanError with the reason."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: is not JSON: {error!s:.200}; plan again") from error
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else document
        raise PlanError(f"{where}: schema {found!r:.80}, expected {PLAN_SCHEMA}; plan again")
    try:
        return from_plain(ClusterPlan, document.get("plan"), where)
    except BundleSchemaError as error:
        raise PlanError(f"{str(error).partition(';')[0]}; plan again") from error
