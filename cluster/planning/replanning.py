"""Decides when to plan again and whether to change plans; hysteresis prevents flapping.

Planning is due every window, as in E3 (4), or immediately when observed and forecast shares differ
(3.1 says "drastically", without a number). The new plan is used only if it is better by a margin
under the same forecast, and only after a pause since the last change, because a transition loads
weights and drains batches.

Suppose that the goal is the highest rate, and that forecast noise changes a plan's rate by at most
a factor of √(1 + margin). Then each new plan is truly better than the one before, and no earlier
plan can return. With other goals or more noise, only the pause limits how often plans change.
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
"""Number of windows after a change in which no other change is made."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRules:
    """Rules for making and changing plans."""

    window_s: float = WINDOW_S
    """Seconds after which planning is due again."""
    margin: float = 0.1
    """Share by which the rate or the cost of a plan must be better than that of the active plan. A
    plan for a wrong forecast loses 6 % of the rate on average (``benchmarks/forecasts.py``), and a
    change should gain more than this."""
    pause_s: float = PAUSE_WINDOWS * WINDOW_S
    """Seconds after a change in which no other change is made."""
    parted: float = 0.15
    """Difference between an exit's observed and forecast share that makes planning due."""
    least_rows: int = 500
    """Smallest number of observed rows to compare shares: two standard deviations of a share are
    then at most 0.045."""

    def __post_init__(self) -> None:
        check_numbers(self, "window_s", "parted", above=0)
        check_numbers(self, "margin", "pause_s", "least_rows", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanDecision:
    """The plan to serve by, and the reason."""

    plan: ClusterPlan | None
    """Plan to serve by; ``None`` if no plan was active and no plan is possible."""
    changed: bool
    """``True`` if :attr:`plan` is not the plan that was active."""
    reason: str
    """Reason for the decision in words, for a log."""


class ReplanGuard:
    """Decides when to plan, and keeps the active plan if it is about as good.

    Callers pass the time.
    """

    def __init__(self, rules: ReplanRules | None = None) -> None:
        self.rules = rules or ReplanRules()
        self._planned_s = -math.inf
        self._changed_s = self._changed_before_s = -math.inf
        self._reported = False
        """``True`` if differing shares already made planning due in this window."""

    def due(
        self,
        now_s: float,
        *,
        observed: Sequence[float | None] = (),
        forecast: Sequence[float] = (),
        rows: int = 0,
    ) -> Due | None:
        """Return why planning is due now; ``None`` if it is not.

        ``observed`` [exits] are the shares of ``rows`` that continued since the window began,
        ``None`` for exits that were off. ``forecast`` [exits] are the shares that the active plan
        was made for.
        """
        if math.isinf(self._planned_s):
            return "first"
        if now_s >= self._planned_s + self.rules.window_s:
            return "window"
        if rows < self.rules.least_rows or self._reported:
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
        """Plan for ``model`` with its forecast shares, and change plans if the gain suffices.

        A plan whose devices are gone is replaced without regard to margin or pause.
        """
        self._reported = due == "parted"
        if due != "parted":  # windows are not shifted
            self._planned_s = now_s
        lost = current is not None and not fits_cluster(current, cluster)
        try:
            result = make_cluster_plan(model, cluster, goal)
        except InfeasiblePlanError as error:
            keeps = None if lost else current
            return ReplanDecision(plan=keeps, changed=lost, reason=f"no plan is possible: {error}")
        if current is None or lost:
            why = "the first plan" if current is None else "devices of the active plan are gone"
            return self._change(now_s, result.plan, why)
        expected = predict(current, model, cluster, arrival_rps=result.arrival_rps)
        return self.compare(now_s, expected, result.plan, goal)

    def compare(
        self, now_s: float, current: ClusterPlan, found: ClusterPlan, goal: PlanningGoal
    ) -> ReplanDecision:
        """Choose between the active plan and another, predicted under the same forecast."""

        def keep(reason: str) -> ReplanDecision:
            return ReplanDecision(plan=current, changed=False, reason=reason)

        gain = gain_of(current, found, goal, tolerance=self.rules.margin)
        if gain <= self.rules.margin:
            return keep(f"a change would gain {gain:.1%}, less than {self.rules.margin:.0%}")
        if now_s < self._changed_s + self.rules.pause_s:
            left_s = self._changed_s + self.rules.pause_s - now_s
            return keep(f"a change would gain {gain:.1%}, but the pause lasts {left_s:.0f} s more")
        words = "the active plan does not meet the goal any more"
        return self._change(now_s, found, words if math.isinf(gain) else f"better by {gain:.1%}")

    def given_up(self) -> None:
        """Record that the last decided change was not made, so that no pause follows."""
        self._changed_s = self._changed_before_s

    def plan_again(self) -> None:
        """Make planning due now, because the last plan cannot be served."""
        self._planned_s = -math.inf

    def _change(self, now_s: float, plan: ClusterPlan, reason: str) -> ReplanDecision:
        self._changed_before_s, self._changed_s = self._changed_s, now_s
        return ReplanDecision(plan=plan, changed=True, reason=reason)


def gain_of(
    current: ClusterPlan, found: ClusterPlan, goal: PlanningGoal, *, tolerance: float = 0.0
) -> float:
    """Return how much better ``found``, which meets the goal, is than ``current``, as a share.

    All figures are PREDICTED. The gain is in cost if the goal has a rate, else in rate. It is
    infinite if ``current`` no longer serves the goal's rate. It is also infinite if the latency of
    ``current`` exceeds the goal's latency by more than the share ``tolerance``, or exceeds the SLO.
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
    """Return whether a cluster has the devices that a plan uses."""
    there = {kind.name: kind.count for kind in cluster.types}
    return all(count <= there.get(name, 0) for name, count in plan.devices().items())
