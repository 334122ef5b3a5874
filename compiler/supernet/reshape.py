"""Which elements of a dimension are kept after a ``Reshape``, where some are before it.

Attention splits channels into (heads, size) and merges them again: whole heads that are kept before
are whole heads after. What would keep a part of a head, or a pattern over two dimensions, is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TypeAlias

import numpy as np

from offramp.compiler.shapes import UNKNOWN

Size: TypeAlias = "int | str"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticAxis:
    """A dimension of a tensor that a subnet has less of."""

    axis: int
    full: int
    """Its size in the supernet."""
    kept: tuple[int, ...]
    """Which of its elements the subnet has, rising."""

    def __str__(self) -> str:
        return f"{len(self.kept)} of {self.full}"


class MixedError(Exception):
    """A reshape spreads what is kept over several dimensions; the message says how."""


def regroup(before: Sequence[Size], after: Sequence[Size], elastic: ElasticAxis) -> ElasticAxis:
    """Find the dimension behind a reshape that has what is kept of one before it.

    MixedError where there is none: the message begins with what happens to the dimension.
    """
    old, new = _group(before, after, elastic.axis)
    sizes, later = [before[i] for i in old], [after[i] for i in new]
    if not all(isinstance(size, int) for size in (*sizes, *later)):
        raise MixedError(
            f"mixes it with sizes that are not fixed, {_told(before)} → {_told(after)}"
        )
    mask = np.zeros([int(size) for size in sizes], bool)
    np.moveaxis(mask, old.index(elastic.axis), 0)[list(elastic.kept)] = True
    mask = mask.reshape([int(size) for size in later])
    kept = [np.flatnonzero(mask.any(axis=_but(mask.ndim, i))) for i in range(mask.ndim)]
    partial = [i for i, found in enumerate(kept) if len(found) < mask.shape[i]]
    if len(partial) != 1 or mask.sum() != prod(len(found) for found in kept):
        inner = prod(mask.shape[1:])
        raise MixedError(
            f"splits it as {_told(before)} → {_told(after)}, which {elastic} do not fit; keep "
            f"multiples of {inner}"
        )
    return ElasticAxis(
        axis=new[partial[0]],
        full=mask.shape[partial[0]],
        kept=tuple(kept[partial[0]].tolist()),
    )


def _but(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i != axis)


def _told(shape: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _group(before: Sequence[Size], after: Sequence[Size], axis: int) -> tuple[list[int], list[int]]:
    """Find the dimensions around one that become others, as few as there are.

    They end where the products of all sizes before, or behind, are the same on both sides.
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
    """Yield the products of the first sizes, of none on; unknown sizes are like no other."""
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
