"""The exit policy: the exits in use, and their confidence thresholds.

Confidence is in [0, 1], higher is more certain; a sample exits when ``confidence >= threshold``. A
threshold above 1 (:data:`NEVER`) switches an exit off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp.bundle.schema.serde import LEFT_OUT, check_numbers, json_key
from offramp.certify.decision import NEVER

__all__ = ["NEVER", "ActiveExit", "ExitPolicy", "Promise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveExit:
    """An exit that is in use, and its threshold."""

    exit: int
    """Index into ``Manifest.exits``."""
    threshold: float
    """Lowest confidence with which a sample exits."""

    def __post_init__(self) -> None:
        if self.exit < 0:
            raise ValueError(f"exit {self.exit} is not an index; exits count from 0")
        if not 0.0 <= self.threshold <= NEVER:
            raise ValueError(
                f"threshold {self.threshold} of exit {self.exit} is not in [0, {NEVER}]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The certificate of a policy, found by Learn then Test (Angelopoulos et al. 2021).

    With probability ``confidence_level`` over the certify split, disagreement on unseen data of the
    same distribution stays within ``max_disagreement``.
    """

    max_disagreement: float
    confidence_level: float = json_key("confidence")
    certify_samples: int
    certify_errors: int
    """Samples of the certify split that the policy answered unlike the source model."""
    p_value: float
    """P(Binomial(certify_samples, max_disagreement) ≤ certify_errors)."""
    predicted_savings: float
    """Share of the source model's time saved on the certify split, from profiled times."""
    max_class_disagreement: float | None = field(default=None, metadata=LEFT_OUT)
    """Bound that is valid for each class of the model with enough certify samples; see
    :mod:`offramp.bundle.records`."""

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "certify_samples", least=1)
        check_numbers(self, "certify_errors", least=0, most=self.certify_samples)
        check_numbers(self, "p_value", least=0, most=1)
        check_numbers(self, "predicted_savings", most=1)
        if self.max_class_disagreement is not None:
            check_numbers(self, "max_class_disagreement", above=0, below=1)

    def covers(self, max_disagreement: float, confidence_level: float) -> bool:
        """Return whether the promise is at least as strict as the one requested."""
        within = self.max_disagreement <= max_disagreement
        return within and self.confidence_level >= confidence_level


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPolicy:
    """An immutable, versioned exit policy; it is replaced as a whole."""

    version: int
    active: tuple[ActiveExit, ...]
    """Exits in use, in depth order; empty for the unmodified model."""
    promise: Promise | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "version", least=0)
        exits = [a.exit for a in self.active]
        if exits != sorted(set(exits)):
            raise ValueError(f"active exits {exits} must increase")
