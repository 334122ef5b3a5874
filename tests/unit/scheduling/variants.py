"""Shared parts of the tests of variants: tables of several variants, and their operating points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import (
    Latencies,
    OperatingPoint,
    OperatingPoints,
    StageTable,
    pareto_front,
)

SIZE = 4

ROWS = st.lists(st.integers(1, 12), min_size=SIZE, max_size=SIZE).map(
    lambda steps: [0.0, *(sum(steps[: i + 1]) / 8 for i in range(SIZE))]
)
"""Seconds of a stage by batch size, in eighths."""
TABLES = st.lists(st.lists(ROWS, min_size=1, max_size=3), min_size=2, max_size=4)
"""[variants][stages][SIZE + 1]."""


def latencies_of(tables: Sequence[Sequence[Sequence[float]]]) -> Latencies:
    full, *smaller = tables
    return Latencies(full, smaller=[StageTable(table) for table in smaller])


def all_points(latencies: Latencies, agreements: Sequence[float]) -> list[OperatingPoint]:
    """A point at every stage of every variant; ``agreements`` are taken in order, over and over."""
    places = [
        (variant, stage)
        for variant, table in enumerate(latencies.variants)
        for stage in range(table.stages)
    ]
    return [
        OperatingPoint(
            variant=variant,
            deepest=stage,
            exit=MODEL_END if stage == latencies.last(variant) else stage,
            agreement=agreements[number % len(agreements)],
        )
        for number, (variant, stage) in enumerate(places)
    ]


def front_of(latencies: Latencies, agreements: Sequence[float]) -> OperatingPoints:
    points = all_points(latencies, agreements)
    return OperatingPoints(points=pareto_front(points, latencies), latencies=latencies)


def dominates(better: OperatingPoint, point: OperatingPoint, latencies: Latencies) -> bool:
    """Return True if a point dominates by definition: no slower, no worse, one strictly better."""
    full_end = point.variant == 0 and point.exit == MODEL_END
    if full_end or better.variant == point.variant == 0:
        return False
    seconds = [latencies.span_s(0, p.deepest, SIZE, p.variant) for p in (better, point)]
    best = better.variant == 0 and better.exit == MODEL_END
    agrees = [2.0 if best else better.agreement, point.agreement]
    no_worse = seconds[0] <= seconds[1] and agrees[0] >= agrees[1]
    return no_worse and (seconds[0] < seconds[1] or agrees[0] > agrees[1])


def rising(values: Sequence[float]) -> bool:
    return all(before <= after for before, after in pairwise(values))
