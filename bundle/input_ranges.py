"""What calibration saw of each input: the schema of ``input_ranges.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.serde import LEFT_OUT, check_numbers

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
class LengthRange:
    """The least and the greatest length that samples had in a symbolic size."""

    size: str
    """The symbolic size."""
    mask: str = field(default="", metadata=LEFT_OUT)
    """Input [batch, size] whose ones are a sample's length; empty where that is the size itself."""
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        check_numbers(self, "shortest", least=0)
        check_numbers(self, "longest", least=self.shortest)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRanges:
    """The ranges of a model's inputs.

    Of those whose elements were all finite numbers, and not all the same: a mask that nothing was
    padded in, say, tells nothing of what it may be.
    """

    inputs: tuple[InputRange, ...]
    lengths: tuple[LengthRange, ...] = field(default=(), metadata=LEFT_OUT)
    """Of every symbolic size but the batch's."""

    @classmethod
    def of(cls, *parts: Mapping[str, NDArray[Any]]) -> Self:
        """Look at the inputs [n, …] of some parts of a data set, none of them empty."""
        return cls.over(parts)

    @classmethod
    def over(cls, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Self:
        """Look at the same, given one after another: none is kept."""
        ends: dict[str, tuple[float, float]] = {}
        for batch in batches:
            for name, values in batch.items():
                lowest, highest = ends.get(name, (np.inf, -np.inf))
                # unlike Python's, these keep NaN
                least, most = (
                    np.minimum(lowest, np.min(values)),
                    np.maximum(highest, np.max(values)),
                )
                ends[name] = float(least), float(most)
        found = [
            InputRange(name=name, lowest=lowest, highest=highest)
            for name, (lowest, highest) in ends.items()
            if np.isfinite([lowest, highest]).all() and lowest < highest
        ]
        return cls(inputs=tuple(found))
