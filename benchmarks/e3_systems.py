"""Systems of E3's evaluation as they are simulated: a model on a cluster's devices, by a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.planning.placing import StageSpan, place_plan, roles_for, stage_times
from offramp.engine.scheduling import (
    DeviceKind,
    Latencies,
    OperatingPoint,
    OperatingPoints,
    Placement,
    StreamPlacement,
)
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.tools.bench.common.outcomes import Outcomes
from offramp.tools.bench.common.traces import Trace, constant
from offramp.tools.bench.simulated_model import Behaviour
from offramp.tools.bench.simulation import draw_load, simulate

RECORDS = 4_096
MOST_WAITING = 10**6
IN_TIME = 0.999
"""Share of the requests that are in time at a rate that is sustained."""
BEARABLE = 0.9
"""Share of the requests in time after a third of the load below which a rate is far too high."""
MOST_GROWTH = 0.02
"""Largest increase of the mean delay of requests from the third quarter of a load to the last, as a
share of the objective. A backlog that grows at 1 % of overload exceeds it, long before requests are
late."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """A model on devices under a policy."""

    spans: tuple[StageSpan, ...]
    placement: Placement
    policy: str
    batch_size: int
    going_on: tuple[float, ...]
    """[stages]: share of the rows of each stage that is expected to continue after it."""

    @property
    def last_split(self) -> int:
        """Number of a stream that prefers the model's end."""
        last = len(self.spans) - 1
        return next(n for n, s in enumerate(self.placement.streams) if last in s.prefers)


def spans_of(
    model: ModelFacts, exits: Sequence[int], borders: Sequence[int] = ()
) -> tuple[StageSpan, ...]:
    """Cut a model after the segments of active exits, and after the last of each split."""
    after = {model.exit_after[exit_]: exit_ for exit_ in exits}
    last = model.segments - 1
    ends = sorted({*after, *borders, last})
    firsts = [0, *(end + 1 for end in ends[:-1])]
    exits_at = [*(after.get(end) for end in ends[:-1]), MODEL_END]
    return tuple(zip(firsts, ends, exits_at, strict=True))


def exits_of(plan: ClusterPlan) -> list[int]:
    """Return the exits that any split of a plan uses."""
    return sorted(plan.exits())


def shared(
    model: ModelFacts, cluster: Cluster, size: int, policy: str, exits: Sequence[int] = ()
) -> System:
    """Return a system in which every device serves all stages."""
    spans = spans_of(model, exits)
    every = frozenset(range(len(spans)))
    placement = Placement(
        stages=len(spans),
        streams=tuple(
            StreamPlacement(kind=name, prefers=every, holds=every) for name in cluster.device_types
        ),
        kinds=tuple(
            DeviceKind(name=kind.name, seconds=stage_times(kind.times, spans, size))
            for kind in cluster.types
        ),
        row_bytes=(0.0, *(model.crossing_bytes(first) for first, _, _ in spans[1:])),
        link=cluster.link,
        links=cluster.links,
    )
    return _system(model, spans, placement, policy, size)


def planned(plan: ClusterPlan, model: ModelFacts, cluster: Cluster, *, steals: bool) -> System:
    """Return a plan's splits on its devices; with stealing, its idle devices help too."""
    borders = [split.last_segment for split in plan.splits]
    spans = spans_of(model, exits_of(plan), borders)
    roles = roles_for(plan, cluster.device_types)
    own = [
        frozenset(range(role.segments[0], role.segments[1] + 1) if role.segments else ())
        for role in roles
    ]
    placement = place_plan(
        plan,
        roles,
        spans,
        model=model,
        cluster=cluster,
        max_batch_size=plan.batch_size,
        held=None if steals else own,
    )
    return _system(model, spans, placement, "refill", plan.batch_size)


def _system(
    model: ModelFacts,
    spans: tuple[StageSpan, ...],
    placement: Placement,
    policy: str,
    batch_size: int,
) -> System:
    shares = [model.shares[first] for first, _, _ in spans]
    behind = [*shares[1:], shares[-1]]
    return System(
        spans=spans,
        placement=placement,
        policy=policy,
        batch_size=batch_size,
        going_on=tuple(float(b / a) for a, b in zip(shares, behind, strict=True)),
    )


def draw_depths(going_on: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Draw int64 [records]: the first exit that is sure of each row.

    ``going_on`` has the share of rows that continue after each exit.
    """
    drawn = np.random.default_rng(seed).random(RECORDS)
    depths: NDArray[np.int64] = (np.asarray(going_on)[None, :] > drawn[:, None]).sum(axis=1)
    return depths


def behaviour_of(system: System, depths: NDArray[np.int64]) -> Behaviour:
    """Return the behaviour of rows: each leaves at the first active exit of at least its depth."""
    leaves_at = np.full(len(depths), len(system.spans) - 1)
    for stage, (_, _, exit_) in reversed(list(enumerate(system.spans))):
        if exit_ is not None and exit_ >= 0:
            leaves_at[depths <= exit_] = stage
    return Behaviour(
        exits=tuple(exit_ for _, _, exit_ in system.spans),
        leaves_at=leaves_at,
        agrees=np.ones((len(system.spans), len(depths)), np.bool_),
    )


def points_of(system: System, placement: Placement) -> OperatingPoints:
    """Return the one operating point of a system, to the model's end, with its stage times."""
    table = placement.kinds[0].seconds
    last = OperatingPoint(deepest=len(table) - 1, exit=MODEL_END, agreement=1.0)
    return OperatingPoints(points=(last,), latencies=Latencies(table, system.going_on))


def run(
    system: System,
    trace: Trace,
    depths: NDArray[np.int64],
    *,
    slo_s: float,
    slower: Mapping[int, float] | None = None,
    seed: int = 0,
) -> Outcomes:
    """Simulate a system under a load."""
    placement, streams = system.placement, len(system.placement.streams)
    scheduler = make_scheduler(
        PolicyName.parse(system.policy),
        points_of(system, placement),
        max_batch_size=system.batch_size,
        max_queue=MOST_WAITING,
        streams=streams,
        placement=placement,
    )
    return simulate(
        behaviour_of(system, depths),
        scheduler,
        placement.kinds[0].seconds,
        draw_load(trace.arrivals_s, trace.duration_s, len(depths), slo_s=slo_s, seed=seed),
        streams=streams,
        placement=placement,
        slower=slower,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Search for the highest rate that a system sustains."""

    slo_s: float
    duration_s: float
    """Duration of a load; the first half may fill a backlog, and is not evaluated."""
    precision: float = 0.02
    seed: int = 0

    def sustained(
        self,
        system: System,
        depths: NDArray[np.int64],
        guess_rps: float,
        slower: Mapping[int, float] | None = None,
    ) -> float:
        """Return the highest rate of evenly spaced requests that is sustained, to the precision."""

        def fine(rate: float) -> bool:
            for duration_s, holds in (
                (0.3 * self.duration_s, self._bearable),
                (self.duration_s, self._holds),
            ):
                trace = constant(rate, duration_s)
                outcomes = run(
                    system, trace, depths, slo_s=self.slo_s, slower=slower, seed=self.seed
                )
                if not holds(outcomes.drop_warm_up(duration_s / 2)):
                    return False
            return True

        step, low = 1.08, guess_rps
        while not fine(low):
            low, step = low / step, step**1.5
        high = low * step
        while fine(high):
            low, high = high, high * step
        while high / low > 1 + self.precision:
            middle = (low * high) ** 0.5
            if fine(middle):
                low = middle
            else:
                high = middle
        return low

    def _bearable(self, outcomes: Outcomes) -> bool:
        """Return True if a longer run is useful: most requests are in time so far."""
        return float(outcomes.within(1e3 * self.slo_s).mean()) > BEARABLE

    def _holds(self, outcomes: Outcomes) -> bool:
        """Return True if requests are in time, and the second half hardly later than the first."""
        if float(outcomes.within(1e3 * self.slo_s).mean()) < IN_TIME:
            return False
        first = outcomes.intended_s < outcomes.duration_s / 2
        latency_s = np.nan_to_num(outcomes.latency_s, nan=self.slo_s)
        growth_s = float(latency_s[~first].mean() - latency_s[first].mean())
        return growth_s <= MOST_GROWTH * self.slo_s
