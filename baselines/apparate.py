"""Apparate's controller as published (3.2, 3.3): it tunes after accuracy loss, adjusts exits.

    the last 16 samples agree less than required:  tune thresholds on the window
    every 128 samples:                             adjust the exits in use

It needs release mode, where every sample runs to the end, so that all answers can be compared. It
makes no promise about unseen samples: thresholds fit the window on which they were tuned. The paper
does not state the length of that window; the authors' artifact uses the same 16 samples.

Decisions made here, where the paper leaves them open:

* Agreement is measured on samples served with the active policy; late results of samples that were
  started with an older policy do not count. In a window that is not full yet, the missing samples
  count as agreeing.
* A sample causes at most one tuning: once a tuning is requested, a new agreement window starts.
* Tuning uses the last samples that every exit in use saw. While a new exit has seen fewer samples
  than the agreement window has, the other exits are tuned without it, and its threshold stays
  NEVER, so that it answers nothing. At the start, tuning waits until that number of samples was
  seen: fewer would set more aggressive thresholds.
* One job runs at a time; accuracy loss has priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from offramp.baselines.thresholds import METHODS, Tuning, tune
from offramp.bundle import NEVER, ExitPolicy
from offramp.certify import BoolArray, Float32Array, FloatArray, Observations, Weighted, Window
from offramp.certify.binomial import count_allowed
from offramp.engine.control.adjustment import DEFAULT_MAX_OVERHEAD, Adjustment, adjust
from offramp.engine.control.controller import Evidence, Job
from offramp.engine.control.costs import CostModel
from offramp.engine.control.static import UncertifiedController, policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ApparateSettings:
    """Settings of the controller; the defaults are those of the paper and its artifact."""

    max_disagreement: float = 0.01
    """Bound on the share of differing answers, in every window."""
    max_overhead: float = DEFAULT_MAX_OVERHEAD
    """Ramp budget: the most time that exits (ramps) may add until the model's end, as a share of
    the model's time."""
    agreement_window: int = 16
    """Number of samples whose agreement is monitored; also the smallest number to tune on."""
    tuning_window: int = 16
    """Number of samples to tune on; results vary less with 512."""
    adjust_every: int = 128
    """Number of samples after which the exits in use are adjusted; the adjustment evaluates these
    samples."""
    method: str = "greedy"
    """Search method of :func:`.thresholds.tune`."""
    confidence_level: float = 0.95
    """Confidence level for display only: nothing is certified."""

    def __post_init__(self) -> None:
        count_allowed(self.max_disagreement, 1)
        if self.agreement_window < 1 or self.adjust_every < 1:
            raise ValueError(
                "agreement_window and adjust_every must be at least 1 sample, "
                f"got {self.agreement_window}, {self.adjust_every}"
            )
        if self.tuning_window < self.agreement_window:
            raise ValueError(
                f"tuning_window {self.tuning_window} must not be below "
                f"agreement_window {self.agreement_window}"
            )
        if not self.max_overhead >= 0:
            raise ValueError(f"max_overhead must be at least 0, got {self.max_overhead}")
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}, expected one of {METHODS}")


_TuningArguments: TypeAlias = tuple[Weighted, FloatArray, float, ApparateSettings]
"""Arguments of :func:`run_tuning`."""


def run_tuning(
    samples: Weighted, latency_ms: FloatArray, source_ms: float, settings: ApparateSettings
) -> Tuning:
    """Tune the exits that have rows in ``samples``; runs as a job.

    ``latency_ms``, float64[exits + 1], is the time until each of these exits, then until the
    model's end, including the time of all exits in use.
    """
    data = samples.confidence, samples.agrees, latency_ms
    return tune(*data, settings.max_disagreement, settings.method, vanilla_ms=source_ms)


def run_adjustment(
    confidence: Float32Array, policy: ExitPolicy, costs: CostModel, tuning: _TuningArguments
) -> Adjustment:
    """Adjust the exits in use, from float32[active, n] confidences; runs as a job.

    ``tuning`` has the arguments of :func:`run_tuning` for all exits in use. The adjustment tunes
    thresholds with them if it needs new ones.
    """
    return adjust(
        confidence,
        [a.exit for a in policy.active],
        [a.threshold for a in policy.active],
        costs,
        max_overhead=tuning[-1].max_overhead,
        retune=lambda: run_tuning(*tuning).thresholds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Out:
    """A job (tuning or adjustment) that is running in another process."""

    number: int
    tuned_exits: tuple[int, ...]
    """Exits whose thresholds a tuning returns; none for an adjustment."""
    samples: int


def evenly_spaced(costs: CostModel, max_overhead: float = DEFAULT_MAX_OVERHEAD) -> tuple[int, ...]:
    """Return the first exits in use: as many as the budget allows, evenly spaced (Apparate 3.1).

    The exits of the bundle are divided by index into parts of equal size; the middle exit of each
    part is used.
    """
    for count in range(costs.exits, 0, -1):
        spaced = tuple((2 * i + 1) * costs.exits // (2 * count) for i in range(count))
        if costs.overhead(spaced) <= max_overhead:
            return spaced
    return ()


class ApparateController(UncertifiedController):
    """Keeps thresholds and the exits in use adapted to the last samples."""

    name = "apparate"

    @classmethod
    def as_published(
        cls, costs: CostModel, settings: ApparateSettings | None = None, *, version: int = 0
    ) -> Self:
        """Start with evenly spaced exits, none of which answers until the first tuning (3.1).

        The ramp budget of the settings limits the number of exits. ``version`` is the version of
        the first policy.
        """
        settings = settings or ApparateSettings()
        exits = evenly_spaced(costs, settings.max_overhead)
        return cls(policy_of(version, exits, [NEVER] * len(exits)), costs, settings)

    def __init__(
        self, policy: ExitPolicy, costs: CostModel, settings: ApparateSettings | None = None
    ) -> None:
        """Start with a policy; :meth:`as_published` starts with the paper's first policy."""
        self._settings = settings = settings or ApparateSettings()
        super().__init__(
            policy,
            max_disagreement=settings.max_disagreement,
            confidence_level=settings.confidence_level,
        )
        self._costs = costs
        newest = max(settings.tuning_window, settings.adjust_every)
        self._recent = Window(exits=costs.exits, capacity=newest)
        self._wrong: BoolArray = np.zeros(0, dtype=np.bool_)
        self._violated = False
        self._since_adjustment = self._jobs = 0
        self._out: _Out | None = None

    def observe(self, seen: Observations) -> None:
        """Record samples that ran to the end; monitor agreement under the active policy."""
        self._counters.add(seen, version=self.policy.version)
        self._recent.add(seen)
        self._since_adjustment += len(seen)
        served = seen.complete & ~seen.forced & (seen.policy_version == self.policy.version)
        self._watch(seen.loss[served] > 0)

    def take_job(self) -> Job | None:
        """Return a tuning if accuracy was lost, else an adjustment if one is due, else ``None``."""
        if self._out is not None:
            return None
        if self._violated:
            return self._tuning_job()
        if self._since_adjustment >= self._settings.adjust_every:
            return self._adjustment_job()
        return None

    def finish(self, job: Job, result: Any) -> None:
        """Apply the result of a tuning or an adjustment; a failed job changes nothing."""
        if self._out is None or job.number != self._out.number:
            return
        out, self._out = self._out, None
        if isinstance(result, Tuning):
            self._take_tuning(out, result)
        elif isinstance(result, Adjustment):
            self._take_adjustment(result)

    def state(self) -> Mapping[str, Any] | None:
        """Return policy and counts; the window fills again from the next samples."""
        counters = self._counters
        counts = {"tunings": counters.tunings, "adjustments": counters.adjustments}
        return {**self._kept_policy(), **counts, "counters": counters.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved policy; the result of a running job will be ignored."""
        kept = self._kept(state, ("tunings", "adjustments"), exits=self._costs.exits)
        self.policy, (self._counters.tunings, self._counters.adjustments) = kept
        self._out, self._violated = None, False
        self._wrong = self._wrong[:0]

    @property
    def _exits(self) -> tuple[int, ...]:
        return tuple(a.exit for a in self.policy.active)

    @property
    def _thresholds(self) -> tuple[float, ...]:
        return tuple(a.threshold for a in self.policy.active)

    def _watch(self, wrong: BoolArray) -> None:
        """Check the agreement of every window that ends at one of the new samples."""
        window = self._settings.agreement_window
        joined = np.concatenate([self._wrong, wrong])
        total = np.concatenate([[0], np.cumsum(joined)])
        ends = np.arange(len(self._wrong) + 1, len(joined) + 1)
        errors = total[ends] - total[np.maximum(ends - window, 0)]
        if (errors > count_allowed(self._settings.max_disagreement, window)).any():
            self._violated = True
        self._wrong = joined[max(len(joined) - window, 0) :]

    def _tuning_job(self) -> Job | None:
        """Return a job that tunes exits in use; exits with too few samples keep threshold NEVER."""
        least = self._settings.agreement_window
        exits = self._exits
        task = self._tuning(exits)
        if len(task[0]) < least:
            newest = self._recent.confidence(exits, least)
            known: BoolArray = np.asarray(~np.isnan(newest).any(axis=1))
            exits = tuple(e for e, saw_all in zip(exits, known, strict=True) if saw_all)
            task = self._tuning(exits)
        samples = len(task[0])
        if not exits or samples < least:
            return None
        self._violated, self._wrong = False, self._wrong[:0]
        purpose = f"tuning on {samples} samples after lost accuracy"
        return self._start(purpose, run_tuning, task, samples=samples, tuned_exits=exits)

    def _adjustment_job(self) -> Job | None:
        active, settings = self._exits, self._settings
        recent = self._recent.seen_by(active).newest(settings.adjust_every)
        samples = len(recent)
        if samples < settings.agreement_window:
            return None
        self._since_adjustment = 0
        task = (recent.confidence, self.policy, self._costs, self._tuning(active))
        purpose = f"adjusting the exits in use by {samples} samples"
        return self._start(purpose, run_adjustment, task, samples=samples)

    def _start(
        self,
        purpose: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        samples: int,
        tuned_exits: tuple[int, ...] = (),
    ) -> Job:
        self._jobs += 1
        self._out = _Out(number=self._jobs, tuned_exits=tuned_exits, samples=samples)
        return Job(number=self._jobs, purpose=purpose, function=function, arguments=arguments)

    def _tuning(self, exits: tuple[int, ...]) -> _TuningArguments:
        """Return arguments to tune some of the exits in use; latencies include all exits in use."""
        recent = self._recent.seen_by(exits).newest(self._settings.tuning_window)
        rows = [self._exits.index(e) for e in exits]
        latency_ms = self._costs.latency_ms(self._exits)[[*rows, -1]]
        return recent, latency_ms, self._costs.source_ms, self._settings

    def _take_tuning(self, out: _Out, tuning: Tuning) -> None:
        self._counters.tunings += 1
        tuned = dict(zip(out.tuned_exits, tuning.thresholds.tolist(), strict=True))
        if self._replace(self._exits, [tuned.get(e, NEVER) for e in self._exits]):
            self._violated = False  # accuracy loss during the tuning came from the old policy
        self._counters.note(
            "tuning",
            f"thresholds tuned on {out.samples} samples: {tuning.savings:.1%} of the time "
            f"saved there, {tuning.disagreement:.2%} answered otherwise",
        )

    def _take_adjustment(self, found: Adjustment) -> None:
        self._counters.tunings += found.tuned
        if found.active != self._exits:
            self._counters.adjustments += 1
            text = f"exits in use: {_names(found.active)} instead of {_names(self._exits)}"
            self._counters.note("exits", f"{text}; {found.reason}")
        self._replace(found.active, found.thresholds)

    def _replace(self, exits: Sequence[int], thresholds: Sequence[float]) -> bool:
        """Make a new policy, unless nothing would change; return whether it did."""
        if (tuple(exits), tuple(thresholds)) == (self._exits, self._thresholds):
            return False
        self.policy = policy_of(self.policy.version + 1, exits, thresholds)
        self._wrong = self._wrong[:0]
        return True

    def _evidence(self) -> Evidence:
        return Evidence.NONE

    def _describe(self) -> str:
        if self._out is not None:
            return "tuning" if self._out.tuned_exits else "adjusting the exits in use"
        if all(t >= NEVER for t in self._thresholds):
            return "shadow mode"
        return "steady"


def _names(exits: Sequence[int]) -> str:
    return ", ".join(str(e) for e in exits) or "none"
