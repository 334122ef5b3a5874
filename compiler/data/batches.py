"""Samples that a program has: arrays by name, and iterables of batches such as a data loader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.dataset import LABEL_KEYS
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.sample_writer import LABEL, SampleWriter, hash_arrays, row_blocks
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.conversion import as_array, fit
from offramp.engine.common.validation import check_tensors


class ArraySource:
    """Arrays [n, …]: by name, in a tuple in the order of the inputs, or one alone.

    Arrays that fit stay where they are, and must not be changed until all is done.
    """

    def __init__(self, arrays: Any, *, name: str = "data") -> None:
        """Take arrays, or tensors of other libraries."""
        self.name = name
        self._arrays = arrays

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Return the arrays; those that an input takes in another dtype are converted in parts."""
        named = _named(self._arrays, specs, self.name)
        arrays = {
            str(name): as_array(value, f"{self.name}: {name!r}") for name, value in named.items()
        }
        for spec in specs:
            array = arrays.get(spec.name)
            if array is not None and array.ndim and array.dtype != spec.dtype:
                arrays[spec.name] = self._converted(array, spec, scratch)
        return arrays, hash_arrays(arrays, keys=keys)

    def _converted(
        self, array: NDArray[Any], spec: TensorSpec, scratch: ScratchSpace
    ) -> NDArray[Any]:
        with SampleWriter(self.name, scratch) as writer:
            for block in row_blocks(array):
                place = _samples(self.name, writer.samples)
                writer.append({spec.name: fit(block, spec, place)}, self.name)
            return writer.finish()[0][spec.name] if writer.samples else array


class IterableSource:
    """Batches of samples, one after the other: mappings, tuples or single arrays.

    A mapping has arrays by the names of inputs. A tuple has them in the order of the inputs, and
    may end with labels, integers [n]. Read once from begin to end, or until ``limit`` samples.
    """

    def __init__(
        self, iterable: Iterable[Any], limit: int | None = None, *, name: str = "data"
    ) -> None:
        """Take batches of arrays, or of tensors of other libraries."""
        self.name = name
        self._iterable = iterable
        self._limit = limit

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Collect the batches; large arrays go to scratch."""
        with SampleWriter(self.name, scratch, keys=keys) as writer:
            for number, batch in enumerate(self._iterable):
                where = f"{self.name}: batch {number}"
                arrays = arrays_of_batch(batch, specs, where)
                if not number:
                    _check_first(arrays, specs, where)
                if self._limit is not None:
                    left = self._limit - writer.samples
                    arrays = {name: array[:left] for name, array in arrays.items()}
                writer.append(arrays, where)
                if writer.samples == self._limit:
                    break
            if not writer.samples:
                raise DataError(
                    f"{self.name}: no batch with samples came; a generator can be read once: give "
                    "a fresh one, or a list or data loader"
                )
            return writer.finish()


def arrays_of_batch(batch: Any, specs: Sequence[TensorSpec], where: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch by name, converted to the dtypes of inputs; labels as ``label``.

    DataError where a tuple has more or fewer arrays than the model has inputs.
    """
    named = _named(batch, specs, where)
    arrays = {str(name): as_array(value, f"{where}: {name!r}") for name, value in named.items()}
    of_inputs = {spec.name: spec for spec in specs}
    return {
        name: fit(array, of_inputs[name], _samples(where)) if name in of_inputs else array
        for name, array in arrays.items()
    }


def _samples(where: str, first: int = 0) -> Callable[[int], str]:
    return lambda row: f"{where}: sample {first + row}"


def _named(batch: Any, specs: Sequence[TensorSpec], where: str) -> Mapping[Any, Any]:
    if isinstance(batch, Mapping):
        return _with_label(batch, specs)
    values = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    names = [spec.name for spec in specs]
    if len(values) == len(names) + 1:
        last = as_array(values[-1], f"{where}: the last array")
        if last.ndim == 1 and last.dtype.kind in "iu":
            return dict(zip([*names, LABEL], [*values[:-1], last], strict=True))
    if len(values) != len(names):
        expected = ", ".join(spec.describe() for spec in specs)
        raise DataError(
            f"{where}: has {len(values)} arrays, expected {len(names)} in this order ({expected}), "
            "or labels behind them, integers [n]; or give a mapping from names to arrays"
        )
    return dict(zip(names, values, strict=True))


def _with_label(batch: Mapping[Any, Any], specs: Sequence[TensorSpec]) -> Mapping[Any, Any]:
    """Return a mapping whose labels have one name, where it has labels under one name."""
    found = [key for key in LABEL_KEYS if key in batch and all(s.name != key for s in specs)]
    if len(found) != 1:
        return batch
    return {(LABEL if name == found[0] else name): value for name, value in batch.items()}


def _check_first(
    arrays: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec], where: str
) -> None:
    """Refuse a batch that does not fit before all of them are read."""
    for spec in specs:
        if spec.name not in arrays:
            raise DataError(
                f"{where}: input {spec.name!r} is missing; found "
                f"{', '.join(map(repr, arrays)) or 'nothing'}, expected {spec.describe()}"
            )
        if wrong := check_tensors([spec], {spec.name: arrays[spec.name]}):
            raise DataError(f"{where}: {wrong}")
