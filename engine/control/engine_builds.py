"""Decisions when to build engines while serving: one build at a time, within a time budget.

TensorRT builds on the GPU that serves, and times its kernels there, so batches that run at the same
time take longer. Therefore builds have a limited share of wall time, stages must have been in use
for a while before one is built, the pause after a failure doubles, and the tries per stage are
limited.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

SAVED_UP_S: Final = 3600.0
"""Seconds for which the budget can be saved up; as much is available at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBudget:
    """Limits on how much building may disturb serving.

    Over any t seconds, builds take at most ``share`` · (t + 3,600 s), plus the excess of the last
    build: its duration is known only at its end, and is paid off before the next build.
    """

    share: float
    """Share of wall time; above 0, at most 1."""
    settle_s: float = 60.0
    """Time that stages must have been in use: exits change often."""
    longest_s: float = 1800.0
    """Time limit of a build; a longer build is stopped, and counts as failed."""
    pause_s: float = 300.0
    """Pause after a failure; doubled with each further failure in a row."""
    longest_pause_s: float = 4 * 3600.0
    tries: int = 2
    """Largest number of build attempts per stage."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share is {self.share}, expected above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """Missing engines of a model that are to be built next."""

    model: str
    units: tuple[str, ...]
    """Names of the engines, in ascending order."""


class BuildDecisions:
    """Decides when which engines are built; sans I/O. ``now_s`` is of one monotonic clock."""

    def __init__(self, budget: BuildBudget, now_s: float) -> None:
        self._budget = budget
        self._wanted: dict[str, dict[str, float]] = {}
        """Engines that each model lacks, with the time in seconds since which each has been
        missing."""
        self._tried: dict[tuple[str, str], int] = {}
        self._running: tuple[BuildRequest, float] | None = None
        self._left_s = budget.share * SAVED_UP_S
        """Build time available now; below 0 while a build is paid off."""
        self._counted_s = self._not_before_s = now_s
        self._failures = 0

    def want(self, model: str, units: Collection[str], now_s: float) -> None:
        """Set the names of all engines that a model lacks now."""
        before = self._wanted.get(model, {})
        self._wanted[model] = {unit: before.get(unit, now_s) for unit in units}

    def start(self, now_s: float) -> BuildRequest | None:
        """Return the build to start now, if any: a build for the model that waits longest."""
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
        """Return whether the running build must be stopped."""
        return self._running is not None and now_s - self._running[1] > self._budget.longest_s

    def ended(self, now_s: float, *, succeeded: bool) -> None:
        """Record that the running build has ended."""
        assert self._running is not None, "none was started"
        request, started_s = self._running
        self._running = None
        self._left_s -= now_s - started_s
        self._earn(now_s)  # after the deduction: at most one hour's budget can be saved up
        self._failures = 0 if succeeded else self._failures + 1
        if self._failures:
            pause_s = self._budget.pause_s * 2.0 ** min(self._failures - 1, 30)
            self._not_before_s = now_s + min(pause_s, self._budget.longest_pause_s)
        # Built engines are loaded now. If the model still lacks them, they may be requested again.
        still = self._wanted.get(request.model, {})
        still.update((unit, now_s) for unit in request.units if unit in still)

    def _due(self, model: str, now_s: float) -> list[str]:
        """Return all engines with tries left, to build together.

        The result is empty until all of them were in use for ``settle_s``.
        """
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
