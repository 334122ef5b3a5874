"""Samples of a program: arrays by name, iterables of batches, and functions that return them.

Values are converted to the dtypes of the model's inputs if their values stay the same
(:func:`fit`). A user's function is named as ``module:function``.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash, DataSource
from offramp.calibration.data.dataset import LABEL_KEYS
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.hashing import LABEL, hash_arrays, row_blocks
from offramp.calibration.data.sample_writer import SampleWriter
from offramp.calibration.data.scratch import ScratchSpace
from offramp.engine.common.validation import check_tensors


class ArraySource:
    """Arrays [n, …]: a mapping by name, a tuple in the order of the inputs, or a single array.

    Arrays with the right dtype are not copied, and must not be changed until the end of the run.
    """

    def __init__(self, arrays: Any, *, name: str = "data") -> None:
        """Create a source of arrays, or of tensors of other libraries."""
        self.name = name
        self._arrays = arrays

    @property
    def known_samples(self) -> int | None:
        """First dimension of the first array; ``None`` if it has none."""
        arrays = self._arrays
        values = arrays.values() if isinstance(arrays, Mapping) else arrays
        first = next(iter(values), None) if isinstance(arrays, Mapping | tuple) else arrays
        shape: Sequence[int] = getattr(first, "shape", ())
        return int(shape[0]) if shape else None

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Return the arrays; arrays of another dtype than their input's are converted in parts."""
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
    """Batches of samples, one after the other. Each batch is a mapping, a tuple or an array.

    A mapping has arrays by the names of inputs. A tuple has arrays in the order of the inputs, and
    may end with labels, integers [n]. The iterable is read once, to its end or up to ``limit``
    samples.
    """

    def __init__(
        self, iterable: Iterable[Any], limit: int | None = None, *, name: str = "data"
    ) -> None:
        """Create a source of batches of arrays, or of tensors of other libraries."""
        self.name = name
        self._iterable = iterable
        self._limit = limit

    @property
    def known_samples(self) -> int | None:
        """Number of samples of a torch data loader whose batches are stacked items of a data set.

        ``None`` for other iterables: the sizes of their batches are not known.
        """
        loader: Any = self._iterable
        iterates = getattr(type(loader), "__iter__", None)
        if getattr(iterates, "__module__", "") != "torch.utils.data.dataloader":
            return None
        collate = getattr(loader.collate_fn, "__name__", "")
        if collate != "default_collate" or not loader.batch_size:  # others make batches themselves
            return None
        if not isinstance(loader.sampler, Sized):
            return None
        samples = len(loader.sampler)
        samples -= samples % loader.batch_size if loader.drop_last else 0
        return samples if self._limit is None else min(samples, self._limit)

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Collect the batches; large arrays are written to the scratch space."""
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
                    f"{self.name}: no batch has samples; a generator can only be read once: pass "
                    "a fresh one, or a list or data loader"
                )
            return writer.finish()


def arrays_of_batch(batch: Any, specs: Sequence[TensorSpec], where: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch by name, converted to the dtypes of inputs; labels as ``label``.

    DataError if a tuple has more or fewer arrays than the model has inputs.
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
            "or labels after them, integers [n]; or pass a mapping from names to arrays"
        )
    return dict(zip(names, values, strict=True))


def _with_label(batch: Mapping[Any, Any], specs: Sequence[TensorSpec]) -> Mapping[Any, Any]:
    """Return a mapping with ``labels`` renamed to ``label``, if only one of these names occurs."""
    found = [key for key in LABEL_KEYS if key in batch and all(s.name != key for s in specs)]
    if len(found) != 1:
        return batch
    return {(LABEL if name == found[0] else name): value for name, value in batch.items()}


def _check_first(
    arrays: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec], where: str
) -> None:
    """Refuse a first batch that does not fit the inputs, before all batches are read."""
    for spec in specs:
        if spec.name not in arrays:
            raise DataError(
                f"{where}: input {spec.name!r} is missing; found "
                f"{', '.join(map(repr, arrays)) or 'nothing'}, expected {spec.describe()}"
            )
        if wrong := check_tensors([spec], {spec.name: arrays[spec.name]}):
            raise DataError(f"{where}: {wrong}")


_NUMBERS = "biuf"


def as_array(value: Any, where: str) -> NDArray[Any]:
    """Return a value as an array: it is a numpy array, another library's tensor, or a list.

    Tensors of torch are recognised by their methods; torch is not imported. DataError if the value
    is not an array of numbers or texts.
    """
    for method in ("detach", "cpu"):  # tensors that need a gradient, or are on a GPU
        if not isinstance(value, np.ndarray) and hasattr(value, method):
            value = getattr(value, method)()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a bfloat16 tensor, a ragged list
        reason = " ".join(str(error).split())
        raise DataError(
            f"{where}: a value of type {type(value).__name__} is not an array ({reason:.150}); "
            "pass numpy arrays, or tensors that numpy can read"
        ) from error
    if array.dtype.kind not in _NUMBERS + "SU":
        raise DataError(
            f"{where}: a value of type {type(value).__name__} is an array of dtype {array.dtype}, "
            "expected numbers"
        )
    return array


def fit(
    array: NDArray[Any], spec: TensorSpec, place: Callable[[int], str], *, numbers: bool = False
) -> NDArray[Any]:
    """Return an array in the dtype of an input, if at most digits of precision are lost.

    Integers are converted to integers of another width, booleans to integers, and floats to other
    floats. With ``numbers``, integers are also converted to floats, and floats to integers: a table
    does not distinguish them. Elsewhere, integers for a float input may be pixels that still have
    to be scaled. Other arrays are returned unchanged, and refused where names, dtypes and shapes
    are checked. DataError if a value is out of range; ``place`` names its row.
    """
    wanted = np.dtype(spec.dtype)
    if array.dtype == wanted or not array.size:
        return array.astype(wanted) if array.dtype.kind in _NUMBERS else array
    found, kind = array.dtype.kind, wanted.kind
    if kind == "f" and found in ("fbiu" if numbers else "f"):
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        same = np.isfinite(converted) | ~np.isfinite(array)
    elif kind in "biu" and found in ("fbiu" if numbers else "biu"):
        with np.errstate(invalid="ignore"):
            converted = array.astype(wanted)
            same = converted.astype(array.dtype) == array
        same &= (converted < 0) == (
            array < 0
        )  # a change of sign would convert back to the same bits
    else:
        return array
    if not same.all():
        row, *rest = (int(i) for i in np.unravel_index(int(np.argmin(same)), same.shape))
        raise DataError(
            f"{place(row)}: {spec.name!r} has the value {array[row, *rest]}, which {wanted} cannot "
            f"hold; expected {spec.describe()}"
        )
    return converted


_NAME: Final = re.compile(
    r"(?P<file>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)"
)


def names_function(text: str) -> bool:
    """Return whether a text has the form ``module:function`` or ``file.py:function``."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function without arguments that yields batches in the forms of :class:`.IterableSource`."""

    name: str
    """``module:function`` or ``file.py:function``."""
    limit: int | None = None
    """Largest number of samples that are read."""

    def __post_init__(self) -> None:
        """Check that the file exists; the function itself is imported by :meth:`load`."""
        file = Path(self.name.rpartition(":")[0])
        if file.suffix == ".py" and not file.is_file():
            raise DataError(f"{file}: no such file; expected FILE.py:FUNCTION")

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Import the function and collect its batches; its exceptions become DataErrors."""
        function = self._import()
        with self._reporting():
            value = function()
        if isinstance(value, Iterator):
            value = self._guarded(value)
        return source_of_value(value, self.name, self.limit).load(specs, scratch, keys=keys)

    def _guarded(self, batches: Iterator[Any]) -> Iterator[Any]:
        with self._reporting():
            yield from batches

    def _import(self) -> Callable[[], Any]:
        file, _, name = self.name.rpartition(":")
        with self._reporting(), _current_folder():
            if file.endswith(".py"):
                function: Any = getattr(_run_file(Path(file)), name, None)
            else:
                function = pkgutil.resolve_name(self.name)
        if not callable(function):
            raise DataError(
                f"{self.name}: there is no function {name!r} in {file}; "
                "expected one without arguments that yields batches"
            )
        found: Callable[[], Any] = function
        return found

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Convert an exception of the user's code into a DataError with its file and line."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # users' code
            last = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"{self.name} failed in {last.filename}:{last.lineno}: {reason:.200}; expected a "
                "function without arguments that yields batches"
            ) from error


def source_of_value(value: Any, name: str, limit: int | None) -> DataSource:
    """Return the source for a program's arrays or batches; DataError for anything else."""
    if isinstance(value, Mapping | tuple) or hasattr(value, "__array__"):
        return ArraySource(value, name=name)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return IterableSource(value, limit, name=name)
    raise DataError(
        f"{name}: a value of type {type(value).__name__} is not data; pass a mapping from the "
        "names of inputs to arrays, an iterable of batches, or a function that returns one"
    )


def _run_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"offramp_data_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle expect it
    spec.loader.exec_module(module)
    return module


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let imports also find modules in the current folder, as ``python -m`` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
