"""What a model answers otherwise in other batches, and what that takes from the promise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offramp.bundle.schema.serde import check_numbers
from offramp.certify.binomial import upper_bound
from offramp.certify.shared_risk import half_risk

_STEPS = 10_000
"""Shares are rounded up to hundredths of a percent, so that they can be told as they are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEffect:
    """How often a dynamically quantised model answers a sample otherwise in another batch.

    Its operators round a row by the range of all rows of the batch. It was counted on samples that
    nothing was certified on, before exits were chosen: what is left of the promise for exits
    depends on no sample of the certify split.
    """

    operators: tuple[str, ...]
    """Names of those that round by the batch."""
    batch_sizes: tuple[int, ...]
    """That answers were compared at."""
    samples: int
    end_differs: int
    """Samples whose answer is not the same at all of these batch sizes."""
    max_disagreement: float
    """That was asked for, of this and of exits together."""
    confidence_level: float
    """Of both together."""

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "samples", least=1)
        check_numbers(self, "end_differs", least=0, most=self.samples)

    def spent(self, confidence_level: float) -> float:
        """Share of samples that may be answered otherwise in another batch, at half the risk."""
        bound = upper_bound(self.end_differs, self.samples, half_risk(confidence_level))
        return math.ceil(bound * _STEPS) / _STEPS

    def left(self) -> float:
        """Share of samples that exits may answer otherwise; nothing is left at 0 and below."""
        return self.max_disagreement - self.spent(self.confidence_level)

    def describe(self) -> str:
        """One sentence for reports and the command line."""
        *sizes, last = map(str, self.batch_sizes)
        spent = self.spent(self.confidence_level)
        return (
            f"In batches of {', '.join(sizes)} and {last} the model itself answers "
            f"{self.end_differs:,} of {self.samples:,} samples otherwise "
            f"({self.end_differs / self.samples:.2%}), as {len(self.operators)} operators round by "
            f"the range of the whole batch: at most {spent:.2%} of samples in batches as these at "
            f"{half_risk(self.confidence_level):.2%} confidence, which is taken from the promise "
            f"({self.max_disagreement:.2%} at {self.confidence_level:.0%})"
        )
