"""The active policy: a level of a threshold path, and the statements that hold for it.

This module also has the policy's metrics, the audit rate, and the policy that is active after a
restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify import (
    NEVER,
    AgreementCurve,
    FloatArray,
    Observations,
    ThresholdPath,
    Weighted,
    count_answers,
)
from offramp.certify.agreement import Fitted, lay_path
from offramp.certify.betting import UpperBound
from offramp.certify.kept import kept_count, kept_flag, kept_part
from offramp.certify.threshold_path import alpha_of
from offramp.engine.control.control_settings import CertifiedSettings
from offramp.engine.control.controller import Evidence
from offramp.engine.control.costs import CostModel
from offramp.engine.control.counters import ControlCounters
from offramp.engine.control.shift import ALIKE, ShiftGuard

_FOR_PATHS: Final = 0.8
"""Share of α (1 − confidence level) for certificates; the remainder is for upper bounds."""


class ActivePolicy:
    """Decides what is answered early, and makes statements about it, each with its share of α."""

    def __init__(
        self,
        initial: ExitPolicy,
        curves: Sequence[AgreementCurve],
        tune: Weighted,
        costs: CostModel,
        settings: CertifiedSettings,
    ) -> None:
        """Make a path that has the initial policy as a level; start there if a promise covers it.

        ``curves`` are of all K exits; ``tune``, at least one sample, is used to choose levels.
        """
        self._initial = initial
        self._costs = costs
        self._settings = settings
        self._paths = 0
        """Number of threshold paths so far: α is shared among all paths."""
        self._policies = 0
        """Number of different policies that were active so far: policies, too, share α."""
        exits = tuple(a.exit for a in initial.active)
        self._given = np.array([a.threshold for a in initial.active])
        bound = settings.max_disagreement
        tune = tune.of(exits)
        fitted = lay_path([curves[e] for e in exits], tune, bound=bound, anchored_at=self._given)
        self._compiled = self.limited(exits, fitted)
        self.path, self.level = self._compiled_path()
        self.calibrated = settings.covered_by(initial)
        """True if this is the policy that calibration certified, and no alarm fired."""
        self.policy = initial
        self.announced = False
        """True if the policy's certification was reported."""
        self.drifted = False
        """True if an alarm ever fired."""
        self.recovering = False
        """True if no exit has answered yet since an alarm."""
        self._held: tuple[int, ExitPolicy, PolicyMetrics] | None = None
        """Level that was learned before a restart and is held back, with its policy and metrics."""
        self._holds_compiled = False
        """True if the compiled thresholds are active while a learned level is held back."""
        if not self.calibrated and exits:
            self.policy = self._policy_at(0, initial.version + 1)
        self.metrics = self._new_metrics()

    @property
    def thresholds(self) -> dict[int, float]:
        """Thresholds of the path's exits at the active level."""
        row: list[float] = self.path.thresholds[self.level].tolist()
        return dict(zip(self.path.exits, row, strict=True))

    @property
    def evidence(self) -> Evidence:
        """Kind of evidence for the policy."""
        if self._holds_compiled:
            return Evidence.CALIBRATED
        if all(threshold > 1 for threshold in self.thresholds.values()):
            return Evidence.CONSERVATIVE
        if self.path.certified >= self.level:
            return Evidence.CERTIFIED
        return Evidence.CALIBRATED if self.calibrated else Evidence.NONE

    @property
    def audit_probability(self) -> float:
        """Audit probability of samples started from now on, unless all are audited."""
        return 1.0 if self._settings.release else self.metrics.audit.value

    def switch(
        self, level: int, *, path: ThresholdPath | None = None, shadow: Sequence[int] = ()
    ) -> None:
        """Activate another level, of the same path by default; this changes early answers.

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
        """Answer nothing early from now on, and test the same levels again."""
        self.drifted = self.recovering = True
        self.switch(0, path=self.new_path(self.path.exits, self.path))

    def restrict_to_compiled(self) -> bool:
        """Restrict early answers to those of the compiled policy, after a restart.

        Returns whether this reduces early answers. Samples are served under the compiled thresholds
        if no evidence contradicts them and all their exits are in use; else under the most
        aggressive level that answers no more samples early than they do.
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
        """Activate the level that is held back."""
        assert self._held is not None, "nothing is held back"
        self.level, learned, self.metrics = self._held
        self._held, self._holds_compiled = None, False
        self.policy = replace(learned, version=self.policy.version + 1)

    def forget_learned(self) -> bool:
        """Drop the held-back level if the compiled thresholds are active; return whether so."""
        if not self._holds_compiled:
            return False
        self._held, self._holds_compiled, self.announced = None, False, False
        self.path, self.level = self._compiled_path()
        self.calibrated = True
        self.policy = self._policy_at(self.level, self.policy.version + 1)
        self.metrics = self._new_metrics()
        return True

    def limited(self, exits: tuple[int, ...], levels: Fitted) -> Fitted:
        """Drop levels that answer more early than the compiled policy, if settings forbid that."""
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
        """Use the path's exits, and others in shadow mode; this changes no answer."""
        policy = self._policy_at(self.level, self.policy.version + 1, shadow)
        if policy.active != self.policy.active:
            self.policy = policy

    def new_path(self, exits: tuple[int, ...], levels: Fitted | ThresholdPath) -> ThresholdPath:
        """Return a threshold path without evidence, at the next share of α."""
        self._paths += 1
        return ThresholdPath(
            exits,
            levels.thresholds,
            levels.shares,
            bound=self._settings.max_disagreement,
            alpha=alpha_of(self._paths, _FOR_PATHS * self._settings.alpha),
        )

    def state(self) -> dict[str, Any]:
        """Return the state to keep across a restart."""
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
        """Continue from a saved state, with its evidence.

        ValueError if the state is refused; nothing has changed then.
        """
        path = ThresholdPath.restored(kept_part(state, "path"), exits=self._costs.exits)
        if path.bound != self._settings.max_disagreement:
            asked = self._settings.max_disagreement
            raise ValueError(f"state: levels were tested for {path.bound}, not for {asked}")
        within = self._last_within(path.exits, path.thresholds)
        if self._settings.never_beyond_compiled and within < path.levels - 1:
            raise ValueError(
                "state: some levels answer more samples than the compiled policy, which is not "
                "allowed"
            )
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
        """Return a path without evidence, and its first level: the compiled level, if covered."""
        path = self.new_path(tuple(a.exit for a in self._initial.active), self._compiled)
        is_compiled = (path.thresholds == self._given).all(axis=1)
        return path, int(is_compiled.argmax()) if self._settings.covered_by(self._initial) else 0

    def _last_within(self, exits: Sequence[int], thresholds: FloatArray) -> int:
        """Return the last level with only such early answers as the initial policy also gives.

        ``thresholds`` are float64[levels, exits]. Thresholds fall along a path, so earlier levels
        answer no more either.
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
        """Start new metrics, for a policy with other early answers than the previous policy."""
        self._policies += 1
        shares = np.zeros(self._costs.exits + 1)
        shares[[*self.path.exits, self._costs.exits]] = self.path.shares[self.level]
        exits = [a.exit for a in self.policy.active]
        alpha = alpha_of(self._policies, (1 - _FOR_PATHS) * self._settings.alpha)
        return PolicyMetrics(self._costs, self._settings, exits, shares, alpha=alpha)


_STEPS_PER_HALVING: Final = 4
_UP: Final = 1.2
"""Factor by which the desired audit probability must exceed the next step before q moves there, so
that q does not oscillate."""
_MEMORY: Final = 2048.0
"""Samples after which the weight of earlier samples in the shares has fallen to about a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Limits on how many audits are made."""

    budget: float = 0.05
    """Largest share of all compute (audits included) that audits may take; in (0, 1)."""
    least: float = 0.01
    """Lower bound of the audit probability, in (0, 1]. It takes precedence over the budget."""
    steady: float = 0.25
    """Share of the budget that is used once no more evidence is needed: enough to detect drift."""
    every: int = 512
    """Smallest number of samples between two changes of the audit probability."""

    def __post_init__(self) -> None:
        for name in ("budget", "least", "steady"):
            value = getattr(self, name)
            if not 0 < value <= 1 or (name == "budget" and value == 1):
                raise ValueError(f"{name} is {value}, expected above 0, below 1")


def affordable(shares: FloatArray, latency_ms: FloatArray, budget: float) -> float:
    """Return the largest audit probability within the budget, a share of all compute, in (0, 1].

    ``shares``, float64[active + 1], are the shares of samples answered at each exit in use, and at
    the end. ``latency_ms`` is the time until each of these answers, including all exits
    (:meth:`.CostModel.latency_ms`).
    """
    without = float(shares @ latency_ms)
    more = float(shares @ (latency_ms[-1] - latency_ms))
    if more <= 0:
        return 1.0
    return min(1.0, budget / (1 - budget) * without / more)


class AuditRate:
    """The active audit probability; it changes rarely, in steps of a factor 2^(1/4).

    The audit rate provides as much evidence as is needed, within a share of all compute. An audit
    runs a sample that was answered at exit e to the end: its cost is the time from e to the end.
    Let C be the mean time that stages take for a sample without audits, and E the mean time from
    the answer to the end (0 for samples that no exit answers). Audits with probability q take the
    share q E / (C + q E) of all compute. So a budget b allows q <= b / (1 − b) · C / E.
    """

    def __init__(self, settings: AuditSettings, shares: FloatArray, latency_ms: FloatArray) -> None:
        self._settings = settings
        self._since = 0
        self.set(self.aim(shares, latency_ms, needed=True))

    def aim(self, shares: FloatArray, latency_ms: FloatArray, *, needed: bool) -> float:
        """Return the desired probability; ``needed`` is whether evidence is still missing."""
        most = affordable(shares, latency_ms, self._settings.budget)
        wanted = most if needed else most * self._settings.steady
        return min(max(wanted, self._settings.least), 1.0)

    def set(self, wanted: float) -> None:
        """Set the step at or below the desired probability, in (0, 1], but at least ``least``."""
        steps = math.floor(np.log2(wanted) * _STEPS_PER_HALVING + 1e-9)
        self.value: float = max(2.0 ** (steps / _STEPS_PER_HALVING), self._settings.least)
        self._since = 0

    def follow(self, wanted: float, samples: int) -> None:
        """Move to the desired probability if it is far enough and the last change old enough."""
        self._since += samples
        if self._since < self._settings.every:
            return
        if wanted < self.value or wanted >= self.value * 2 ** (1 / _STEPS_PER_HALVING) * _UP:
            self.set(wanted)


class PolicyMetrics:
    """Metrics of one policy; a policy with other early answers starts with new metrics."""

    def __init__(
        self,
        costs: CostModel,
        settings: CertifiedSettings,
        exits: Sequence[int],
        shares: FloatArray,
        *,
        alpha: float,
    ) -> None:
        """Start without observations; ``exits`` are in use, some of them in shadow mode.

        ``shares``, float64[K + 1], are the expected shares of samples answered at each exit, the
        last at the end. The upper bound is ever wrong with a probability of at most ``alpha``.
        """
        self._costs = costs
        self._answered = shares.copy()
        """float64[K + 1]: samples answered at each exit, with decay."""
        self.bound = UpperBound(alpha)
        """Upper bound of the policy's risk."""
        self.served = 0
        """Samples seen that were served under the policy."""
        audits = AuditSettings(budget=settings.audit_budget, least=settings.least_budgeted)
        self.audit = AuditRate(audits, *self._shares(exits))

    def observe(self, seen: Observations, loss: FloatArray) -> None:
        """Add samples served under the policy, none of them forced, with losses float64[n]."""
        self.served += len(seen)
        self.bound.add(loss, largest=1 / float(seen.audit_probability.min()))
        self._answered *= math.exp(-len(seen) / _MEMORY)
        self._answered += count_answers(seen.answered_at, self._costs.exits)

    def follow(self, exits: Sequence[int], *, needs_evidence: bool, samples: int) -> None:
        """Adjust the audit probability for the exits in use, ``samples`` after the last call."""
        aim = self.audit.aim(*self._shares(exits), needed=needs_evidence)
        self.audit.follow(aim, samples)

    def _shares(self, exits: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Return the shares answered at the exits in use and the end, and the times until them."""
        answered = self._answered[[*exits, self._costs.exits]]
        return answered / max(float(answered.sum()), 1e-9), self._costs.latency_ms(exits)


class Resumption:
    """Holds back what was learned before a restart, and decides when to use or drop it.

    What was learned was certified on samples before the restart; the load after the restart may
    differ. So thresholds that answer more than the compiled policy are held back, and the
    confidences of served samples are compared with those before the restart
    (:class:`.ShiftGuard`). In the meantime the compiled thresholds are active; or, where these are
    not possible (an alarm fired, or the exits differ), the most aggressive certified level that
    answers no more than they do.

        alike:      after enough samples, what was learned becomes active again, with its evidence
        different:  it is dropped, and the server continues as without a saved state; where the
                    compiled thresholds are not possible, this is an alarm

    A learned policy that answers no more than the compiled one becomes active immediately.
    """

    def __init__(
        self, active_policy: ActivePolicy, counters: ControlCounters, guard: ShiftGuard | None
    ) -> None:
        """Start with nothing held back; without a guard, nothing is ever held back."""
        self._active, self._counters, self._guard = active_policy, counters, guard
        self.kept: Mapping[str, Any] | None = None
        """The restored state while its policy is held back; else ``None``."""

    def begin(self, state: Mapping[str, Any]) -> None:
        """Hold back the policy of a state that was just restored, if it answers more samples early.

        ValueError if the state has too few samples to compare with.
        """
        if self._guard is None:
            return
        if not self._active.restrict_to_compiled():
            self._guard.watch(self._active.policy)
            return
        if not self._guard.compare_with_past(self._active.policy):
            raise ValueError("state: 'recent' has too few samples to compare with")
        self.kept = state
        text = f"thresholds stay within the compiled ones until {ALIKE:,} samples look like those"
        self._note(f"{text} before the restart")

    def resume_if_matching(self) -> None:
        """Activate what was learned once enough samples look like those before the restart."""
        if self._guard is None or self.kept is None or not self._guard.matches_previous:
            return
        self._active.resume()
        version = self._active.policy.version
        self._counters.resume_estimate(kept_part(self.kept, "counters"), version=version)
        self.kept = None
        self._note("samples look like those before the restart; what was learned is active")

    def forget(self) -> bool:
        """Forget what was learned; return whether the compiled thresholds remain active."""
        kept, self.kept = self.kept, None
        if self._guard is None or kept is None or not self._active.forget_learned():
            return False
        self._guard.start_over(self._active.policy)
        self._note("samples differ from those before the restart; what was learned is dropped")
        return True

    def describe(self) -> str:
        """Return the progress of the comparison, as text for people."""
        alike = 0 if self._guard is None else self._guard.alike
        return f"as compiled: {alike:,} of {ALIKE:,} samples like those before the restart"

    def _note(self, why: str) -> None:
        self._counters.note("policy", f"policy {self._active.policy.version}: {why}")
