"""Tables in text files: CSV with a header, and JSONL with an object in each line."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.columns import ROWS, TableColumns, plan_table, read_table
from offramp.compiler.data.spec import PreprocessingSpec

CSV_SUFFIXES: Final = frozenset({".csv", ".tsv"})
JSONL_SUFFIXES: Final = frozenset({".jsonl", ".ndjson"})


class Record(NamedTuple):
    """A row of a text file."""

    line: int
    """Number of its first line, from 1 on."""
    values: Mapping[str, Any]
    """Cells by column; all of them are texts in CSV."""


@dataclass(frozen=True, slots=True)
class TextTableSource:
    """A CSV, TSV or JSONL file; how its columns become inputs is :mod:`.columns`' to say."""

    path: Path
    options: PreprocessingSpec

    @property
    def name(self) -> str:
        """The path as it was given."""
        return str(self.path)

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Read the rows; one that is wrong is an error that names its line."""
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
    """Some rows of a text file."""

    path: Path
    records: Sequence[Record]

    def __len__(self) -> int:
        return len(self.records)

    def place(self, row: int) -> str:
        """``texts.csv:17``."""
        return f"{self.path}:{self.records[row].line}"

    def objects(self, column: str) -> Sequence[Any]:
        """Return a column; DataError where a row has none."""
        for row, record in enumerate(self.records):
            if column not in record.values:
                raise DataError(
                    f"{self.place(row)}: there is no {column!r}; every line needs it, as the first "
                    "one has it"
                )
        return [record.values[column] for record in self.records]

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a column as numbers, texts of CSV read as such."""
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
    """Yield the lines of a file, and their numbers from 1 on; DataError where one is no UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number} is no UTF-8 ({error.reason} at byte {error.start} of the "
                    "line); save the file as UTF-8"
                ) from error


def _json_records(path: Path) -> Iterator[Record]:
    for number, line in _decoded(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is no JSON: {error}; mend or remove it") from error
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
            raise DataError(f"{path}:{line} is no CSV: {error}; mend it there") from error
        if row is None:
            return
        if not row:
            continue
        if header is None:
            header = _header(path, line, row)
        elif len(row) != len(header):
            raise DataError(
                f"{path}:{line} has {len(row)} cells, and the header {len(header)}; mend it (cells "
                "with a delimiter in them need quotes)"
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
