"""Other thresholds, or other exits, on their way into force: fitted, tested, adopted or dropped.

One at a time, beside the threshold path in force, on the same samples. A path is fitted elsewhere (a job),
and costs a share of α and audits only if it promises to save more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from offramp.certify.agreement import AgreementCurve
from offramp.certify.observations import Observations
from offramp.certify.threshold_path import ThresholdPath
from offramp.certify.window import Window
from offramp.engine.control.controller import Job
from offramp.engine.control.refit import Fitted, refit
from offramp.engine.control.savings import SavingsEstimator
from offramp.engine.control.settings import CertifiedSettings

_AT_THE_END: Final = 4
"""Times the samples that tuning takes: the wait for a new path where the threshold path's last level
passed."""
_MOST_DOUBLINGS: Final = 6
"""Of the wait for the next path to be fitted."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One under way."""

    exits: tuple[int, ...]
    purpose: str
    threshold_path: ThresholdPath | None = None
    """``None`` while samples are collected that it is fitted on."""
    samples: int = 0
    """Seen since it began."""

    def describe(self) -> str:
        """Where it stands."""
        if self.threshold_path is None:
            return f"{self.purpose}: collecting, {self.samples} samples"
        return f"{self.purpose}: on trial, {self.threshold_path.samples} samples"


class Trials:
    """Starts, tests and ends them; whether one comes into force is for its owner to do."""

    def __init__(
        self,
        window: Window,
        savings: SavingsEstimator,
        curves: Sequence[AgreementCurve],
        settings: CertifiedSettings,
        new_path: Callable[[tuple[int, ...], Fitted], ThresholdPath],
    ) -> None:
        """Start without one.

        Args:
            window: Samples to fit on.
            savings: Judges whether something is worth a trial.
            curves: Of all K exits; renewed with every path that comes on trial.
            settings: How many samples to fit on, and how long to wait.
            new_path: Makes a threshold path at the next share of α.
        """
        self.current: Trial | None = None
        self.curves = tuple(curves)
        self.tunings = 0
        """Paths fitted."""
        self._window = window
        self._savings = savings
        self._settings = settings
        self._new_path = new_path
        self._job: Job | None = None
        self._out: int | None = None
        """Number of the job that is being computed."""
        self._jobs = 0
        self._unfitted = 0
        """Samples since a path was last asked for."""
        self._fruitless = 0
        """Paths asked for since one last came into force; each doubles the wait for the next."""
        self._drifted = False
        """No path was fitted yet since the alarm."""

    @property
    def exits(self) -> tuple[int, ...]:
        """On trial."""
        return self.current.exits if self.current else ()

    def observe(self, seen: Observations) -> None:
        """Count samples, none of them forced, as evidence."""
        self._unfitted += len(seen)
        if self.current is not None:
            self.current.samples += len(seen)
            if self.current.threshold_path is not None:
                self.current.threshold_path.add(seen)

    def begin(self, exits: tuple[int, ...], purpose: str) -> None:
        """Try these; there must be no other trial under way."""
        self.current = Trial(exits=exits, purpose=purpose)

    def seek(self, threshold_path: ThresholdPath) -> None:
        """Ask for a new path after an alarm, where the threshold path ends, and now and then."""
        if self.current is not None or not threshold_path.exits:
            return
        settings = self._settings
        at_the_end = threshold_path.certified == threshold_path.levels - 1
        wait = _AT_THE_END * settings.tune_samples if at_the_end else settings.retune_every
        due = self._drifted or self._unfitted >= wait << self._fruitless
        if due and self._has_enough(threshold_path.exits):
            self.begin(
                threshold_path.exits, "tuning after the drift alarm" if self._drifted else "tuning"
            )
            self._ask_for_path(self.exits)

    def advance(
        self, threshold_path: ThresholdPath, level: int, audit_probability: float
    ) -> int | str | None:
        """Carry the trial on against the level in force.

        Returns:
            The level of its threshold path that should come into force; or why the trial should end; or
            ``None`` while it goes on.
        """
        trial = self.current
        if trial is None:
            return None
        if trial.threshold_path is None:
            if self._out is None and self._has_enough(trial.exits):
                self._ask_for_path(trial.exits)
            elif trial.samples * audit_probability > self._settings.patience:
                return "too few samples passed them"
            return None
        theirs, ours = (
            self._savings.outlook(trial.threshold_path),
            self._savings.outlook(threshold_path),
        )
        goal = self._savings.best_certified(trial.threshold_path, theirs)
        mean_ms = self._savings.mean_ms(trial.exits, theirs.shares)[goal]
        if goal > 0 and self._savings.is_gain(
            mean_ms, self._savings.mean_ms(threshold_path.exits, ours.shares)[level]
        ):
            return goal
        return (
            "nothing better passed"
            if trial.threshold_path.effort > self._settings.patience
            else None
        )

    def take_job(self) -> Job | None:
        """A path to be fitted, once."""
        job, self._job = self._job, None
        return job

    def finish(
        self, job: Job, fitted: Fitted | None, *, threshold_path: ThresholdPath
    ) -> str | None:
        """Test a path from now on, if it promises to save more than the threshold path in force.

        Returns:
            Why the trial should end; ``None`` if it goes on, or the job is not waited for.
        """
        if job.number != self._out:
            return None
        self._out = None
        trial = self.current
        if trial is None:
            return None
        if fitted is None:
            return "fitting failed"
        self.tunings += 1
        if not self._savings.promises_more(fitted, trial.exits, threshold_path):
            return "would save no more"
        known = dict(zip(trial.exits, fitted.curves, strict=True))
        self.curves = tuple(known.get(e, curve) for e, curve in enumerate(self.curves))
        trial.threshold_path = self._new_path(trial.exits, fitted)
        return None

    def end(self, *, adopted: bool = False) -> None:
        """Forget the current one, and its job."""
        self.current = self._job = self._out = None
        if adopted:
            self._fruitless = 0

    def drifted(self) -> None:
        """Forget everything, and fit a path as soon as there are samples again."""
        self.end()
        self._unfitted = self._fruitless = 0
        self._drifted = True

    def _ask_for_path(self, exits: tuple[int, ...]) -> None:
        self._unfitted = 0
        self._drifted = False
        self._fruitless = min(self._fruitless + 1, _MOST_DOUBLINGS)
        self._jobs += 1
        self._out = self._jobs
        self._job = Job(
            number=self._jobs,
            purpose=self.current.purpose if self.current else "tuning",
            function=refit,
            arguments=(
                tuple(self.curves[e] for e in exits),
                self._window.seen_by(exits),
                self._settings.max_disagreement,
            ),
        )

    def _has_enough(self, exits: Sequence[int]) -> bool:
        samples = self._window.seen_by(exits)
        fewest = self._settings.tune_samples
        return len(samples.weight) >= fewest and samples.effective >= fewest / 2
