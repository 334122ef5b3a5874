"""The settings of the certified controller."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.bundle import ExitPolicy
from offramp.engine.control.drift import DEFAULT_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedSettings:
    """The constraint, the confidence level, and the patience of the search for savings."""

    max_disagreement: float = 0.01
    """The constraint, ε: largest allowed share of disagreement."""
    confidence_level: float = 0.95
    """1 − α, over the controller's life."""
    never_beyond_compiled: bool = False
    """True if a sample may be answered early only where the initial policy would answer it
    early."""
    release: bool = False
    """True if every sample runs to the end; else audits choose which do."""
    audit_budget: float = 0.05
    """Largest share of all compute that audits may take."""
    least_budgeted: float = 0.01
    """Audit probability that is always affordable, even beyond :attr:`audit_budget`."""
    least_audit: float = 0.003
    """Lower bound of the audit probability; the larger part of the budget may be kept for the
    samples that follow disagreements (:mod:`.drift`)."""
    raise_audits: bool = True
    """True if audits increase after a disagreement, and decrease at other times (:mod:`.drift`)."""
    alarm_rate: float = DEFAULT_RATE
    """Largest number of false drift alarms per audited sample."""
    min_gain: float = 0.01
    """Share of the mean time until the answer that a change of policy must save."""
    look_every: int = 256
    """Samples between two checks for possible changes."""
    window: int = 4096
    """Number of complete samples (:attr:`.Observations.complete`) that are kept to tune on."""
    tune_samples: int = 512
    """Number of complete samples needed to tune. With their weights, they must be worth at least
    half as many unweighted samples (:attr:`.Weighted.effective`)."""
    retune_every: int = 16_384
    """Samples after which a new path is fitted, to see if it saves more; the number doubles each
    time that it does not."""
    patience: int = 10_000
    """Number of audited samples without success after which no more audits are requested, and
    tested candidates are dropped."""

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
        """Probability that any statement over the controller's life may be wrong."""
        return 1 - self.confidence_level

    def covered_by(self, policy: ExitPolicy) -> bool:
        """Return whether a policy's certificate covers these settings."""
        promise = policy.promise
        return promise is not None and promise.covers(self.max_disagreement, self.confidence_level)
