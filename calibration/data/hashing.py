"""The hash of samples, the same for equal arrays of equal names, however they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LABEL: Final = "label"
"""Name of the array of labels."""
_BLOCK_BYTES: Final = 2**22
"""Bytes of an array that are read together."""


def hash_arrays(arrays: Mapping[str, NDArray[Any]], *, keys: Collection[str] = ()) -> str:
    """Return the SHA-256 of arrays with their names, dtypes and shapes; ``keys`` are left out.

    Labels count as int64.
    """
    digest = hashlib.sha256()
    for name in sorted(arrays.keys() - set(keys)):
        array, of_array = arrays[name], hashlib.sha256()
        if name == LABEL and array.dtype.kind in "iu":
            array = array.astype(np.int64)
        for block in row_blocks(np.atleast_1d(array)):
            of_array.update(block.tobytes())
        described = describe(array.dtype, array.shape, of_array.hexdigest())
        digest.update(f"{name} {described}\n".encode())
    return digest.hexdigest()


def row_blocks(array: NDArray[Any]) -> Iterable[NDArray[Any]]:
    """Yield an array's rows as contiguous blocks of bounded size."""
    rows = max(1, _BLOCK_BYTES * len(array) // max(array.nbytes, 1))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows])


def describe(dtype: np.dtype[Any], shape: tuple[int, ...], digest: str) -> str:
    """Return the text that is hashed for an array whose bytes have the hash ``digest``."""
    return f"{dtype.str} {[*shape]} {digest}"
