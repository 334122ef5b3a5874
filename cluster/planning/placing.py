"""Conversion of a plan to a placement, which states the stages that each stream holds and prefers.

A plan states how many devices of each type run which split. First, each stream gets a role, which
is one of these splits. A placement has the stages of that split instead of its segments: a stage
ends at an exit in use, or at the end of a split.

A device holds its own split, and further segments if its memory allows, the nearest first: it
steals work of these segments when its own split is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError
from offramp.cluster.planning.transition import Segments
from offramp.engine.scheduling.placement import DeviceKind, Placement, StreamPlacement

StageSpan = tuple[int, int, int | None]
"""First and last segment of a stage, and the exit at its end (``None`` or below 0: no exit)."""


class StreamRole(NamedTuple):
    """The role of a stream in a plan."""

    device_type: str
    segments: Segments | None
    """Segments of the stream's split; ``None`` for a spare device, which only steals work."""

    @property
    def own(self) -> frozenset[int]:
        """Segments of the stream's split; empty for a spare device."""
        first, last = self.segments or (0, -1)
        return frozenset(range(first, last + 1))


def roles_of(plan: ClusterPlan) -> tuple[StreamRole, ...]:
    """Return a role for each device that a plan uses, in the order of its splits."""
    return tuple(
        StreamRole(replicas.device_type, (split.first_segment, split.last_segment))
        for split in plan.splits
        for replicas in split.replicas
        for _ in range(replicas.count)
    )


def roles_for(plan: ClusterPlan, device_types: Sequence[str]) -> tuple[StreamRole, ...]:
    """Return a role for each stream; streams that the plan does not need are spares.

    ``device_types`` has the type of each stream. PlanError if there are too few streams of a type.
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
                f"the plan needs {len(left)} more devices of type {kind!r} than there are workers; "
                "plan again for the present workers"
            )
    return tuple(given)


def borders_of(plan: ClusterPlan) -> frozenset[int]:
    """Return the last segment of each split except the model's last; stages must end there."""
    return frozenset(split.last_segment for split in plan.splits[:-1])


def held_segments(role: StreamRole, model: ModelFacts, cluster: Cluster) -> frozenset[int]:
    """Return the segments whose weights a device holds: its split, and other segments that fit.

    These are all segments if sizes are unknown, or memory is not bounded.
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
    """Convert a plan of segments to a placement of stages.

    Args:
        plan: Plan whose splits are served.
        roles: [streams] role of each stream; every split needs at least one.
        spans: [stages] stages of the served model; one of them ends at each split's end.
        model: Sizes of weights and borders.
        cluster: Types, times and links.
        max_batch_size: Largest batch size of the times.
        overhead_s: Time of a stage on its device in addition to its graph.
        held: [streams] segments whose weights each stream has; by default those that fit. A stream
            may steal work of held segments outside its split.

    Raises:
        PlanError: The splits do not end where stages do, or a split has no stream.
    """
    stages_of = dict(_stages_by_split(plan, spans))
    unserved = sorted(set(stages_of) - {role.segments for role in roles})
    if unserved:
        raise PlanError(
            f"no device runs segments {unserved[0][0]} to {unserved[0][1]}; plan again with the "
            "present devices"
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
    """Return seconds of stages on a device, [stages][max_batch_size + 1], by batch size."""
    sizes = slice(1, max_batch_size + 1)
    if max_batch_size > times.max_batch_size:
        raise PlanError(
            f"times cover batches of up to {times.max_batch_size}, expected {max_batch_size}"
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
    """Yield the stages of each split, with its segments."""
    for split in plan.splits:
        first, last = split.first_segment, split.last_segment
        mine = {n for n, span in enumerate(spans) if first <= span[1] <= last}
        torn = [span for n, span in enumerate(spans) if n in mine and span[0] < first]
        if not mine or torn or (split is plan.splits[-1] and spans[-1][1] > last):
            raise PlanError(
                f"the split of segments {first} to {last} does not consist of whole stages, which "
                f"are segments {', '.join(f'{a} to {b}' for a, b, _ in spans)}; plan again for "
                "this bundle"
            )
        yield (first, last), frozenset(mine)
