"""Options of an engine that concern clusters, in addition to the engine's devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offramp.cluster.planning.batch_profile import WINDOW_S
from offramp.cluster.planning.forecasting import LAST, METHODS
from offramp.engine.models.options import EngineOptions, refuse_unless

NAME: Final = "cluster"
"""Name of the extension in an engine's options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of an engine that the extension ``cluster`` adds."""

    profile_window_s: float = WINDOW_S
    """Length of a window of the batch profile, in seconds; plans use the profile (E3 3.1)."""

    forecast: str = LAST
    """Key of the forecasting method in :data:`.METHODS`."""

    def __post_init__(self) -> None:
        a_day = "from 1 to 86400"
        refuse_unless(self, lambda v: 1 <= v <= 86400, a_day, "profile_window_s")
        refuse_unless(self, METHODS.__contains__, f"one of {', '.join(METHODS)}", "forecast")


def cluster_options(options: EngineOptions) -> ClusterOptions:
    """Return the cluster options of an engine; the defaults if the engine has none."""
    found = options.extensions.get(NAME)
    return found if isinstance(found, ClusterOptions) else ClusterOptions()
