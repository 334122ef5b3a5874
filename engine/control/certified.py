"""Our controller: thresholds go as far as evidence carries, and back at once when it breaks.

    the bundle's policy is a level of a threshold path; all levels are tested on what is served
    a bolder level passed, and saves more:            it comes into force
    other thresholds or exits might save more:        a second threshold path is tested beside the first
    drift alarm, or far more disagreement of late:    no exit answers, all look on; start again

What is in force was therefore certified on the calibration data, or on what was served (see the
theorem in :mod:`.threshold_path`), or answers nothing early. Every statement made over the controller's
life, certificates and upper bounds, is right with probability 1 − α; they share α between them.

Works on release mode's feedback (all samples run to the end) as on audit mode's (few do, weighted
by how unlikely that was).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.bundle.bundle import TUNE
from offramp.bundle.policy import NEVER
from offramp.certify.agreement import AgreementCurve, fit_curves
from offramp.certify.betting import UpperBound
from offramp.certify.decision import FloatArray
from offramp.certify.observations import Observations
from offramp.certify.threshold_path import ThresholdPath, alpha_of
from offramp.certify.window import Weighted, Window
from offramp.engine.control.candidate_test import Trials
from offramp.engine.control.controller import ControlStatus, Event, Evidence, Job
from offramp.engine.control.costs import CostModel
from offramp.engine.control.counters import AgreementCounters
from offramp.engine.control.drift import DriftAlarm
from offramp.engine.control.policy_metrics import Standing
from offramp.engine.control.refit import Fitted, lay_path
from offramp.engine.control.savings import SavingsEstimator
from offramp.engine.control.settings import CertifiedSettings

__all__ = ["CertifiedController", "CertifiedSettings"]

_FOR_PATHS: Final = 0.8
"""Share of α for certificates; the rest is for upper bounds."""
_SETTLED: Final = 2048
"""Samples that a policy that answers stays in force for, unless the next one takes much less time:
while levels pass one after the other, versions would follow each other fast."""
_LEAP: Final = 0.95
"""Share of the mean time that is much less."""
_FEWEST: Final = 500
"""Audited samples, or as many as the others are worth, below which recent risk is not judged. With
fewer the drift alarm is quicker, and would only be put off by a change of policy."""
_DEVIATIONS: Final = 3.0
"""Standard errors by which recent risk must be above the bound to be taken for drift. It is looked
at again and again, and 2 were often reached by chance."""


class CertifiedController:
    """Keeps the constraint with confidence, and saves what can be saved within it."""

    def __init__(
        self,
        policy: ExitPolicy,
        costs: CostModel,
        records: Mapping[str, NDArray[Any]],
        settings: CertifiedSettings | None = None,
    ) -> None:
        """Start from a policy.

        Args:
            policy: In force at first if it comes with a promise that covers constraint and
                confidence; else its exits look on until levels are certified.
            costs: Of all K exits of the bundle.
            records: The bundle's calibration records: ``confidence`` float[K, n], ``prediction``
                [K, n], ``final_prediction`` [n] and ``split`` [n], of which 1 is to tune on.
            settings: Default: audit mode, 1 % at 95 %.

        Raises:
            ValueError: There is nothing to tune on, or the exits do not fit.
        """
        self._settings = settings = settings or CertifiedSettings()
        self._costs = costs
        self._initial = policy
        tune = _tuning_split(records, costs.exits)
        curves = fit_curves(tune.confidence, tune.agrees)
        exits = tuple(a.exit for a in policy.active)
        through = np.array([a.threshold for a in policy.active])
        fitted = lay_path(
            [curves[e] for e in exits],
            tune.of(exits),
            bound=settings.max_disagreement,
            through=through,
        )
        self._paths = 0
        """Threshold paths so far: α is shared among all that ever come."""
        self._policies = 0
        """Different policies that were in force, likewise."""
        self._window = Window(exits=costs.exits, capacity=settings.window)
        self._savings = SavingsEstimator(
            self._window,
            costs,
            max_disagreement=settings.max_disagreement,
            min_gain=settings.min_gain,
        )
        self._trials = Trials(self._window, self._savings, curves, settings, self._new_path)
        self._counters = AgreementCounters()
        self._drift = DriftAlarm(settings.max_disagreement, rate=settings.alarm_rate)
        self._events: list[Event] = []
        self._alarms = self._adjustments = 0
        self._unlooked = 0
        """Samples since the last look."""
        self._recovering = False
        """No exit answers yet since an alarm."""
        self._announced = False
        """Whether it was said that the policy in force is certified."""
        self._path = self._new_path(exits, fitted)
        self._level = 0
        """In force, of the threshold path."""
        self._calibrated = settings.covered_by(policy)
        """Whether the policy in force is the one that calibration certified, and no alarm rang."""
        self._policy = policy
        if self._calibrated or not exits:
            self._level = _level_of(self._path, through)
        else:
            self._policy = self._policy_at(0, policy.version + 1)
        self._standing = self._new_standing()

    @property
    def name(self) -> str:
        """As on the command line."""
        return "certified"

    @property
    def policy(self) -> ExitPolicy:
        """What shall be in force."""
        return self._policy

    @property
    def audit_probability(self) -> float:
        """For samples that are started from now on."""
        return 1.0 if self._settings.release else self._standing.audit_probability

    @property
    def wants_evidence(self) -> bool:
        """Whether audits can bring something beside noticing drift."""
        return self._needs_evidence()

    def observe(self, seen: Observations) -> None:
        """Count, test every level, watch for drift, and now and then look what to change."""
        if not len(seen):
            return
        self._counters.add(seen, version=self._policy.version)
        if seen.forced.any():
            seen = seen.take(~seen.forced)
        self._window.add(seen)
        self._test(seen)
        if self._watch(seen):
            self.invalidate("disagreement rose above the constraint")
            return
        self._unlooked += len(seen)
        if self._unlooked >= self._settings.look_every:
            self._look()
            self._unlooked = 0

    def take_job(self) -> Job | None:
        """A path to be fitted, once."""
        return self._trials.take_job()

    def finish(self, job: Job, result: Any) -> None:
        """Put a path that was fitted on trial, if it promises to save more."""
        self._end_trial(self._trials.finish(job, result, threshold_path=self._path))

    def consider(self, active: Sequence[int]) -> bool:
        """Try another set of exits, beside the one in force.

        Exits that are new look on at first, and answer nothing; when enough samples have passed
        them, a threshold path over the new set is tested, and comes into force if it certifies a level
        that saves more. Exits that do not answer at the level in force are just left out.

        Returns:
            Whether it will be tried: not while another trial is under way, nor before the policy
            in force answers anything again after an alarm.

        Raises:
            ValueError: The bundle has no such exit.
        """
        target = tuple(sorted({int(e) for e in active}))
        if target and not 0 <= target[0] <= target[-1] < self._costs.exits:
            raise ValueError(f"exits {list(active)} must be within 0 to {self._costs.exits - 1}")
        if self._trials.current or self._recovering or target == self._path.exits:
            return False
        gone = [e for e in self._path.exits if e not in target]
        answers = dict(zip(self._path.exits, self._thresholds(), strict=True))
        if set(target) < set(answers) and all(answers[e] > 1 for e in gone):
            self._path = self._path.without(gone)
            self._adjustments += 1
            self._note("exits", f"exits {gone} answered nothing, and are not in use any more")
        else:
            self._trials.begin(target, f"exits {list(target)}")
            self._note("exits", f"exits {list(target)} on trial")
        self._use_exits()
        return True

    def invalidate(self, why: str) -> None:
        """Answer nothing early from now on, forget, and test the same levels afresh.

        What the drift alarm does; to be called by whoever knows that samples are not what they
        were.

        Args:
            why: In a few words, for the log.
        """
        self._alarms += 1
        self._drift.reset()
        self._window.clear()
        self._trials.drifted()
        self._path = self._new_path(self._path.exits, self._path)
        self._recovering = True
        self._put_in_force(
            0,
            f"drift: {why}; no exit answers until levels are certified again",
            kind="alarm",
            warning=True,
        )

    def status(self) -> ControlStatus:
        """A snapshot."""
        evidence = self._evidence()
        upper = self._standing.bound.value
        if evidence is Evidence.CERTIFIED:
            upper = min(upper, self._settings.max_disagreement)
        return ControlStatus(
            controller=self.name,
            max_disagreement=self._settings.max_disagreement,
            confidence=self._settings.confidence,
            evidence=evidence,
            disagreement=self._counters.estimate(self._policy.version),
            disagreement_upper_bound=0.0 if evidence is Evidence.CAUTIOUS else upper,
            audit_probability=self.audit_probability,
            observed=self._counters.observed,
            audited=self._counters.audited,
            disagreed=self._counters.disagreed,
            alarms=self._alarms,
            tunings=self._trials.tunings,
            adjustments=self._adjustments,
            state=self._describe(evidence),
        )

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def state(self) -> Mapping[str, Any] | None:
        """Policy, threshold path with its evidence, counts and curves; a trial starts again."""
        return {
            "version": self._policy.version,
            "ladder": self._path.state(),
            "level": self._level,
            "calibrated": self._calibrated,
            "ladders": self._paths,
            "policies": self._policies,
            "bound": self._standing.bound.state(),
            "drift": self._drift.state(),
            "curves": np.array([[c.slope, c.intercept] for c in self._trials.curves]),
            "tally": self._counters.state(),
            "recovering": self._recovering,
            "counts": [self._alarms, self._trials.tunings, self._adjustments],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state, evidence included; a job that is out is not waited for.

        Raises:
            ValueError: It does not fit this controller.
        """
        try:
            self._restore(state)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"no state of the {self.name} controller: {error!r}") from error

    # What is observed

    def _test(self, seen: Observations) -> None:
        """Count a chunk as evidence for or against every level."""
        self._path.add(seen)
        self._trials.observe(seen)
        if not self._announced and self._evidence() is Evidence.CERTIFIED:
            self._announced = True
            self._note(
                "certified",
                f"disagreement is at most {self._settings.max_disagreement:.2%} with "
                f"{self._settings.confidence:.0%} confidence, from {self._path.samples} samples",
            )

    def _watch(self, seen: Observations) -> bool:
        """Follow the policy in force; whether it drifted."""
        mine = seen.policy_version == self._policy.version
        if not mine.all():
            seen = seen.take(mine)
        if not len(seen):
            return False
        loss = seen.loss
        self._standing.observe(seen, loss)
        return self._drift.add(loss, seen.audit_probability) is not None

    # What to change

    def _look(self) -> None:
        if (risk := self._recent_excess()) is not None:
            self.invalidate(f"{risk:.2%} disagreed of late")
            return
        self._climb()
        self._advance_trial()
        self._trials.seek(self._path)
        self._standing.follow(
            [a.exit for a in self._policy.active],
            needs_evidence=self._needs_evidence(),
            samples=self._unlooked,
        )

    def _recent_excess(self) -> float | None:
        """Disagreement of late, where it contradicts all that speaks for the level in force."""
        if self._level == 0:
            return None
        recent = self._savings.recent(self._path.exits)
        audited = float(recent.weight.sum()) / float(recent.weight.max(initial=1.0))
        if audited < _FEWEST:
            return None
        bound = self._settings.max_disagreement
        risk = recent.risk(self._path.thresholds[self._level])
        return risk if risk > bound + _DEVIATIONS * math.sqrt(bound / audited) else None

    def _climb(self) -> None:
        """Go to the boldest level that passed, if it is worth a change."""
        threshold_path = self._path
        if threshold_path.certified <= self._level:
            return
        found = self._savings.outlook(threshold_path)
        level = self._savings.best_certified(threshold_path, found)
        mean_ms = self._savings.mean_ms(threshold_path.exits, found.shares)
        is_worth_it = self._savings.is_gain(mean_ms[level], mean_ms[self._level])
        if 0 < self._level < level and self._standing.served < _SETTLED:
            is_worth_it = mean_ms[level] <= mean_ms[self._level] * _LEAP
        if level > self._level and is_worth_it:
            saved = 1 - mean_ms[level] / self._costs.source_ms
            self._put_in_force(level, f"bolder thresholds were certified; they save {saved:.1%}")

    def _advance_trial(self) -> None:
        """Put a level on trial in force that passed and saves more, or give the trial up."""
        trial = self._trials.current
        found = self._trials.advance(self._path, self._level, self.audit_probability)
        if trial is None or trial.threshold_path is None or not isinstance(found, int):
            self._end_trial(found if isinstance(found, str) else None)
            return
        self._adjustments += trial.exits != self._path.exits
        self._path = trial.threshold_path
        self._trials.end(adopted=True)
        self._put_in_force(found, f"{trial.purpose}: certified, and saves more")

    def _end_trial(self, why: str | None) -> None:
        trial = self._trials.current
        if why is None or trial is None:
            return
        self._trials.end()
        kind = "tuning" if trial.exits == self._path.exits else "exits"
        self._note(kind, f"{trial.purpose}: {why}")
        self._use_exits()

    def _needs_evidence(self) -> bool:
        """Whether audits can still bring something beside noticing drift."""
        if self._trials.current is not None:
            return True
        threshold_path = self._path
        if threshold_path.effort > self._settings.patience:
            return False
        if threshold_path.certified < self._level:
            return True
        goal = self._savings.hopeful(threshold_path.risk)
        mean_ms = self._savings.mean_ms(threshold_path.exits, threshold_path.shares)
        return goal > self._level and self._savings.is_gain(mean_ms[goal], mean_ms[self._level])

    # The policy in force

    def _put_in_force(
        self, level: int, why: str, *, kind: str = "policy", warning: bool = False
    ) -> None:
        """Change what is answered."""
        self._level = level
        self._calibrated = False
        self._announced = self._path.certified >= level > 0
        self._recovering = self._recovering and level == 0
        self._policy = self._policy_at(level, self._policy.version + 1)
        self._standing = self._new_standing()
        self._note(kind, f"policy {self._policy.version}: {why}", warning=warning)

    def _use_exits(self) -> None:
        """Put exits in use, or out of it, without a change to any answer."""
        policy = self._policy_at(self._level, self._policy.version + 1)
        if policy.active != self._policy.active:
            self._policy = policy

    def _new_standing(self) -> Standing:
        """Know nothing of a policy that answers otherwise than the one before."""
        self._policies += 1
        shares = np.zeros(self._costs.exits + 1)
        shares[[*self._path.exits, self._costs.exits]] = self._path.shares[self._level]
        alpha = alpha_of(self._policies, (1 - _FOR_PATHS) * self._settings.alpha)
        exits = [a.exit for a in self._policy.active]
        return Standing(self._costs, self._settings, exits, shares, alpha=alpha)

    def _policy_at(self, level: int, version: int) -> ExitPolicy:
        """The policy of a level, with the exits on trial looking on."""
        thresholds = dict(zip(self._path.exits, self._path.thresholds[level].tolist(), strict=True))
        answers = {e: t for e, t in thresholds.items() if t <= 1}
        initially = {a.exit: a.threshold for a in self._initial.active if a.threshold <= 1}
        exits = sorted({*thresholds, *self._trials.exits})
        return ExitPolicy(
            version=version,
            active=tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits),
            promise=self._initial.promise if answers == initially and not self._alarms else None,
        )

    def _thresholds(self) -> list[float]:
        """In force, of the threshold path's exits."""
        thresholds: list[float] = self._path.thresholds[self._level].tolist()
        return thresholds

    def _evidence(self) -> Evidence:
        if all(threshold > 1 for threshold in self._thresholds()):
            return Evidence.CAUTIOUS
        if self._path.certified >= self._level:
            return Evidence.CERTIFIED
        return Evidence.CALIBRATED if self._calibrated else Evidence.NONE

    def _describe(self, evidence: Evidence) -> str:
        if self._recovering:
            needed = math.log(1 / self._path.alpha) / (0.8 * self._settings.max_disagreement)
            return f"recovering: {self._path.samples} of about {needed:.0f} samples"
        if self._trials.current is not None:
            return self._trials.current.describe()
        if evidence is Evidence.CERTIFIED:
            return "gathering evidence for more" if self._needs_evidence() else "steady"
        return f"gathering evidence: {self._path.samples} samples"

    def _new_path(self, exits: tuple[int, ...], levels: Fitted | ThresholdPath) -> ThresholdPath:
        """A threshold path without evidence, at the share of α that comes next."""
        self._paths += 1
        return ThresholdPath(
            exits,
            levels.thresholds,
            levels.shares,
            bound=self._settings.max_disagreement,
            alpha=alpha_of(self._paths, _FOR_PATHS * self._settings.alpha),
        )

    def _note(self, kind: str, text: str, *, warning: bool = False) -> None:
        self._events.append(Event(kind=kind, text=text, warning=warning))

    def _restore(self, state: Mapping[str, Any]) -> None:
        threshold_path = ThresholdPath.restored(state["ladder"])
        level, version = int(state["level"]), int(state["version"])
        if threshold_path.exits and threshold_path.exits[-1] >= self._costs.exits:
            raise ValueError(
                f"state: exit {threshold_path.exits[-1]} is in use, the bundle has {self._costs.exits}"
            )
        if not 0 <= level < threshold_path.levels or version < self._initial.version:
            raise ValueError(f"state: there is no level {level} of policy {version}")
        curves = [AgreementCurve(slope=float(a), intercept=float(b)) for a, b in state["curves"]]
        if len(curves) != self._costs.exits:
            raise ValueError(
                f"state: {len(curves)} curves, the bundle has {self._costs.exits} exits"
            )
        bound = UpperBound(0.5)
        bound.restore(state["bound"])
        alarms, tunings, adjustments = (int(count) for count in state["counts"])
        threshold_paths, policies = int(state["ladders"]), int(state["policies"])
        calibrated, recovering = bool(state["calibrated"]), bool(state["recovering"])
        drift = DriftAlarm(self._settings.max_disagreement, rate=self._settings.alarm_rate)
        drift.restore(state["drift"])
        self._counters.restore(
            state["tally"]
        )  # the last that may refuse: until here all is as it was
        self._path, self._level, self._trials.curves = threshold_path, level, tuple(curves)
        self._calibrated, self._recovering = calibrated, recovering
        self._alarms, self._trials.tunings, self._adjustments = alarms, tunings, adjustments
        self._paths, self._policies = threshold_paths, policies - 1
        if recovering:
            self._trials.drifted()
        else:
            self._trials.end()
        self._policy = self._policy_at(level, version)
        self._announced = threshold_path.certified >= level > 0
        self._standing = self._new_standing()
        self._standing.bound, self._drift = bound, drift


def _tuning_split(records: Mapping[str, NDArray[Any]], exits: int) -> Weighted:
    """The samples of the calibration data that curves may be fitted on."""
    confidence = np.asarray(records["confidence"])
    if confidence.ndim != 2 or confidence.shape[0] != exits:
        raise ValueError(
            f"records hold confidences of shape {confidence.shape}, expected [{exits}, samples]"
        )
    rows = np.flatnonzero(records["split"] == TUNE)
    if not rows.size:
        raise ValueError("records hold no samples to tune on (split 1); compile the bundle again")
    agrees = np.asarray(records["prediction"] == records["final_prediction"])
    return Weighted(
        confidence=confidence[:, rows].astype(np.float32),
        agrees=agrees[:, rows],
        weight=np.ones(len(rows)),
    )


def _level_of(threshold_path: ThresholdPath, thresholds: FloatArray) -> int:
    """The level with these thresholds; it is one."""
    return int((threshold_path.thresholds == thresholds).all(axis=1).argmax())
