"""When to plan again, and whether to change to what was planned: hysteresis against flapping.

Planning is due every window, as E3 does it (4), or at once where what is observed and what was
forecast part (3.1 says "drastically", and gives no number). The better plan is taken only if it is
better by a margin under the same forecast, and not within a pause after the last change: a
transition loads weights and drains batches.

Where the highest rate is wanted, and the noise of forecasts moves the rate of no plan by more than
a factor of √(1 + margin) either way, each plan that is taken is truly better than the one before:
so none comes back. Otherwise the pause alone bounds how often plans change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from offramp.bundle.schema.serde import check_numbers
from offramp.cluster.planning.batch_profile import WINDOW_S
from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, InfeasiblePlanError
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.prediction import predict

Due: TypeAlias = Literal["first", "window", "parted"]
PAUSE_WINDOWS: Final = 5
"""Windows after a change in which there is no other."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRules:
    """How readily plans are made and changed."""

    window_s: float = WINDOW_S
    """Seconds after which planning is due again."""
    margin: float = 0.1
    """Share by which a plan must be better than the one in force, in rate or in cost. A plan for a
    wrong forecast loses some 6 % of the rate in the mean (``benchmarks/forecasts.py``): a change
    should gain more."""
    pause_s: float = PAUSE_WINDOWS * WINDOW_S
    """Seconds after a change in which there is no other."""
    parted: float = 0.15
    """Difference of an exit's share, observed and forecast, from which planning is due at once."""
    least_rows: int = 500
    """Rows observed below which a difference may be chance: with 500, two deviations are 0.045."""

    def __post_init__(self) -> None:
        check_numbers(self, "window_s", "parted", above=0)
        check_numbers(self, "margin", "pause_s", "least_rows", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanDecision:
    """The plan to serve by from now on, and why."""

    plan: ClusterPlan | None
    """``None`` where none was in force and none is possible."""
    changed: bool
    """Whether it is another one than was in force."""
    reason: str
    """In words, for a log."""


class ReplanGuard:
    """Says when to plan, and keeps a plan that is about as good; the caller tells the time."""

    def __init__(self, rules: ReplanRules | None = None) -> None:
        self.rules = rules or ReplanRules()
        self._planned_s = -math.inf
        self._changed_s = self._changed_before_s = -math.inf
        self._told = False
        """Whether planning was due in this window as shares parted: once is enough."""

    def due(
        self,
        now_s: float,
        *,
        observed: Sequence[float | None] = (),
        forecast: Sequence[float] = (),
        rows: int = 0,
    ) -> Due | None:
        """Say why planning is due now; ``None`` if it is not.

        ``observed`` [exits] are the shares that went on of ``rows`` since the window began,
        ``None`` of exits that were off; ``forecast`` [exits] those of the plan in force.
        """
        if math.isinf(self._planned_s):
            return "first"
        if now_s >= self._planned_s + self.rules.window_s:
            return "window"
        if rows < self.rules.least_rows or self._told:
            return None
        pairs = zip(observed, forecast, strict=True)
        parts = any(o is not None and abs(o - f) > self.rules.parted for o, f in pairs)
        return "parted" if parts else None

    def decide(
        self,
        now_s: float,
        current: ClusterPlan | None,
        model: ModelFacts,
        cluster: Cluster,
        goal: PlanningGoal,
        *,
        due: Due = "window",
    ) -> ReplanDecision:
        """Plan for ``model``, which has the forecast shares, and change plans if that is worth it.

        What a plan lost (devices that are gone) is no matter of margin or pause: it is replaced.
        """
        self._told = due == "parted"
        if due != "parted":  # windows go on as they were
            self._planned_s = now_s
        lost = current is not None and not fits_cluster(current, cluster)
        try:
            result = make_cluster_plan(model, cluster, goal)
        except InfeasiblePlanError as error:
            keeps = None if lost else current
            return ReplanDecision(plan=keeps, changed=lost, reason=f"no plan is possible: {error}")
        if current is None or lost:
            why = "the first plan" if current is None else "devices of the plan in force are gone"
            return self._change(now_s, result.plan, why)
        expected = predict(current, model, cluster, arrival_rps=result.arrival_rps)
        return self.compare(now_s, expected, result.plan, goal)

    def compare(
        self, now_s: float, current: ClusterPlan, found: ClusterPlan, goal: PlanningGoal
    ) -> ReplanDecision:
        """Choose between the plan in force and another, both predicted under the same forecast."""

        def keep(reason: str) -> ReplanDecision:
            return ReplanDecision(plan=current, changed=False, reason=reason)

        gain = gain_of(current, found, goal, tolerance=self.rules.margin)
        if gain <= self.rules.margin:
            return keep(f"a change would gain {gain:.1%}, less than {self.rules.margin:.0%}")
        if now_s < self._changed_s + self.rules.pause_s:
            left_s = self._changed_s + self.rules.pause_s - now_s
            return keep(
                f"a change would gain {gain:.1%}, and there is none for {left_s:.0f} s more"
            )
        words = "the plan in force does not meet the goal any more"
        return self._change(now_s, found, words if math.isinf(gain) else f"better by {gain:.1%}")

    def given_up(self) -> None:
        """Say that the change that was decided last was not made: there is no pause after it."""
        self._changed_s = self._changed_before_s

    def plan_again(self) -> None:
        """Have planning be due at once: what was planned cannot be."""
        self._planned_s = -math.inf

    def _change(self, now_s: float, plan: ClusterPlan, reason: str) -> ReplanDecision:
        self._changed_before_s, self._changed_s = self._changed_s, now_s
        return ReplanDecision(plan=plan, changed=True, reason=reason)


def gain_of(
    current: ClusterPlan, found: ClusterPlan, goal: PlanningGoal, *, tolerance: float = 0.0
) -> float:
    """How much better a plan is that meets the goal, as a share; both PREDICTED alike.

    In rate, or where a rate is asked for, in cost. Infinite if the plan in force does not serve the
    rate any more, or takes longer than the goal allows by a share of ``tolerance``, which is at the
    expense of the objective's slack.
    """
    late = current.latency_s > min(goal.latency_s * (1 + tolerance), goal.slo_s) * (1 + _ROUNDING)
    if goal.rate_rps is None:
        return math.inf if late else found.rate_rps / current.rate_rps - 1
    if late or current.rate_rps < goal.rate_rps * (1 - _ROUNDING):
        return math.inf
    if found.cost_per_hour == 0:
        return 0.0 if current.cost_per_hour == 0 else math.inf
    return current.cost_per_hour / found.cost_per_hour - 1


def fits_cluster(plan: ClusterPlan, cluster: Cluster) -> bool:
    """Whether a cluster has the devices that a plan uses."""
    there = {kind.name: kind.count for kind in cluster.types}
    return all(count <= there.get(name, 0) for name, count in plan.devices().items())
