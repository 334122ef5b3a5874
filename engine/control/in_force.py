"""The policy in force: a level of a threshold path, and what may be said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify import NEVER, AgreementCurve, ThresholdPath, Weighted
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
        given = np.array([a.threshold for a in initial.active])
        bound = settings.max_disagreement
        tune = tune.of(exits)
        fitted = lay_path([curves[e] for e in exits], tune, bound=bound, anchored_at=given)
        self.path = self.new_path(exits, fitted)
        self.level = 0
        self.policy = initial
        self.calibrated = settings.covered_by(initial)
        """Whether it is the policy that calibration certified, and no alarm rang."""
        self.announced = False
        """Whether it was said that it is certified."""
        self.drifted = False
        """Whether an alarm rang ever."""
        self.recovering = False
        """Whether no exit answered yet since an alarm."""
        if self.calibrated or not exits:
            self.level = int((self.path.thresholds == given).all(axis=1).argmax())
        else:
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
        self.calibrated = False
        self.announced = self.path.certified >= level > 0
        self.recovering = self.recovering and level == 0
        self.policy = self._policy_at(level, self.policy.version + 1, shadow)
        self.metrics = self._new_metrics()

    def restart(self) -> None:
        """Answer nothing from now on, and test the same levels afresh."""
        self.drifted = self.recovering = True
        self.switch(0, path=self.new_path(self.path.exits, self.path))

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
        """What to keep over a restart; the keys are those of the first version of the format."""
        return {
            "version": self.policy.version,
            "ladder": self.path.state(),
            "level": self.level,
            "calibrated": self.calibrated,
            "ladders": self._paths,
            "policies": self._policies,
            "bound": self.metrics.bound.state(),
            "recovering": self.recovering,
        }

    def restore(self, state: Mapping[str, Any], *, drifted: bool) -> None:
        """Go on from a kept state, evidence included; if it is refused, nothing has changed."""
        path = ThresholdPath.restored(kept_part(state, "ladder"), exits=self._costs.exits)
        if path.bound != self._settings.max_disagreement:
            asked = self._settings.max_disagreement
            raise ValueError(f"state: levels were tested for {path.bound}, not for {asked}")
        level = kept_count(state, "level", most=path.levels - 1)
        version = kept_count(state, "version", least=self._initial.version)
        bound = UpperBound(0.5)
        bound.restore(kept_part(state, "bound"))
        paths, policies = (kept_count(state, name, least=1) for name in ("ladders", "policies"))
        calibrated, recovering = kept_flag(state, "calibrated"), kept_flag(state, "recovering")
        self.path, self.level, self.drifted = path, level, drifted
        self.calibrated, self.recovering = calibrated, recovering
        self.announced = path.certified >= level > 0
        self._paths, self._policies = paths, policies - 1  # the metrics count it once more
        self.policy = self._policy_at(level, version)
        self.metrics = self._new_metrics()
        self.metrics.bound = bound

    def _policy_at(self, level: int, version: int, shadow: Sequence[int] = ()) -> ExitPolicy:
        thresholds = dict(zip(self.path.exits, self.path.thresholds[level].tolist(), strict=True))
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
