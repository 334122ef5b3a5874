"""Collects samples that arrive batch by batch into arrays, within bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import IO, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.npz import map_array
from offramp.calibration.data import data_sources
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.hashing import LABEL, describe, row_blocks
from offramp.calibration.data.scratch import ScratchError, ScratchSpace

_STEP_BYTES: Final = 2**26
"""Bytes by which a scratch file grows."""


class SampleWriter:
    """Arrays by name that grow batch by batch.

    An array of up to :data:`.data_sources.HELD_BYTES` is held in memory; a larger one moves to an
    unnamed scratch file, and is mapped at the end. Labels and keys, which are small, are always
    held. The object is a context manager, which closes the files.
    """

    def __init__(self, name: str, scratch: ScratchSpace, *, keys: Collection[str] = ()) -> None:
        """Write samples of the data called ``name``; ``keys`` are arrays that are not hashed."""
        self.name, self.scratch = name, scratch
        self._keys = frozenset(keys)
        self._columns: dict[str, _HeldColumn | _StoredColumn] = {}
        self.samples = 0
        """Number of samples so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for column in self._columns.values():
            column.close()

    def append(self, batch: Mapping[str, NDArray[Any]], where: str) -> None:
        """Add the samples of a batch, arrays [n, …] by name; ``where`` is its place in the data.

        DataError if it has other names than earlier batches, or an array of another dtype or shape;
        or if arrays have different lengths, or the disk is full.
        """
        self._check(batch, where)
        for name, array in batch.items():
            column = self._columns.get(name)
            if column is None:
                small = name == LABEL or name in self._keys
                column = _HeldColumn(array) if small else _StoredColumn(array, self)
                self._columns[name] = column
            if not column.takes(array):
                raise DataError(
                    f"{where}: {name!r} is {_form(array)} for each sample, expected "
                    f"{_form(column.first)} as in the samples before; convert all to one form"
                )
            try:
                column.append(array)
            except ScratchError as error:
                raise DataError(str(error)) from error
        self.samples += len(next(iter(batch.values()), ()))

    def _check(self, batch: Mapping[str, NDArray[Any]], where: str) -> None:
        known = self._columns.keys()
        if self._columns and known != batch.keys():
            raise DataError(
                f"{where}: has {_listed(batch)}, those before had {_listed(known)}; every sample "
                "needs the same"
            )
        for name, array in batch.items():
            if not array.ndim:
                raise DataError(
                    f"{where}: {name!r} is a single number, expected an array with one row for "
                    "each sample"
                )
        lengths = {name: len(array) for name, array in batch.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{where}: arrays differ in length: {lengths}; every sample needs all")

    def finish(self) -> ArraysAndHash:
        """Return the arrays by name, and the SHA-256 of all except keys; DataError if empty."""
        if not self.samples:
            raise DataError(f"{self.name}: there are no samples in it")
        digest = hashlib.sha256()
        for name in sorted(self._columns.keys() - self._keys):
            digest.update(f"{name} {self._columns[name].describe()}\n".encode())
        arrays = {name: column.finish() for name, column in self._columns.items()}
        return arrays, digest.hexdigest()


class _HeldColumn:
    """An array of labels or keys: it is small; lengths of its texts may vary between batches."""

    def __init__(self, first: NDArray[Any]) -> None:
        self.first = first[:0].copy()
        self._parts: list[NDArray[Any]] = []

    def takes(self, array: NDArray[Any]) -> bool:
        """Return whether an array has the same kind and shape as earlier ones."""
        kinds = {array.dtype.kind, self.first.dtype.kind}
        same = len(kinds) == 1 or kinds <= {"i", "u"}
        return same and array.shape[1:] == self.first.shape[1:]

    def append(self, array: NDArray[Any]) -> None:
        self._parts.append(np.array(array))

    def describe(self) -> str:
        array = self.finish()
        return describe(array.dtype, array.shape, hashlib.sha256(array.tobytes()).hexdigest())

    def finish(self) -> NDArray[Any]:
        array = np.concatenate(self._parts)
        return array.astype(np.int64) if array.dtype.kind in "iu" else array

    def close(self) -> None:
        """Do nothing, as there is no file."""


class _StoredColumn:
    """An array of an input: it is in memory while it is small, then in a scratch file."""

    def __init__(self, first: NDArray[Any], writer: SampleWriter) -> None:
        self.first = first[:0].copy()
        self._writer = writer
        self._held: list[NDArray[Any]] = []
        self._rows = self._bytes = self._allocated = 0
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()

    def takes(self, array: NDArray[Any]) -> bool:
        """Return whether an array has the dtype and shape of earlier ones."""
        return array.dtype == self.first.dtype and array.shape[1:] == self.first.shape[1:]

    def append(self, array: NDArray[Any]) -> None:
        for block in row_blocks(array):
            self._digest.update(block.data)
            self._bytes += block.nbytes
            if self._file is None and self._bytes <= data_sources.HELD_BYTES:
                self._held.append(block.copy())  # the caller may reuse its array
                continue
            file = self._extended_file()
            for each in (*self._held, block):
                file.write(each.data)
            self._held.clear()
        self._rows += len(array)

    def _extended_file(self) -> IO[bytes]:
        """Return the file, with space for all bytes so far."""
        what, remedy = f"the arrays of {self._writer.name}", "read fewer samples (--max-samples)"
        lacking = max(self._bytes - self._allocated, 0)
        step = -(-lacking // _STEP_BYTES) * _STEP_BYTES
        scratch = self._writer.scratch
        if self._file is None:
            self._file = scratch.unnamed_file(step, what, remedy)
        elif step:
            scratch.extend(self._file, self._allocated, step, what, remedy)
        self._allocated += step
        return self._file

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self._rows, *self.first.shape[1:])

    def describe(self) -> str:
        return describe(self.first.dtype, self._shape, self._digest.hexdigest())

    def finish(self) -> NDArray[Any]:
        if self._file is None:
            return np.concatenate([self.first, *self._held])
        self._file.flush()
        self._file.truncate(self._bytes)
        self._writer.scratch.take(self._bytes - self._allocated)
        return map_array(self._file, self.first.dtype, self._shape)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # the mapping outlives the file object


def _form(array: NDArray[Any]) -> str:
    return f"{array.dtype} {[*array.shape[1:]]}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
