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
    """Devices whose workers serve a model, and what is asked of the plans that split it."""

    cluster: Cluster
    """Times reach up to the largest batch that is served."""
    goal: PlanningGoal
    plan: ClusterPlan | None = None
    """That is to be served as it stands; ``None`` has one made, and others after it."""
    batches_per_worker: int = 1
    """Streams of each worker."""

    def without(self, *refused: RefusedSegments) -> ServedCluster:
        """Return it without plans that have what could not be loaded."""
        goal = replace(self.goal, refused=(*self.goal.refused, *refused))
        return replace(self, goal=goal)


def segments_of(error: StageNotLoadedError, device_types: Sequence[str]) -> RefusedSegments:
    """Return what no device of a worker's type is to be asked to load any more."""
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
    """Plan a bundle on workers, by the shares of exits that its records say.

    Exits that earn nothing inside a split are off (E3 3.4): their check costs more than the smaller
    batch saves. Where none earns anything, all stay on, as they let easy rows come early.

    Args:
        name: Of the model, for messages.
        bundle: Its policy is planned for.
        served: Devices and goal.
        device_types: [workers] The type of each.
        mode: What becomes of rows that are sure at an exit.
        steals: Whether devices hold more than their split where there is room.

    Raises:
        OptionsError: No plan meets the goal, or the one that is given is of other parts or workers.
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
        goal=replace(served.goal, wrapper=False),  # of the exits that control then has in use
        roles=roles,
        kept=served.plan is not None,
        steals=steals,
        batches_per_worker=served.batches_per_worker,
    )


def check_plan(plan: ClusterPlan, model: ModelFacts) -> None:
    """Refuse, by a PlanError, a plan that is not of all of a model's segments and of its exits."""
    segments = (plan.splits[0].first_segment, plan.splits[-1].last_segment)
    if segments != (0, model.segments - 1):
        raise PlanError(
            f"the plan is of segments {segments[0]} to {segments[1]}, expected 0 to "
            f"{model.segments - 1} as the bundle has; plan again for this bundle"
        )
    unknown = sorted(plan.exits() - {*model.exit_names})
    if unknown:
        raise PlanError(
            f"the plan has exits {unknown!s:.60} on, expected some of those in use, "
            f"{list(model.exit_names)!s:.100}; plan again for this bundle"
        )


def check_loaded(plan: ClusterPlan, goal: PlanningGoal) -> None:
    """Refuse, by a PlanError, a plan with a split that its devices could not load."""
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
    return f"; exits {', '.join(map(str, off))} earn nothing there, and are off" if off else ""


def served_facts(bundle: Bundle, shares: Mapping[int, float], mode: Mode) -> ModelFacts:
    """Give what plans know of a bundle as it is served: by exit, the ``shares`` that go on.

    In release mode all rows run to the end. All exits are on, so of a cascade both models run: the
    unmodified one alone is no candidate.
    """
    going_on = [1.0 if mode is Mode.RELEASE else share for share in shares.values()]
    return replace(facts_of(bundle, exits=tuple(shares), going_on=going_on), begins=0)


def describe_plan(plan: ClusterPlan) -> str:
    """Say a plan in a line, with what is predicted."""
    splits = "; ".join(
        f"segments {split.first_segment} to {split.last_segment} on "
        + " and ".join(f"{r.count} × {r.device_type}" for r in split.replicas)
        for split in plan.splits
    )
    return (
        f"{splits}, in batches of {plan.batch_size}; predicted: {plan.rate_rps:,.1f} rows/s, "
        f"{1e3 * plan.latency_s:,.2f} ms at worst"
    )
