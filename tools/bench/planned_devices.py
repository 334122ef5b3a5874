"""Simulated placement of a cluster's plan, and of the source model for comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster_file import MOST_FILE_BYTES, parse_cluster
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.cluster_times import make_cluster
from offramp.cluster.planning.facts import facts_of, recorded_shares
from offramp.cluster.planning.placing import roles_for, stage_times
from offramp.cluster.serving.cluster_serving import check_plan
from offramp.cluster.serving.planning_files import read_plan, read_planning, read_profiles
from offramp.cluster.serving.served_splits import ServedSplits
from offramp.engine.scheduling import DeviceKind, Placement, StreamPlacement
from offramp.engine.stages.plan import Mode, make_plan


def read_splits(bundle: Bundle, plan: Path, cluster: Path, most_rows: int) -> ServedSplits:
    """Read a plan and its cluster; return the splits of a bundle with all its exits.

    Times include batches of up to ``most_rows``. Raise PlanError, with one line, if they do not
    fit.
    """
    planned = read_plan(plan)
    shares = recorded_shares(bundle)
    model = facts_of(bundle, exits=[*shares], going_on=[*shares.values()])
    try:
        check_plan(planned, model)
    except PlanError as error:
        raise PlanError(f"{plan}: {error}") from error
    file = parse_cluster(read_planning(cluster, MOST_FILE_BYTES), str(cluster))
    rows = max(most_rows, planned.batch_size)
    devices = make_cluster(file, bundle.profile(), read_profiles(file, cluster.parent), rows)
    there = {kind.name: kind.count for kind in devices.types}
    for name, count in planned.devices().items():
        if count > there.get(name, 0):
            raise PlanError(
                f"{plan}: takes {count} devices of type {name!r}, of which {cluster} has "
                f"{there.get(name, 0)}; plan again for this cluster"
            )
    return ServedSplits(
        plan=planned,
        model=model,
        cluster=devices,
        goal=file.goal.goal([planned.batch_size], wrapper=False),
        roles=roles_for(planned, devices.device_types),
    )


def placed(
    splits: ServedSplits, bundle: Bundle, mode: Mode, max_batch_size: int, overhead_s: float
) -> Placement:
    """Return the placement in a mode: of the splits, or in mode ``off`` of the source model."""
    if mode is not Mode.OFF:
        stages = make_plan(bundle, mode=mode, borders=splits.borders)
        return splits.placement(stages, max_batch_size, overhead_s)
    (source,) = make_plan(bundle, mode=mode).stages
    return Placement(
        stages=1,
        streams=tuple(
            StreamPlacement(kind=name, prefers=frozenset({0}), holds=frozenset({0}))
            for name in splits.cluster.device_types
        ),
        kinds=tuple(
            DeviceKind(
                name=kind.name,
                seconds=stage_times(kind.times, [source.unit], max_batch_size, overhead_s),
            )
            for kind in splits.cluster.types
        ),
    )


def slowed(placement: Placement, slowdown: float) -> Placement:
    """Return a placement with all times multiplied by a factor."""
    kinds = tuple(replace(kind, speed=slowdown * kind.speed) for kind in placement.kinds)
    return replace(placement, kinds=kinds)
