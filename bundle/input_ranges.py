"""What calibration saw of each input: the schema of ``input_ranges.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.serde import check_numbers

INPUT_RANGES: Final = "input_ranges.json"
"""File of a bundle that holds :class:`InputRanges`; not in those of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """The least and the greatest element that an input had."""

    name: str
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        check_numbers(self, "highest", least=self.lowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRanges:
    """The ranges of a model's inputs.

    Of those whose elements were all finite numbers, and not all the same: a mask that nothing was
    padded in, say, tells nothing of what it may be.
    """

    inputs: tuple[InputRange, ...]

    @classmethod
    def of(cls, *parts: Mapping[str, NDArray[Any]]) -> Self:
        """Look at the inputs [n, …] of some parts of a data set, none of them empty."""
        found = []
        for name in parts[0]:
            lowest = float(min(np.min(part[name]) for part in parts))
            highest = float(max(np.max(part[name]) for part in parts))
            if np.isfinite([lowest, highest]).all() and lowest < highest:
                found.append(InputRange(name=name, lowest=lowest, highest=highest))
        return cls(inputs=tuple(found))
