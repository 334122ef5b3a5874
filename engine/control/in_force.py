"""The policy in force: a level of a threshold path, and what may be said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify import NEVER, AgreementCurve, FloatArray, ThresholdPath, Weighted
from offramp.certify.betting import UpperBound
from offramp.certify.fitting import Fitted, lay_path
from offramp.certify.kept import kept_count, kept_flag, kept_part
from offramp.certify.threshold_path import alpha_of
from offramp.engine.control.controller import Evidence
from offramp.engine.control.costs import CostModel
from offramp.engine.control.policy_metrics import PolicyMetrics
from offramp.engine.control.settings import CertifiedSettings

_FOR_PATHS: Final = 0.8
"""Share of α for certificates; the rest is for upper bounds."""


class PolicyInForce:
    """Says what is answered early, and makes statements about it, each with its share of α."""

    def __init__(
        self,
        initial: ExitPolicy,
        curves: Sequence[AgreementCurve],
        tune: Weighted,
        costs: CostModel,
        settings: CertifiedSettings,
    ) -> None:
        """Lay a path that the initial policy is a level of, and start at it if it is covered.

        ``curves`` are of all K exits, and levels are chosen by ``tune``, at least one sample.
        """
        self._initial = initial
        self._costs = costs
        self._settings = settings
        self._paths = 0
        """Threshold paths so far: α is shared among all that ever come."""
        self._policies = 0
        """Different policies that were in force, likewise."""
        exits = tuple(a.exit for a in initial.active)
        self._given = np.array([a.threshold for a in initial.active])
        bound = settings.max_disagreement
        tune = tune.of(exits)
        fitted = lay_path([curves[e] for e in exits], tune, bound=bound, anchored_at=self._given)
        self._compiled = self.limited(exits, fitted)
        self.path, self.level = self._compiled_path()
        self.calibrated = settings.covered_by(initial)
        """Whether it is the policy that calibration certified, and no alarm rang."""
        self.policy = initial
        self.announced = False
        """Whether it was said that it is certified."""
        self.drifted = False
        """Whether an alarm rang ever."""
        self.recovering = False
        """Whether no exit answered yet since an alarm."""
        self._held: tuple[int, ExitPolicy, PolicyMetrics] | None = None
        """The level that was learned before a restart and is held back, and what belongs to it."""
        self._holds_compiled = False
        """Whether the compiled thresholds are in force meanwhile."""
        if not self.calibrated and exits:
            self.policy = self._policy_at(0, initial.version + 1)
        self.metrics = self._new_metrics()

    @property
    def thresholds(self) -> dict[int, float]:
        """Thresholds of the path's exits."""
        row: list[float] = self.path.thresholds[self.level].tolist()
        return dict(zip(self.path.exits, row, strict=True))

    @property
    def evidence(self) -> Evidence:
        """What stands behind the policy."""
        if self._holds_compiled:
            return Evidence.CALIBRATED
        if all(threshold > 1 for threshold in self.thresholds.values()):
            return Evidence.CONSERVATIVE
        if self.path.certified >= self.level:
            return Evidence.CERTIFIED
        return Evidence.CALIBRATED if self.calibrated else Evidence.NONE

    @property
    def audit_probability(self) -> float:
        """For samples that are started from now on, while nothing was invalidated."""
        return 1.0 if self._settings.release else self.metrics.audit.value

    def switch(
        self, level: int, *, path: ThresholdPath | None = None, shadow: Sequence[int] = ()
    ) -> None:
        """Put another level in force, of the same path by default; changes what is answered.

        ``shadow`` are exits of a candidate, which run in shadow mode.
        """
        self.path, self.level = path or self.path, level
        self._held, self._holds_compiled = None, False
        self.calibrated = False
        self.announced = self.path.certified >= level > 0
        self.recovering = self.recovering and level == 0
        self.policy = self._policy_at(level, self.policy.version + 1, shadow)
        self.metrics = self._new_metrics()

    def restart(self) -> None:
        """Answer nothing from now on, and test the same levels afresh."""
        self.drifted = self.recovering = True
        self.switch(0, path=self.new_path(self.path.exits, self.path))

    def hold_back(self) -> bool:
        """Keep to what the compiled policy answers, after a restart: whether less is answered.

        Samples are served under the compiled thresholds if nothing speaks against them and all
        their exits are in use; else under the most aggressive level that answers no more.
        """
        level = self._last_within(self.path.exits, self.path.thresholds)
        if self.level <= level:
            return False
        self._held = self.level, self.policy, self.metrics
        self.level, version = level, self.policy.version + 1
        compiled = {a.exit: a.threshold for a in self._initial.active}
        is_covered = self._settings.covered_by(self._initial) and not self.drifted
        self._holds_compiled = is_covered and compiled.keys() <= set(self.path.exits)
        if self._holds_compiled:
            self.policy = self._policy_of(dict.fromkeys(self.path.exits, NEVER) | compiled, version)
        else:
            self.policy = self._policy_at(level, version)
        self.metrics = self._new_metrics()
        return True

    def resume(self) -> None:
        """Put what is held back in force again."""
        assert self._held is not None, "nothing is held back"
        self.level, learned, self.metrics = self._held
        self._held, self._holds_compiled = None, False
        self.policy = replace(learned, version=self.policy.version + 1)

    def forget_learned(self) -> bool:
        """Forget what is held back, if the compiled thresholds are in force: whether they are."""
        if not self._holds_compiled:
            return False
        self._held, self._holds_compiled, self.announced = None, False, False
        self.path, self.level = self._compiled_path()
        self.calibrated = True
        self.policy = self._policy_at(self.level, self.policy.version + 1)
        self.metrics = self._new_metrics()
        return True

    def limited(self, exits: tuple[int, ...], levels: Fitted) -> Fitted:
        """Leave levels out that answer what the compiled policy does not, if none may."""
        if not self._settings.never_beyond_compiled:
            return levels
        end = self._last_within(exits, levels.thresholds) + 1
        return replace(
            levels,
            thresholds=levels.thresholds[:end],
            risk=levels.risk[:end],
            shares=levels.shares[:end],
        )

    def use_exits(self, shadow: Sequence[int]) -> None:
        """Use the path's exits, and others in shadow mode; changes no answer."""
        policy = self._policy_at(self.level, self.policy.version + 1, shadow)
        if policy.active != self.policy.active:
            self.policy = policy

    def new_path(self, exits: tuple[int, ...], levels: Fitted | ThresholdPath) -> ThresholdPath:
        """A threshold path without evidence, at the share of α that comes next."""
        self._paths += 1
        return ThresholdPath(
            exits,
            levels.thresholds,
            levels.shares,
            bound=self._settings.max_disagreement,
            alpha=alpha_of(self._paths, _FOR_PATHS * self._settings.alpha),
        )

    def state(self) -> dict[str, Any]:
        """What to keep over a restart."""
        return {
            "version": self.policy.version,
            "path": self.path.state(),
            "level": self.level,
            "calibrated": self.calibrated,
            "paths": self._paths,
            "policies": self._policies,
            "bound": self.metrics.bound.state(),
            "recovering": self.recovering,
        }

    def restore(self, state: Mapping[str, Any], *, drifted: bool) -> None:
        """Go on from a kept state, evidence included; if it is refused, nothing has changed."""
        path = ThresholdPath.restored(kept_part(state, "path"), exits=self._costs.exits)
        if path.bound != self._settings.max_disagreement:
            asked = self._settings.max_disagreement
            raise ValueError(f"state: levels were tested for {path.bound}, not for {asked}")
        within = self._last_within(path.exits, path.thresholds)
        if self._settings.never_beyond_compiled and within < path.levels - 1:
            raise ValueError("state: levels answer more than the compiled policy, and none may")
        level = kept_count(state, "level", most=path.levels - 1)
        version = kept_count(state, "version", least=self._initial.version)
        bound = UpperBound(0.5)
        bound.restore(kept_part(state, "bound"))
        paths, policies = (kept_count(state, name, least=1) for name in ("paths", "policies"))
        calibrated, recovering = kept_flag(state, "calibrated"), kept_flag(state, "recovering")
        self.path, self.level, self.drifted = path, level, drifted
        self.calibrated, self.recovering = calibrated, recovering
        self.announced = path.certified >= level > 0
        self._paths, self._policies = paths, policies - 1  # the metrics count it once more
        self.policy = self._policy_at(level, version)
        self.metrics = self._new_metrics()
        self.metrics.bound = bound

    def _compiled_path(self) -> tuple[ThresholdPath, int]:
        """A path without evidence, and the level to start at: the compiled policy if it may be."""
        path = self.new_path(tuple(a.exit for a in self._initial.active), self._compiled)
        is_compiled = (path.thresholds == self._given).all(axis=1)
        return path, int(is_compiled.argmax()) if self._settings.covered_by(self._initial) else 0

    def _last_within(self, exits: Sequence[int], thresholds: FloatArray) -> int:
        """The last of float64[levels, exits] that answers nothing that the initial policy does not.

        Thresholds fall along a path, so that all levels before it answer nothing more either.
        """
        compiled = {a.exit: a.threshold for a in self._initial.active}
        least = np.array([compiled.get(e, NEVER) for e in exits])
        is_beyond = ((thresholds < least) & (thresholds <= 1)).any(axis=1)
        return (int(is_beyond.argmax()) if is_beyond.any() else len(thresholds)) - 1

    def _policy_at(self, level: int, version: int, shadow: Sequence[int] = ()) -> ExitPolicy:
        thresholds = zip(self.path.exits, self.path.thresholds[level].tolist(), strict=True)
        return self._policy_of(dict(thresholds), version, shadow)

    def _policy_of(
        self, thresholds: dict[int, float], version: int, shadow: Sequence[int] = ()
    ) -> ExitPolicy:
        answers = {e: t for e, t in thresholds.items() if t <= 1}
        initially = {a.exit: a.threshold for a in self._initial.active if a.threshold <= 1}
        exits = sorted({*thresholds, *shadow})
        keeps_promise = answers == initially and not self.drifted
        return ExitPolicy(
            version=version,
            active=tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits),
            promise=self._initial.promise if keeps_promise else None,
        )

    def _new_metrics(self) -> PolicyMetrics:
        """Know nothing of a policy that answers otherwise than the one before."""
        self._policies += 1
        shares = np.zeros(self._costs.exits + 1)
        shares[[*self.path.exits, self._costs.exits]] = self.path.shares[self.level]
        exits = [a.exit for a in self.policy.active]
        alpha = alpha_of(self._policies, (1 - _FOR_PATHS) * self._settings.alpha)
        return PolicyMetrics(self._costs, self._settings, exits, shares, alpha=alpha)
