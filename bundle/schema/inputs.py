"""A model's inputs: names and shapes, padding, legal values, values in the calibration data.

``paddings`` and ``value_bounds`` are parts of the manifest, :class:`InputRanges` is a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.serde import LEFT_OUT, check_numbers

NUMBER_DTYPES: Final = frozenset(np.dtype(code).name for code in "?bhilqBHILQefd")
"""numpy's names of the element types that models may have as inputs and outputs."""


MOST_SAMPLE_BYTES: Final = 2**30
"""Limit on the size of a sample's input: a larger one would exhaust memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A named input or output of the model."""

    name: str
    dtype: str
    """numpy's name of the element type, for instance ``float32``."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a symbolic size. The first one is the batch."""

    def __post_init__(self) -> None:
        if self.dtype not in NUMBER_DTYPES:
            raise ValueError(f"dtype {self.dtype!r:.50} is not numpy's name of a number type")
        sizes = [size for size in self.shape if isinstance(size, int)]
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape {list(self.shape)!s:.100} has a negative size")
        if prod(sizes) * np.dtype(self.dtype).itemsize > MOST_SAMPLE_BYTES:
            raise ValueError(f"shape {list(self.shape)!s:.100} takes more than 1 GiB per sample")

    def describe(self) -> str:
        """Return ``image: uint8 [batch, 1, 28, 28]``, for messages."""
        return f"{self.name}: {self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadInput:
    """An input that the model's file declares and no operator reads.

    Requests and data may have it or leave it out. If present it is checked, then dropped.
    """

    spec: TensorSpec
    place: int
    """Index among all inputs that the file declares."""


def declared_inputs(
    read: Iterable[TensorSpec], unread: Iterable[UnreadInput]
) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model's file in file order, with those that no operator reads."""
    declared = list(read)
    for each in unread:
        declared.insert(each.place, each.spec)
    return tuple(declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBound:
    """The smallest and the largest value that the model accepts in an input; others make it fail.

    The compiler finds the bound where values select from a table of a fixed length
    (:mod:`offramp.compiler.samples.value_bounds`).
    """

    input: str
    lowest: float | None
    """Smallest legal value, inclusive; ``None`` if there is no such limit."""
    highest: float | None
    """Largest legal value, inclusive; ``None`` if there is no such limit."""
    axis: int = field(default=0, metadata=LEFT_OUT)
    """Dimension that ``places`` index; 0 where the bound is for all elements."""
    places: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    """Indices in the dimension ``axis`` that the bound is for, such as the columns of a table."""
    operator: str
    """Name of the operator that fails on values outside the bound."""

    def __post_init__(self) -> None:
        check_numbers(self, "lowest", "highest")
        ends = (self.lowest, self.highest)
        if None not in ends and not ends[0] <= ends[1]:  # type: ignore[operator]
            raise ValueError(
                f"value_bounds: {self.input!r:.50} has lowest {ends[0]} above highest {ends[1]}"
            )
        if (self.axis > 0) != bool(self.places) or any(p < 0 for p in self.places):
            raise ValueError(
                f"value_bounds: {self.input!r:.50} has places {list(self.places)!s:.100} in "
                f"dimension {self.axis}, expected indices of a dimension from 1, or neither"
            )

    def legal(self) -> str:
        """Return the legal values in words: ``0 to 999``."""
        if self.lowest is None:
            return f"at most {plain(self.highest)}"
        if self.highest is None:
            return f"at least {plain(self.lowest)}"
        return f"{plain(self.lowest)} to {plain(self.highest)}"

    def describe(self) -> str:
        """Return a sentence for reports and the command line."""
        where = f" at places {list(self.places)} of dimension {self.axis}" if self.places else ""
        return (
            f"requests whose {self.input!r}{where} is not {self.legal()} are refused: the model "
            f"fails on other values ({self.operator})"
        )


def plain(value: float | None) -> str:
    """Return a number as text, without a fraction that is zero."""
    whole = value is not None and float(value).is_integer()
    return str(int(value)) if whole and value is not None else str(value)


def check_value_bounds(bounds: Sequence[ValueBound], inputs: Iterable[TensorSpec]) -> None:
    """Raise ValueError for bounds that do not fit the inputs of a model."""
    specs = {spec.name: spec for spec in inputs}
    for bound in bounds:
        spec = specs.get(bound.input)
        if spec is None or np.dtype(spec.dtype).kind == "c":
            raise ValueError(f"value_bounds: {bound.input!r:.50} is not an input of real numbers")
        size = spec.shape[bound.axis] if bound.axis < len(spec.shape) else 0
        if bound.places and not (isinstance(size, int) and max(bound.places) < size):
            raise ValueError(
                f"value_bounds: places {list(bound.places)!s:.100} of dimension {bound.axis} are "
                f"outside of {spec.describe()}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A symbolic size in which samples may be padded: this changes answers by rounding errors only.

    The compiler checks this on the source model and every exit
    (:mod:`~offramp.compiler.samples.padding`).
    """

    size: str
    """Name of the symbolic size that is padded."""
    mask: str
    """Input [batch, size] that is 1 where a position counts; it is padded with 0."""
    fills: dict[str, float]
    """Value that each input with this size is padded with, at its end."""
    longest: int
    """Greatest size at which answers were compared: nothing is padded to more."""
    limit: int | None = field(default=None, metadata=LEFT_OUT)
    """Largest size that the model accepts, if it failed when it was tried with one more."""
    difference: float
    """Largest difference found between padded and other samples, relative to the scale of each
    value."""

    def __post_init__(self) -> None:
        check_numbers(self, "longest", "limit", least=1)
        check_numbers(self, "difference", least=0)
        if self.limit is not None and self.limit < self.longest:
            raise ValueError(f"limit is {self.limit}, below longest {self.longest}")

    def describe(self) -> str:
        """Return a sentence for reports and the command line."""
        return (
            f"samples of different `{self.size}` are padded into one batch, up to {self.longest}: "
            f"with the mask {self.mask!r} this changed answers and confidences by "
            f"{self.difference:.0e} of their scale"
        )


def check_paddings(paddings: Sequence[Padding], inputs: Iterable[TensorSpec]) -> None:
    """Raise ValueError for paddings that do not fit the inputs of a model."""
    specs = {spec.name: spec for spec in inputs}
    sizes = [padding.size for padding in paddings]
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"paddings: {sizes!s:.100} has the same size twice")
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
                f"paddings: the mask {padding.mask!r:.50} is not an input [batch, "
                f"{padding.size:.50}] that is filled with 0"
            )
        for name, fill in padding.fills.items():
            if not _holds(specs[name].dtype, fill):
                raise ValueError(
                    f"paddings: {name!r:.50} is {specs[name].dtype}, which has no {fill!r:.50}"
                )


def _holds(dtype: str, value: float) -> bool:
    """Return whether a number type can represent a value."""
    if dtype == "bool":
        return value in (0, 1)
    if np.dtype(dtype).kind == "f":
        return abs(value) <= float(np.finfo(dtype).max)
    ends = np.iinfo(dtype)
    return float(value).is_integer() and ends.min <= value <= ends.max


INPUT_RANGES: Final = "input_ranges.json"
"""File of a bundle that holds :class:`InputRanges`, where there was calibration data."""


NotFinite: TypeAlias = Literal["nan", "inf", "-inf"]
"""Element that is not a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """The least and the greatest finite element of an input."""

    name: str
    lowest: float
    highest: float
    beyond: tuple[NotFinite, ...] = field(default=(), metadata=LEFT_OUT)
    """Kinds of elements that are not finite and occurred, for instance NaN for missing values."""

    def __post_init__(self) -> None:
        check_numbers(self, "highest", least=self.lowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """The least and the greatest length of samples in a symbolic size."""

    size: str
    """Name of the symbolic size, as in the shapes of the inputs."""
    mask: str = field(default="", metadata=LEFT_OUT)
    """Input [batch, size] whose ones count the sample's length; empty if the size is the length."""
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        check_numbers(self, "shortest", least=0)
        check_numbers(self, "longest", least=self.shortest)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRanges:
    """The ranges of a model's inputs in the calibration data.

    Inputs whose finite elements were all equal have no range: a mask in data without padding, for
    example, does not show its legal values.
    """

    inputs: tuple[InputRange, ...]
    lengths: tuple[LengthRange, ...] = field(default=(), metadata=LEFT_OUT)
    """Range of lengths in every symbolic size except the batch."""

    @classmethod
    def of(cls, *parts: Mapping[str, NDArray[Any]]) -> Self:
        """Return the ranges of inputs [n, …] in non-empty parts of a data set."""
        return cls.over(parts)

    @classmethod
    def over(cls, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Self:
        """Return the ranges of inputs in consecutive batches, without keeping any batch."""
        ends: dict[str, tuple[float, float]] = {}
        beyond: dict[str, set[NotFinite]] = {}
        for batch in batches:
            for name, values in batch.items():
                known = ends.get(name, (np.inf, -np.inf))
                least, most = float(np.min(values)), float(np.max(values))
                if not np.isfinite([least, most]).all():  # NaN in the data makes both NaN
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
