"""What it costs to run a model or a variant on the bundle's file of weights itself.

A runtime that packs weights for its kernels holds a private copy of them in each session. Sessions
that share the file hold none, and take longer. Both were measured, or counted, when the bundle was
compiled, so that whoever serves it can choose.
"""

from __future__ import annotations

from dataclasses import dataclass

from offramp.bundle.schema.serde import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCost:
    """Time and memory of one of a bundle's models, with weights shared and with packed ones."""

    variant: int
    """0 is the full model."""
    time_ratio: float
    """Measured: time with shared weights over that with packed ones, as one graph, at
    ``Calibration.reference_batch_size``; the median of rounds in turns."""
    half_width: float
    """Half of the interval that holds the ratio with 95 % confidence."""
    packed_bytes: int
    """Counted: bytes of the weights that packing makes private copies of."""

    def __post_init__(self) -> None:
        check_numbers(self, "variant", "half_width", "packed_bytes", least=0)
        check_numbers(self, "time_ratio", above=0, most=1e6)

    @property
    def more_time(self) -> float:
        """How much longer a run takes with shared weights, as a share; may be below 0."""
        return self.time_ratio - 1

    def describe(self) -> str:
        """``21 % longer (measured), 120.0 MiB less of its own (counted)``, for people."""
        share, size = round(100 * self.more_time), self.packed_bytes / 2**20
        longer = f"{share} % longer" if share > 0 else "no longer"
        return f"{longer} (measured), {size:.1f} MiB less of its own (counted)"
