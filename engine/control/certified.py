"""Our controller: thresholds go as far as evidence carries, and back at once when it breaks.

    the bundle's policy is a level of a ladder; all levels are tested on what is served
    a bolder level passed, and saves more:        it comes into force
    the level in force does worse than it may:    back to one that passed and does better
    drift alarm:                                  no exit answers, all look on; start again
    other thresholds or exits might save more:    a second ladder is tested beside the first

What is in force was therefore certified on the calibration data, or on what was served (see the
theorem in :mod:`.ladder`), or answers nothing early. Every statement made over the controller's
life, certificates and upper bounds, is right with probability 1 − α; they share α between them.

Works on release mode's feedback (all samples run to the end) as on audit mode's (few do, weighted
by how unlikely that was).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.bundle.policy import NEVER
from offramp.engine.control.agreement import AgreementCurve
from offramp.engine.control.audit import AuditRate, AuditSettings
from offramp.engine.control.betting import UpperBound
from offramp.engine.control.controller import ControlStatus, Event, Evidence, Job
from offramp.engine.control.costs import CostModel
from offramp.engine.control.drift import DEFAULT_RATE, DriftAlarm
from offramp.engine.control.ladder import Ladder, alpha_of, look_ahead
from offramp.engine.control.observations import Observations
from offramp.engine.control.prospects import Prospects
from offramp.engine.control.records import FloatArray
from offramp.engine.control.refit import Fitted, fit_curves, lay_path, refit
from offramp.engine.control.tally import Tally
from offramp.engine.control.window import Weighted, Window

_TUNE: Final = 1
"""Split of the calibration data that curves are fitted on."""
_FOR_LADDERS: Final = 0.8
"""Share of α for certificates; the rest is for upper bounds."""
_MEMORY: Final = 2048.0
"""Samples after which the shares answered at each exit have forgotten all but a third."""
_SETTLED: Final = 2048
"""Samples that a policy that answers stays in force for, unless the next one takes much less time:
while levels pass one after the other, versions would follow each other fast."""
_LEAP: Final = 0.95
"""Share of the mean time that is much less."""
_MOST_DOUBLINGS: Final = 6
"""Of the wait for the next path to be fitted."""
_FEWEST: Final = 500
"""Complete samples below which recent risk is not judged."""
_DEVIATIONS: Final = 3.0
"""Standard errors above the bound that make recent risk a reason to step down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedSettings:
    """What may be set."""

    max_disagreement: float = 0.01
    """The constraint, ε."""
    confidence: float = 0.95
    """1 − α, over the controller's life."""
    release: bool = False
    """Every sample runs to the end; else audits choose which do."""
    audit_budget: float = 0.05
    """Largest share of all compute that audits may take."""
    least_audit: float = 0.01
    """Audit probability that is never gone below."""
    alarm_rate: float = DEFAULT_RATE
    """False drift alarms per sample, at most."""
    min_gain: float = 0.01
    """Share of the mean time until the answer that a change of policy must save."""
    look_every: int = 256
    """Samples from one look at what could be changed to the next."""
    window: int = 4096
    """Complete samples that are kept to tune on."""
    tune_samples: int = 512
    """Complete samples that it takes to tune; they must be worth half as many unweighted ones."""
    retune_every: int = 16_384
    """Samples after which it is tried whether a new path would save more."""
    patience: int = 10_000
    """Audited samples without success after which no more are asked for, and another set of
    thresholds or exits on trial is dropped."""

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        for name in ("max_disagreement", "confidence", "audit_budget", "alarm_rate"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected above 0, below 1")
        for name in ("look_every", "window", "tune_samples", "retune_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.tune_samples > self.window:
            raise ValueError(
                f"tune_samples is {self.tune_samples}, more than the window of {self.window}"
            )


@dataclass(slots=True, kw_only=True)
class _Trial:
    """Other thresholds, perhaps of other exits, on their way into force."""

    exits: tuple[int, ...]
    purpose: str
    ladder: Ladder | None = None
    """``None`` while samples are collected that it is fixed on."""
    samples: int = 0
    """Seen since it began."""


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
        self._alpha = 1 - settings.confidence
        self._initial = policy
        tune = _tuning_split(records, costs.exits)
        self._curves = fit_curves(tune.confidence, tune.agrees)
        exits = tuple(a.exit for a in policy.active)
        through = np.array([a.threshold for a in policy.active])
        fitted = lay_path(
            [self._curves[e] for e in exits],
            tune.of(exits),
            bound=settings.max_disagreement,
            through=through,
        )
        self._ladders = 0
        """Ladders so far: α is shared among all that ever come."""
        self._policies = 0
        """Different policies that were in force, likewise."""
        self._ladder = self._next_ladder(exits, fitted)
        self._level = 0
        """In force, of the ladder."""
        self._calibrated = _covers(policy, settings)
        """Whether the policy in force is the one that calibration certified, and no alarm rang."""
        self._policy = policy
        self._trial: _Trial | None = None
        self._job: Job | None = None
        self._out: int | None = None
        """Number of the job that is being computed."""
        self._jobs = 0
        self._window = Window(exits=costs.exits, capacity=settings.window)
        self._prospects = Prospects(
            self._window,
            costs,
            max_disagreement=settings.max_disagreement,
            min_gain=settings.min_gain,
        )
        self._tally = Tally()
        self._drift = DriftAlarm(settings.max_disagreement, rate=settings.alarm_rate)
        self._events: list[Event] = []
        self._alarms = self._tunings = self._adjustments = 0
        self._unlooked = 0
        """Samples since the last look."""
        self._unfitted = 0
        """Samples since a path was last fitted."""
        self._fruitless = 0
        """Paths fitted since one last came into force; each doubles the wait for the next."""
        self._recovering = self._refit_due = False
        """No exit answers yet since an alarm; no path was fitted yet since an alarm."""
        self._was_certified = False
        if self._calibrated or not exits:
            self._level = _level_of(self._ladder, through)
        else:
            self._policy = self._policy_at(0, policy.version + 1)
        self._begin_policy()

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
        return 1.0 if self._settings.release else self._audit.value

    def observe(self, seen: Observations) -> None:
        """Count, test every level, watch for drift, and now and then look what to change."""
        if not len(seen):
            return
        self._tally.add(seen, version=self._policy.version)
        if seen.forced.any():
            seen = seen.take(~seen.forced)
        self._window.add(seen)
        self._test(seen)
        if self._watch(seen):
            self._sound_alarm()
            return
        self._unlooked += len(seen)
        self._unfitted += len(seen)
        if self._unlooked >= self._settings.look_every:
            self._look()
            self._unlooked = 0

    def take_job(self) -> Job | None:
        """A path to be fitted, once."""
        job, self._job = self._job, None
        return job

    def finish(self, job: Job, result: Any) -> None:
        """Put a path that was fitted on trial, if it promises to save more."""
        if job.number != self._out:
            return
        self._out = None
        trial = self._trial
        if trial is None:
            return
        if result is None or not self._prospects.promises_more(result, trial.exits, self._ladder):
            self._tunings += result is not None
            self._drop_trial("saves no more than what is in force")
            return
        self._tunings += 1
        self._set_curves(trial.exits, result.curves)
        trial.ladder = self._next_ladder(trial.exits, result)
        self._note("tuning", f"{trial.purpose}: {trial.ladder.levels} levels on trial")

    def consider(self, active: Sequence[int]) -> bool:
        """Try another set of exits, beside the one in force.

        Exits that are new look on at first, and answer nothing; when enough samples have passed
        them, a ladder over the new set is tested, and comes into force if it certifies a level
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
        if self._trial is not None or self._recovering or target == self._ladder.exits:
            return False
        gone = [e for e in self._ladder.exits if e not in target]
        answers = dict(zip(self._ladder.exits, self._thresholds(), strict=True))
        if set(target) < set(answers) and all(answers[e] > 1 for e in gone):
            self._ladder = self._ladder.without(gone)
            self._adjustments += 1
            self._note("exits", f"exits {gone} answered nothing, and are not in use any more")
        else:
            self._trial = _Trial(exits=target, purpose=f"exits {list(target)}")
            self._note("exits", f"exits {list(target)} on trial")
        self._use_exits()
        return True

    def status(self) -> ControlStatus:
        """A snapshot."""
        evidence = self._evidence()
        upper = self._bound.value
        if evidence is Evidence.CERTIFIED:
            upper = min(upper, self._settings.max_disagreement)
        return ControlStatus(
            controller=self.name,
            max_disagreement=self._settings.max_disagreement,
            confidence=self._settings.confidence,
            evidence=evidence,
            disagreement=self._tally.estimate(self._policy.version),
            disagreement_upper_bound=0.0 if evidence is Evidence.CAUTIOUS else upper,
            audit_probability=self.audit_probability,
            observed=self._tally.observed,
            audited=self._tally.audited,
            disagreed=self._tally.disagreed,
            alarms=self._alarms,
            tunings=self._tunings,
            adjustments=self._adjustments,
            state=self._describe(evidence),
        )

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def state(self) -> Mapping[str, Any] | None:
        """Policy, ladder with its evidence, counts and curves; a trial starts again."""
        return {
            "version": self._policy.version,
            "ladder": self._ladder.state(),
            "level": self._level,
            "calibrated": self._calibrated,
            "ladders": self._ladders,
            "policies": self._policies,
            "bound": self._bound.state(),
            "drift": self._drift.state(),
            "curves": np.array([[c.slope, c.intercept] for c in self._curves]),
            "tally": self._tally.state(),
            "recovering": self._recovering,
            "counts": [self._alarms, self._tunings, self._adjustments],
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
        self._ladder.add(seen)
        if self._trial is not None:
            self._trial.samples += len(seen)
            if self._trial.ladder is not None:
                self._trial.ladder.add(seen)
        if not self._was_certified and self._evidence() is Evidence.CERTIFIED:
            self._was_certified = True
            self._note(
                "certified",
                f"disagreement is at most {self._settings.max_disagreement:.2%} with "
                f"{self._settings.confidence:.0%} confidence, from {self._ladder.samples} samples",
            )

    def _watch(self, seen: Observations) -> bool:
        """Follow the policy in force; whether it drifted."""
        mine = seen.policy_version == self._policy.version
        if not mine.all():
            seen = seen.take(mine)
        if not len(seen):
            return False
        loss = seen.loss
        self._served += len(seen)
        self._bound.add(loss, largest=1 / float(seen.audit_probability.min()))
        self._answered *= math.exp(-len(seen) / _MEMORY)
        self._answered += np.bincount(seen.answered_at, minlength=self._costs.exits + 1)
        return self._drift.add(loss, seen.audit_probability) is not None

    def _sound_alarm(self) -> None:
        """Answer nothing early from now on, forget, and test the same levels afresh."""
        self._alarms += 1
        self._drift.reset()
        self._window.clear()
        self._trial = self._job = self._out = None
        self._ladder = self._next_ladder(self._ladder.exits, self._ladder)
        self._recovering = self._refit_due = True
        self._unfitted = self._fruitless = 0
        self._put_in_force(
            0, "drift: disagreement rose above the constraint; no exit answers now", kind="alarm"
        )

    # What to change

    def _look(self) -> None:
        if not self._step_down():
            self._climb()
        self._carry_trial_on()
        self._seek_trial()
        shares, latency_ms = self._shares()
        self._audit.follow(
            self._audit.aim(shares, latency_ms, needed=self._needs_evidence()), self._unlooked
        )

    def _step_down(self) -> bool:
        """Leave a level that did worse than the bound of late, for one that passed and did not."""
        recent = self._prospects.recent(self._ladder.exits)
        if self._level == 0 or len(recent.weight) < _FEWEST:
            return False
        bound = self._settings.max_disagreement
        risk = float(look_ahead(self._ladder.thresholds[[self._level]], recent).risk[0])
        # an error counts for as much as its sample stands for, 1/q at most
        error = math.sqrt(bound * float(recent.weight.max()) / float(recent.weight.sum()))
        if risk <= bound + _DEVIATIONS * error:
            return False
        below = min(self._ladder.certified + 1, self._level)
        found = look_ahead(self._ladder.thresholds[:below], recent)
        level = int(np.flatnonzero(found.risk <= bound)[-1])
        self._put_in_force(
            level, f"disagreed on {risk:.2%} of late; more cautious thresholds", warning=True
        )
        return True

    def _climb(self) -> None:
        """Go to the boldest level that passed, if it is worth a change."""
        ladder = self._ladder
        if ladder.certified <= self._level:
            return
        found = self._prospects.outlook(ladder)
        level = self._prospects.best_certified(ladder, found)
        mean_ms = self._prospects.mean_ms(ladder.exits, found.shares)
        is_worth_it = self._prospects.is_gain(mean_ms[level], mean_ms[self._level])
        if 0 < self._level < level and self._served < _SETTLED:
            is_worth_it = mean_ms[level] <= mean_ms[self._level] * _LEAP
        if level > self._level and is_worth_it:
            saved = 1 - mean_ms[level] / self._costs.source_ms
            self._put_in_force(level, f"bolder thresholds were certified; they save {saved:.1%}")

    def _carry_trial_on(self) -> None:
        """Fix its ladder, put it in force, or give it up."""
        trial = self._trial
        if trial is None:
            return
        if trial.ladder is None:
            if self._out is None and self._enough(trial.exits):
                self._ask_for_path(trial)
            elif trial.samples > self._settings.patience * max(1, int(1 / self.audit_probability)):
                self._drop_trial("too few samples passed them")
            return
        prospects, ladder = self._prospects, trial.ladder
        theirs, ours = prospects.outlook(ladder), prospects.outlook(self._ladder)
        level = prospects.best_certified(ladder, theirs)
        mean_ms = prospects.mean_ms(ladder.exits, theirs.shares)[level]
        now_ms = prospects.mean_ms(self._ladder.exits, ours.shares)[self._level]
        if level > 0 and prospects.is_gain(mean_ms, now_ms):
            self._adopt(trial, ladder, level)
        elif ladder.effort > self._settings.patience:
            self._drop_trial("nothing better was certified")

    def _seek_trial(self) -> None:
        """Fit a new path after an alarm, where the ladder ends, and now and then."""
        if self._trial is not None or not self._ladder.exits:
            return
        at_the_end = self._ladder.certified == self._ladder.levels - 1
        wait = 4 * self._settings.tune_samples if at_the_end else self._settings.retune_every
        due = self._refit_due or self._unfitted >= wait << self._fruitless
        if due and self._enough(self._ladder.exits):
            why = "tuning after the drift alarm" if self._refit_due else "tuning"
            self._trial = _Trial(exits=self._ladder.exits, purpose=why)
            self._ask_for_path(self._trial)

    def _ask_for_path(self, trial: _Trial) -> None:
        self._unfitted = 0
        self._refit_due = False
        self._fruitless = min(self._fruitless + 1, _MOST_DOUBLINGS)
        self._jobs += 1
        self._out = self._jobs
        self._job = Job(
            number=self._jobs,
            purpose=trial.purpose,
            function=refit,
            arguments=(
                tuple(self._curves[e] for e in trial.exits),
                self._window.seen_by(trial.exits),
                self._settings.max_disagreement,
            ),
        )

    def _adopt(self, trial: _Trial, ladder: Ladder, level: int) -> None:
        """Put a level of a ladder on trial in force."""
        self._adjustments += trial.exits != self._ladder.exits
        self._ladder, self._trial = ladder, None
        self._fruitless = 0
        self._put_in_force(level, f"{trial.purpose}: certified, and saves more")

    def _drop_trial(self, why: str) -> None:
        trial, self._trial, self._job, self._out = self._trial, None, None, None
        if trial is not None:
            self._note(
                "exits" if trial.exits != self._ladder.exits else "tuning",
                f"{trial.purpose}: {why}",
            )
            self._use_exits()

    def _needs_evidence(self) -> bool:
        """Whether audits can still bring something beside noticing drift."""
        if self._trial is not None:
            return True
        ladder = self._ladder
        if ladder.effort > self._settings.patience:
            return False
        if ladder.certified < self._level:
            return True
        goal = self._prospects.hopeful(ladder.risk)
        mean_ms = self._prospects.mean_ms(ladder.exits, ladder.shares)
        return goal > self._level and self._prospects.is_gain(mean_ms[goal], mean_ms[self._level])

    # The policy in force

    def _put_in_force(
        self, level: int, why: str, *, kind: str = "policy", warning: bool = False
    ) -> None:
        """Change what is answered."""
        self._level = level
        self._calibrated = False
        self._was_certified = self._ladder.certified >= level > 0
        self._recovering = self._recovering and level == 0
        self._policy = self._policy_at(level, self._policy.version + 1)
        self._begin_policy()
        self._note(kind, f"policy {self._policy.version}: {why}", warning=warning)

    def _use_exits(self) -> None:
        """Put exits in use, or out of it, without a change to any answer."""
        policy = self._policy_at(self._level, self._policy.version + 1)
        if policy.active != self._policy.active:
            self._policy = policy

    def _begin_policy(self) -> None:
        """Know nothing of a policy that answers otherwise than the one before."""
        self._policies += 1
        self._served = 0
        """Samples seen that were served under the policy in force."""
        alpha = (1 - _FOR_LADDERS) * self._alpha
        self._bound = UpperBound(alpha_of(self._policies, alpha))
        self._answered = np.zeros(self._costs.exits + 1)
        places = [*self._ladder.exits, self._costs.exits]
        self._answered[places] = self._ladder.shares[self._level]
        shares, latency_ms = self._shares()
        settings = AuditSettings(
            budget=self._settings.audit_budget, least=self._settings.least_audit
        )
        self._audit = AuditRate(settings, shares, latency_ms)

    def _policy_at(self, level: int, version: int) -> ExitPolicy:
        """The policy of a level, with the exits on trial looking on."""
        thresholds = dict(
            zip(self._ladder.exits, self._ladder.thresholds[level].tolist(), strict=True)
        )
        answers = {e: t for e, t in thresholds.items() if t <= 1}
        initially = {a.exit: a.threshold for a in self._initial.active if a.threshold <= 1}
        exits = sorted({*thresholds, *(self._trial.exits if self._trial else ())})
        return ExitPolicy(
            version=version,
            active=tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits),
            promise=self._initial.promise if answers == initially and not self._alarms else None,
        )

    def _thresholds(self) -> list[float]:
        """In force, of the ladder's exits."""
        thresholds: list[float] = self._ladder.thresholds[self._level].tolist()
        return thresholds

    def _evidence(self) -> Evidence:
        if all(threshold > 1 for threshold in self._thresholds()):
            return Evidence.CAUTIOUS
        if self._ladder.certified >= self._level:
            return Evidence.CERTIFIED
        return Evidence.CALIBRATED if self._calibrated else Evidence.NONE

    def _describe(self, evidence: Evidence) -> str:
        trial = self._trial
        if self._recovering:
            needed = math.log(1 / self._ladder.alpha) / (0.8 * self._settings.max_disagreement)
            return f"recovering: {self._ladder.samples} of about {needed:.0f} samples"
        if trial is not None and trial.ladder is None:
            return f"{trial.purpose}: collecting, {trial.samples} samples"
        if trial is not None and trial.ladder is not None:
            return f"{trial.purpose}: on trial, {trial.ladder.samples} samples"
        if evidence is Evidence.CERTIFIED:
            return "gathering evidence for more" if self._needs_evidence() else "steady"
        return f"gathering evidence: {self._ladder.samples} samples"

    # Ladders, and what they promise

    def _next_ladder(self, exits: tuple[int, ...], levels: Fitted | Ladder) -> Ladder:
        """A ladder without evidence, at the share of α that comes next."""
        self._ladders += 1
        return Ladder(
            exits,
            levels.thresholds,
            levels.shares,
            bound=self._settings.max_disagreement,
            alpha=alpha_of(self._ladders, _FOR_LADDERS * self._alpha),
        )

    def _enough(self, exits: Sequence[int]) -> bool:
        samples = self._window.seen_by(exits)
        fewest = self._settings.tune_samples
        return len(samples.weight) >= fewest and samples.effective >= fewest / 2

    def _shares(self) -> tuple[FloatArray, FloatArray]:
        """Shares answered at the exits in use and the end, and the time until each."""
        exits = [a.exit for a in self._policy.active]
        answered = self._answered[[*exits, self._costs.exits]]
        return answered / max(float(answered.sum()), 1e-9), self._costs.latency_ms(exits)

    def _set_curves(self, exits: Sequence[int], curves: Sequence[AgreementCurve]) -> None:
        known = dict(zip(exits, curves, strict=True))
        self._curves = tuple(known.get(e, curve) for e, curve in enumerate(self._curves))

    def _note(self, kind: str, text: str, *, warning: bool = False) -> None:
        self._events.append(Event(kind=kind, text=text, warning=warning))

    def _restore(self, state: Mapping[str, Any]) -> None:
        ladder = Ladder.restored(state["ladder"])
        level, version = int(state["level"]), int(state["version"])
        if ladder.exits and ladder.exits[-1] >= self._costs.exits:
            raise ValueError(
                f"state: exit {ladder.exits[-1]} is in use, the bundle has {self._costs.exits}"
            )
        if not 0 <= level < ladder.levels or version < self._initial.version:
            raise ValueError(f"state: there is no level {level} of policy {version}")
        curves = [AgreementCurve(slope=float(a), intercept=float(b)) for a, b in state["curves"]]
        if len(curves) != self._costs.exits:
            raise ValueError(
                f"state: {len(curves)} curves, the bundle has {self._costs.exits} exits"
            )
        self._tally.restore(state["tally"])
        self._drift.restore(state["drift"])
        self._ladder, self._level = ladder, level
        self._calibrated, self._recovering = bool(state["calibrated"]), bool(state["recovering"])
        self._ladders, self._policies = int(state["ladders"]), int(state["policies"])
        self._curves = tuple(curves)
        self._alarms, self._tunings, self._adjustments = map(int, state["counts"])
        self._trial = self._job = self._out = None
        self._policy = self._policy_at(level, version)
        self._was_certified = ladder.certified >= level > 0
        self._begin_policy()
        self._policies -= 1
        self._bound.restore(state["bound"])


def _tuning_split(records: Mapping[str, NDArray[Any]], exits: int) -> Weighted:
    """The samples of the calibration data that curves may be fitted on."""
    confidence = np.asarray(records["confidence"])
    if confidence.ndim != 2 or confidence.shape[0] != exits:
        raise ValueError(
            f"records hold confidences of shape {confidence.shape}, expected [{exits}, samples]"
        )
    rows = np.flatnonzero(records["split"] == _TUNE)
    if not rows.size:
        raise ValueError("records hold no samples to tune on (split 1); compile the bundle again")
    agrees = np.asarray(records["prediction"] == records["final_prediction"])
    return Weighted(
        confidence=confidence[:, rows].astype(np.float32),
        agrees=agrees[:, rows],
        weight=np.ones(len(rows)),
    )


def _covers(policy: ExitPolicy, settings: CertifiedSettings) -> bool:
    """Whether what the policy was certified for is what is asked for, or more."""
    promise = policy.promise
    return promise is not None and (
        promise.max_disagreement <= settings.max_disagreement
        and promise.confidence >= settings.confidence
    )


def _level_of(ladder: Ladder, thresholds: FloatArray) -> int:
    """The level with these thresholds; it is one."""
    return int((ladder.thresholds == thresholds).all(axis=1).argmax())
