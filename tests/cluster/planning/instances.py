"""Random small instances of planning, and all of their plans by brute force.

Written on its own: nothing of the optimiser is used, plans are enumerated one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType, ModelFacts
from offramp.cluster.planning.goal import PlanningGoal
from offramp.engine.scheduling import DeviceLink

SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    batch_size: int
    splits: int
    period_s: float
    latency_s: float
    cost: float


def random_instance(seed: int) -> tuple[ModelFacts, Cluster, PlanningGoal]:
    """Up to 4 segments on up to 3 types of up to 3 devices; some are infeasible."""
    rng = np.random.default_rng(seed)
    segments = int(rng.integers(2, 5))
    places = [k for k in range(segments - 1) if rng.random() < 0.75]
    going_on = np.sort(rng.uniform(0.0, 1.0, len(places)))[::-1]
    model = ModelFacts(
        segments=segments,
        exit_after=tuple(places),
        going_on=tuple(float(share) for share in going_on),
        row_bytes=tuple(float(b) for b in rng.uniform(0, 2e3, segments - 1)),
        weight_bytes=tuple(float(b) for b in rng.uniform(1, 4, segments)),
        begins=segments - 1 if rng.random() < 0.15 else 0,
    )
    kinds = int(rng.integers(1, 4))
    types = [random_type(rng, number, model) for number in range(kinds)]
    names = [kind.name for kind in types]
    pairs = [(a, b, random_link(rng)) for a in names for b in names if rng.random() < 0.4]
    cluster = Cluster(types=tuple(types), link=random_link(rng), links=tuple(pairs))
    scale_s = float(np.mean([kind.times.segments_s[:, 1].sum() for kind in types]))
    goal = PlanningGoal(
        slo_s=math.inf if rng.random() < 0.2 else scale_s * float(rng.uniform(0.8, 8)),
        slack=float(rng.choice([0.0, 0.2])),
        rate_rps=None if rng.random() < 0.5 else float(rng.uniform(0.1, 6)) / scale_s,
        cost_factor=float(rng.choice([1.0, 0.7, 0.3])),
        wrapper=bool(rng.random() < 0.7),
        batch_sizes=SIZES,
    )
    return model, cluster, goal


def random_type(rng: np.random.Generator, number: int, model: ModelFacts) -> DeviceType:
    sizes = np.arange(SIZES[-1] + 1)
    speed, half = rng.uniform(0.5, 2), rng.uniform(0, 20)
    curve = (half + sizes) / (half + 1) * (sizes > 0) * speed
    times = DeviceTimes(
        segments_s=rng.uniform(0.5, 1.5, (model.segments, 1)) * curve * 1e-3,
        exits_s=rng.uniform(0, 0.2, (len(model.exit_after), 1)) * curve * 1e-3,
    )
    return DeviceType(
        name=f"type{number}",
        count=int(rng.integers(1, 4)),
        cost_per_hour=float(rng.integers(1, 5)),
        times=times,
        memory_bytes=math.inf if rng.random() < 0.6 else float(rng.uniform(2, 12)),
    )


def random_link(rng: np.random.Generator) -> DeviceLink:
    fast = rng.random() < 0.6
    bytes_per_s = math.inf if fast else float(rng.uniform(0.2e6, 5e6))
    return DeviceLink(bytes_per_s=bytes_per_s, latency_s=float(rng.choice([0.0, 2e-4])))


def batch_time(times: DeviceTimes, rows: Any, size: float) -> float:
    low = min(math.floor(size), SIZES[-1])
    high = min(low + 1, SIZES[-1])
    return float(rows[low] + (rows[high] - rows[low]) * (size - low))


def share_at(model: ModelFacts, segment: int) -> float:
    """Return the share of the entering rows that reach a segment."""
    share = 1.0
    for after, going in zip(model.exit_after, model.going_on, strict=True):
        if after < segment:
            share = max(going, 1e-6)
    return share


def split_time(
    model: ModelFacts, kind: DeviceType, first: int, last: int, size: int, *, wrapper: bool
) -> tuple[float, float]:
    """Seconds of segments first to last with the exits inside by which they take least.

    As rows leave, and if none does.
    """
    if sum(model.weight_bytes[first : last + 1]) > kind.memory_bytes:
        return math.inf, math.inf
    inside = [e for e, after in enumerate(model.exit_after) if first <= after < last]
    final = last == model.segments - 1
    ending = [e for e, after in enumerate(model.exit_after) if after == last and not final]
    best = (math.inf, math.inf)
    for count in range(len(inside) + 1):
        for chosen in itertools.combinations(inside, count):
            if not wrapper and len(chosen) < len(inside):
                continue
            if not ending and not final and inside and inside[-1] not in chosen:
                continue  # nothing but the last exit makes rows as few as they are behind it
            on = {model.exit_after[e]: e for e in (*chosen, *ending)}
            total, longest, rows = 0.0, 0.0, float(size)
            for segment in range(first, last + 1):
                total += batch_time(kind.times, kind.times.segments_s[segment], rows)
                longest += float(kind.times.segments_s[segment][size])
                if segment in on:
                    longest += float(kind.times.exits_s[on[segment]][size])
                    total += batch_time(kind.times, kind.times.exits_s[on[segment]], rows)
                    rows = size * share_at(model, segment + 1) / share_at(model, first)
            best = min(best, (total, longest))
    return best


def as_it_is(model: ModelFacts, kind: DeviceType, size: int) -> float:
    if sum(model.weight_bytes[model.begins :]) > kind.memory_bytes:
        return math.inf
    return float(kind.times.segments_s[model.begins :, size].sum())


def mixes(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    every = itertools.product(*(range(kind.count + 1) for kind in cluster.types))
    return (counts for counts in every if any(counts))


def whole(cluster: Cluster, counts: tuple[int, ...], each_s: list[float], size: int) -> Any:
    """Rate and slowest stage of the whole model on a mix of devices; None if it does not fit."""
    used = [s for s, count in zip(each_s, counts, strict=True) if count]
    if not all(math.isfinite(s) for s in used):
        return None
    pairs = zip(each_s, counts, strict=True)
    return sum(count * size / s for s, count in pairs if count), max(used)


def cost_of(cluster: Cluster, counts: tuple[int, ...]) -> float:
    return sum(c * kind.cost_per_hour for c, kind in zip(counts, cluster.types, strict=True))


def baseline_rate(model: ModelFacts, cluster: Cluster, goal: PlanningGoal) -> float:
    """The rate of the model as it is, within latency and cost; else the most it could be."""
    within, any_ = [], []
    for size in SIZES:
        each_s = [as_it_is(model, kind, size) for kind in cluster.types]
        for counts in mixes(cluster):
            if (found := whole(cluster, counts, each_s, size)) is None:
                continue
            rate, slowest_s = found
            any_.append(rate)
            latency_s = slowest_s + (size - 1) / 2 / rate
            most = goal.cost_factor * cluster.cost_per_hour * (1 + 1e-9)
            if latency_s <= goal.latency_s and cost_of(cluster, counts) <= most:
                within.append(rate)
    if within or any_:
        return float(max(within or any_))
    return sum(k.count / float(k.times.segments_s[:, 1].sum()) for k in cluster.types)


def candidates(
    model: ModelFacts, cluster: Cluster, goal: PlanningGoal, arrival_rps: float
) -> Iterator[Candidate]:
    """Yield all plans that the devices allow, at any time and cost."""
    for size in SIZES:
        plain = [(as_it_is(model, kind, size),) * 2 for kind in cluster.types]
        last = model.segments - 1
        exits = [
            split_time(model, kind, 0, last, size, wrapper=goal.wrapper) for kind in cluster.types
        ]
        for variant in (plain, exits):
            for counts in mixes(cluster):
                each_s = [mean_s for mean_s, _ in variant]
                if (found := whole(cluster, counts, each_s, size)) is not None:
                    pairs = zip(variant, counts, strict=True)
                    longest_s = max(longest_s for (_, longest_s), count in pairs if count)
                    wait_s = (size - 1) / 2 / arrival_rps
                    cost = cost_of(cluster, counts)
                    yield Candidate(size, 1, 1 / found[0], longest_s + wait_s, cost)
        times: dict[tuple[int, int, int], tuple[float, float]] = {
            (k, first, last): split_time(model, kind, first, last, size, wrapper=goal.wrapper)
            for k, kind in enumerate(cluster.types)
            for first in range(model.segments)
            for last in range(first, model.segments)
        }
        for cuts in range(model.segments):
            for places in itertools.combinations(range(model.segments - 1), cuts):
                bounds = [-1, *places, model.segments - 1]
                yield from placed(model, cluster, times, bounds, (size, arrival_rps))


def placed(
    model: ModelFacts,
    cluster: Cluster,
    times: dict[tuple[int, int, int], tuple[float, float]],
    bounds: list[int],
    given: tuple[int, float],
) -> Iterator[Candidate]:
    size, arrival_rps = given
    options = [(k, m) for k, kind in enumerate(cluster.types) for m in range(1, kind.count + 1)]
    splits = [(a + 1, b) for a, b in itertools.pairwise(bounds)]
    for chosen in itertools.product(options, repeat=len(splits)):
        used = [sum(m for k, m in chosen if k == n) for n in range(len(cluster.types))]
        if any(u > kind.count for u, kind in zip(used, cluster.types, strict=True)):
            continue
        period_s = latency_s = 0.0
        before = None
        for (first, last), (k, m) in zip(splits, chosen, strict=True):
            share = share_at(model, first)
            stage_s, longest_s = times[k, first, last]
            period_s = max(period_s, share * stage_s / (m * size))
            latency_s += longest_s + (size - 1) / 2 / (share * arrival_rps)
            if before is not None:
                link = cluster.link_between(cluster.types[before].name, cluster.types[k].name)
                each_s = model.row_bytes[first - 1] / link.bytes_per_s
                period_s = max(period_s, share * each_s)
                latency_s += size * each_s + link.latency_s
            before = k
        if math.isfinite(latency_s):
            yield Candidate(size, len(splits), period_s, latency_s, cost_of(cluster, tuple(used)))
