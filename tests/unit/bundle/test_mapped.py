"""Rows of arrays in mapped files: copied once, and laid as runtimes expect them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.bundle.npz import copy_rows, is_mapped, map_array

ROWS, WIDTH = 400, 1000
SOME = (slice(3, 203), np.arange(1, ROWS, 2), slice(None, None, 2))


def mapped(folder: Path, *, offset: int = 0, fortran: bool = False) -> NDArray[np.float32]:
    values = np.arange(ROWS * WIDTH, dtype=np.float32)
    path = folder / "array"
    path.write_bytes(bytes(offset) + values.tobytes())
    with path.open("rb") as file:
        return map_array(file, values.dtype, (ROWS, WIDTH), offset=offset, fortran=fortran)


@pytest.mark.parametrize("rows", SOME)
@pytest.mark.parametrize(("offset", "fortran"), [(0, False), (3, False), (0, True)])
def test_rows_of_a_mapped_file_lie_in_memory(
    tmp_path: Path, rows: slice | NDArray[np.intp], offset: int, fortran: bool
) -> None:
    array = mapped(tmp_path, offset=offset, fortran=fortran)
    found = copy_rows(array, rows)
    assert type(found) is np.ndarray
    assert not is_mapped(found)
    assert found.flags.c_contiguous
    assert found.flags.aligned
    np.testing.assert_array_equal(found, np.array(array)[rows])


@pytest.mark.parametrize("rows", SOME)
def test_rows_are_copied_once(tmp_path: Path, rows: slice | NDArray[np.intp]) -> None:
    array = mapped(tmp_path)
    tracemalloc.start()
    try:
        found = copy_rows(array, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * found.nbytes


def test_what_is_in_memory_is_given_as_it_is() -> None:
    array = np.zeros((4, 2))
    assert np.shares_memory(copy_rows(array, slice(1, 3)), array)
