"""Kinds of data, and recognition of the kind from a command-line text or a program's object."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import (
    ArraysAndHash,
    DataSource,
    NpyFolderSource,
    NpzSource,
    known_samples,
)
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.batches import FunctionSource, names_function, source_of_value
from offramp.compiler.data.images import SUFFIXES as IMAGE_SUFFIXES
from offramp.compiler.data.images import ImageFolderSource
from offramp.compiler.data.made import RANDOM, SAMPLES, RandomSource
from offramp.compiler.data.reading_options import TOML_NAME, Family, PreprocessingSpec, read_toml
from offramp.compiler.data.recordings import RecordingSource
from offramp.compiler.data.tables import (
    CSV_SUFFIXES,
    JSONL_SUFFIXES,
    PARQUET,
    HuggingFaceSource,
    ParquetSource,
    TextTableSource,
)
from offramp.engine.learning.recording_file import is_recording

_TABLES: Final[frozenset[Family]] = frozenset({"texts", "tables"})
_TYPED_TABLES: Final[frozenset[Family]] = frozenset({"texts", "tables", "images"})
_SAVED: Final = ("state.json", "dataset_dict.json")
"""Files that mark a folder as a data set saved by Hugging Face's package."""


class NamedData:
    """A text that names data, and the file or folder at that path, if there is one."""

    def __init__(self, text: str) -> None:
        """Look for the file or folder that a text names."""
        self.text, self.path = text, Path(text)
        self.exists = bool(text) and self.path.exists()
        self.is_file = self.exists and self.path.is_file()
        self.is_folder = self.exists and self.path.is_dir()

    @property
    def suffix(self) -> str:
        """The file's suffix in lower case; empty for a folder."""
        return "" if self.is_folder else self.path.suffix.lower()

    @cached_property
    def suffixes(self) -> frozenset[str]:
        """Suffixes in lower case of all files in the folder and in folders inside it."""
        if not self.is_folder:
            return frozenset()
        return frozenset(
            os.path.splitext(name)[1].lower()  # noqa: PTH122 - millions of them
            for _, _, names in os.walk(self.path)
            for name in names
            if not name.startswith(".")
        )

    def has(self, *names: str) -> bool:
        """Return whether the folder itself contains a file with one of some names."""
        return any((self.path / name).is_file() for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """A kind of data that ``--data`` takes."""

    name: str
    """Noun for messages, with its article, such as ``a folder of images``."""
    form: str
    """Form of the text that names such data, for the list of kinds in messages."""
    fits: Callable[[NamedData], bool]
    """Function that returns whether a text names data of this kind."""
    make: Callable[[NamedData, PreprocessingSpec], DataSource]
    families: Collection[Family] = field(default=frozenset())
    """Families of reading options that apply to this kind."""
    names_path: bool = True
    """True if the text is the path of a file or folder."""


KINDS: Final[tuple[DataKind, ...]] = (
    DataKind(
        name="an npz or npy file",
        form="FILE.npz with an array for each input, or FILE.npy for the only one",
        fits=lambda data: data.suffix in {".npz", ".npy"} or _is_zip(data),
        make=lambda data, spec: first_of(NpzSource(data.path), spec.max_samples),
    ),
    DataKind(
        name="a folder of npy files",
        form="a folder with INPUT.npy for each input",
        fits=lambda data: ".npy" in data.suffixes,
        make=lambda data, spec: first_of(NpyFolderSource(data.path), spec.max_samples),
    ),
    DataKind(
        name="a folder of images",
        form="a folder of images (png, jpg, bmp, webp)",
        fits=lambda data: not IMAGE_SUFFIXES.isdisjoint(data.suffixes),
        make=lambda data, spec: ImageFolderSource(data.path, spec),
        families=frozenset({"images"}),
    ),
    DataKind(
        name="a CSV or JSONL file",
        form="FILE.csv, .tsv or .jsonl of numbers, or of texts with --tokenizer",
        fits=lambda data: data.suffix in CSV_SUFFIXES | JSONL_SUFFIXES,
        make=lambda data, spec: TextTableSource(data.path, spec),
        families=_TABLES,
    ),
    DataKind(
        name="parquet",
        form="FILE.parquet or a folder of them",
        fits=lambda data: data.suffix == PARQUET or PARQUET in data.suffixes,
        make=lambda data, spec: ParquetSource(data.path, spec),
        families=_TYPED_TABLES,
    ),
    DataKind(
        name="a data set of Hugging Face",
        form="a folder that Dataset.save_to_disk wrote",
        fits=lambda data: data.is_folder and data.has(*_SAVED),
        make=lambda data, spec: HuggingFaceSource(data.path, spec),
        families=_TYPED_TABLES,
    ),
    DataKind(
        name="a recording",
        form="a folder that eeserve --learn recorded inputs in",
        fits=lambda data: data.is_folder and is_recording(data.path),
        make=lambda data, spec: first_of(RecordingSource(data.path), spec.max_samples),
    ),
    DataKind(
        name="a function",
        form="module:function or FILE.py:function that yields batches",
        fits=lambda data: not data.exists and names_function(data.text),
        make=lambda data, spec: FunctionSource(data.text, spec.max_samples),
        names_path=False,
    ),
    DataKind(
        name="generated inputs",
        form=f"{RANDOM} for a dry run on generated inputs",
        fits=lambda data: not data.exists and data.text == RANDOM,
        make=lambda _, spec: RandomSource(spec.max_samples or SAMPLES),
        names_path=False,
    ),
)
"""All kinds of data; a text must fit exactly one of them."""


def find_source(text: str, spec: PreprocessingSpec, *, besides: Collection[str] = ()) -> DataSource:
    """Return the source of the data that a text names.

    A folder's own ``preprocessing.toml`` completes the options. DataError if no kind or more than
    one kind fits, if the file does not exist, or if an option does not apply to the kind. Options
    named in ``besides`` may be given with any kind, because the caller uses them, too.
    """
    data = NamedData(text)
    found = [kind for kind in KINDS if kind.fits(data)]
    if len(found) > 1:
        raise DataError(
            f"{text} is {' and also '.join(kind.name for kind in found)}; use a folder with data "
            "of one kind alone"
        )
    if not found:
        what = "is of no kind that can be read" if data.exists else "no such file or folder"
        raise DataError(
            f"{text or repr(text)}: {what}; expected {'; '.join(kind.form for kind in KINDS)}"
        )
    (kind,) = found
    if kind.names_path and not data.exists:  # its suffix alone has shown the kind
        raise DataError(f"{text}: no such file")
    if data.is_folder and data.has(TOML_NAME):
        spec = spec.filled_from(read_toml(data.path / TOML_NAME))
    spec.check_used(kind.families, text, besides=besides)
    return kind.make(data, spec)


def as_source(data: object, spec: PreprocessingSpec | None = None) -> DataSource:
    """Return the source of data that a program has.

    Data is a path or text as in ``--data``, a source, arrays (a mapping, a tuple or a single
    array), a ``datasets.Dataset``, a function that returns batches, or an iterable of batches.
    DataError for anything else.
    """
    spec = spec or PreprocessingSpec()
    if isinstance(data, str | Path):
        return find_source(str(data), spec)
    if hasattr(data, "load") and hasattr(data, "name"):
        source: DataSource = data
        return source
    if hasattr(data, "select_columns") and hasattr(data, "features"):
        return HuggingFaceSource(data, spec)
    spec.check_used((), "data")
    return source_of_value(data() if callable(data) else data, "data", spec.max_samples)


def _is_zip(data: NamedData) -> bool:
    """Return whether a file with any suffix is a zip archive, as npz files are."""
    if not data.is_file or data.suffix in {PARQUET, *CSV_SUFFIXES, *JSONL_SUFFIXES}:
        return False
    try:
        with data.path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def first_of(source: DataSource, samples: int | None) -> DataSource:
    """Return a source with only the first ``samples`` samples of another; ``None`` means all."""
    return source if samples is None else FirstSamples(source, samples)


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first samples of a source, or all samples if the source has fewer."""

    source: DataSource
    samples: int

    @property
    def name(self) -> str:
        """Name of the whole source, for messages."""
        return self.source.name

    @property
    def known_samples(self) -> int | None:
        """Number of the samples, if the source knows its own number."""
        count = known_samples(self.source)
        return None if count is None else min(count, self.samples)

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Return the beginning of each array; the hash covers the source's hash and the number."""
        arrays, digest = self.source.load(specs, scratch, keys=keys)
        if all(not array.ndim or len(array) <= self.samples for array in arrays.values()):
            return arrays, digest
        first = {n: array[: self.samples] if array.ndim else array for n, array in arrays.items()}
        return first, hashlib.sha256(f"{digest} first {self.samples}".encode()).hexdigest()
