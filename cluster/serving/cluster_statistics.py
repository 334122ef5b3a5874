"""What statistics of a model have of clusters."""

from __future__ import annotations

from typing import Final

from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.cluster.serving.plan_status import PlanStatus
from offramp.engine.requests.statistics import ModelStatistics

PROFILE: Final = "batch_profile"
PLAN: Final = "plan"
"""Names of the background tasks that tell it."""


def profile_of(statistics: ModelStatistics) -> ProfileStatus | None:
    """Return what exits did in the last window; ``None`` where none runs."""
    found = statistics.extensions.get(PROFILE)
    return found if isinstance(found, ProfileStatus) else None


def plan_of(statistics: ModelStatistics) -> PlanStatus | None:
    """Return the plan by which a model is split among workers; ``None`` if it is not."""
    found = statistics.extensions.get(PLAN)
    return found if isinstance(found, PlanStatus) else None
