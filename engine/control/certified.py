"""The certified controller: it lowers thresholds as far as evidence allows; drift resets them.

    the bundle's policy is a level of a threshold path
    every chunk of served samples:
        test:    it is evidence for or against each level of the path and of the tested candidate
        watch:   risk has risen, or inputs have changed:
                     no exit answers, all run in shadow mode; the levels are tested again
        look:    a more aggressive level passed, and saves more:    it becomes active
                 the candidate passed, and saves more:              its path becomes active
                 other thresholds might save more:                  they become the candidate
        propose: other exits might save more:                       they become the candidate
    after a restart:
        resume:  samples look like those before it:                 the learned level becomes active

The active policy was therefore certified on the calibration data, or on served samples (see the
theorem in :mod:`offramp.certify.threshold_path`), or answers nothing early. Every statement over
the controller's life, certificates and upper bounds, is right with probability 1 − α; the
statements share α.

The feedback is that of release mode (all samples run to the end) or of audit mode (few do, weighted
by the inverse of their probability).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ExitPolicy
from offramp.certify import AgreementCurve, FloatArray, Observations, Window, fit_curves
from offramp.certify.kept import kept_array, kept_part
from offramp.engine.control.active_policy import ActivePolicy, Resumption
from offramp.engine.control.adjustment import ExitProposals
from offramp.engine.control.candidates import CandidateTests, SavingsEstimator
from offramp.engine.control.control_settings import CertifiedSettings
from offramp.engine.control.controller import ControlEvent, ControlStatus, Evidence, Job
from offramp.engine.control.costs import CostModel
from offramp.engine.control.counters import ControlCounters
from offramp.engine.control.drift import DriftAlarm, Suspicion
from offramp.engine.control.initial import tuning_split
from offramp.engine.control.shift import ShiftGuard

__all__ = ["CertifiedController", "CertifiedSettings"]

_SETTLED: Final = 2048
"""Number of samples for which an answering policy stays active, unless the next policy takes much
less time: while levels pass one after the other, versions would otherwise change fast."""
_LEAP: Final = 0.95
"""A policy takes much less time than the active one if its mean time is at most this share of the
active policy's mean time."""


class CertifiedController:
    """Keeps the constraint with the required confidence, and saves as much time as this allows."""

    name = "certified"

    def __init__(
        self,
        policy: ExitPolicy,
        costs: CostModel,
        records: Mapping[str, NDArray[Any]],
        settings: CertifiedSettings | None = None,
        *,
        guard: ShiftGuard | None = None,
        proposals: ExitProposals | None = None,
    ) -> None:
        """Start from a policy, for all K exits of the bundle, in audit mode by default.

        ``policy`` is active at first if its promise covers constraint and confidence; else its
        exits run in shadow mode until levels are certified. ``records`` are the bundle's:
        ``confidence`` float[K, n], ``prediction`` [K, n], ``final_prediction`` [n] and ``split``
        [n], where 1 is the tuning split. Without a guard, only audits detect drift; without
        proposals, the policy's exits stay in use.
        """
        self._settings = settings = settings or CertifiedSettings()
        self._costs = costs
        tune = tuning_split(records, costs.exits)
        curves = fit_curves(tune.confidence, tune.agrees)
        self._active = ActivePolicy(policy, curves, tune, costs, settings)
        self._window = Window(exits=costs.exits, capacity=settings.window)
        self._savings = SavingsEstimator(self._window, costs, settings)
        self._candidates = CandidateTests(
            self._window, self._savings, curves, settings, self._active.new_path
        )
        self._drift = DriftAlarm(settings.max_disagreement, rate=settings.alarm_rate)
        self._suspicion = Suspicion(settings.max_disagreement, least=settings.least_audit)
        self._guard = guard
        self._proposals = proposals
        self._counters = ControlCounters(tolerated=settings.max_disagreement)
        self._unlooked = 0
        """Samples since the last check for possible changes."""
        self._resumption = Resumption(self._active, self._counters, guard)
        if guard is not None:
            guard.watch(self.policy)

    @property
    def policy(self) -> ExitPolicy:
        """Policy that should be active."""
        return self._active.policy

    @property
    def audit_probability(self) -> float:
        """Audit probability of samples started from now on; 1 while evidence is gathered again.

        It is predictable: it depends only on earlier observations.
        """
        probability = self._active.audit_probability
        if self._settings.raise_audits and not self._settings.release:
            probability = self._suspicion.audit_probability(probability)
        return 1.0 if self._audits_all else probability

    @property
    def _audits_all(self) -> bool:
        return self._guard is not None and self._guard.audits_all

    @property
    def needs_evidence(self) -> bool:
        """True if audits are still useful for more than the detection of drift."""
        if self._candidates.current is not None:
            return True
        path, level = self._active.path, self._active.level
        if path.effort > self._settings.patience:
            return False
        if path.certified < level:
            return True
        goal = self._savings.promising(path.risk)
        mean_ms = self._savings.mean_ms(path.exits, path.shares)
        return goal > level and self._savings.is_gain(mean_ms[goal], mean_ms[level])

    def observe(self, seen: Observations) -> None:
        """Test every level, watch for changes, look for better policies, and propose exits."""
        why = None
        self._suspicion.count_samples(len(seen))
        if len(seen):
            why = self._test(seen) or self._check_if_due()
        if self._guard is not None:
            self._guard.count_samples(len(seen))
            needed = self.needs_evidence
            if why is None and self._guard.has_shifted(seen, self.policy, needs_evidence=needed):
                why = None if self._resumption.forget() else "inputs have changed"
            elif why is None:
                self._resumption.resume_if_matching()
        if why is not None:
            self.invalidate(why)
        if self._proposals is not None:
            exits = self._proposals.propose(seen, self.policy, alarms=self._counters.alarms)
            if exits is not None and self.consider(exits):
                self._proposals.accepted(exits)

    def take_job(self) -> Job | None:
        """Return the next path to fit, once; ``None`` if there is none."""
        return self._candidates.take_job()

    def finish(self, job: Job, result: Any) -> None:
        """Test a path that was fitted, if it promises to save more."""
        if not self._candidates.expects(job):
            return
        if result is None:
            self._end_test("fitting failed")
            return
        self._counters.tunings += 1
        assert self._candidates.current is not None
        fitted = self._active.limited(self._candidates.current.exits, result)
        self._end_test(self._candidates.adopt_path(fitted, against=self._active.path))

    def consider(self, active: Sequence[int]) -> bool:
        """Test another set of exits next to the active one; return whether the test starts.

        New exits run in shadow mode at first, and answer nothing. When enough samples have passed
        them, a threshold path over the new set is tested, and becomes active if it certifies a
        level that saves more. Exits that do not answer at the active level are dropped without a
        test. No test starts while another candidate is tested, or while the active policy does not
        answer again after an alarm.
        """
        target = tuple(sorted({int(e) for e in active}))
        if target and not 0 <= target[0] <= target[-1] < self._costs.exits:
            raise ValueError(f"exits {list(active)} must be within 0 to {self._costs.exits - 1}")
        now = self._active
        is_busy = self._candidates.current or now.recovering or self._resumption.kept is not None
        if is_busy or target == now.path.exits:
            return False
        thresholds = now.thresholds
        gone = [e for e in thresholds if e not in target]
        if set(target) < set(thresholds) and all(thresholds[e] > 1 for e in gone):
            now.path = now.path.without(gone)
            self._counters.adjustments += 1
            text = f"exits {gone} answered nothing, and are not in use any more"
            self._counters.note("exits", text)
        else:
            named = f"exits {', '.join(map(str, target))}" if target else "no exits"
            self._candidates.begin(target, named)
            self._counters.note("exits", f"{named} are being tested")
        now.use_exits(self._candidates.exits)
        return True

    def invalidate(self, why: str) -> None:
        """Answer nothing early from now on, drop all evidence, and test the same levels again.

        ``why`` states in a few words, for the log, how samples have changed.
        """
        self._counters.alarms += 1
        self._drift.reset()
        self._suspicion.reset()
        self._window.keep(0)
        self._candidates.drifted()
        self._resumption.kept = None
        self._active.restart()
        if self._guard is not None:
            self._guard.recover(self.policy)
        why = f"drift: {why}; no exit answers until levels are certified again"
        self._note_policy(why, kind="alarm", warning=True)

    def status(self) -> ControlStatus:
        """Return a snapshot; cheap."""
        evidence = self._evidence()
        upper = self._active.metrics.bound.value
        if evidence is Evidence.CERTIFIED:
            upper = min(upper, self._settings.max_disagreement)
        return self._counters.status(
            self.name,
            self.policy.version,
            max_disagreement=self._settings.max_disagreement,
            confidence_level=self._settings.confidence_level,
            evidence=evidence,
            upper_bound=0.0 if evidence is Evidence.CONSERVATIVE else upper,
            audit_probability=self.audit_probability,
            state=self._describe(evidence),
        )

    def take_events(self) -> list[ControlEvent]:
        """Return the events since the last call."""
        return self._counters.take_events()

    def state(self) -> Mapping[str, Any]:
        """Return all state except the test of a candidate, which restarts."""
        if self._resumption.kept is not None:
            return self._resumption.kept
        kept = {
            **self._active.state(),
            "drift": self._drift.state(),
            "suspicion": self._suspicion.state(),
            "curves": np.array([[c.slope, c.intercept] for c in self._candidates.curves]),
            "counters": self._counters.state(),
        }
        return kept if self._guard is None else {**kept, "guard": self._guard.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, including its evidence; a running job is not waited for.

        Where inputs are watched, thresholds beyond the compiled ones are held back at first
        (:mod:`.active_policy`).
        """
        try:
            if self._guard is not None:
                self._guard.restore(kept_part(state, "guard"))
            self._restore(state)
            self._resumption.begin(state)
        except ValueError as error:
            raise ValueError(f"no state of the {self.name} controller: {error}") from error

    def _test(self, seen: Observations) -> str | None:
        """Add a chunk as evidence on every level; if the policy drifted, return the reason."""
        now = self._active
        self._counters.add(seen, version=now.policy.version)
        if seen.forced.any():
            seen = seen.take(~seen.forced)
        self._window.add(seen)
        now.path.add(seen)
        self._candidates.observe(seen)
        if not now.announced and now.evidence is Evidence.CERTIFIED:
            now.announced = True
            bound, level = self._settings.max_disagreement, self._settings.confidence_level
            self._counters.note(
                "certified",
                f"exits disagree on at most {bound:.2%} with {100 * level:.4g} % confidence, "
                f"from {now.path.samples} samples",
            )
        mine = seen.policy_version == now.policy.version
        if mine.any():  # samples that the active policy served
            served = seen if mine.all() else seen.take(mine)
            loss = served.loss
            now.metrics.observe(served, loss)
            if self._drift.add(loss, served.audit_probability) is not None:
                return "disagreement rose above the constraint"
            self._suspect(loss, served.audit_probability)
        self._unlooked += len(seen)
        return None

    def _suspect(self, loss: FloatArray, audit_probability: FloatArray) -> None:
        """Track how many of the audited samples disagreed; report once that there are too many."""
        suspicion, was_serious = self._suspicion, self._suspicion.serious
        suspicion.observe(loss, audit_probability)
        if not self._audits_all:
            suspicion.account(audit_probability, self._active.audit_probability)
        if suspicion.serious and not was_serious:
            self._counters.note("suspicion", suspicion.describe(), warning=True)

    def _check_if_due(self) -> str | None:
        """Look for changes; if recent samples contradict the active policy, return the reason."""
        if self._unlooked < self._settings.look_every or self._resumption.kept is not None:
            return None
        samples, self._unlooked = self._unlooked, 0
        risk = self._savings.recent_excess(self._active.path, self._active.level)
        if risk is not None:
            return f"{risk:.2%} disagreed recently"
        self._climb()
        self._advance_test()
        self._candidates.seek(self._active.path)
        exits, needed = [a.exit for a in self.policy.active], self.needs_evidence
        self._active.metrics.follow(exits, needs_evidence=needed, samples=samples)
        return None

    def _climb(self) -> None:
        """Switch to the most aggressive level that passed, if the gain is worth a change."""
        path, now = self._active.path, self._active.level
        if path.certified <= now:
            return
        found = self._savings.outlook(path)
        level = self._savings.best_certified(path, found)
        mean_ms = self._savings.mean_ms(path.exits, found.shares)
        is_worth_it = self._savings.is_gain(mean_ms[level], mean_ms[now])
        if 0 < now < level and self._active.metrics.served < _SETTLED:
            is_worth_it = mean_ms[level] <= mean_ms[now] * _LEAP
        if level > now and is_worth_it:
            self._active.switch(level, shadow=self._candidates.exits)
            saved = 1 - mean_ms[level] / self._costs.source_ms
            self._note_policy(f"more aggressive thresholds were certified; they save {saved:.1%}")

    def _advance_test(self) -> None:
        """Activate a candidate's level that passed and saves more, or drop the candidate."""
        test, now = self._candidates.current, self._active
        found = self._candidates.advance(now.path, now.level, now.audit_probability)
        if test is None or test.path is None or not isinstance(found, int):
            self._end_test(found if isinstance(found, str) else None)
            return
        self._counters.adjustments += test.exits != now.path.exits
        self._candidates.end(adopted=True)
        now.switch(found, path=test.path)
        self._note_policy(f"{test.purpose}: certified, and saves more")

    def _end_test(self, why: str | None) -> None:
        test = self._candidates.current
        if why is not None and test is not None:
            self._candidates.end()
            kind = "tuning" if test.exits == self._active.path.exits else "exits"
            self._counters.note(kind, f"{test.purpose}: {why}")
            self._active.use_exits(())

    def _note_policy(self, why: str, *, kind: str = "policy", warning: bool = False) -> None:
        self._counters.note(kind, f"policy {self.policy.version}: {why}", warning=warning)

    def _evidence(self) -> Evidence:
        """Return the evidence for the policy, unless recent samples contradict it."""
        evidence = self._active.evidence
        if evidence is Evidence.CONSERVATIVE:
            return evidence
        version, bound = self.policy.version, self._settings.max_disagreement
        is_doubtful = self._suspicion.serious or self._counters.exceeds(bound, version)
        return Evidence.SUSPICIOUS if is_doubtful else evidence

    def _describe(self, evidence: Evidence) -> str:
        path, suspicion = self._active.path, self._suspicion
        more = self._settings.raise_audits and not self._settings.release and suspicion.raised
        if suspicion.serious or more:
            return suspicion.describe() + ("; auditing more" if more else "")
        if evidence is Evidence.SUSPICIOUS:
            return "suspicious: more disagreed under this policy than the constraint allows"
        if self._active.recovering:
            needed = math.log(1 / path.alpha) / (0.8 * self._settings.max_disagreement)
            return f"recovering: {path.samples:,} samples so far, at least {needed:,.0f} needed"
        test = self._candidates.current if self._resumption.kept is None else self._resumption
        if test is not None:
            return test.describe()
        if evidence is Evidence.CERTIFIED:
            return "gathering evidence for more" if self.needs_evidence else "steady"
        return f"gathering evidence: {path.samples:,} samples so far"

    def _restore(self, state: Mapping[str, Any]) -> None:
        rows = kept_array(state, "curves", (self._costs.exits, 2)).tolist()
        curves = [AgreementCurve(slope=slope, intercept=intercept) for slope, intercept in rows]
        drift = DriftAlarm(self._settings.max_disagreement, rate=self._settings.alarm_rate)
        drift.restore(kept_part(state, "drift"))
        suspicion = copy.copy(self._suspicion)
        suspicion.restore(kept_part(state, "suspicion"))
        counted, counts = kept_part(state, "counters"), ControlCounters()
        counts.restore(counted)  # raises before anything has changed
        self._active.restore(state, drifted=counts.alarms > 0)
        self._counters.restore(counted)
        self._drift, self._suspicion = drift, suspicion
        self._candidates.curves = tuple(curves)
        if self._active.recovering:
            self._candidates.drifted()
        else:
            self._candidates.end()
