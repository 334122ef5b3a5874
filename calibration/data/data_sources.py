"""Sources of samples: the protocol of all kinds of data, and the two kinds of numpy files.

Other kinds, such as folders of images and tables, are in :mod:`offramp.compiler.data`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.bundle.npz import NpzError, map_npy, map_npz, measure_npz, open_regular, read_npz
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.hashing import hash_arrays
from offramp.calibration.data.scratch import ScratchError, ScratchSpace

HELD_BYTES: Final = 2**26
"""Largest size of an array that is held in memory; larger arrays stay on the disk."""

ArraysAndHash: TypeAlias = tuple[dict[str, NDArray[Any]], str]
"""Arrays by name, and the SHA-256 of all data that was read."""


class DataSource(Protocol):
    """Samples of any kind, which become arrays for the inputs of a model.

    Implementations stream: they hold a few batches in memory, and write large arrays to unnamed
    files in the scratch folder. They need not check names, dtypes and shapes against the model:
    :func:`offramp.calibration.data.dataset.read_dataset` does so.
    """

    @property
    def name(self) -> str:
        """Name of the data in messages, such as its path."""

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Return the arrays by name, each with first dimension n, and the SHA-256 of the content.

        Args:
            specs: The inputs that the model reads, in its order.
            scratch: Space for large arrays, which are then returned as mapped files.
            keys: Names of arrays that are needed besides inputs and labels, such as the key of
                ``--group``. A source without such arrays omits them.

        Labels are in the array ``label``, where the source has any. The same content always has
        the same hash. DataError where the source cannot be read; the message names file and row.
        """


def known_samples(data: Path | DataSource) -> int | None:
    """Return the number of samples, if a source knows it before it is loaded.

    Such a source has an attribute ``known_samples``, which may be ``None``.
    """
    count: int | None = getattr(data, "known_samples", None)
    return count


def data_name(data: Path | DataSource) -> str:
    """Return the name of data for messages."""
    return str(data) if isinstance(data, Path) else data.name


def numpy_source(path: Path) -> DataSource:
    """Return the source for numpy's own files: a folder of npy files, or an npz file."""
    return NpyFolderSource(path) if path.is_dir() else NpzSource(path)


@dataclass(frozen=True, slots=True)
class NpzSource:
    """An npz file with an array for each input; ``label`` or ``labels`` contains the classes.

    An npy file counts as one array with the name of the file.
    """

    path: Path

    @property
    def name(self) -> str:
        """The user's path."""
        return str(self.path)

    def load(
        self,
        specs: Sequence[TensorSpec],  # noqa: ARG002 - all arrays of the file are returned
        scratch: ScratchSpace,
        *,
        keys: Collection[str] = (),
    ) -> ArraysAndHash:
        """Map the arrays, if they are large; unpack compressed arrays to scratch space."""
        try:
            with open_regular(self.path) as file:
                single = file.read(6) == b"\x93NUMPY"
                arrays = (
                    {self.path.stem: map_npy(self.path)} if single else self._arrays(file, scratch)
                )
                return arrays, hash_arrays(arrays, keys=keys)
        except FileNotFoundError as error:
            raise DataError(f"{self.path}: no such file") from error
        except (OSError, NpzError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(
                f"{self.path} is not an npz file of plain arrays ({reason}); "
                "write one with numpy.savez_compressed(path, INPUT=array, label=classes)"
            ) from error

    def _arrays(self, file: IO[bytes], scratch: ScratchSpace) -> dict[str, NDArray[Any]]:
        takes = measure_npz(file)
        if takes.arrays <= HELD_BYTES:
            return read_npz(file, max_bytes=HELD_BYTES)
        if not takes.packed:
            return map_npz(file, None)
        what = f"the unpacked arrays of {self.path}"
        remedy = "save it with numpy.savez, uncompressed: then it is read in place"
        try:
            unpacked = scratch.unnamed_file(takes.packed, what, remedy)
        except ScratchError as error:
            raise DataError(str(error)) from error
        with unpacked:  # the mapping outlives the file object
            return map_npz(file, unpacked)


@dataclass(frozen=True, slots=True)
class NpyFolderSource:
    """A folder where ``NAME.npy`` is the array of the input ``NAME``."""

    path: Path

    @property
    def name(self) -> str:
        """The user's path."""
        return str(self.path)

    def load(
        self,
        specs: Sequence[TensorSpec],  # noqa: ARG002 - all arrays of the folder are returned
        scratch: ScratchSpace,  # noqa: ARG002 - the files themselves are mapped
        *,
        keys: Collection[str] = (),
    ) -> ArraysAndHash:
        """Map the arrays of the folder."""
        arrays: dict[str, NDArray[Any]] = {}
        for file in sorted(self.path.rglob("*.npy")):
            name = file.relative_to(self.path).with_suffix("").as_posix()
            try:
                arrays[name] = map_npy(file)
            except (OSError, NpzError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise DataError(
                    f"{file} is not a file of a plain array ({reason}); write it with numpy.save"
                ) from error
        if not arrays:
            raise DataError(
                f"{self.path} is a folder without .npy files; put one there for each input, named "
                "after it, such as image.npy, or give an npz file"
            )
        return arrays, hash_arrays(arrays, keys=keys)
