"""Rows of a table as samples: which columns feed which input, and how they are converted.

The same rules are used for CSV, JSONL, parquet and data sets of Hugging Face. With a tokenizer, a
column of texts feeds the model. Otherwise the first rule that fits is used: a column of images
feeds the model, a column with the name of each input feeds that input, or all columns of numbers
together are the features of the only input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.dataset import LABEL_KEYS
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.hashing import LABEL
from offramp.calibration.data.sample_writer import SampleWriter
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.batches import fit
from offramp.compiler.data.images import ImageForm, image_form
from offramp.compiler.data.reading_options import PreprocessingSpec
from offramp.compiler.data.texts import TextEncoder

_log = logging.getLogger(__name__)

ROWS: Final = 64
"""Number of rows of a table that are in memory at a time."""


class TableRows(Protocol):
    """Some consecutive rows of a table."""

    def __len__(self) -> int:
        """Return the number of these rows."""

    def place(self, row: int) -> str:
        """Return the place of a row, such as ``texts.csv:17``."""

    def objects(self, column: str) -> Sequence[Any]:
        """Return a column as Python objects; DataError if there is no such column."""

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a column as numbers [n, …]; DataError if a row has none or another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """Columns of a table, which are known before its rows are read."""

    names: Sequence[str]
    images: Sequence[str] = ()
    """Columns that hold encoded images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """Decision about which columns of a table become which inputs of a model, and how."""

    columns: tuple[str, ...]
    """Names of the columns to read from the table."""
    inputs: Callable[[TableRows], dict[str, NDArray[Any]]]
    label: str | None
    label_requested: bool
    """True if the user named the column of labels."""
    keys: tuple[str, ...]
    encoder: TextEncoder | None = None


def read_table(
    batches: Iterable[TableRows],
    plan: TablePlan,
    name: str,
    scratch: ScratchSpace,
    *,
    max_samples: int | None,
) -> ArraysAndHash:
    """Collect the samples of a table, batch by batch."""
    with SampleWriter(name, scratch, keys=plan.keys) as writer:
        label = plan.label
        for rows in batches:
            arrays = plan.inputs(rows)
            if label is not None and not writer.samples and not _has_classes(rows, label, plan):
                label = None
            if label is not None:
                arrays[LABEL] = _classes(rows, label)
            for key in plan.keys:
                arrays[key] = _key(rows, key)
            if max_samples is not None:
                left = max_samples - writer.samples
                arrays = {column: array[:left] for column, array in arrays.items()}
            writer.append(arrays, rows.place(0))
            if writer.samples == max_samples:
                break
        if plan.encoder is not None:
            plan.encoder.warn_of_truncation()
        return writer.finish()


def plan_table(
    table: TableColumns,
    specs: Sequence[TensorSpec],
    options: PreprocessingSpec,
    name: str,
    *,
    keys: Collection[str] = (),
) -> TablePlan:
    """Choose the columns of each input; DataError if no rule fits."""
    inputs = {spec.name for spec in specs}
    label = options.label_column
    if label is not None:
        _check_column(label, "--label-column", table, name)
    else:
        label = next((n for n in LABEL_KEYS if n in table.names and n not in inputs), None)
    found_keys = tuple(key for key in keys if key in table.names)
    aside = {label, *found_keys} - inputs
    used, convert, encoder = _inputs(table, specs, options, name, aside=aside)
    others = [column for column in (label, *found_keys) if column is not None]
    return TablePlan(
        columns=tuple(dict.fromkeys([*used, *others])),
        inputs=convert,
        label=label,
        label_requested=options.label_column is not None,
        keys=found_keys,
        encoder=encoder,
    )


def _inputs(
    table: TableColumns,
    specs: Sequence[TensorSpec],
    options: PreprocessingSpec,
    name: str,
    *,
    aside: Collection[str | None],
) -> tuple[Sequence[str], Callable[[TableRows], dict[str, NDArray[Any]]], TextEncoder | None]:
    """Return the columns that feed the model, their conversion, and a text encoder, if any."""
    if options.tokenizer is not None:
        texts = options.text_column or ("text",)
        for column in texts:
            _check_column(column, "--text-column", table, name)
        encoder = TextEncoder(specs, options.tokenizer, options, name)
        return texts, lambda rows: encoder.encode(_texts(rows, texts)), encoder
    if options.text_column or options.max_tokens:
        flag = "--text-column" if options.text_column else "--max-tokens"
        raise DataError(
            f"{name}: {flag} is for texts, and they need --tokenizer FILE, the tokenizer.json of "
            "the model; add it, or leave the flag out"
        )
    image = _image_column(table, options, name)
    if image is not None:
        form = image_form(specs, options, name)
        return (image,), lambda rows: {form.spec.name: _images(rows, image, form)}, None
    if all(spec.name in table.names for spec in specs):
        names = [spec.name for spec in specs]
        return names, lambda rows: {s.name: _tensor(rows, s.name, s) for s in specs}, None
    features = [column for column in table.names if column not in aside]
    if len(specs) == 1 and len(specs[0].shape) == 2:
        (spec,) = specs
        if spec.shape[1] == len(features) or isinstance(spec.shape[1], str):
            return features, lambda rows: {spec.name: _features(rows, features, spec)}, None
    raise DataError(
        f"{name}: its columns ({', '.join(table.names)}) are not the inputs of the model "
        f"({'; '.join(spec.describe() for spec in specs)}); expected a column named after each "
        "input, or as many columns as the only input has features, or texts with --tokenizer FILE; "
        "rename the columns, or use a module:function that yields batches"
    )


def _check_column(column: str, flag: str, table: TableColumns, name: str) -> None:
    if column not in table.names:
        raise DataError(
            f"{name}: there is no column {column!r}, its columns are {', '.join(table.names)}; "
            f"name one with {flag}"
        )


def _image_column(table: TableColumns, options: PreprocessingSpec, name: str) -> str | None:
    if options.image_column is not None:
        _check_column(options.image_column, "--image-column", table, name)
        return options.image_column
    if len(table.images) > 1:
        raise DataError(
            f"{name}: the columns {' and '.join(table.images)} hold images; choose one with "
            "--image-column"
        )
    return table.images[0] if table.images else None


def _texts(rows: TableRows, columns: Sequence[str]) -> list[Any]:
    found = [rows.objects(column) for column in columns]
    for column, values in zip(columns, found, strict=True):
        for row, value in enumerate(values):
            if not isinstance(value, str) or not _is_unicode(value):
                raise DataError(
                    f"{rows.place(row)}: {column!r} is {value!r:.50}, expected a text; mend or "
                    "remove the row"
                )
    return list(found[0]) if len(found) == 1 else list(zip(*found, strict=True))


def _is_unicode(text: str) -> bool:
    """Return whether a text is valid Unicode: tokenizers refuse halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _images(rows: TableRows, column: str, form: ImageForm) -> NDArray[Any]:
    samples = []
    for row, value in enumerate(rows.objects(column)):
        content = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(content, bytes):
            raise DataError(
                f"{rows.place(row)}: {column!r} has no bytes of an image; save the data with the "
                "images inside, as Dataset.save_to_disk and to_parquet do once they are decoded"
            )
        samples.append(form.decode(content, f"{rows.place(row)}: {column!r}"))
    return np.stack(samples)


def _tensor(rows: TableRows, column: str, spec: TensorSpec) -> NDArray[Any]:
    """Return a column as an input; flat lists of the right length are reshaped to the input."""
    array = rows.numbers(column)
    sizes = spec.shape[1:]
    fixed = [size for size in sizes if isinstance(size, int)]
    flat = array.ndim <= 2 and len(sizes) != array.ndim - 1 and len(fixed) == len(sizes)
    if flat and prod(array.shape[1:]) == prod(fixed):
        array = array.reshape(len(array), *fixed)
    return fit(array, spec, rows.place, numbers=True)


def _features(rows: TableRows, columns: Sequence[str], spec: TensorSpec) -> NDArray[Any]:
    found = []
    for column in columns:
        values = rows.numbers(column)
        if values.ndim > 1:
            raise DataError(
                f"{rows.place(0)}: {column!r} is a list, expected a number, as each column is a "
                f"feature of {spec.describe()}"
            )
        found.append(fit(values, spec, rows.place, numbers=True))
    return np.stack(found, axis=1)


def _has_classes(rows: TableRows, label: str, plan: TablePlan) -> bool:
    """Return whether labels are used: the user named them, or the first one is a class number."""
    first = rows.objects(label)[0]
    if plan.label_requested or _is_class(first):
        return True
    _log.warning(
        "%s: %r is %.50r, not the number of a class: labels are ignored, as exits learn "
        "without them.",
        rows.place(0), label, first,
    )  # fmt: skip
    return False


def _is_class(value: Any) -> bool:
    if isinstance(value, list):  # 0 or 1 for each of several labels
        return all(map(_is_class, value))
    try:
        return float(value).is_integer()
    except (TypeError, ValueError):
        return False


def _classes(rows: TableRows, label: str) -> NDArray[Any]:
    array = rows.numbers(label)
    with np.errstate(invalid="ignore"):
        classes = array.astype(np.int64)
    wrong = (classes != array).reshape(len(array), -1).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{rows.place(row)}: {label!r} is {array[row]}, expected the number of a class; write "
            "numbers there, or name another column with --label-column"
        )
    return classes


def _key(rows: TableRows, key: str) -> NDArray[Any]:
    values = rows.objects(key)
    for row, value in enumerate(values):
        if not isinstance(value, str | int):
            raise DataError(
                f"{rows.place(row)}: --group {key} is {value!r:.50}, expected an integer or a text"
            )
    return np.array([str(value) for value in values])
