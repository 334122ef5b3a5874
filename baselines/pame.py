"""PAME's reaction to a changing load, while serving (7.6).

    every 1,024 samples:
        too many batches would have been late:   the exit moves to the next later candidate
        too many answers differed:               thresholds are raised in steps of 0.05

The paper re-tunes offline, on a data set of the new load
(``offramp.calibration.rehearsal.adaptation``); here the last samples served replace that data set.
This needs feedback on early answers, which PAME itself does not have. The feedback comes from
samples that run on after their answer: all samples in release mode, some of them in audit mode.
Without such samples, only latency is controlled.

The evaluation forms batches of n consecutive samples, in the order in which samples were started.
They are not the scheduler's batches, because the evaluation asks whether the load meets the time
limits that exits were chosen by (the paper's inference time matrix).

``eeserve --controller pame`` uses it.

Limits: there is no promise about unseen samples. The estimate of one period is noisy if the period
is short. Thresholds never fall and exits never move back, so that under a load that changes back
and forth fewer and fewer samples exit. Answers that a deadline forced are not part of the estimate
of disagreement. They count as rows that ran on, because they would have run on without the
deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from offramp.bundle import NEVER, ExitPolicy
from offramp.calibration.rehearsal.two_stage import StageTimes
from offramp.certify import MODEL_END, BoolArray, IntArray, Observations, first_exit
from offramp.engine.control.static import UncertifiedController, policy_of

PERIOD: Final = 1024
"""Number of samples between two evaluations, if all samples run to the end."""
_ROUNDING: Final = 1e-9
"""Tolerance for rounding errors, when steps of a threshold add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PameSettings:
    """Settings of the controller; bounds and step are those of the paper's evaluation."""

    max_disagreement: float = 0.01
    """Bound on the share of differing answers: 1 − η, where η is the paper's bound on accuracy."""
    max_violations: float = 0.02
    """Largest share of batches that may be late because of an exit: τ_l."""
    batch_size: int = 32
    """Number of samples in a batch, n, as in :mod:`offramp.calibration.rehearsal`."""
    period: int = PERIOD
    """Number of samples between two evaluations; an evaluation uses the samples since the last."""
    threshold_step: float = 0.05
    """Step by which a confidence threshold is raised."""
    audit_probability: float = 1.0
    """Probability that a sample runs on after an early answer; 1 is release mode."""
    confidence_level: float = 0.95
    """Confidence level for display only: nothing is certified."""

    def __post_init__(self) -> None:
        for name in ("max_disagreement", "max_violations"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not 1 <= self.batch_size <= self.period:
            raise ValueError(
                f"batch_size {self.batch_size} must be at least 1, and period {self.period} at "
                "least as large: both are in samples"
            )
        for name in ("threshold_step", "audit_probability"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")


class PameController(UncertifiedController):
    """Moves exits towards the model's end, and raises thresholds, but never the reverse."""

    name = "pame"

    def __init__(
        self, policy: ExitPolicy, times: StageTimes, settings: PameSettings | None = None
    ) -> None:
        """Start with the bundle's policy, which a rehearsal chose, and the times of all exits."""
        self.settings = settings = settings or PameSettings()
        super().__init__(
            policy,
            max_disagreement=settings.max_disagreement,
            confidence_level=settings.confidence_level,
            audit_probability=settings.audit_probability,
        )
        self._times = times
        self._own = False
        """True once the controller has made or restored a policy of its own."""
        self._recent: list[Observations] = []

    def observe(self, seen: Observations) -> None:
        """Count samples of the active policy; evaluate each full period."""
        self._counters.add(seen, version=self.policy.version)
        self._recent.append(seen.take(seen.policy_version == self.policy.version))
        if sum(map(len, self._recent)) >= self.settings.period:
            period, self._recent = _join(self._recent), []
            self._look(period)

    def state(self) -> Mapping[str, Any] | None:
        """Return policy and counts; a new period starts after a restart."""
        return {
            **self._kept_policy(),
            "own": self._own,
            "moves": self._counters.adjustments,
            "raises": self._counters.tunings,
            "counters": self._counters.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved policy."""
        own = state.get("own") is True
        kept = self._kept(state, ("moves", "raises"), exits=self._times.exits)
        policy, (self._counters.adjustments, self._counters.tunings) = kept
        if own or policy.active != self.policy.active:
            self.policy, self._own = policy, True
        self._recent = []

    def _look(self, period: Observations) -> None:
        """Raise thresholds, and move the first exit that makes too many batches late."""
        before = self._answering()
        raised = self._raise(period, before)
        after = self._move(raised, self._violations(period, before))
        if after != before:
            self._own = True
            exits = sorted(after)
            self.policy = policy_of(self.policy.version + 1, exits, [after[e] for e in exits])

    def _violations(self, period: Observations, active: Mapping[int, float]) -> dict[int, float]:
        """Return the share of the period's batches that each exit made late."""
        size, found = self.settings.batch_size, {}
        rows, after = size, None
        batches = len(period) // size
        late = np.zeros(batches, dtype=np.bool_)
        for exit_ in active:
            if rows < 1:
                found[exit_] = 1.0
                continue
            matrix = self._times.matrix(after=after, candidates=[exit_], rows=rows)
            going_on = _rows_behind(period, exit_, size)
            late_here = late | matrix.violated[0][matrix.column_of(going_on)]
            found[exit_] = float(late_here.mean())
            rows, after = int(matrix.allowed_rows[0]), exit_
            late = going_on > rows
        return found

    def _move(self, active: dict[int, float], violations: Mapping[int, float]) -> dict[int, float]:
        """Replace an exit by the next later candidate, with the same threshold."""
        late = [e for e in active if violations[e] > self.settings.max_violations]
        if not late:
            return active
        exit_ = late[0]
        behind = min([e for e in active if e > exit_], default=self._times.exits)
        moved = {e: t for e, t in active.items() if e != exit_}
        where = "it is no longer in use"
        if exit_ + 1 < behind:
            moved[exit_ + 1] = active[exit_]
            where = f"exit {exit_ + 1} takes its place"
        self._counters.adjustments += 1
        text = f"{violations[exit_]:.1%} of the batches late by exit {exit_}; {where}"
        self._counters.note("exits", text)
        return moved

    def _raise(self, period: Observations, active: Mapping[int, float]) -> dict[int, float]:
        """Repeatedly raise the threshold of the worst exit until the bound is met.

        Samples that ran to the end show what each exit would have answered.
        """
        counted = period.take(~period.forced)
        raised = dict(active)
        allowed = self.settings.max_disagreement * len(counted)
        complete = counted.take(counted.complete)
        was = wrong = _wrong_by_exit(complete, raised)
        while sum(wrong.values()) > allowed:
            worst = max(wrong, key=wrong.__getitem__)
            stepped = min(raised[worst] + self.settings.threshold_step, 1.0)
            # Above 1, no sample would exit.
            raised[worst] = NEVER if raised[worst] >= 1 - _ROUNDING else stepped
            wrong = _wrong_by_exit(complete, raised)
        if raised != active:
            self._counters.tunings += 1
            share = sum(was.values()) / len(counted)
            changed = {e: t for e, t in raised.items() if t != active[e]}
            to = {e: "off" if t >= NEVER else f"to {t:.4g}" for e, t in changed.items()}
            words = ", ".join(f"exit {e} {word}" for e, word in to.items())
            text = f"{share:.2%} of a period answered otherwise; thresholds raised: {words}"
            self._counters.note("tuning", text)
        return {e: t for e, t in raised.items() if t < NEVER}

    def _answering(self) -> dict[int, float]:
        """Return the thresholds of the exits that answer, in depth order."""
        return {a.exit: a.threshold for a in self.policy.active if a.threshold < NEVER}

    def _describe(self) -> str:
        return "steady" if self._answering() else "no exit answers"


def _rows_behind(period: Observations, exit_: int, size: int) -> IntArray:
    """Return the number of rows of each batch that ran on after an exit: int64[batches]."""
    going_on = (period.answered_at == MODEL_END) | (period.answered_at > exit_) | period.forced
    whole = len(going_on) // size * size
    return np.asarray(going_on[:whole].reshape(-1, size).sum(axis=1), dtype=np.int64)


def _wrong_by_exit(complete: Observations, active: Mapping[int, float]) -> dict[int, float]:
    """Return, by exit, the total weight of the samples that this exit would answer wrongly."""
    exits = list(active)
    if not exits or not len(complete):
        return dict.fromkeys(exits, 0.0)
    first = first_exit(complete.confidence[exits], np.array(list(active.values())))
    agrees: BoolArray = complete.agrees()[exits]
    weight = complete.weight
    return {e: float(weight[(first == i) & ~agrees[i]].sum()) for i, e in enumerate(exits)}


def _join(parts: list[Observations]) -> Observations:
    """Concatenate observations along their samples."""
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts], axis=-1)
        for field in fields(Observations)
    }
    return Observations(**arrays)
