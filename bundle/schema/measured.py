"""What a policy brings, measured where the bundle was compiled: the schema of ``measured.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offramp.bundle.schema.serde import check_numbers

MEASURED: Final = "measured.json"
"""File of a bundle that holds a :class:`Measured`; not in those of earlier versions, and not where
the policy or the profile is a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time over the unmodified model's for the same batches: a median over rounds."""

    value: float
    half_width: float
    """Half of the median's 95 % interval."""

    def __post_init__(self) -> None:
        check_numbers(self, "value", above=0)
        check_numbers(self, "half_width", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """What was measured at a batch size."""

    batch_size: int
    rounds: int
    samples: int
    """Answered in all rounds."""
    mean: Ratio
    """Of the samples' latencies, from the start of their batch to their own answer."""
    median: Ratio
    """Likewise."""
    busy: Ratio
    """From a batch's start to its last answer: 1 less this is the share of compute saved."""
    nothing_exits: Ratio
    """``busy`` with thresholds that nobody reaches."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_size", "rounds", "samples", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A policy beside the unmodified model, batch by batch on samples of the certify split."""

    device: str
    threads: int
    samples: int
    """Different ones, at all batch sizes together."""
    agreement: float
    """Share of the answers that are those of the unmodified model."""
    sizes: tuple[MeasuredSize, ...]
    disturbed: tuple[str, ...] = ()
    """In what ways the machine was disturbed meanwhile, in words."""

    def __post_init__(self) -> None:
        check_numbers(self, "threads", "samples", least=1)
        check_numbers(self, "agreement", least=0, most=1)
        batch_sizes = [found.batch_size for found in self.sizes]
        if not batch_sizes or batch_sizes != sorted(set(batch_sizes)):
            raise ValueError(f"sizes: batch sizes {batch_sizes} must rise, and there must be one")

    def nearest(self, batch_size: int) -> MeasuredSize:
        """What was measured at the size that is nearest by ratio; the larger one of two."""
        return min(
            reversed(self.sizes),
            key=lambda at: max(at.batch_size / batch_size, batch_size / at.batch_size),
        )
