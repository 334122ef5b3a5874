"""Statistics that clusters add to a served model."""

from __future__ import annotations

from typing import Final

from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.cluster.serving.plan_status import PlanStatus
from offramp.engine.requests.statistics import ModelStatistics

PROFILE: Final = "batch_profile"
PLAN: Final = "plan"
"""Name of the background task that reports statistics of plans."""


def profile_of(statistics: ModelStatistics) -> ProfileStatus | None:
    """Return the batch profile's last window; ``None`` if no exit runs."""
    found = statistics.extensions.get(PROFILE)
    return found if isinstance(found, ProfileStatus) else None


def plan_of(statistics: ModelStatistics) -> PlanStatus | None:
    """Return the plan by which a model is split among workers; ``None`` for unsplit models."""
    found = statistics.extensions.get(PLAN)
    return found if isinstance(found, PlanStatus) else None
