"""Tables as samples: CSV, JSONL and parquet files, and data sets of Hugging Face.

A CSV file has a header, and a JSONL file has an object in each line. :mod:`.columns` decides how
columns become inputs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.bundle.optional_imports import optional_import
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.columns import ROWS, TableColumns, plan_table, read_table
from offramp.compiler.data.images import files_in
from offramp.compiler.data.reading_options import PreprocessingSpec

if TYPE_CHECKING:
    import pyarrow


CSV_SUFFIXES: Final = frozenset({".csv", ".tsv"})
JSONL_SUFFIXES: Final = frozenset({".jsonl", ".ndjson"})


class Record(NamedTuple):
    """A row of a text file."""

    line: int
    """Number of the row's first line in the file, from 1 on."""
    values: Mapping[str, Any]
    """Values by column; in CSV all of them are texts."""


@dataclass(frozen=True, slots=True)
class TextTableSource:
    """A CSV, TSV or JSONL file; :mod:`.columns` decides how its columns become inputs."""

    path: Path
    options: PreprocessingSpec

    @property
    def name(self) -> str:
        """Path as it was passed in."""
        return str(self.path)

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Read the rows; a wrong row is an error that names its line."""
        as_csv = self.path.suffix.lower() in CSV_SUFFIXES
        try:
            records = _csv_records(self.path) if as_csv else _json_records(self.path)
            first = next(records, None)
            if first is None:
                raise DataError(f"{self.path}: there are no samples in it")
            table = TableColumns(names=list(first.values))
            plan = plan_table(table, specs, self.options, self.name, keys=keys)
            batches = _batches(self.path, chain([first], records))
            return read_table(
                batches, plan, self.name, scratch, max_samples=self.options.max_samples
            )
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RecordRows:
    """Consecutive rows of a text file."""

    path: Path
    records: Sequence[Record]

    def __len__(self) -> int:
        return len(self.records)

    def place(self, row: int) -> str:
        """Return the place of a row, such as ``texts.csv:17``."""
        return f"{self.path}:{self.records[row].line}"

    def objects(self, column: str) -> Sequence[Any]:
        """Return a column as Python objects; DataError if a row lacks the column."""
        for row, record in enumerate(self.records):
            if column not in record.values:
                raise DataError(
                    f"{self.place(row)}: there is no {column!r}; every line needs it, as the first "
                    "one has it"
                )
        return [record.values[column] for record in self.records]

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a column as numbers; texts of CSV are parsed."""
        arrays = [
            _number(value, column, self.place(row))
            for row, value in enumerate(self.objects(column))
        ]
        for row, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise DataError(
                    f"{self.place(row)}: {column!r} is of shape {[*array.shape]}, and of "
                    f"{[*arrays[0].shape]} in {self.place(0)}; pad all to one shape"
                )
        return np.stack(arrays)


def _number(value: Any, column: str, place: str) -> NDArray[Any]:
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return np.array(kind(value))
            except (ValueError, OverflowError):
                continue
    try:
        array = np.array(value)
    except ValueError:  # lists of several lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf" or not array.size:
        raise DataError(
            f"{place}: {column!r} is {value!r:.50}, expected a number, or equally long lists of "
            "them in JSONL; mend or remove the row (texts need --tokenizer FILE)"
        )
    return array


def _batches(path: Path, records: Iterator[Record]) -> Iterator[RecordRows]:
    while part := list(islice(records, ROWS)):
        yield RecordRows(path, part)


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1 on; DataError if one is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number} is not UTF-8 ({error.reason} at byte {error.start} of the "
                    "line); save the file as UTF-8"
                ) from error


def _json_records(path: Path) -> Iterator[Record]:
    for number, line in _decoded(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is not JSON: {error}; mend or remove it") from error
        if not isinstance(values, dict):
            raise DataError(
                f"{path}:{number} is {line.strip()!r:.50}, expected an object such as "
                '{"text": "…"} in each line'
            )
        yield Record(number, values)


def _csv_records(path: Path) -> Iterator[Record]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader((line for _, line in _decoded(path)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path}:{line} is not CSV: {error}; mend it there") from error
        if row is None:
            return
        if not row:
            continue
        if header is None:
            header = _header(path, line, row)
        elif len(row) != len(header):
            raise DataError(
                f"{path}:{line} has {len(row)} cells, but the header has {len(header)}; mend it "
                "(cells with a delimiter in them need quotes)"
            )
        else:
            yield Record(line, dict(zip(header, row, strict=True)))


def _header(path: Path, line: int, row: list[str]) -> list[str]:
    names = [name.strip() for name in row]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}:{line}: two columns are named {twice!r}; rename one of them")
    if all(_is_number(name) for name in names):
        raise DataError(
            f"{path}:{line} has numbers ({', '.join(names):.50}), expected the names of the "
            "columns; add a first line with them"
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


PARQUET: Final = ".parquet"
_INSTALL: Final = "pip install 'offramp[parquet]'"
_INSTALL_DATASETS: Final = "pip install 'offramp[datasets]'"
_BUFFER_BYTES: Final = 2**20
"""Number of bytes of a column that are read at a time. Without it, a whole row group would be read
into memory."""
_PARQUET_REMEDY: Final = "expected parquet; write it again"
_SAVED_REMEDY: Final = "expected a data set of Hugging Face; write it with Dataset.save_to_disk"


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Consecutive rows of an Arrow table."""

    table: pyarrow.Table
    where: str
    """File or folder of the rows."""
    first: int
    """Number of the first row in that file or folder, from 0 on."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def place(self, row: int) -> str:
        """Return the place of a row, such as ``part-0.parquet: row 12``, from 0 on."""
        return f"{self.where}: row {self.first + row}"

    def objects(self, column: str) -> Sequence[Any]:
        """Return a column as Python objects."""
        found: list[Any] = self._column(column).to_pylist()
        return found

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a column of numbers, or of equally long lists of them, as an array [n, …]."""
        import pyarrow  # noqa: PLC0415 - an optional package

        types, array = pyarrow.types, self._column(column)
        shape: list[int] = []
        while True:
            if isinstance(array.type, pyarrow.BaseExtensionType):
                array = array.storage
            if types.is_dictionary(array.type):
                array = array.dictionary_decode()
            if array.null_count:
                row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
                raise DataError(
                    f"{self.place(self._row(row, shape))}: {column!r} has no value (null); mend or "
                    "remove the row"
                )
            if not (types.is_list(array.type) or types.is_large_list(array.type)
                    or types.is_fixed_size_list(array.type)):  # fmt: skip
                break
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            wrong = np.flatnonzero(lengths != lengths[0])
            if len(wrong):
                raise DataError(
                    f"{self.place(self._row(int(wrong[0]), shape))}: {column!r} is a list of "
                    f"{lengths[wrong[0]]}, and of {lengths[0]} in {self.place(0)}; pad all to one "
                    "length"
                )
            shape.append(int(lengths[0]))
            array = array.flatten()
        if not (types.is_integer(array.type) or types.is_floating(array.type)
                or types.is_boolean(array.type) or types.is_decimal(array.type)):  # fmt: skip
            raise DataError(
                f"{self.where}: the column {column!r} is of type {array.type}, expected numbers or "
                "lists of them (texts need --tokenizer FILE)"
            )
        if types.is_decimal(array.type):
            array = array.cast(pyarrow.float64())
        values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return values.reshape(len(self), *shape)

    def _column(self, column: str) -> Any:
        if column not in self.table.column_names:
            raise DataError(
                f"{self.where}: there is no column {column!r}, its columns are "
                f"{', '.join(self.table.column_names)}; use data with one schema"
            )
        return self.table.column(column).combine_chunks()

    @staticmethod
    def _row(element: int, shape: Sequence[int]) -> int:
        """Return the row that contains an element of nested lists."""
        return element // int(np.prod(shape, dtype=np.int64)) if shape else element


def columns_of(schema: pyarrow.Schema) -> TableColumns:
    """Describe the columns of a schema; structs with ``bytes`` are images."""
    import pyarrow  # noqa: PLC0415 - an optional package

    images = []
    for field in schema:
        kind = field.type
        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            images.append(field.name)
    return TableColumns(names=schema.names, images=images)


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A parquet file, or all parquet files of a folder in the order of their paths."""

    path: Path
    options: PreprocessingSpec

    @property
    def name(self) -> str:
        """Path as it was passed in."""
        return str(self.path)

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Read the columns that are needed, some rows at a time."""
        with optional_import("pyarrow", install=_INSTALL, raises=DataError):
            from pyarrow import parquet  # noqa: PLC0415

        files = files_in(self.path, {PARQUET}) if self.path.is_dir() else [self.path]
        with _reporting(files[0], _PARQUET_REMEDY):
            table = columns_of(parquet.read_schema(files[0]))
        plan = plan_table(table, specs, self.options, self.name, keys=keys)
        batches = chain.from_iterable(_parquet_rows(file, plan.columns) for file in files)
        return read_table(batches, plan, self.name, scratch, max_samples=self.options.max_samples)


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[ArrowRows]:
    import pyarrow  # noqa: PLC0415 - an optional package
    from pyarrow import parquet  # noqa: PLC0415

    with _reporting(path, _PARQUET_REMEDY):
        file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    with file:
        batches = file.iter_batches(batch_size=ROWS, columns=list(columns))
        tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
        yield from _rows_of(tables, path, _PARQUET_REMEDY)


def _rows_of(tables: Iterator[Any], where: Path | str, remedy: str) -> Iterator[ArrowRows]:
    """Yield tables as rows that know their places; a failure while reading one is a DataError."""
    first = 0
    while True:
        with _reporting(where, remedy):
            table = next(tables, None)
        if table is None:
            return
        yield ArrowRows(table, str(where), first)
        first += table.num_rows


@contextmanager
def _reporting(where: Path | str, remedy: str) -> Iterator[None]:
    """Convert any exception that a reader raises for damaged data into a DataError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{where} cannot be read ({reason:.150}); {remedy}") from error


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A data set of Hugging Face's package ``datasets``, on disk or in a program."""

    data: Any
    """A folder that ``Dataset.save_to_disk`` wrote, or a ``datasets.Dataset``."""
    options: PreprocessingSpec

    @property
    def name(self) -> str:
        """Folder as it was passed in."""
        return str(self.data) if isinstance(self.data, Path) else "data"

    @property
    def known_samples(self) -> int | None:
        """Number of rows that are read; ``None`` for a folder and for streams."""
        if not isinstance(self.data, Sized):
            return None
        return min(len(self.data), self.options.max_samples or len(self.data))

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Read the columns that are needed, some rows at a time."""
        data = _saved(self.data) if isinstance(self.data, Path) else self.data
        table = columns_of(data.features.arrow_schema)
        plan = plan_table(table, specs, self.options, self.name, keys=keys)
        tables = data.select_columns(list(plan.columns)).with_format("arrow").iter(ROWS)
        batches = _rows_of(iter(tables), self.name, _SAVED_REMEDY)
        return read_table(batches, plan, self.name, scratch, max_samples=self.options.max_samples)


def _saved(path: Path) -> Any:
    """Open a folder that ``save_to_disk`` wrote; DataError if it has splits, or is damaged."""
    with optional_import("datasets", install=_INSTALL_DATASETS, raises=DataError):
        import datasets  # noqa: PLC0415 - an optional package

    with _reporting(path, _SAVED_REMEDY):
        data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        raise DataError(
            f"{path} has the splits {', '.join(data)}; use one of them, such as "
            f"{path / next(iter(data), 'train')}"
        )
    return data
