"""Where the tensors of a batch lie in a piece of device memory.

Offsets depend on what a row is and on the rows that there is room for, never on the rows that
there are: so a stage finds its inputs at the same addresses however many rows survived the stage
before it, and a CUDA graph that was captured once holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from offramp.engine.cuda.driver import ALIGNMENT

RowPart: TypeAlias = tuple[str, np.dtype[Any], tuple[int, ...]]
"""A tensor's name, type on the device and shape of one row."""

Row: TypeAlias = tuple[RowPart, ...]
"""Of every tensor of a batch."""


def aligned(size_bytes: int) -> int:
    """Rounded up, so that what comes behind is aligned as an allocation is."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def row_bytes(dtype: np.dtype[Any], sample_shape: tuple[int, ...]) -> int:
    """Bytes of a row."""
    return math.prod(sample_shape) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor in a layout."""

    name: str
    dtype: np.dtype[Any]
    """On the device."""
    sample_shape: tuple[int, ...]
    """Of one row."""
    row_bytes: int
    offset: int
    """Bytes from the beginning of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Tensors behind each other; compared by identity, since it is looked up every stage."""

    row: Row
    """What a row is."""
    capacity: int
    """Rows that there is room for."""
    tensors: tuple[Placed, ...]
    size_bytes: int

    def addresses(self, base: int) -> tuple[int, ...]:
        """Of all tensors, if the memory begins at ``base``."""
        return tuple(base + tensor.offset for tensor in self.tensors)


def place(row: Row, capacity: int) -> Layout:
    """Lay out tensors with room for ``capacity`` rows."""
    tensors, offset = [], 0
    for name, dtype, sample_shape in row:
        size_bytes = row_bytes(dtype, sample_shape)
        placed = Placed(
            name=name, dtype=dtype, sample_shape=sample_shape, row_bytes=size_bytes, offset=offset
        )
        tensors.append(placed)
        offset += aligned(capacity * size_bytes)
    return Layout(row=row, capacity=capacity, tensors=tuple(tensors), size_bytes=offset)


def size_of(rows_bytes: Iterable[int], capacity: int) -> int:
    """Bytes of a layout of tensors whose rows have so many bytes."""
    return sum(aligned(capacity * row_bytes) for row_bytes in rows_bytes)


class Layouts:
    """Makes every layout once, so that the same is the same object."""

    def __init__(self) -> None:
        """None is made yet."""
        self._made: dict[tuple[Row, int], Layout] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._made)

    def of(self, row: Row, capacity: int) -> Layout:
        """The layout of such rows."""
        key = (row, capacity)
        layout = self._made.get(key)
        if layout is None:
            layout = self._made[key] = place(row, capacity)
        return layout

    def clear(self) -> None:
        """Forget them; those in use stay what they are, and are never met again."""
        self._made.clear()
