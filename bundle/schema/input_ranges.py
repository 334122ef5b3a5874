"""What calibration saw of each input: the schema of ``input_ranges.json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.serde import LEFT_OUT, check_numbers

INPUT_RANGES: Final = "input_ranges.json"
"""File of a bundle that holds :class:`InputRanges`; not in those of earlier versions."""


NotFinite: TypeAlias = Literal["nan", "inf", "-inf"]
"""An element that is no finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """The least and the greatest finite element that an input had."""

    name: str
    lowest: float
    highest: float
    beyond: tuple[NotFinite, ...] = field(default=(), metadata=LEFT_OUT)
    """The elements that it had beside finite ones, as where values are missing or masked."""

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

    Inputs whose finite elements were all the same have none: a mask that nothing was padded in,
    say, tells nothing of what it may be.
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
        beyond: dict[str, set[NotFinite]] = {}
        for batch in batches:
            for name, values in batch.items():
                known = ends.get(name, (np.inf, -np.inf))
                least, most = float(np.min(values)), float(np.max(values))
                if not np.isfinite([least, most]).all():  # NaN is both
                    finite = np.isfinite(values)
                    beyond.setdefault(name, set()).update(_not_finite(values[~finite]))
                    least = float(np.min(values, initial=np.inf, where=finite))
                    most = float(np.max(values, initial=-np.inf, where=finite))
                ends[name] = min(known[0], least), max(known[1], most)
        found = [
            InputRange(
                name=name,
                lowest=lowest,
                highest=highest,
                beyond=tuple(sorted(beyond.get(name, ()))),
            )
            for name, (lowest, highest) in ends.items()
            if lowest < highest
        ]
        return cls(inputs=tuple(found))


def _not_finite(values: NDArray[Any]) -> Iterator[NotFinite]:
    if np.isnan(values).any():
        yield "nan"
    if np.isposinf(values).any():
        yield "inf"
    if np.isneginf(values).any():
        yield "-inf"
