"""Values of inputs that a model takes: the schema of ``value_bounds`` in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from offramp.bundle.schema.serde import LEFT_OUT, check_numbers

if TYPE_CHECKING:
    from offramp.bundle.schema.manifest import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBound:
    """The least and the greatest value that an input may have: the model fails beyond them.

    The compiler finds it where values select from a table of a fixed length
    (:mod:`offramp.compiler.samples.value_bounds`).
    """

    input: str
    lowest: float | None
    """Least legal value, inclusive; ``None`` where there is none."""
    highest: float | None
    """Greatest legal value, inclusive."""
    axis: int = field(default=0, metadata=LEFT_OUT)
    """Dimension that ``places`` are places of; 0 where the bound is for all elements."""
    places: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    """Places of that dimension whose elements are meant, such as the columns of a table."""
    operator: str
    """Operator that fails on other values."""

    def __post_init__(self) -> None:
        check_numbers(self, "lowest", "highest")
        ends = (self.lowest, self.highest)
        if None not in ends and not ends[0] <= ends[1]:  # type: ignore[operator]
            raise ValueError(f"value_bounds: {self.input!r:.50} is from {ends[0]} to {ends[1]}")
        if (self.axis > 0) != bool(self.places) or any(p < 0 for p in self.places):
            raise ValueError(
                f"value_bounds: {self.input!r:.50} has places {list(self.places)!s:.100} of "
                f"dimension {self.axis}, expected both or neither"
            )

    def legal(self) -> str:
        """Return the legal values in words: ``0 to 999``."""
        if self.lowest is None:
            return f"at most {plain(self.highest)}"
        if self.highest is None:
            return f"at least {plain(self.lowest)}"
        return f"{plain(self.lowest)} to {plain(self.highest)}"

    def describe(self) -> str:
        """One sentence for reports and the command line."""
        where = f" at places {list(self.places)} of dimension {self.axis}" if self.places else ""
        return (
            f"requests are refused whose {self.input!r}{where} is not {self.legal()}: the model "
            f"fails on other values ({self.operator})"
        )


def plain(value: float | None) -> str:
    """Write a number without a fraction that is zero."""
    whole = value is not None and float(value).is_integer()
    return str(int(value)) if whole and value is not None else str(value)


def check_value_bounds(bounds: Sequence[ValueBound], inputs: Iterable[TensorSpec]) -> None:
    """Refuse, by a ValueError, bounds that do not fit the inputs of a model."""
    specs = {spec.name: spec for spec in inputs}
    for bound in bounds:
        spec = specs.get(bound.input)
        if spec is None or np.dtype(spec.dtype).kind == "c":
            raise ValueError(f"value_bounds: {bound.input!r:.50} is no input of real numbers")
        size = spec.shape[bound.axis] if bound.axis < len(spec.shape) else 0
        if bound.places and not (isinstance(size, int) and max(bound.places) < size):
            raise ValueError(
                f"value_bounds: places {list(bound.places)!s:.100} of dimension {bound.axis} are "
                f"none of {spec.describe()}"
            )
