"""From a plan of splits to the placement that streams are asked by: who prefers and holds what.

A plan says how many devices of each type run which split. Roles give each stream one of these; a
placement says the same in stages, which end where exits are in use and where splits end. A device
holds its own split, and what else its memory has room for, the nearest first: that is what it
steals where its own has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError
from offramp.cluster.planning.transition import Segments
from offramp.engine.scheduling.placement import DeviceKind, Placement, StreamPlacement

StageSpan = tuple[int, int, int | None]
"""First and last segment of a stage, and the exit that it ends with: none where below 0, either."""


class StreamRole(NamedTuple):
    """What a stream is in a plan."""

    device_type: str
    segments: Segments | None
    """Its split; ``None`` for a spare device, which helps where it can."""

    @property
    def own(self) -> frozenset[int]:
        """The segments of its split."""
        first, last = self.segments or (0, -1)
        return frozenset(range(first, last + 1))


def roles_of(plan: ClusterPlan) -> tuple[StreamRole, ...]:
    """Give a stream to each device that a plan uses, in the order of its splits."""
    return tuple(
        StreamRole(replicas.device_type, (split.first_segment, split.last_segment))
        for split in plan.splits
        for replicas in split.replicas
        for _ in range(replicas.count)
    )


def roles_for(plan: ClusterPlan, device_types: Sequence[str]) -> tuple[StreamRole, ...]:
    """Give each stream a role in a plan by its type of device, the surplus that of a spare.

    PlanError if there are too few of a type.
    """
    wanted: dict[str, list[Segments | None]] = {}
    for role in reversed(roles_of(plan)):
        wanted.setdefault(role.device_type, []).append(role.segments)
    given = []
    for kind in device_types:
        left = wanted.get(kind)
        given.append(StreamRole(kind, left.pop() if left else None))
    for kind, left in wanted.items():
        if left:
            raise PlanError(
                f"the plan has {len(left)} devices of type {kind!r} more than there are workers; "
                "plan again for the workers that are there"
            )
    return tuple(given)


def borders_of(plan: ClusterPlan) -> frozenset[int]:
    """Give the segments that splits end with, but for the last: stages have to end there."""
    return frozenset(split.last_segment for split in plan.splits[:-1])


def held_segments(role: StreamRole, model: ModelFacts, cluster: Cluster) -> frozenset[int]:
    """Give the segments whose weights a device holds: its split's, and what else has room.

    Where sizes are not known, or memory is not bounded, all.
    """
    (memory_bytes,) = [k.memory_bytes for k in cluster.types if k.name == role.device_type]
    first, last = role.segments or (0, -1)
    held = set(range(first, last + 1))
    left_bytes = memory_bytes - sum(model.weight_bytes[first : last + 1])

    def distance(segment: int) -> int:
        return max(first - segment, segment - last)

    for segment in sorted(set(range(model.segments)) - held, key=distance):
        size_bytes = model.weight_bytes[segment] if model.weight_bytes else 0.0
        if size_bytes > left_bytes:
            break
        held.add(segment)
        left_bytes -= size_bytes
    return frozenset(held)


def place_plan(
    plan: ClusterPlan,
    roles: Sequence[StreamRole],
    spans: Sequence[StageSpan],
    *,
    model: ModelFacts,
    cluster: Cluster,
    max_batch_size: int,
    overhead_s: float = 0.0,
    held: Sequence[frozenset[int]] | None = None,
) -> Placement:
    """Say in stages what a plan says in segments.

    Args:
        plan: Whose splits are served.
        roles: [streams] What each is in it: every split needs one at least.
        spans: [stages] Of the served model, one of which ends where a split does.
        model: For the weights' and the borders' sizes.
        cluster: Types, times and links.
        max_batch_size: The times reach so far.
        overhead_s: What a stage takes on its device beyond its graph.
        held: [streams] segments whose weights each has; by default what it has room for. More than
            its split is what it may steal.

    Raises:
        PlanError: The splits do not end where stages do, or a split has no stream.
    """
    stages_of = dict(_stages_by_split(plan, spans))
    unserved = sorted(set(stages_of) - {role.segments for role in roles})
    if unserved:
        raise PlanError(
            f"no device runs segments {unserved[0][0]} to {unserved[0][1]}; plan again with the "
            "devices that are there"
        )
    streams = []
    for stream, role in enumerate(roles):
        prefers = stages_of[role.segments] if role.segments else frozenset()
        here = held_segments(role, model, cluster) if held is None else held[stream]
        others = {
            n for n, (first, last, _) in enumerate(spans) if here >= {*range(first, last + 1)}
        }
        streams.append(
            StreamPlacement(kind=role.device_type, prefers=prefers, holds=prefers | others)
        )
    used = {role.device_type for role in roles}
    kinds = [
        DeviceKind(
            name=kind.name, seconds=stage_times(kind.times, spans, max_batch_size, overhead_s)
        )
        for kind in cluster.types
        if kind.name in used
    ]
    return Placement(
        stages=len(spans),
        streams=tuple(streams),
        kinds=tuple(kinds),
        row_bytes=(0.0, *(model.crossing_bytes(first) for first, _, _ in spans[1:])),
        link=cluster.link,
        links=tuple(link for link in cluster.links if used >= {*link[:2]}),
    )


def stage_times(
    times: DeviceTimes, spans: Sequence[StageSpan], max_batch_size: int, overhead_s: float = 0.0
) -> tuple[tuple[float, ...], ...]:
    """[stages][max_batch_size + 1]: seconds of stages on a device, by batch size."""
    sizes = slice(1, max_batch_size + 1)
    if max_batch_size > times.max_batch_size:
        raise PlanError(
            f"times reach up to batches of {times.max_batch_size}, expected {max_batch_size}"
        )
    table = []
    for first, last, exit_ in spans:
        row = times.segments_s[first : last + 1, sizes].sum(0) + overhead_s
        if exit_ is not None and exit_ >= 0:
            row = row + times.exits_s[exit_, sizes]
        table.append((0.0, *row.tolist()))
    return tuple(table)


def _stages_by_split(
    plan: ClusterPlan, spans: Sequence[StageSpan]
) -> Iterator[tuple[Segments, frozenset[int]]]:
    """Give the stages of each split, by its segments."""
    for split in plan.splits:
        first, last = split.first_segment, split.last_segment
        mine = {n for n, span in enumerate(spans) if first <= span[1] <= last}
        torn = [span for n, span in enumerate(spans) if n in mine and span[0] < first]
        if not mine or torn or (split is plan.splits[-1] and spans[-1][1] > last):
            raise PlanError(
                f"the split of segments {first} to {last} is none of whole stages, which are "
                f"{', '.join(f'{a} to {b}' for a, b, _ in spans)}; plan again for this bundle"
            )
        yield (first, last), frozenset(mine)
