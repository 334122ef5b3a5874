"""How many distinct samples the calibration data had, where that were fewer than rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offramp.bundle.schema.serde import check_numbers

COPIES_WITHIN: Final = 0.1
"""Share of the typical distance between rows within which rows may be copies, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctSamples:
    """Rows of the calibration data that count as one sample each, and why others do not."""

    rows: int
    """Rows of the data."""
    samples: int
    """Distinct samples: groups of rows that belong together."""
    found: tuple[str, ...]
    """Reasons why rows do not count by themselves, each with the number of rows."""
    key: str | None = None
    """Array of the data that groups rows (``--group``)."""
    within: float = COPIES_WITHIN
    """``--copies-within`` of the compilation: the same data are grouped in the same way by it."""

    def __post_init__(self) -> None:
        check_numbers(self, "rows", least=1)
        check_numbers(self, "samples", least=1, most=self.rows)
        check_numbers(self, "within", least=0, most=1)

    def describe(self) -> str:
        """Return a sentence without its end."""
        why = "; ".join(self.found) or "none belong together"
        return f"of {self.rows:,} rows of calibration data {why}"
