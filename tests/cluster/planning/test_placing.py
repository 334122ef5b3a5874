"""Placements of plans: which stages a stream prefers, which it holds, and what they take there."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from offramp.certify import MODEL_END
from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.placing import (
    StageSpan,
    StreamRole,
    borders_of,
    held_segments,
    place_plan,
    roles_for,
    roles_of,
)
from offramp.engine.scheduling import DeviceLink

MODEL = ModelFacts(
    segments=4,
    exit_after=(0, 2),
    going_on=(0.5, 0.2),
    row_bytes=(10.0, 20.0, 30.0),
    weight_bytes=(1.0, 2.0, 3.0, 4.0),
)
SPANS: list[StageSpan] = [(0, 0, 0), (1, 1, None), (2, 2, 1), (3, 3, MODEL_END)]
"""Stages of both exits, and a border after segment 1."""


def device(name: str, speed: float, *, memory: float = math.inf) -> DeviceType:
    row = np.array([0.0, 1.0, 1.5])
    times = DeviceTimes(
        segments_s=np.array([[1.0], [2.0], [4.0], [8.0]]) * row / speed,
        exits_s=np.array([[0.1], [0.2]]) * row / speed,
    )
    return DeviceType(name=name, count=2, cost_per_hour=1.0, times=times, memory_bytes=memory)


def cluster_of(*types: DeviceType) -> Cluster:
    link = DeviceLink(bytes_per_s=100.0, latency_s=1.0)
    return Cluster(types=types, links=((types[0].name, types[-1].name, link),))


def two_splits(cluster: Cluster) -> ClusterPlan:
    """Segments 0 and 1 on both devices of the first type, the others on both of the last."""
    plan = make_cluster_plan(MODEL, cluster, PlanningGoal(batch_sizes=(2,))).plan
    (replicas, *_) = plan.splits[0].replicas
    halves = []
    for kind, (first, last) in zip(
        (cluster.types[0], cluster.types[-1]), [(0, 1), (2, 3)], strict=True
    ):
        like = replace(replicas, device_type=kind.name, count=2, exits=())
        halves.append(
            replace(plan.splits[0], first_segment=first, last_segment=last, replicas=(like,))
        )
    return replace(plan, splits=tuple(halves))


def test_streams_prefer_their_split_and_hold_all_where_there_is_room() -> None:
    cluster = cluster_of(device("fast", 2.0), device("slow", 1.0))
    plan = two_splits(cluster)
    assert borders_of(plan) == {1}
    placement = place_plan(
        plan, roles_of(plan), SPANS, model=MODEL, cluster=cluster, max_batch_size=2
    )
    assert [s.kind for s in placement.streams] == ["fast", "fast", "slow", "slow"]
    assert [s.prefers for s in placement.streams] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    assert all(s.holds == {0, 1, 2, 3} for s in placement.streams)
    assert placement.row_bytes == (0.0, 10.0, 20.0, 30.0)
    assert placement.moving_s("fast", "slow", 2, 5) == 1.0 + 5 * 20 / 100
    assert placement.moving_s("slow", "fast", 2, 5) == 0.0
    slow = placement.kind_of(3).seconds
    for row, one_s in zip(slow, (1.1, 2.0, 4.2, 8.0), strict=True):
        assert row == pytest.approx((0.0, one_s, 1.5 * one_s))
    assert placement.kind_of(0).seconds[3] == (0.0, 4.0, 6.0)


def test_roles_go_by_type_and_what_is_left_is_spare() -> None:
    plan = two_splits(cluster_of(device("fast", 2.0), device("slow", 1.0)))
    roles = roles_for(plan, ["slow", "fast", "fast", "slow", "fast"])
    assert [role.segments for role in roles] == [(2, 3), (0, 1), (0, 1), (2, 3), None]
    with pytest.raises(PlanError, match="1 more devices of type 'slow'"):
        roles_for(plan, ["fast", "fast", "slow"])


def test_a_device_holds_the_nearest_segments_that_fit_its_memory() -> None:
    cluster = cluster_of(device("small", 1.0, memory=6.0), device("tiny", 1.0, memory=7.0))
    assert held_segments(StreamRole("small", (0, 1)), MODEL, cluster) == {0, 1, 2}
    assert held_segments(StreamRole("tiny", (2, 3)), MODEL, cluster) == {2, 3}
    assert held_segments(StreamRole("tiny", None), MODEL, cluster) == {0, 1, 2}
    unknown = replace(MODEL, weight_bytes=())
    assert held_segments(StreamRole("tiny", (2, 3)), unknown, cluster) == {0, 1, 2, 3}


def test_without_stealing_devices_hold_their_split() -> None:
    cluster = cluster_of(device("one", 1.0))
    plan = two_splits(cluster)
    roles = [*roles_of(plan), StreamRole("one", None)]
    held = [frozenset(range(r.segments[0], r.segments[1] + 1) if r.segments else ()) for r in roles]
    placement = place_plan(
        plan, roles, SPANS, model=MODEL, cluster=cluster, max_batch_size=1, held=held
    )
    assert [s.holds for s in placement.streams] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}, set()]


@pytest.mark.parametrize(
    ("roles", "spans", "says"),
    [
        ([("one", (0, 1))], SPANS, "no device runs segments 2 to 3"),
        ([("one", (0, 1)), ("one", (2, 3))], [(0, 0, 0), (1, 3, MODEL_END)], "whole stages"),
        ([("one", (0, 1)), ("one", (2, 3))], [(0, 1, None), (2, 4, MODEL_END)], "whole stages"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    roles: list[tuple[str, tuple[int, int]]], spans: list[StageSpan], says: str
) -> None:
    cluster = cluster_of(device("one", 1.0))
    with pytest.raises(PlanError, match=says):
        place_plan(
            two_splits(cluster),
            [StreamRole(*role) for role in roles],
            spans,
            model=MODEL,
            cluster=cluster,
            max_batch_size=1,
        )
