"""The first plan of a served model on the workers of a cluster (E3 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError
from offramp.cluster.planning.facts import facts_of, recorded_shares
from offramp.cluster.planning.goal import PlanningGoal, RefusedSegments
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.placing import roles_for
from offramp.cluster.serving.served_splits import ServedSplits
from offramp.engine.common.errors import OptionsError, StageNotLoadedError
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedCluster:
    """Devices whose workers serve a model, and the goal of its plans."""

    cluster: Cluster
    """Devices with times for batches up to the largest that is served."""
    goal: PlanningGoal
    plan: ClusterPlan | None = None
    """Plan to serve unchanged; ``None``: plan at the start, and again while serving."""
    batches_per_worker: int = 1
    """Number of batches that a worker holds at a time, each on its own stream."""

    def without(self, *refused: RefusedSegments) -> ServedCluster:
        """Return a copy whose goal excludes segments that could not be loaded together."""
        goal = replace(self.goal, refused=(*self.goal.refused, *refused))
        return replace(self, goal=goal)


def segments_of(error: StageNotLoadedError, device_types: Sequence[str]) -> RefusedSegments:
    """Return the segments of a failed load, which devices of the worker's type must not combine."""
    return RefusedSegments(device_types[error.device], *error.segments)


def plan_splits(
    name: str,
    bundle: Bundle,
    served: ServedCluster,
    device_types: Sequence[str],
    mode: Mode = Mode.LEAVE,
    *,
    steals: bool = True,
) -> ServedSplits:
    """Plan a bundle on workers, with the exits' shares from its records.

    An exit inside a split is off if its check costs more time than the smaller batch saves (E3
    3.4). If no exit saves time, all stay on, because they answer easy rows early.

    Args:
        name: Name of the model, for messages.
        bundle: Bundle; the exits of its policy are planned for.
        served: Devices and goal.
        device_types: [workers] device type of each worker.
        mode: What happens to rows that are confident at an exit.
        steals: ``True`` if devices hold more than their split where memory allows.

    Raises:
        OptionsError: No plan meets the goal, or the configured plan does not fit the bundle or the
        workers.
    """
    shares = recorded_shares(bundle)
    model, plan = served_facts(bundle, shares, mode), served.plan
    wrapper = not bundle.manifest.answer.criterion.depends_on_earlier
    try:
        cluster = served.cluster.of_devices(device_types)
        if plan is None:
            goal = replace(served.goal, wrapper=wrapper)
            plan = make_cluster_plan(model, cluster, goal).plan
        else:
            check_plan(plan, model)
            check_loaded(plan, served.goal)
        roles = roles_for(plan, device_types)
    except PlanError as error:
        raise OptionsError(f"{name}: {error}") from error
    used = plan.exits() if wrapper else frozenset[int]()
    _log.info("%s: %s%s", name, describe_plan(plan), _describe_exits(shares, used))
    return ServedSplits(
        plan=plan,
        model=served_facts(bundle, {e: s for e, s in shares.items() if e in used} or shares, mode),
        cluster=cluster,
        goal=replace(served.goal, wrapper=False),  # control chooses among all exits
        roles=roles,
        kept=served.plan is not None,
        steals=steals,
        batches_per_worker=served.batches_per_worker,
    )


def check_plan(plan: ClusterPlan, model: ModelFacts) -> None:
    """Raise PlanError if a plan does not cover all of a model's segments, or has other exits."""
    first, last = plan.splits[0].first_segment, plan.splits[-1].last_segment
    if first not in (0, model.begins) or last != model.segments - 1:
        raise PlanError(
            f"the plan has segments {first} to {last}, expected 0 to "
            f"{model.segments - 1} as the bundle has; plan again for this bundle"
        )
    unknown = sorted(plan.exits() - {*model.exit_names})
    if unknown:
        raise PlanError(
            f"the plan uses exits {unknown!s:.60}, expected only exits that are in use, "
            f"{list(model.exit_names)!s:.100}; plan again for this bundle"
        )


def check_loaded(plan: ClusterPlan, goal: PlanningGoal) -> None:
    """Raise PlanError if a plan has a split that its devices could not load."""
    for split in plan.splits:
        segments = range(split.first_segment, split.last_segment + 1)
        for kind, first, last in goal.refused:
            if first in segments and last in segments and kind in split.device_types:
                raise PlanError(
                    f"devices of type {kind!r} cannot load segments {first} to {last} of the plan, "
                    "as the log says; give workers more memory, or plan with their memory_gib"
                )


def _describe_exits(shares: Mapping[int, float], used: Collection[int]) -> str:
    off = sorted(set(shares) - set(used)) if used else []
    return f"; exits {', '.join(map(str, off))} save no time there, and are off" if off else ""


def served_facts(bundle: Bundle, shares: Mapping[int, float], mode: Mode) -> ModelFacts:
    """Return a served bundle's facts for plans.

    ``shares`` has, by exit, the share of rows that continues after it. In release mode all rows run
    to the end, and all exits are on. So both models of a cascade run, and the unmodified model
    alone is not a candidate.
    """
    going_on = [1.0 if mode is Mode.RELEASE else share for share in shares.values()]
    return replace(facts_of(bundle, exits=tuple(shares), going_on=going_on), begins=0)


def describe_plan(plan: ClusterPlan) -> str:
    """Describe a plan in one line, with its predictions."""
    splits = "; ".join(
        f"segments {split.first_segment} to {split.last_segment} on "
        + " and ".join(f"{r.count} × {r.device_type}" for r in split.replicas)
        for split in plan.splits
    )
    return (
        f"{splits}, in batches of {plan.batch_size}; predicted: {plan.rate_rps:,.1f} rows/s, "
        f"{1e3 * plan.latency_s:,.2f} ms at worst"
    )
