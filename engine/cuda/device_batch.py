"""Batches of tensors in device memory: where their tensors lie, and for how long.

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
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import aligned
from offramp.engine.cuda.memory import MemoryPool, PooledMemory, Region

RowPart: TypeAlias = tuple[str, np.dtype[Any], tuple[int, ...]]
"""A tensor's name, type on the device and shape of one row."""

Row: TypeAlias = tuple[RowPart, ...]
"""Of every tensor of a batch."""


def row_bytes(dtype: np.dtype[Any], sample_shape: tuple[int, ...]) -> int:
    """Bytes of a row."""
    return math.prod(sample_shape) * dtype.itemsize


def size_of(rows_bytes: Iterable[int], capacity: int) -> int:
    """Bytes of a layout of tensors whose rows have so many bytes."""
    return sum(aligned(capacity * row_bytes) for row_bytes in rows_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor in a layout."""

    name: str
    dtype: np.dtype[Any]
    sample_shape: tuple[int, ...]
    row_bytes: int
    offset: int
    """Bytes from the beginning of the memory."""

    def fill(self, memory: NDArray[np.uint8], array: NDArray[Any]) -> None:
        """Put an array into an upload, in the device's type; BackendError if it cannot hold it."""
        target = memory[self.offset : self.offset + len(array) * self.row_bytes]
        if self.dtype != array.dtype and self.dtype.kind in "iu" and array.size:
            limits = np.iinfo(self.dtype)
            if not limits.min <= array.min() <= array.max() <= limits.max:
                raise BackendError(
                    f"{self.name}: values {array.min()} to {array.max()} do not fit {self.dtype}, "
                    f"which the engine takes for {array.dtype}"
                )
        with np.errstate(over="ignore"):  # float64 beyond float32 is infinite there
            np.copyto(target.view(self.dtype).reshape(array.shape), array, casting="same_kind")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Tensors one behind the other; compared by identity, since it is looked up every stage."""

    row: Row
    capacity: int
    tensors: tuple[Placed, ...]
    size_bytes: int

    def addresses(self, base: int) -> tuple[int, ...]:
        """Addresses of all tensors, if the memory begins at ``base``."""
        return tuple(base + tensor.offset for tensor in self.tensors)


class Layouts:
    """Makes every layout once, so that the same is the same object."""

    def __init__(self) -> None:
        self._made: dict[tuple[Row, int], Layout] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, row: Row, capacity: int) -> Layout:
        """Lay out tensors with room for ``capacity`` rows."""
        layout = self._made.get((row, capacity))
        if layout is None:
            layout = self._made[row, capacity] = _lay_out(row, capacity)
        return layout

    def clear(self) -> None:
        """Forget them; those in use stay what they are, and are never met again."""
        self._made.clear()


def _lay_out(row: Row, capacity: int) -> Layout:
    tensors, offset = [], 0
    for name, dtype, sample_shape in row:
        size_bytes = row_bytes(dtype, sample_shape)
        placed = Placed(
            name=name, dtype=dtype, sample_shape=sample_shape, row_bytes=size_bytes, offset=offset
        )
        tensors.append(placed)
        offset += aligned(capacity * size_bytes)
    return Layout(row=row, capacity=capacity, tensors=tuple(tensors), size_bytes=offset)


@dataclass(slots=True, kw_only=True, eq=False)
class CudaBatch:
    """Rows in the buffers of a slot; not frozen, since one is made every stage."""

    owner: object
    rows: int
    layout: Layout
    """Of the input area where it lies, or would be brought to."""
    area: int
    """Which of the two input areas."""
    addresses: tuple[int, ...]
    """Of ``layout.tensors``, where they lie now."""
    home: tuple[int, ...]
    """The same, where they lie in the input area or would be brought to."""
    stamps: tuple[tuple[Region, int], ...]
    """Buffers that it lies in, and their versions when it was written."""
    placed: bool = True
    """Whether it lies in the input area; otherwise it still lies where its stage gave it."""
    survivors: NDArray[np.int32] | None = None
    """Rows that the stage's end has already brought to the input area, rising."""
    brought: tuple[Region, int] | None = None
    """The input area, and its version then."""

    def __len__(self) -> int:
        return self.rows

    @property
    def valid(self) -> bool:
        """Whether it was not overwritten."""
        return all(region.version == version for region, version in self.stamps)

    def was_brought(self, rows: NDArray[np.intp] | None) -> bool:
        """Whether the stage end brought just these rows (``None``: all) to the input area.

        They must still be there.
        """
        survivors, count = self.survivors, self.rows if rows is None else len(rows)
        if survivors is None or self.brought is None or len(survivors) != count:
            return False
        region, version = self.brought
        return region.version == version and (rows is None or bool((survivors == rows).all()))


@dataclass(slots=True, kw_only=True, eq=False)
class BufferedRows:
    """A batch in memory of its own, that waits at a split; written for good."""

    pool: MemoryPool
    """Of the device that has them."""
    rows: int
    layout: Layout
    memory: PooledMemory
    area: int
    """The input area where it would have gone on, so that a graph captured there fits it."""
    capacity: int
    """Of the layout that it had there."""

    def __len__(self) -> int:
        return self.rows
