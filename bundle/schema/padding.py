"""How samples of different size come into one batch: the schema of ``paddings`` in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from offramp.bundle.schema.serde import LEFT_OUT, check_numbers

if TYPE_CHECKING:
    from offramp.bundle.schema.manifest import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A symbolic size that samples may be padded in: no answer changes by more than rounding.

    The compiler tries it, on the source model and every exit (:mod:`.samples.padding`).
    """

    size: str
    """The symbolic size."""
    mask: str
    """Input [batch, size] that is 1 where a position counts; what is added to it is 0."""
    fills: dict[str, float]
    """What is added to every input that has the size, behind what it holds."""
    longest: int
    """Greatest size that answers were compared at: nothing is padded to more."""
    limit: int | None = field(default=None, metadata=LEFT_OUT)
    """Greatest size that the model takes, where it was seen to fail at one more."""
    difference: float
    """Largest difference that was found, relative to the scale of each value."""

    def __post_init__(self) -> None:
        check_numbers(self, "longest", "limit", least=1)
        check_numbers(self, "difference", least=0)
        if self.limit is not None and self.limit < self.longest:
            raise ValueError(f"limit is {self.limit}, below longest {self.longest}")

    def describe(self) -> str:
        """One sentence for reports and the command line."""
        return (
            f"samples of different `{self.size}` are padded into one batch, up to {self.longest}: "
            f"under the mask {self.mask!r} that changed answers and confidences by "
            f"{self.difference:.0e} of their scale"
        )


def check_paddings(paddings: Sequence[Padding], inputs: Iterable[TensorSpec]) -> None:
    """Refuse, by a ValueError, paddings that do not fit the inputs of a model."""
    specs = {spec.name: spec for spec in inputs}
    sizes = [padding.size for padding in paddings]
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"paddings: {sizes!s:.100} has a size twice")
    for padding in paddings:
        having = sorted(name for name, spec in specs.items() if padding.size in spec.shape[1:])
        if sorted(padding.fills) != having or not having:
            raise ValueError(
                f"paddings: fills are for {sorted(padding.fills)!s:.100}, expected the inputs with "
                f"the size {padding.size!r:.50}: {having}"
            )
        mask = specs.get(padding.mask)
        if mask is None or mask.shape[1:] != (padding.size,) or padding.fills[mask.name] != 0:
            raise ValueError(
                f"paddings: the mask {padding.mask!r:.50} is no input [batch, {padding.size:.50}] "
                "that is filled with 0"
            )
        for name, fill in padding.fills.items():
            if not _holds(specs[name].dtype, fill):
                raise ValueError(
                    f"paddings: {name!r:.50} is {specs[name].dtype}, which has no {fill!r:.50}"
                )


def _holds(dtype: str, value: float) -> bool:
    """Whether a number type has a value."""
    if dtype == "bool":
        return value in (0, 1)
    if np.dtype(dtype).kind == "f":
        return abs(value) <= float(np.finfo(dtype).max)
    ends = np.iinfo(dtype)
    return float(value).is_integer() and ends.min <= value <= ends.max
