"""The optimiser: computes a plan from a forecast of the exits and a cluster (E3 3.2, fig. 6).

The goal is either the highest rate of the devices, or the lowest cost for a given rate. Every batch
size is tried. A plan's latency (stages, links, and waits for batches to fill) is at most SLO · (1 −
slack); its cost is at most a given share of the cost of all devices. Among plans within 1 % of the
best period, the one with the fewest splits is chosen, then the cheapest, then the one with the
lowest latency. The paper minimises the longest stage, without a bound on the sum of the stages,
although this sum is the latency of a row.

Two candidates always have the whole model on every device, with the exits that save time and
without exits. So no plan is more than that 1 % worse than the unmodified model (the paper's can be,
5.9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import (
    ClusterPlan,
    InfeasiblePlanError,
    PlanError,
    PlannedSplit,
    Replicas,
)
from offramp.cluster.planning.goal import Limits, PlanningGoal, PlanningResult
from offramp.cluster.planning.prediction import describe_split, plan_of, replicas_of
from offramp.cluster.planning.recursion import ROUNDING, DeviceGrid, SplitSearch
from offramp.cluster.planning.stage_times import SplitTimes, check_times, split_times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnsplitModel:
    """Figures of the whole model as one split, for each count of devices, at one batch size."""

    times: SplitTimes
    exits: bool
    """``True`` if the exits that save time are on, ``False`` if no exit is on."""
    rate_rps: NDArray[np.float64]
    """[grid]: rows per second. The grid is every combination of device counts."""
    slowest_s: NDArray[np.float64]
    """[grid]: seconds of a batch if no row leaves; infinite if the model does not fit in memory."""

    @staticmethod
    def of(times: SplitTimes, counts: NDArray[np.int64], *, exits: bool) -> UnsplitModel:
        """Compute the figures for ``counts`` [grid, types]; devices share rows by their speed."""
        stage_s = times.seconds[:, 0, -1] if exits else times.unsplit_s
        longest_s = times.longest_s[:, 0, -1] if exits else times.unsplit_s
        fits = np.isfinite(stage_s)
        rates = np.where(fits, times.batch_size / np.where(fits, stage_s, 1.0), 0.0)
        return UnsplitModel(
            times=times,
            exits=exits,
            rate_rps=(counts * rates).sum(axis=1),
            slowest_s=np.where(counts > 0, longest_s, 0.0).max(axis=1),
        )


NEAR: Final = 0.01
"""Share by which a period may exceed the best one, for fewer splits or less cost."""
MOST_PLACES: Final = 10_000_000
"""Largest search: number of types · counts of one type · combinations of the counts of all
types."""


def make_cluster_plan(model: ModelFacts, cluster: Cluster, goal: PlanningGoal) -> PlanningResult:
    """Plan a model on a cluster.

    Raises:
        InfeasiblePlanError: No plan meets the goal; the error names the binding constraint.
        PlanError: The cluster has too many combinations of devices, no batch size is profiled on
            all device types, or the times belong to another model.
    """
    return _Optimiser(model, cluster, goal).result()


def check_size(cluster: Cluster) -> None:
    """Raise PlanError if a cluster has too many combinations of devices to search."""
    budget = [kind.count for kind in cluster.types]
    places = len(budget) * (max(budget) + 1) * math.prod(count + 1 for count in budget)
    if places > MOST_PLACES:
        raise PlanError(
            f"device counts {budget!s:.100} make {places:,} combinations to search, expected "
            f"at most {MOST_PLACES:,}; remove types, or plan for fewer devices"
        )


class _Optimiser:
    def __init__(self, model: ModelFacts, cluster: Cluster, goal: PlanningGoal) -> None:
        self._model, self._cluster, self._goal = model, cluster, goal
        check_times(model, cluster)
        check_size(cluster)
        budget = [kind.count for kind in cluster.types]
        most = min(kind.times.max_batch_size for kind in cluster.types)
        sizes = sorted({size for size in goal.batch_sizes if size <= most})
        if not sizes:
            raise PlanError(
                f"batch sizes {list(goal.batch_sizes)}: expected at least one size of at most "
                f"{most}, as all device types have times up to that"
            )
        self._grid = DeviceGrid(tuple(budget))
        prices = np.array([kind.cost_per_hour for kind in cluster.types])
        self._cost = self._grid.counts @ prices
        self._most = Limits(
            goal.latency_s * (1 + ROUNDING),
            goal.cost_factor * cluster.cost_per_hour * (1 + ROUNDING),
        )
        eliminated = int(np.argmax(budget))
        others = [0 if kind == eliminated else count for kind, count in enumerate(budget)]
        self._others = DeviceGrid(tuple(others))
        self._others_cost, self._price = self._others.counts @ prices, float(prices[eliminated])
        every = [split_times(model, cluster, size, goal) for size in sizes]
        counts = self._grid.counts
        self._as_it_is = [UnsplitModel.of(times, counts, exits=False) for times in every]
        self._wholes = self._as_it_is + [
            UnsplitModel.of(times, counts, exits=True) for times in every
        ]
        self._baseline = self._fastest_as_it_is()
        self._arrival_rps = goal.rate_rps or self._reference_rps()
        self._searches = [SplitSearch(model, cluster, times, self._arrival_rps) for times in every]

    def result(self) -> PlanningResult:
        """Search, and choose among the plans that are nearly optimal."""
        if self._goal.rate_rps is None:
            period_s, most = self._least_period(self._most) * (1 + NEAR), self._most
        else:
            period_s = 1.0 / self._goal.rate_rps
            cost = self._least_cost(period_s) * (1 + ROUNDING)
            most = Limits(self._most.latency_s, cost)
        if not math.isfinite(period_s) or not math.isfinite(most.cost):
            raise self._infeasible()
        return PlanningResult(
            plan=self._fewest_splits(period_s, most),
            baseline=self._baseline,
            arrival_rps=self._arrival_rps,
        )

    # The whole model as one split.

    def _fastest_as_it_is(self) -> ClusterPlan | None:
        """Return the fastest plan without exits, or the cheapest at the goal's rate."""
        best, best_rank = None, (math.inf, math.inf)
        for whole in self._as_it_is:
            wait = (whole.times.batch_size - 1) / 2
            with np.errstate(divide="ignore", invalid="ignore"):
                latency_s = whole.slowest_s + wait / (self._goal.rate_rps or whole.rate_rps)
            fine = self._within(latency_s, self._most)
            fine &= whole.rate_rps >= (self._goal.rate_rps or ROUNDING) * (1 - ROUNDING)
            for place in np.flatnonzero(fine):
                period_s = 1.0 / float(whole.rate_rps[place])
                rank = (period_s, float(self._cost[place]))
                if self._goal.rate_rps is not None:
                    rank = rank[::-1]
                if rank < best_rank:
                    arrival_rps = self._goal.rate_rps or float(whole.rate_rps[place])
                    best, best_rank = (whole, int(place), arrival_rps), rank
        return None if best is None else self._plan_unsplit(*best)

    def _reference_rps(self) -> float:
        """Return the baseline's rate, in rows per second.

        Without a baseline, it is the highest rate of the unmodified model, whatever its latency and
        cost.
        """
        if self._baseline is not None:
            return self._baseline.rate_rps
        rate_rps = max(float(whole.rate_rps.max()) for whole in self._as_it_is)
        if rate_rps > 0:
            return rate_rps
        # The whole model does not fit on any device: assume segments spread over all devices.
        times = [kind.times.segments_s[:, 1].sum() for kind in self._cluster.types]
        counts = [kind.count for kind in self._cluster.types]
        return sum(count / float(time_s) for count, time_s in zip(counts, times, strict=True))

    def _plan_unsplit(self, whole: UnsplitModel, place: int, arrival_rps: float) -> ClusterPlan:
        model, cluster, size = self._model, self._cluster, whole.times.batch_size
        first = 0 if whole.exits else model.begins
        segments = (first, model.segments - 1)
        replicas = [
            self._replicas(whole.times, (first, model.segments, kind, int(count)), on=whole.exits)
            for kind, count in enumerate(self._grid.counts[place])
            if count
        ]
        split = describe_split(
            model, cluster, segments, replicas, senders=(), batch_size=size, arrival_rps=arrival_rps
        )
        return plan_of(cluster, size, [split])

    # Splits.

    def _least_period(self, most: Limits) -> float:
        """Return the shortest period of a plan within the limits; infinite without such a plan."""
        best_s = min(
            (1 / float(rate[fine].max()) for rate, fine in self._whole_rates(most) if fine.any()),
            default=math.inf,
        )
        for search in self._most_promising_first(most):
            if search.least_latency_s() > most.latency_s:
                continue
            periods = search.periods(0.0, best_s * (1 - ROUNDING))
            low, high = 0, len(periods)  # the shortest possible one is in [low, high]
            if not high or not self._possible(search, float(periods[-1]), most):
                continue
            high -= 1
            while low < high:
                middle = (low + high) // 2
                if self._possible(search, float(periods[middle]), most):
                    high = middle
                else:
                    low = middle + 1
            best_s = float(periods[high])
        return best_s

    def _most_promising_first(self, most: Limits) -> list[SplitSearch]:
        """Return the searches, fastest whole model first: early results shorten later searches."""
        best = dict.fromkeys((s.times.batch_size for s in self._searches), 0.0)
        for whole in self._wholes:
            size = whole.times.batch_size
            fastest = whole.rate_rps[self._fine(whole, most)].max(initial=0.0)
            best[size] = max(best[size], float(fastest))
        return sorted(self._searches, key=lambda s: -best[s.times.batch_size])

    def _whole_rates(self, most: Limits) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        return [(whole.rate_rps, self._fine(whole, most)) for whole in self._wholes]

    def _fine(self, whole: UnsplitModel, most: Limits) -> NDArray[np.bool_]:
        """Return bool [grid]: whether the whole model, as one split, meets latency and cost."""
        wait_s = (whole.times.batch_size - 1) / 2 / self._arrival_rps
        return self._within(whole.slowest_s + wait_s, most) & (whole.rate_rps > 0)

    def _within(self, latency_s: NDArray[np.float64], most: Limits) -> NDArray[np.bool_]:
        """Return bool [grid]: whether a plan with this latency is within the limits."""
        there = np.isfinite(latency_s) & (latency_s <= most.latency_s)
        fine: NDArray[np.bool_] = there & (self._cost <= most.cost)
        return fine

    def _possible(self, search: SplitSearch, period_s: float, most: Limits) -> bool:
        """Return whether some plan of the search's batch size keeps this period and the limits."""
        steps = search.steps(period_s, most.latency_s)
        counted = search.extend(
            self._others, steps, search.begin(self._others), counting=True, once=False
        )
        cost = self._counted_cost(counted)
        place = int(cost.argmin())
        if not cost[place] <= most.cost or not math.isfinite(cost[place]):
            return False
        splits = search.trace(self._others, steps, [counted], place, counting=True)
        if search.latency_of(splits) <= most.latency_s:
            return True
        latency_s = self._latencies(search, period_s, most.latency_s)
        return bool(self._within(latency_s, most).any())

    def _least_cost_of(self, search: SplitSearch, period_s: float, most: Limits) -> float:
        """Return a lower bound on the cost of a batch size's plans; infinite if there is none."""
        steps = search.steps(period_s, most.latency_s)
        begun = search.begin(self._others)
        counted = search.extend(self._others, steps, begun, counting=True, once=False)
        return float(self._counted_cost(counted).min())

    def _counted_cost(self, counted: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the lowest cost of a plan, whatever its latency.

        The result has one value for each combination of device counts of the types that are not
        eliminated (:attr:`SplitSearch.eliminated`).
        """
        counts = counted[-1, :, :-1].min(axis=0)
        finite = np.isfinite(counts)
        cost = self._others_cost + np.where(finite, counts, 0.0) * self._price
        return np.where(finite, cost, np.inf)

    def _latencies(
        self, search: SplitSearch, period_s: float, most_s: float = math.inf
    ) -> NDArray[np.float64]:
        """Return the lowest latency of a plan, in seconds, for each combination of device counts.

        It is infinite if no plan is possible, or beyond ``most_s``.
        """
        begun = search.begin(self._grid)
        steps = search.steps(period_s, most_s)
        found = search.extend(self._grid, steps, begun, counting=False, once=False)
        least: NDArray[np.float64] = found[-1, :, :-1].min(axis=0)
        return least

    def _least_cost(self, period_s: float) -> float:
        """Return the lowest cost of a plan with at most this period; infinite without a plan."""
        best = math.inf
        for rate_rps, fine in self._whole_rates(self._most):
            enough = fine & (rate_rps * period_s >= 1 - ROUNDING)
            best = min(best, float(self._cost[enough].min(initial=math.inf)))
        for search in self._searches:
            if search.least_latency_s() > self._most.latency_s:
                continue
            bound = self._least_cost_of(search, period_s, self._most)
            if bound < best * (1 - ROUNDING) and bound <= self._most.cost:
                latency_s = self._latencies(search, period_s, self._most.latency_s)
                fine = self._within(latency_s, self._most)
                best = min(best, float(self._cost[fine].min(initial=math.inf)))
        return best

    def _fewest_splits(self, period_s: float, most: Limits) -> ClusterPlan:
        """Return the best plan within the limits: fewest splits, then cost, then latency."""
        found = self._best_unsplit(period_s, most)
        if found is not None:
            return found
        searches = [
            search
            for search in self._searches
            if self._least_cost_of(search, period_s, most) <= most.cost < math.inf
        ]
        counted = [search.begin(self._others) for search in searches]
        steps = [search.steps(period_s, most.latency_s) for search in searches]
        for splits in range(1, self._model.segments + 1):
            for number, search in enumerate(searches):
                counted[number] = search.extend(
                    self._others, steps[number], counted[number], counting=True, once=True
                )
            bounds = [float(self._counted_cost(table).min()) for table in counted]
            found = self._cheapest(searches, bounds, splits, (period_s, most))
            if found is not None:
                return found
        raise AssertionError("a plan was found before")

    def _cheapest(
        self,
        searches: Sequence[SplitSearch],
        bounds: Sequence[float],
        splits: int,
        within: tuple[float, Limits],
    ) -> ClusterPlan | None:
        """Return the plan with this number of splits that has the lowest cost, then latency."""
        period_s, most = within
        best, best_cost, best_latency_s = None, most.cost, math.inf
        for number in np.argsort(bounds, kind="stable"):
            search = searches[number]
            if bounds[number] > best_cost * (1 + ROUNDING) or not math.isfinite(bounds[number]):
                break
            steps = search.steps(period_s, most.latency_s)
            layers = [search.begin(self._grid)]
            for _ in range(splits):
                layers.append(
                    search.extend(self._grid, steps, layers[-1], counting=False, once=True)
                )
            latency_s = layers[-1][-1, :, :-1].min(axis=0)
            fine = self._within(latency_s, most)
            if not fine.any():
                continue
            cost = float(self._cost[fine].min())
            alike = np.where(fine & (self._cost <= cost * (1 + ROUNDING)), latency_s, np.inf)
            place = int(alike.argmin())
            cheaper = cost < best_cost * (1 - ROUNDING) or best is None
            alike_cost = cost <= best_cost * (1 + ROUNDING)
            if cheaper or (alike_cost and alike[place] < best_latency_s):
                traced = search.trace(self._grid, steps, layers, place, counting=False)
                best = self._plan_splits(search, traced)
                best_cost, best_latency_s = cost, float(alike[place])
        return best

    def _best_unsplit(self, period_s: float, most: Limits) -> ClusterPlan | None:
        best, best_rank = None, (math.inf, math.inf)
        for whole in self._wholes:
            fine = self._fine(whole, most) & (whole.rate_rps * period_s >= 1 - ROUNDING)
            for place in np.flatnonzero(fine):
                latency_s = float(whole.slowest_s[place])
                latency_s += (whole.times.batch_size - 1) / 2 / self._arrival_rps
                rank = (round(float(self._cost[place]), 9), latency_s)
                if rank < best_rank:
                    best, best_rank = (whole, int(place), self._arrival_rps), rank
        return None if best is None else self._plan_unsplit(*best)

    def _plan_splits(
        self, search: SplitSearch, traced: Sequence[tuple[int, int, int, int]]
    ) -> ClusterPlan:
        size = search.times.batch_size
        splits: list[PlannedSplit] = []
        for step in traced:
            splits.append(
                describe_split(
                    self._model,
                    self._cluster,
                    (step[0], step[1] - 1),
                    [self._replicas(search.times, step, on=True)],
                    senders=splits[-1].replicas if splits else (),
                    batch_size=size,
                    arrival_rps=self._arrival_rps,
                )
            )
        return plan_of(self._cluster, size, splits)

    def _replicas(
        self, times: SplitTimes, step: tuple[int, int, int, int], *, on: bool
    ) -> Replicas:
        start, end, kind, count = step
        exit_at = self._model.exit_at
        borders = [*times.exits_between(kind, start, end), end] if on else []
        exits = tuple(int(exit_at[border]) for border in borders if exit_at[border] >= 0)
        named = Replicas(
            device_type=self._cluster.types[kind].name,
            count=count,
            exits=exits,
            stage_s=0.0,
            longest_s=0.0,
        )
        segments = (start, end - 1)
        return replicas_of(self._model, self._cluster, segments, named, times.batch_size)

    # Reasons why no plan is possible.

    def _infeasible(self) -> InfeasiblePlanError:
        """Return the error for the first unmet constraint: memory, latency, cost, rate."""
        goal, most = self._goal, self._most
        if not math.isfinite(self._least_period(Limits(math.inf, math.inf))):
            return InfeasiblePlanError(
                "memory",
                f"memory: {sum(self._model.weight_bytes) / 1e6:,.1f} MB of weights do not fit on "
                f"{int(self._grid.counts[-1].sum())} devices; add devices, or larger ones",
            )
        if not math.isfinite(self._least_period(Limits(most.latency_s, math.inf))):
            least_s = min(float(self._latencies(s, math.inf).min()) for s in self._searches)
            return InfeasiblePlanError(
                "latency",
                f"latency: no plan is faster than {1e3 * least_s:,.2f} ms, expected at most "
                f"{1e3 * most.latency_s:,.2f} ms (the SLO of {1e3 * goal.slo_s:,.2f} ms less a "
                f"slack of {goal.slack:.0%}); raise the SLO, or lower the slack",
            )
        period_s = self._least_period(most)
        if not math.isfinite(period_s):
            return InfeasiblePlanError(
                "cost",
                f"cost: no plan costs at most {most.cost:,.4g} an hour ({goal.cost_factor:g} of "
                "all devices); raise the factor",
            )
        return InfeasiblePlanError(
            "rate",
            f"rate: no plan serves more than {1 / period_s:,.1f} rows/s, expected "
            f"{goal.rate_rps:,.1f}; add devices, a longer SLO, or a lower rate",
        )
