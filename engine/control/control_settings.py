"""The settings of the certified controller."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.bundle import ExitPolicy
from offramp.engine.control.drift import DEFAULT_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedSettings:
    """The constraint, the confidence level, and how patiently to look for more."""

    max_disagreement: float = 0.01
    """The constraint, ε."""
    confidence_level: float = 0.95
    """1 − α, over the controller's life."""
    never_beyond_compiled: bool = False
    """Whether nothing is ever answered early that the policy at the start would not answer."""
    release: bool = False
    """Every sample runs to the end; else audits choose which do."""
    audit_budget: float = 0.05
    """Largest share of all compute that audits may take."""
    least_budgeted: float = 0.01
    """Audit probability that there is always a budget for, whatever :attr:`audit_budget` says."""
    least_audit: float = 0.003
    """Audit probability that is never gone below; of those in the budget, most may be kept for what
    follows disagreements (:mod:`.drift`)."""
    raise_audits: bool = True
    """Audits become more after a disagreement, and fewer at other times (:mod:`.drift`)."""
    alarm_rate: float = DEFAULT_RATE
    """False drift alarms per audited sample, at most."""
    min_gain: float = 0.01
    """Share of the mean time until the answer that a change of policy must save."""
    look_every: int = 256
    """Samples from one look at what could be changed to the next."""
    window: int = 4096
    """Complete samples that are kept to tune on."""
    tune_samples: int = 512
    """Complete samples that it takes to tune; they must be worth half as many unweighted ones."""
    retune_every: int = 16_384
    """Samples after which it is tried whether a new path would save more; doubled whenever not."""
    patience: int = 10_000
    """Audited samples without success after which no more are asked for, and other thresholds or
    exits under test are dropped."""

    def __post_init__(self) -> None:
        shares = ("max_disagreement", "confidence_level", "audit_budget", "alarm_rate", "min_gain")
        for name in shares:
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected above 0, below 1")
        if not 0 < self.least_audit <= self.least_budgeted <= 1:
            raise ValueError(
                f"least_audit is {self.least_audit}, expected above 0, and at most least_budgeted, "
                f"{self.least_budgeted}, which is at most 1"
            )
        for name in ("look_every", "window", "tune_samples", "retune_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.tune_samples > self.window:
            raise ValueError(
                f"tune_samples is {self.tune_samples}, more than the window of {self.window}"
            )

    @property
    def alpha(self) -> float:
        """With which probability any statement over the controller's life may be wrong."""
        return 1 - self.confidence_level

    def covered_by(self, policy: ExitPolicy) -> bool:
        """Whether what a policy was certified for is what is asked for, or more."""
        promise = policy.promise
        return promise is not None and promise.covers(self.max_disagreement, self.confidence_level)
