"""``eecompile plan``: plan a bundle on a cluster of devices (E3 3.2); all figures are predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from offramp.bundle import Bundle, Profile
from offramp.cluster.planning.batch_profile import MOST_PROFILE_BYTES, BatchProfile, parse_recorded
from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_file import MOST_FILE_BYTES, parse_cluster
from offramp.cluster.planning.cluster_plan import PlanError, dump_plan
from offramp.cluster.planning.cluster_times import make_cluster
from offramp.cluster.planning.facts import exits_in_use, facts_of, recorded_shares
from offramp.cluster.planning.forecasting import CONSERVATIVE, LAST, METHODS, forecast_next
from offramp.cluster.planning.goal import PlanningGoal, PlanningResult
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.serving.planning_files import read_planning, read_profiles
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.common.control_state import identity_of

MATTERS = 0.01
"""Smallest relative change of rate or cost for which a constraint is reported as binding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of ``eecompile plan``; missing parts of the goal come from the cluster file."""

    bundle: Path
    cluster: Path
    slo_ms: float | None = None
    rate: float | None = None
    """Rows per second to serve at the least cost; ``None`` maximises the rate."""
    slack: float | None = None
    cost_factor: float | None = None
    batch_profile: Path | None = None
    """Observed batch profile of the exits; ``None`` uses the bundle's own records."""
    forecast: str | None = None
    """Key of the forecasting method in :data:`.METHODS`; ``None`` uses the last value."""
    json: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBundle:
    """A bundle's plan, and the reasons for it."""

    result: PlanningResult
    goal: PlanningGoal
    model: ModelFacts
    cluster: Cluster
    shares_from: str
    """Source of the shares of rows that continue after each exit, in words."""
    without_slo: PlanningResult | None
    """The plan without a latency objective; ``None`` if the goal has none."""

    @property
    def slo_binds(self) -> bool:
        """``True`` if the latency objective changes rate or cost by 1 % or more."""
        if self.without_slo is None:
            return False
        free, plan = self.without_slo.plan, self.result.plan
        if self.goal.rate_rps is None:
            return free.rate_rps > plan.rate_rps * (1 + MATTERS)
        return free.cost_per_hour < plan.cost_per_hour * (1 - MATTERS)


def plan_bundle(options: PlanOptions) -> PlannedBundle:
    """Plan a bundle on a cluster, and write the plan to a file if requested.

    Raises:
        PlanError: The cluster file or the batch profile is malformed, or no plan meets the goal.
        BundleError: The bundle is absent or damaged.
    """
    bundle = open_runnable(options.bundle)
    content = read_planning(options.cluster, MOST_FILE_BYTES)
    file = parse_cluster(content, str(options.cluster))
    own = bundle.profile()
    profiles = read_profiles(file, options.cluster.parent)
    sizes = _sizes(own, profiles)
    cluster = make_cluster(file, own, profiles, max(sizes))
    model, shares_from = _facts(bundle, options)
    said = {name: getattr(options, name) for name in ("slo_ms", "slack", "rate", "cost_factor")}
    goal_entry = replace(
        file.goal, **{key: value for key, value in said.items() if value is not None}
    )
    # If an exit's criterion uses earlier exits, these must be on: E3's dependent exits (3.4).
    wrapper = not bundle.manifest.answer.criterion.depends_on_earlier
    goal = goal_entry.goal(sizes, wrapper=wrapper)
    result = make_cluster_plan(model, cluster, goal)
    if options.json is not None:
        options.json.write_text(dump_plan(result.plan))
    without_slo = None
    if math.isfinite(goal.slo_s):
        without_slo = make_cluster_plan(model, cluster, replace(goal, slo_s=math.inf))
    return PlannedBundle(
        result=result,
        goal=goal,
        model=model,
        cluster=cluster,
        shares_from=shares_from,
        without_slo=without_slo,
    )


def _sizes(own: Profile, profiles: Mapping[str, Profile]) -> tuple[int, ...]:
    """Return the profiled batch sizes, up to the largest size that every profile has."""
    most = min(max(profile.batch_sizes) for profile in (own, *profiles.values()))
    return tuple(size for size in own.batch_sizes if size <= most) or (most,)


def _facts(bundle: Bundle, options: PlanOptions) -> tuple[ModelFacts, str]:
    """Return a bundle's facts for planning, and the source of the exits' shares in words."""
    if options.batch_profile is None:
        if options.forecast is not None:
            raise PlanError(
                f"--forecast {options.forecast} has no data to forecast from; add --batch-profile "
                "FILE, which eeserve writes next to a bundle, or omit it"
            )
        shares = recorded_shares(bundle)
        shares_from = "the bundle's certify split"
    else:
        profile = _batch_profile(options.batch_profile, bundle)
        forecast = forecast_next(profile, METHODS[options.forecast or LAST]())
        shares = {exit_: forecast.going_on[exit_] for exit_ in exits_in_use(bundle.policy)}
        shares_from = (
            f"a conservative forecast ({forecast.method}, quantile {CONSERVATIVE:g}) of "
            f"{profile.describe()}, in {options.batch_profile}"
        )
    return facts_of(bundle, exits=[*shares], going_on=[*shares.values()]), shares_from


def _batch_profile(path: Path, bundle: Bundle) -> BatchProfile:
    text = read_planning(path, MOST_PROFILE_BYTES).decode(errors="replace")
    recorded, exits = parse_recorded(text, str(path)), len(bundle.manifest.exits)
    if recorded.profile.exits != exits:
        raise PlanError(
            f"{path}: has {recorded.profile.exits} exits, expected {exits} as the bundle has; "
            "use a profile of this bundle"
        )
    identity = identity_of(bundle)["bundle"]
    if recorded.bundle not in ("", identity):
        raise PlanError(
            f"{path}: belongs to bundle {recorded.bundle!r:.18}, expected {identity!r:.18}; use a "
            "profile of this bundle, or serve the bundle to record one"
        )
    return recorded.profile
