"""The loop that plans again while a split model is served (E3 3.1, 4), on its own thread.

Once a second the thread checks the workers, the current window of the batch profile, and the clock.
When planning is due (:mod:`.planning.replanning`), it plans for the forecast of the batch profile
and the present workers, and changes the plan if the gain suffices (:mod:`.split_change`). Errors
are logged in one line; serving continues with the active plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError
from offramp.cluster.planning.forecasting import Forecaster, forecast_next
from offramp.cluster.planning.goal import RefusedSegments
from offramp.cluster.planning.replanning import Due, ReplanGuard, ReplanRules
from offramp.cluster.planning.transition import splits_of
from offramp.cluster.serving.cluster_serving import describe_plan, served_facts
from offramp.cluster.serving.plan_status import PlanStatus, SplitStatus
from offramp.cluster.serving.profile_loop import ProfileLoop
from offramp.cluster.serving.split_change import SplitChange, SplitServing
from offramp.engine.models.served_model import ServedModel
from offramp.engine.scheduling.stragglers import ReplicaStatus
from offramp.engine.serving.periodic import FailureLog, PeriodicLoop

_log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Seconds between two checks."""
_DRAINING_PERIOD_S: Final = 0.02
"""Seconds between two checks while rows drain."""
GONE_AFTER_S: Final = 30.0
"""A worker that is out of service for this number of seconds counts as gone."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """Facts that the loop keeps about the active plan."""

    plan: ClusterPlan
    """The plan, predicted under the last forecast."""
    going_on: Mapping[int, float]
    """Share of rows that continues after each exit in the last forecast, by exit."""
    gone: frozenset[int] = frozenset()
    """Workers that the plan does not use because they were gone."""
    reason: str
    changes: int = 0
    given_up: int = 0
    changed_at_s: float | None = None
    changed_for: str = ""
    """Reason of the last change of plans; empty before the first."""
    failure: str = ""
    """Reason of the last failed change since the last successful change; each reason is logged
    once."""


class PlanLoop(PeriodicLoop):
    """Plans again for a split model, and changes the model's plan, until stopped."""

    def __init__(
        self,
        served: SplitServing,
        profiles: ProfileLoop,
        *,
        rules: ReplanRules | None = None,
        forecaster: Forecaster | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("plans")
        self._served = served
        self._profiles = profiles
        self._forecaster = forecaster
        self._clock = clock
        self._guard = ReplanGuard(rules)
        splits = served.splits
        shares = dict(zip(splits.model.exit_names, splits.model.going_on, strict=True))
        reason = "the configured plan" if splits.kept else "the first plan"
        self._known = _Known(plan=splits.plan, going_on=shares, reason=reason)
        self._lost_at_s: dict[int, float] = {}
        """Times at which lost workers were first seen as lost, by worker."""
        self._change: SplitChange | None = None
        self._refused: list[RefusedSegments] = []
        """Segments that devices could not load."""
        self._failures = FailureLog(_log, "%s: planning failed; its plan stays", served.name)

    def start(self) -> None:
        """Start the thread that plans again while serving."""
        self.begin()

    def stop(self) -> None:
        """Stop the loop; a change in progress stays incomplete. Blocks for seconds."""
        self.halt()
        self._served.deployments.cancel()
        self.end()

    def add(self, key: str, name: str, model: ServedModel) -> None:
        """Do nothing: a split model is the only model, and is never replaced."""

    def retire(self, key: str) -> None:
        """Do nothing: a split model is never replaced."""

    def remove(self, key: str, *, save: bool = True) -> None:
        """Do nothing."""

    def pause_s(self) -> float:
        """Return the period, which is short while rows drain."""
        return PERIOD_S if self._change is None else _DRAINING_PERIOD_S

    def poll(self) -> None:
        """Check once whether to plan, and continue a change in progress."""
        if not self._failures.run(self._poll):
            self._change = None

    def status(self, key: str) -> PlanStatus:  # noqa: ARG002 - there is one model
        """Return the status of the active plan; called by any thread."""
        served, known, splits = self._served, self._known, self._served.splits
        there = served.workers.there
        placed = served.executor.placed(served.name)
        statuses = [
            placed.stragglers.status(stream) if placed else ReplicaStatus.USUAL
            for stream in range(len(splits.roles))
        ]
        found = []
        for planned, segments in zip(splits.plan.splits, splits_of(splits.plan), strict=True):
            mine = [n for n, role in enumerate(splits.roles) if role.segments == segments]
            found.append(
                SplitStatus(
                    first_segment=segments[0],
                    last_segment=segments[1],
                    devices=tuple((r.device_type, r.count) for r in planned.replicas),
                    in_service=sum(there[n] for n in mine),
                    slow=sum(statuses[n] is ReplicaStatus.REDUCED for n in mine),
                    excluded=sum(statuses[n] is ReplicaStatus.EXCLUDED for n in mine),
                )
            )
        observed, _ = self._observed()
        changed = known.changed_at_s
        return PlanStatus(
            splits=tuple(found),
            spare=sum(role.segments is None for role in splits.roles),
            batch_size=splits.plan.batch_size,
            rate_rps=known.plan.rate_rps,
            latency_s=known.plan.latency_s,
            shares=tuple((e, share, observed.get(e)) for e, share in known.going_on.items()),
            changes=known.changes,
            given_up=known.given_up,
            changing=self._change is not None,
            reason=known.reason,
            changed_s=None if changed is None else self._clock() - changed,
            changed_for=known.changed_for,
        )

    def _poll(self) -> None:
        if self._served.splits.kept:
            return
        now_s = self._clock()
        gone = self._gone(now_s)
        if self._change is not None:
            if self._change.advance():
                self._conclude(self._change, now_s)
            return
        due = self._due(now_s, gone)
        if due is not None:
            self._plan(now_s, due, gone)

    def _gone(self, now_s: float) -> frozenset[int]:
        """Return the workers that have been out of service for :data:`GONE_AFTER_S`."""
        lost = [number for number, there in enumerate(self._served.workers.there) if not there]
        self._lost_at_s = {number: self._lost_at_s.get(number, now_s) for number in lost}
        return frozenset(n for n, at_s in self._lost_at_s.items() if now_s >= at_s + GONE_AFTER_S)

    def _due(self, now_s: float, gone: frozenset[int]) -> Due | None:
        """Return why planning is due; ``None`` if planning is not due.

        Planning is due if a worker of the plan is gone.
        """
        if self._lacks(gone) and gone != self._known.gone:
            return "window"
        observed, rows = self._observed()
        exits = [exit_ for exit_ in self._known.going_on if exit_ in observed]
        return self._guard.due(
            now_s,
            observed=[observed[exit_] for exit_ in exits],
            forecast=[self._known.going_on[exit_] for exit_ in exits],
            rows=rows,
        )

    def _lacks(self, gone: frozenset[int]) -> bool:
        roles = self._served.splits.roles
        return any(roles[number].segments is not None for number in gone)

    def _observed(self) -> tuple[dict[int, float], int]:
        """Return the shares that continued in the current window, by exit, and the row count."""
        running = self._profiles.running(self._served.name)
        if running is None or not running.windows:
            return {}, 0
        (window,), (shares,) = running.windows, running.going_on()
        found = {e: float(share) for e, share in enumerate(shares) if np.isfinite(share)}
        return found, max(window.decided)

    def _plan(self, now_s: float, due: Due, gone: frozenset[int]) -> None:
        """Plan for the forecast on the present workers, and begin a change if needed."""
        served, splits = self._served, self._served.splits
        self._known.gone = gone
        excluded = self._excluded()
        model, cluster = self._facts(due), self._cluster(gone | excluded)
        if cluster is None:
            self._known.reason = "no worker is available to plan for"
            return
        current = _with_exits(splits.plan, model)
        goal = replace(splits.goal, refused=(*splits.goal.refused, *self._refused))
        decision = self._guard.decide(now_s, current, model, cluster, goal, due=due)
        self._known.reason = decision.reason
        self._known.going_on = dict(zip(model.exit_names, model.going_on, strict=True))
        if decision.plan is None:
            self._fail(decision.reason)
            return
        self._known.plan = decision.plan
        if not decision.changed and not self._lacks(gone):
            return
        reason = decision.reason if decision.changed else "workers of the active plan are gone"
        self._known.reason = reason
        try:
            self._change = SplitChange(
                served, decision.plan, model, gone=gone, excluded=excluded, clock=self._clock
            )
        except PlanError as error:
            self._guard.given_up()
            self._fail(f"{reason}, but {error}")
            return
        _log.info(
            "%s: the plan changes (%s): %s",
            served.name,
            reason,
            describe_plan(decision.plan),
        )

    def _conclude(self, change: SplitChange, now_s: float) -> None:
        """Record and log the result of a finished change."""
        self._change = None
        if change.failure is not None:
            self._guard.given_up()
            self._fail(f"the change was given up: {change.failure}")
            if change.refused is not None:  # the next plan avoids these
                self._refused.append(change.refused)
                self._guard.plan_again()
            return
        known = self._known
        known.changes += 1
        known.changed_at_s, known.changed_for, known.failure = now_s, known.reason, ""
        _log.info("%s: the plan is changed", self._served.name)

    def _fail(self, reason: str) -> None:
        known, splits = self._known, self._served.splits
        known.given_up += 1
        known.plan, known.reason = splits.plan, reason
        if reason != known.failure:
            _log.warning("%s: the plan stays: %s", self._served.name, reason)
        known.failure = reason

    def _facts(self, due: Due) -> ModelFacts:
        """Return the model with the forecast shares of the exits that run now."""
        served, splits = self._served, self._served.splits
        profile, running = self._profiles.profile(served.name), self._profiles.running(served.name)
        if profile is None or running is None:
            return splits.model
        if due == "parted":  # the current window counts as the last one
            profile = replace(profile, windows=(*profile.windows, *running.windows))
        if not profile.windows:
            return splits.model  # nothing was observed: keep the planned shares
        forecast = forecast_next(profile, self._forecaster)
        exits = served.executor.deployment(served.name).plan.exits
        shares = {exit_: forecast.going_on[exit_] for exit_ in exits}
        return served_facts(served.deployments.bundle, shares, served.deployments.mode)

    def _excluded(self) -> frozenset[int]:
        """Return the slow workers (stragglers) that the next plan must not use (E3 3.3)."""
        placed = self._served.executor.placed(self._served.name)
        if placed is None:
            return frozenset()
        streams = range(len(self._served.splits.roles))
        status = placed.stragglers.status
        return frozenset(n for n in streams if status(n) is ReplicaStatus.EXCLUDED)

    def _cluster(self, without: frozenset[int]) -> Cluster | None:
        """Return the devices of all workers but ``without``; ``None`` if none are left."""
        splits = self._served.splits
        kinds = [role.device_type for n, role in enumerate(splits.roles) if n not in without]
        if not kinds:
            return None
        return splits.cluster.of_devices(kinds)


def _with_exits(plan: ClusterPlan, model: ModelFacts) -> ClusterPlan:
    """Return a plan with the exits that run now, which control may have changed."""
    after = dict(zip(model.exit_names, model.exit_after, strict=True))
    splits = []
    for split in plan.splits:
        inside = range(split.first_segment, split.last_segment + 1)
        exits = tuple(exit_ for exit_, segment in after.items() if segment in inside)
        replicas = tuple(replace(r, exits=exits) for r in split.replicas)
        splits.append(replace(split, replicas=replicas))
    return replace(plan, splits=tuple(splits))
