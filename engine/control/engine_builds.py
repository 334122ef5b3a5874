"""When engines are built beside serving: one build at a time, within a budget of wall time.

TensorRT builds on the very GPU that serves, and times its kernels there: batches that run meanwhile
take longer. So builds have a share of wall time, stages must have been in use for a while before
one is built, a failure is followed by a pause that doubles, and no stage is tried for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

SAVED_UP_S: Final = 3600.0
"""The budget of so many seconds can be saved up; it is there at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBudget:
    """How much building may disturb serving.

    Over any t seconds, builds take at most ``share`` · (t + 3,600 s), and what the last of them
    took beyond: how long one takes shows only at its end, and is paid off before the next.
    """

    share: float
    """Of wall time; above 0, at most 1."""
    settle_s: float = 60.0
    """How long stages must have been in use: exits come and go."""
    longest_s: float = 1800.0
    """A build that takes longer is ended, and counts as failed."""
    pause_s: float = 300.0
    """After a failure; doubled with each further one in a row."""
    longest_pause_s: float = 4 * 3600.0
    tries: int = 2
    """How often a stage is asked for at most."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share is {self.share}, expected above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """A build that is to be started."""

    model: str
    units: tuple[str, ...]
    """Names of the engines, rising."""


class BuildDecisions:
    """Decides when which engines are built; sans I/O, ``now_s`` of one clock never falls."""

    def __init__(self, budget: BuildBudget, now_s: float) -> None:
        self._budget = budget
        self._wanted: dict[str, dict[str, float]] = {}
        """By model: the engines it lacks, and since when."""
        self._tried: dict[tuple[str, str], int] = {}
        self._running: tuple[BuildRequest, float] | None = None
        self._left_s = budget.share * SAVED_UP_S
        """What builds may take now; below 0 while one is paid off."""
        self._counted_s = self._not_before_s = now_s
        self._failures = 0

    def want(self, model: str, units: Collection[str], now_s: float) -> None:
        """Say which engines a model lacks now, all of them."""
        before = self._wanted.get(model, {})
        self._wanted[model] = {unit: before.get(unit, now_s) for unit in units}

    def start(self, now_s: float) -> BuildRequest | None:
        """Give the build that is to be started now, if any: the model that waits longest."""
        self._earn(now_s)
        if self._running is not None or now_s < self._not_before_s or self._left_s <= 0.0:
            return None
        waiting = {model: self._due(model, now_s) for model in self._wanted}
        models = [model for model, units in waiting.items() if units]
        if not models:
            return None
        model = min(models, key=lambda name: min(self._wanted[name].values()))
        for unit in waiting[model]:
            self._tried[model, unit] = self._tried.get((model, unit), 0) + 1
        request = BuildRequest(model=model, units=tuple(sorted(waiting[model])))
        self._running = request, now_s
        return request

    def overdue(self, now_s: float) -> bool:
        """Whether the build that runs has to be ended."""
        return self._running is not None and now_s - self._running[1] > self._budget.longest_s

    def ended(self, now_s: float, *, succeeded: bool) -> None:
        """Say that the build that ran has ended."""
        assert self._running is not None, "none was started"
        request, started_s = self._running
        self._running = None
        self._left_s -= now_s - started_s
        self._earn(now_s)  # after what was spent: no more than an hour's can be saved up
        self._failures = 0 if succeeded else self._failures + 1
        if self._failures:
            pause_s = self._budget.pause_s * 2.0 ** min(self._failures - 1, 30)
            self._not_before_s = now_s + min(pause_s, self._budget.longest_pause_s)
        # What was built is taken into use now: it may be asked for again when that did not help.
        still = self._wanted.get(request.model, {})
        still.update((unit, now_s) for unit in request.units if unit in still)

    def _due(self, model: str, now_s: float) -> list[str]:
        """The engines to build together: all that may be tried, once all have settled."""
        budget = self._budget
        units = {u: since for u, since in self._wanted[model].items() if self._may_try(model, u)}
        settled = all(now_s - since >= budget.settle_s for since in units.values())
        return list(units) if settled else []

    def _may_try(self, model: str, unit: str) -> bool:
        return self._tried.get((model, unit), 0) < self._budget.tries

    def _earn(self, now_s: float) -> None:
        earned_s = self._budget.share * (now_s - self._counted_s)
        self._counted_s = now_s
        self._left_s = min(self._left_s + earned_s, self._budget.share * SAVED_UP_S)
