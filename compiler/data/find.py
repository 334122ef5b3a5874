"""Kinds of data: which one a text of the command line, or an object of a program, is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offramp.calibration.data_sources import DataSource, NpyFolderSource, NpzSource
from offramp.calibration.errors import DataError
from offramp.compiler.data.batches import ArraySource, IterableSource
from offramp.compiler.data.spec import PreprocessingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """A kind of data that ``--data`` takes."""

    name: str
    """Noun for messages."""
    form: str
    """How it is written, for lists of kinds."""
    fits: Callable[[str], bool]
    """Whether a text names data of this kind."""
    make: Callable[[str, PreprocessingSpec], DataSource]


def _is_npz(text: str) -> bool:
    return Path(text).suffix == ".npz"


def _is_npy_folder(text: str) -> bool:
    return Path(text).is_dir() and next(Path(text).rglob("*.npy"), None) is not None


KINDS: Final[tuple[DataKind, ...]] = (
    DataKind(
        name="npz file",
        form="FILE.npz, an array for each input",
        fits=_is_npz,
        make=lambda text, _: NpzSource(Path(text)),
    ),
    DataKind(
        name="folder of npy files",
        form="a folder with INPUT.npy for each input",
        fits=_is_npy_folder,
        make=lambda text, _: NpyFolderSource(Path(text)),
    ),
)
"""All kinds; every text must fit one of them alone."""


def find_source(text: str, spec: PreprocessingSpec) -> DataSource:
    """Return the source of the data that a text names.

    DataError where no kind fits, or more than one: nothing is guessed.
    """
    found = [kind for kind in KINDS if kind.fits(text)]
    if len(found) == 1:
        return found[0].make(text, spec)
    if found:
        raise DataError(
            f"{text} is {' and also '.join(kind.name for kind in found)}; keep the data of one "
            "kind there, and move the others"
        )
    path = Path(text)
    if not path.exists():
        raise DataError(f"{text}: no such file; expected one of: {_forms()}")
    raise DataError(f"{text} is of no kind of data that is known; expected one of: {_forms()}")


def as_source(data: object, spec: PreprocessingSpec | None = None) -> DataSource:
    """Return the source of whatever a program gives as data.

    A path or text as ``--data`` takes it, a source, arrays (a mapping, a tuple or one alone), a
    function that yields batches, or an iterable of batches. DataError for anything else.
    """
    spec = spec or PreprocessingSpec()
    if isinstance(data, str | Path):
        return find_source(str(data), spec)
    if hasattr(data, "load") and hasattr(data, "name"):
        source: DataSource = data
        return source
    if isinstance(data, Mapping | tuple) or hasattr(data, "__array__"):
        return ArraySource(data)
    batches: Any = data() if callable(data) else data
    if isinstance(batches, Iterable):
        return IterableSource(batches, spec.max_samples)
    raise DataError(
        f"data of type {type(data).__name__} cannot be read; give a path, a mapping from input "
        "names to arrays, an iterable of batches, or a function that returns one"
    )


def _forms() -> str:
    return "; ".join(kind.form for kind in KINDS)
