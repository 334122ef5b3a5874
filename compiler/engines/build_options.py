"""Options for building engines: sizes, parts of the bundle, precision, and their syntax."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from offramp.bundle.engines import Precision
from offramp.compiler.common.errors import EngineOptionsError

Part: TypeAlias = Literal["source", "stages", "segments"]
"""Sources of engines: the unmodified model, the stages of the exit policy, or all segments."""
PARTS: tuple[Part, ...] = get_args(Part)
OPTIMIZATION_LEVELS = range(6)
"""TensorRT's optimisation levels, from fast builds to fast engines."""

DEFAULT_BATCHES = "1,2-8,9-32"
"""Default batch profiles. TensorRT uses different tactics for one sample, for small and for large
batches."""


class SizeRange(NamedTuple):
    """Sizes of one dimension, both ends included; an engine is tuned for the last size."""

    first: int
    last: int

    def __str__(self) -> str:
        """Return ``2-8``, or ``1`` for a single size."""
        return str(self.last) if self.first == self.last else f"{self.first}-{self.last}"


def parse_batches(text: str) -> tuple[SizeRange, ...]:
    """Read ``1,2-8,9-32``: rising batch sizes and ranges, each of which becomes a profile."""
    where = f"--batch-profiles {text!r}"
    ranges = [_range(item, where) or SizeRange(_size(item, where), _size(item, where))
              for item in _items(text, where)]  # fmt: skip
    return _rising(ranges, where)


def parse_buckets(options: Sequence[str]) -> dict[str, tuple[SizeRange, ...]]:
    """Read ``sequence=32,64,128``: sizes of dimensions other than the batch, by their symbol.

    Each size is the upper end of a range, which begins after the previous range, or at 1. With
    ``height=200-224`` both ends of the range are set. Sizes must increase, and each dimension is
    named once.
    """
    buckets: dict[str, tuple[SizeRange, ...]] = {}
    for option in options:
        where = f"--buckets {option!r}"
        name, equals, text = option.partition("=")
        if not name or not equals:
            raise EngineOptionsError(f"{where} is not NAME=SIZES, for instance sequence=32,64,128")
        if name in buckets:
            raise EngineOptionsError(
                f"{where}: {name} is named twice; list all its sizes in one option"
            )
        buckets[name] = _rising(list(_buckets(text, where)), where)
    return buckets


def describe_ranges(ranges: Sequence[SizeRange]) -> str:
    """Return text such as ``1, 2-8, 9-32``."""
    return ", ".join(map(str, ranges))


def _buckets(text: str, where: str) -> Iterator[SizeRange]:
    first = 1
    for item in _items(text, where):
        given = _range(item, where)
        # _rising refuses a size below the last one.
        size = given.last if given else _size(item, where)
        yield given or SizeRange(min(first, size), size)
        first = size + 1


def _items(text: str, where: str, what: str = "size", example: str = "1,2-8,9-32") -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise EngineOptionsError(f"{where}: a {what} is missing; for instance {example}")
    return items


def _range(item: str, where: str) -> SizeRange | None:
    first, dash, last = item.partition("-")
    if not dash:
        return None
    found = SizeRange(_size(first, where), _size(last, where))
    if found.first > found.last:
        remedy = f"did you mean {found.last}-{found.first}?"
        raise EngineOptionsError(f"{where}: {item} ends before it begins; {remedy}")
    return found


def _size(text: str, where: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise EngineOptionsError(f"{where}: {text.strip()!r} is not a size; sizes are 1 or more")
    return size


def _rising(ranges: Sequence[SizeRange], where: str) -> tuple[SizeRange, ...]:
    for before, after in itertools.pairwise(ranges):
        if after.first <= before.last:
            raise EngineOptionsError(
                f"{where}: {after} does not begin after {before}; ranges must increase and must "
                "not overlap, so that each size has one profile"
            )
    return tuple(ranges)


def parse_parts(text: str) -> tuple[Part, ...]:
    """Read ``source,stages,segments``, or only some of these parts."""
    asked = [item.strip() for item in text.split(",")]
    unknown = [item for item in asked if item not in PARTS]
    if unknown:
        raise EngineOptionsError(
            f"--parts {text!r}: there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}"
        )
    return tuple(part for part in PARTS if part in asked)


def parse_units(text: str) -> tuple[str, ...]:
    """Read ``00-01-exit1,02-03``: names of engines, which are compared with a bundle later."""
    return tuple(dict.fromkeys(_items(text, f"--units {text!r}", "name", "00-01-exit1,02-03")))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """Settings that an engine is built with."""

    precision: Precision
    """Precision of the arithmetic that TensorRT may use; the graph has been converted to it."""
    workspace_bytes: int | None = None
    """Limit on device memory for scratch, in bytes; ``None`` means all free memory."""
    optimization_level: int = 3
    """Level from 0 to 5 of TensorRT's search for a faster engine."""

    def __post_init__(self) -> None:
        if self.optimization_level not in OPTIMIZATION_LEVELS:
            raise ValueError(f"optimization level {self.optimization_level} is not in 0 to 5")
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise ValueError(f"workspace of {self.workspace_bytes} bytes is not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuildOptions(BuildSettings):
    """Options for building engines, after a compilation or for a bundle."""

    precision: Precision = "fp32"
    device: str = "cuda:0"
    batches: tuple[SizeRange, ...] = parse_batches(DEFAULT_BATCHES)
    buckets: tuple[tuple[str, tuple[SizeRange, ...]], ...] = ()
    """Ranges of symbolic sizes other than the batch, by the model's name for the size."""
    parts: tuple[Part, ...] = PARTS
    units: tuple[str, ...] = ()
    """Names of units to build instead of ``parts``, as the result of a build lists them."""
    accept_disagreement: bool = False
    """True to build although the precision breaks the bundle's promise."""
