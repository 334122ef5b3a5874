"""Tests of candidates (other thresholds or other exits) before they may become active.

One candidate at a time is tested next to the active threshold path, on the same samples. Its path
is fitted elsewhere (a job). The test uses a share of α and audits, so it runs only if the path
promises to save more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.certify import (
    AgreementCurve,
    FloatArray,
    Observations,
    ThresholdPath,
    Weighted,
    Window,
)
from offramp.certify.agreement import Fitted, expect, refit
from offramp.certify.path import Outlook, look_ahead
from offramp.engine.control.control_settings import CertifiedSettings
from offramp.engine.control.controller import Job
from offramp.engine.control.costs import CostModel

_AT_THE_END: Final = 4
"""Samples to wait for a new path after the last level passed, as a multiple of the samples to tune
on."""
_MOST_DOUBLINGS: Final = 6
"""Largest number of doublings of the wait for the next path."""


@dataclass(slots=True, kw_only=True)
class CandidateTest:
    """A test of one set of exits that may replace the exits in use."""

    exits: tuple[int, ...]
    purpose: str
    path: ThresholdPath | None = None
    """Path that is tested; ``None`` while samples to fit it are collected."""
    samples: int = 0
    """Samples seen since the test began."""

    def describe(self) -> str:
        """Return the progress of the test, as text for people."""
        if self.path is None:
            return f"collecting samples to test {self.purpose}: {self.samples:,} so far"
        return f"testing {self.purpose}: {self.path.samples:,} samples so far"


class CandidateTests:
    """Starts, advances and ends tests; the owner decides whether a candidate becomes active."""

    def __init__(
        self,
        window: Window,
        savings: SavingsEstimator,
        curves: Sequence[AgreementCurve],
        settings: CertifiedSettings,
        new_path: Callable[[tuple[int, ...], Fitted], ThresholdPath],
    ) -> None:
        """Start without a candidate.

        ``curves`` are the curves of all K exits; every tested path replaces the curves of its
        exits. ``new_path`` makes a threshold path at the next share of α.
        """
        self.current: CandidateTest | None = None
        self.curves = tuple(curves)
        self._window = window
        self._savings = savings
        self._settings = settings
        self._new_path = new_path
        self._job: Job | None = None
        self._out: int | None = None
        """Number of the job that is being computed."""
        self._jobs = 0
        self._unfitted = 0
        """Number of samples since a path was last requested."""
        self._fruitless = 0
        """Number of paths requested since a path last became active; each doubles the wait for the
        next."""
        self._drifted = False
        """True if no path was fitted yet since the alarm."""

    @property
    def exits(self) -> tuple[int, ...]:
        """Exits of the candidate that is tested; empty if none is."""
        return self.current.exits if self.current else ()

    def observe(self, seen: Observations) -> None:
        """Add samples, none of them forced, as evidence."""
        self._unfitted += len(seen)
        if self.current is not None:
            self.current.samples += len(seen)
            if self.current.path is not None:
                self.current.path.add(seen)

    def begin(self, exits: tuple[int, ...], purpose: str) -> None:
        """Begin a test; no other test may be running."""
        self.current = CandidateTest(exits=exits, purpose=purpose)

    def seek(self, path: ThresholdPath) -> None:
        """Request a new path after an alarm, at the end of the active path, and periodically."""
        if self.current is not None or not path.exits:
            return
        settings = self._settings
        at_the_end = path.certified == path.levels - 1
        wait = _AT_THE_END * settings.tune_samples if at_the_end else settings.retune_every
        due = self._drifted or self._unfitted >= wait << self._fruitless
        if due and self._has_enough(path.exits):
            self.begin(path.exits, "tuning after the drift alarm" if self._drifted else "tuning")
            self._request_path(self.current)

    def advance(
        self, path: ThresholdPath, level: int, audit_probability: float
    ) -> int | str | None:
        """Advance the test, compared with the active path and level.

        Returns the level of the candidate's path that should become active, or the reason why the
        test should end, or ``None`` while it goes on.
        """
        test = self.current
        if test is None:
            return None
        if test.path is None:
            if self._out is None and self._has_enough(test.exits):
                self._request_path(test)
            elif test.samples * audit_probability > self._settings.patience:
                return "too few samples passed them"
            return None
        savings = self._savings
        theirs, ours = savings.outlook(test.path), savings.outlook(path)
        goal = savings.best_certified(test.path, theirs)
        goal_ms = savings.mean_ms(test.exits, theirs.shares)[goal]
        if goal > 0 and savings.is_gain(goal_ms, savings.mean_ms(path.exits, ours.shares)[level]):
            return goal
        return "nothing better passed" if test.path.effort > self._settings.patience else None

    def take_job(self) -> Job | None:
        """Return the next path to fit, once; ``None`` if there is none."""
        job, self._job = self._job, None
        return job

    def expects(self, job: Job) -> bool:
        """Return whether a job's result is awaited; after this call it is not awaited any more."""
        if job.number != self._out:
            return False
        self._out = None
        return self.current is not None

    def adopt_path(self, fitted: Fitted, *, against: ThresholdPath) -> str | None:
        """Test a path from now on, if it promises to save more than the active path.

        Returns the reason why the test should end; ``None`` if it goes on.
        """
        test = self.current
        assert test is not None
        if not self._savings.promises_more(fitted, test.exits, against):
            return "would save no more"
        known = dict(zip(test.exits, fitted.curves, strict=True))
        self.curves = tuple(known.get(e, curve) for e, curve in enumerate(self.curves))
        test.path = self._new_path(test.exits, fitted)
        return None

    def end(self, *, adopted: bool = False) -> None:
        """End the test of the candidate, and drop its job."""
        self.current = self._job = self._out = None
        if adopted:
            self._fruitless = 0

    def drifted(self) -> None:
        """Drop everything, and fit a path as soon as there are enough samples again."""
        self.end()
        self._unfitted = self._fruitless = 0
        self._drifted = True

    def _request_path(self, test: CandidateTest | None) -> None:
        assert test is not None
        self._unfitted, self._drifted = 0, False
        self._fruitless = min(self._fruitless + 1, _MOST_DOUBLINGS)
        self._jobs += 1
        self._out = self._jobs
        curves = tuple(self.curves[e] for e in test.exits)
        self._job = Job(
            number=self._jobs,
            purpose=test.purpose,
            function=refit,
            arguments=(curves, self._window.seen_by(test.exits), self._settings.max_disagreement),
        )

    def _has_enough(self, exits: Sequence[int]) -> bool:
        samples, fewest = self._window.seen_by(exits), self._settings.tune_samples
        return len(samples) >= fewest and samples.effective >= fewest / 2


_JUDGED: Final = 2048
"""Number of newest complete samples that levels are judged by."""
_FEWEST: Final = 64
"""Number of complete samples below which expected values are used instead."""
_WORTH_A_TEST: Final = 3.0
"""Smallest gain that a candidate must promise, in units of ``min_gain``: its test uses α and
audits.
"""
_PROMISING: Final = 0.8
"""Estimated risk, as a share of the bound, up to which a level is worth testing."""
_ENOUGH_AUDITED: Final = 500
"""Number of audited samples, or of samples of the same weight, below which recent risk is not
judged. With fewer, the drift alarm is faster, and a change of policy would only delay it."""
_DEVIATIONS: Final = 3.0
"""Number of standard errors by which recent risk must exceed the bound to count as drift. The check
repeats often, and chance often reaches 2."""


class SavingsEstimator:
    """Judges levels and paths by a window of samples, which the owner of the window fills."""

    def __init__(self, window: Window, costs: CostModel, settings: CertifiedSettings) -> None:
        self._window, self._costs = window, costs
        self._bound, self._min_gain = settings.max_disagreement, settings.min_gain

    def recent(self, exits: Sequence[int]) -> Weighted:
        """Return the newest samples that passed all these exits."""
        return self._window.seen_by(exits, _JUDGED)

    def outlook(self, path: ThresholdPath) -> Outlook:
        """Return recent risk and shares of levels, or expected ones while samples are few."""
        recent = self.recent(path.exits)
        if len(recent) < _FEWEST:
            return Outlook(risk=path.risk, shares=path.shares)
        return look_ahead(path.thresholds, recent)

    def recent_excess(self, path: ThresholdPath, level: int) -> float | None:
        """Return a level's recent disagreement if it contradicts the evidence; else ``None``."""
        if level == 0:
            return None
        recent = self.recent(path.exits)
        audited = float(recent.weight.sum()) / float(recent.weight.max(initial=1.0))
        if audited < _ENOUGH_AUDITED:
            return None
        risk = recent.risk(path.thresholds[level])
        limit = self._bound + _DEVIATIONS * math.sqrt(self._bound / audited)
        return risk if risk > limit else None

    def mean_ms(self, exits: Sequence[int], shares: FloatArray) -> FloatArray:
        """Return the mean time until the answer with these exits in use, float64[levels]."""
        return np.asarray(shares @ self._costs.latency_ms(exits))

    def best_certified(self, path: ThresholdPath, outlook: Outlook) -> int:
        """Return the most aggressive level that passed with recent risk within the bound."""
        fine = outlook.risk[: path.certified + 1] <= self._bound
        return int(np.flatnonzero(fine)[-1])

    def promising(self, risk: FloatArray) -> int:
        """Return the most aggressive level that may pass later; ``risk`` is float64[levels]."""
        return int(np.flatnonzero(risk <= _PROMISING * self._bound)[-1])

    def is_gain(self, mean_ms: float, than_ms: float) -> bool:
        """Return whether the first time is enough below the second to justify a change."""
        return mean_ms <= than_ms * (1 - self._min_gain)

    def promises_more(self, fitted: Fitted, exits: Sequence[int], than: ThresholdPath) -> bool:
        """Return whether a path may save more than another one, by the curves of the first."""
        goal = self.mean_ms(exits, fitted.shares)[self.promising(fitted.risk)]
        if set(than.exits) <= set(exits):
            # Use the same smooth curves for both paths: errors counted on a window would differ by
            # chance.
            curves = [fitted.curves[exits.index(e)] for e in than.exits]
            ours = expect(than.thresholds, curves, self.recent(than.exits))
        else:
            ours = self.outlook(than)
        reach = self.mean_ms(than.exits, ours.shares)[self.promising(ours.risk)]
        return float(goal) <= float(reach) * (1 - _WORTH_A_TEST * self._min_gain)
