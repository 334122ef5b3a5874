"""Batches of tensors in device memory: offsets and lifetimes of their tensors.

Offsets depend on the tensors of a row (:data:`Row`) and on the capacity, never on the actual number
of rows: so a stage finds its inputs at the same addresses for any number of survivors of the stage
before it, and a captured CUDA graph stays valid.
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
"""Row parts of every tensor of a batch."""


def row_bytes(dtype: np.dtype[Any], sample_shape: tuple[int, ...]) -> int:
    """Return the bytes of one row of a tensor."""
    return math.prod(sample_shape) * dtype.itemsize


def size_of(rows_bytes: Iterable[int], capacity: int) -> int:
    """Return the bytes of a layout of tensors, given the bytes of their rows."""
    return sum(aligned(capacity * row_bytes) for row_bytes in rows_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor in a layout."""

    name: str
    dtype: np.dtype[Any]
    sample_shape: tuple[int, ...]
    row_bytes: int
    offset: int
    """Offset in bytes from the start of the memory."""

    def fill(self, memory: NDArray[np.uint8], array: NDArray[Any]) -> None:
        """Write an array to an upload, in the device's type; BackendError if values do not fit."""
        target = memory[self.offset : self.offset + len(array) * self.row_bytes]
        if self.dtype != array.dtype and self.dtype.kind in "iu" and array.size:
            limits = np.iinfo(self.dtype)
            if not limits.min <= array.min() <= array.max() <= limits.max:
                raise BackendError(
                    f"{self.name}: values {array.min()} to {array.max()} do not fit {self.dtype}, "
                    f"which the engine takes for {array.dtype}"
                )
        with np.errstate(over="ignore"):  # float64 values beyond float32 become infinite
            np.copyto(target.view(self.dtype).reshape(array.shape), array, casting="same_kind")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A layout of consecutive tensors.

    Layouts are compared by identity, because every stage looks its layouts up.
    """

    row: Row
    capacity: int
    tensors: tuple[Placed, ...]
    size_bytes: int

    def addresses(self, base: int) -> tuple[int, ...]:
        """Return the addresses of all tensors, in memory that begins at ``base``."""
        return tuple(base + tensor.offset for tensor in self.tensors)


class Layouts:
    """Makes every layout once, so that equal layouts are the same object."""

    def __init__(self) -> None:
        self._made: dict[tuple[Row, int], Layout] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, row: Row, capacity: int) -> Layout:
        """Return the layout of tensors for ``capacity`` rows."""
        layout = self._made.get((row, capacity))
        if layout is None:
            layout = self._made[row, capacity] = _lay_out(row, capacity)
        return layout

    def clear(self) -> None:
        """Forget the layouts; those in use stay valid, but are not found again."""
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
    """Rows in the buffers of a slot; not frozen, because every stage makes such a batch."""

    owner: object
    rows: int
    layout: Layout
    """Layout of the input area where the batch is, or where it would be copied to."""
    area: int
    """Index of the input area, 0 or 1."""
    addresses: tuple[int, ...]
    """Current addresses of ``layout.tensors``."""
    home: tuple[int, ...]
    """Addresses of these tensors in the input area."""
    stamps: tuple[tuple[Region, int], ...]
    """Buffers that contain the batch, with their versions when it was written."""
    placed: bool = True
    """``True`` if the batch is in the input area; otherwise it is still in its stage's outputs."""
    survivors: NDArray[np.int32] | None = None
    """Rows that the stage's end has already copied to the input area, ascending."""
    brought: tuple[Region, int] | None = None
    """The input area, and its version when the ``survivors`` were copied."""

    def __len__(self) -> int:
        return self.rows

    @property
    def valid(self) -> bool:
        """``True`` if the batch was not overwritten."""
        return all(region.version == version for region, version in self.stamps)

    def was_copied(self, rows: NDArray[np.intp] | None) -> bool:
        """Return whether exactly these rows (``None``: all) were copied to the input area.

        The answer is ``False`` if the copies were overwritten since then.
        """
        survivors, count = self.survivors, self.rows if rows is None else len(rows)
        if survivors is None or self.brought is None or len(survivors) != count:
            return False
        region, version = self.brought
        return region.version == version and (rows is None or bool((survivors == rows).all()))


@dataclass(slots=True, kw_only=True, eq=False)
class BufferedRows:
    """A batch in its own memory, which waits at a split; never changed."""

    pool: MemoryPool
    """Pool of the device with the memory."""
    rows: int
    layout: Layout
    memory: PooledMemory
    area: int
    """Input area in which the batch would have continued, so that a CUDA graph captured there fits
    it."""
    capacity: int
    """Capacity, in rows, of the layout in that area."""

    def __len__(self) -> int:
        return self.rows
