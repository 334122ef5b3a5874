"""The first plan of a served model on the workers of a cluster (E3 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError
from offramp.cluster.planning.facts import facts_of, recorded_shares
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.placing import roles_for
from offramp.cluster.serving.served_splits import ServedSplits
from offramp.engine.common.errors import OptionsError
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedCluster:
    """Devices whose workers serve a model, and what is asked of the plans that split it."""

    cluster: Cluster
    """Times reach up to the largest batch that is served."""
    goal: PlanningGoal


def plan_splits(
    name: str,
    bundle: Bundle,
    served: ServedCluster,
    device_types: Sequence[str],
    mode: Mode = Mode.LEAVE,
) -> ServedSplits:
    """Plan a bundle on workers, by the shares of exits that its records say.

    Args:
        name: Of the model, for messages.
        bundle: Its policy is planned for, with all its exits on: the promise is about those.
        served: Devices and goal.
        device_types: [workers] The type of each.
        mode: What becomes of rows that are sure at an exit.

    Raises:
        OptionsError: No plan meets the goal.
    """
    model = served_facts(bundle, recorded_shares(bundle), mode)
    goal = replace(served.goal, wrapper=False)
    try:
        cluster = served.cluster.of_devices(device_types)
        plan = make_cluster_plan(model, cluster, goal).plan
    except PlanError as error:
        raise OptionsError(f"{name}: {error}") from error
    _log.info("%s: %s", name, describe_plan(plan))
    roles = roles_for(plan, device_types)
    return ServedSplits(plan=plan, model=model, cluster=cluster, goal=goal, roles=roles)


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
