"""Kept elements of a dimension after a ``Reshape``, computed from the kept elements before it.

Attention splits channels into (heads, size) and merges them again: whole heads kept before are
whole heads after. A part of a head, or a pattern over two dimensions, cannot be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import TypeAlias

import numpy as np

from offramp.compiler.graphs.shapes import UNKNOWN

Size: TypeAlias = "int | str"

_FREE = 3
"""Assumed value of each free size; all can be equal, because only the order of elements matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticAxis:
    """A dimension that has fewer elements in a subnet."""

    axis: int
    full: int
    """Size of the dimension in the supernet. If the size is a factor times a free size, for
    instance 4 heads times the batch, ``full`` is the factor, and the kept elements repeat."""
    kept: tuple[int, ...]
    """Ascending indices of the elements that the subnet has."""

    def __str__(self) -> str:
        return f"{len(self.kept)} of {self.full}"


class MixedError(Exception):
    """A reshape spreads the kept elements over several dimensions; the message states how."""


def regroup(before: Sequence[Size], after: Sequence[Size], elastic: ElasticAxis) -> ElasticAxis:
    """Return the elastic dimension after a reshape, with its kept elements.

    ``elastic`` is the elastic dimension before the reshape. If heads are merged with the batch, the
    result is the merged dimension. MixedError if no single dimension has the kept elements; its
    message begins with the effect on the dimension.
    """
    found = _regrouped(before, after, elastic)
    if found is not None:
        return found
    first = (
        replace(elastic, kept=tuple(range(count)))
        for count in range(1, elastic.full)
        if elastic.full % count == 0
    )
    fitting = next((len(e.kept) for e in first if _regrouped(before, after, e)), None)
    remedy = f"keep multiples of {fitting}" if fitting else "keep its input whole"
    raise MixedError(
        f"splits it as {_shown(before)} → {_shown(after)}, which {elastic} do not fit; {remedy}"
    )


def _regrouped(
    before: Sequence[Size], after: Sequence[Size], elastic: ElasticAxis
) -> ElasticAxis | None:
    """Follow the kept elements through the reshape; ``None`` if they spread over dimensions."""
    old, new = _group(before, after, elastic.axis)
    sizes = _sizes([*(before[i] for i in old), *(after[i] for i in new)])
    mask = np.zeros([sizes[before[i]] for i in old], bool)
    pattern = np.zeros(elastic.full, bool)
    pattern[list(elastic.kept)] = True
    pattern = np.tile(pattern, sizes[before[elastic.axis]] // elastic.full)
    np.moveaxis(mask, old.index(elastic.axis), 0)[pattern] = True
    mask = mask.reshape([sizes[after[i]] for i in new])
    along = [np.asarray(mask.any(axis=_but(mask.ndim, i))) for i in range(mask.ndim)]
    partial = [i for i, marks in enumerate(along) if not marks.all()]
    if len(partial) != 1 or mask.sum() != prod(marks.sum() for marks in along):
        return None
    axis, marks = new[partial[0]], along[partial[0]]
    full, _ = _factor(after[axis], "")
    if not (np.tile(marks[:full], len(marks) // full) == marks).all():
        return None
    return ElasticAxis(axis=axis, full=full, kept=tuple(np.flatnonzero(marks[:full]).tolist()))


def _sizes(shape: Sequence[Size]) -> dict[Size, int]:
    """Map each size to a number; a free size gets an assumed value."""
    found: dict[Size, int] = {}
    for size in shape:
        number, symbols = _factor(size, "")
        if any(UNKNOWN in symbol for symbol in symbols):
            raise MixedError(f"mixes it with an unknown size, in {_shown(shape)}")
        found[size] = number * _FREE ** len(symbols)
    return found


def _but(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i != axis)


def _shown(shape: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _group(before: Sequence[Size], after: Sequence[Size], axis: int) -> tuple[list[int], list[int]]:
    """Return the smallest group of dimensions around one that a reshape regroups.

    The group ends where the products of all sizes before it, or after it, are equal on both sides.
    """
    common = {
        (i, j)
        for i, a in enumerate(_products(before, "before"))
        for j, b in enumerate(_products(after, "after"))
        if a == b
    } | {
        (len(before) - i, len(after) - j)
        for i, a in enumerate(_products(before[::-1], "before"))
        for j, b in enumerate(_products(after[::-1], "after"))
        if a == b
    }
    common |= {(0, 0), (len(before), len(after))}
    first = max((i, j) for i, j in common if i <= axis)
    last = min((i, j) for i, j in common if i > axis and j > first[1])
    return list(range(first[0], last[0])), list(range(first[1], last[1]))


_Product: TypeAlias = tuple[int, tuple[str, ...]]


_ONE: _Product = (1, ())


def _products(shape: Sequence[Size], side: str) -> Iterator[_Product]:
    """Yield the products of the first 0, 1, … sizes; an unknown size differs from all others."""
    factors = [_factor(size, f"{side}{i}") for i, size in enumerate(shape)]
    for end in range(len(factors) + 1):
        yield reduce(_times, factors[:end], _ONE)


def _factor(size: Size, unknown: str) -> _Product:
    if isinstance(size, int):
        return size, ()
    if UNKNOWN in size:
        return 1, (f"{UNKNOWN}{unknown}",)
    parts = size.split("*")
    numbers = prod(int(p) for p in parts if p.isdigit())
    return numbers, tuple(sorted(p for p in parts if not p.isdigit()))


def _times(a: _Product, b: _Product) -> _Product:
    return a[0] * b[0], tuple(sorted(a[1] + b[1]))
