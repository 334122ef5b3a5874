"""Arrays that lie in files and are mapped into memory: what is read of them is not kept.

Pages that a process has read count as its own until they are let go; the system's cache still has
them then, for as long as it has room.
"""

from __future__ import annotations

import mmap
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray


def map_array(
    file: BinaryIO | IO[bytes],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    offset: int = 0,
    fortran: bool = False,
) -> NDArray[Any]:
    """Map an array that begins at a byte of a file, to be read only.

    ValueError if the file ends before it does. The file must not be cut short while it is mapped:
    reading beyond its end ends the process.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    order = "F" if fortran else "C"
    return np.memmap(file, dtype, mode="r", offset=offset, shape=shape, order=order)  # type: ignore[call-overload,no-any-return]


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array lies in a mapped file."""
    return _mapping(array) is not None


def let_go(array: NDArray[Any]) -> None:
    """Let go of the pages that were read of, or written to, an array in a mapped file."""
    mapping = _mapping(array)
    if mapping is not None and hasattr(mapping, "madvise"):  # Windows has none
        mapping.madvise(mmap.MADV_DONTNEED)


def copy_rows(array: NDArray[Any], rows: slice | NDArray[np.intp]) -> NDArray[Any]:
    """Give some rows: of an array in a mapped file a copy, and what was read of it is let go.

    Where a file has its array at any byte, the copy lies as runtimes expect it.
    """
    found = array[rows]
    if not is_mapped(array):
        return found
    # An index copies already, a slice does not.
    copied = np.array(found, order="C") if is_mapped(found) else np.ascontiguousarray(found)
    let_go(array)
    return copied


def _mapping(array: NDArray[Any]) -> mmap.mmap | None:
    found = getattr(array, "_mmap", None)  # views of a numpy.memmap have it, copies do not
    return found if isinstance(found, mmap.mmap) else None
