"""Predictions for splits on devices, and for a plan under any forecast of the exits."""

from __future__ import annotations

from collections.abc import Sequence

from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit, Replicas
from offramp.cluster.planning.stage_times import seconds_with


def predict(
    plan: ClusterPlan, model: ModelFacts, cluster: Cluster, *, arrival_rps: float
) -> ClusterPlan:
    """Predict a plan again, with the shares of ``model``; the plan itself does not change."""
    splits: list[PlannedSplit] = []
    for split in plan.splits:
        replicas = [
            replicas_of(
                model, cluster, (split.first_segment, split.last_segment), old, plan.batch_size
            )
            for old in split.replicas
        ]
        splits.append(
            describe_split(
                model,
                cluster,
                (split.first_segment, split.last_segment),
                replicas,
                senders=splits[-1].replicas if splits else (),
                batch_size=plan.batch_size,
                arrival_rps=arrival_rps,
            )
        )
    return plan_of(cluster, plan.batch_size, splits)


def replicas_of(
    model: ModelFacts,
    cluster: Cluster,
    segments: tuple[int, int],
    like: Replicas,
    batch_size: int,
) -> Replicas:
    """Return the same devices as ``like``, with the same exits on, but for other segments."""
    (kind,) = [kind for kind in cluster.types if kind.name == like.device_type]
    first, last = segments
    after = dict(zip(model.exit_names, model.exit_after, strict=True))
    inside = [after[exit_] + 1 for exit_ in like.exits]
    borders = [first, *(border for border in inside if border <= last), last + 1]
    stage_s, longest_s = seconds_with(
        kind.times, model, borders, batch_size, ends_with_exit=last + 1 in inside
    )
    return Replicas(
        device_type=like.device_type,
        count=like.count,
        exits=like.exits,
        stage_s=stage_s,
        longest_s=longest_s,
    )


def describe_split(
    model: ModelFacts,
    cluster: Cluster,
    segments: tuple[int, int],
    replicas: Sequence[Replicas],
    *,
    senders: Sequence[Replicas],
    batch_size: int,
    arrival_rps: float,
) -> PlannedSplit:
    """Combine replicas into a split; the replicas share the rows of the split by their speed."""
    first, last = segments
    share = float(model.shares[first]) if senders else 1.0  # all rows reach the first split
    each_rps = sum(replica.count * batch_size / replica.stage_s for replica in replicas)
    crossing = model.crossing_bytes(first) if senders else 0.0
    links = [
        cluster.link_between(sender.device_type, replica.device_type)
        for sender in senders
        for replica in replicas
    ]
    each_s = max((crossing / link.bytes_per_s for link in links), default=0.0)
    return PlannedSplit(
        first_segment=first,
        last_segment=last,
        replicas=tuple(replicas),
        share=share,
        period_s=share / each_rps,
        fill_s=(batch_size - 1) / 2 / (share * arrival_rps),
        link_period_s=share * each_s,
        link_s=each_s * batch_size + max((link.latency_s for link in links), default=0.0),
    )


def plan_of(cluster: Cluster, batch_size: int, splits: Sequence[PlannedSplit]) -> ClusterPlan:
    """Make a plan of splits, with the total cost of its devices."""
    prices = {kind.name: kind.cost_per_hour for kind in cluster.types}
    used = [replica for split in splits for replica in split.replicas]
    return ClusterPlan(
        batch_size=batch_size,
        splits=tuple(splits),
        cost_per_hour=sum(replica.count * prices[replica.device_type] for replica in used),
    )
