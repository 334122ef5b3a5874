"""Numbers in CSV, JSONL, parquet and data sets of Hugging Face become the inputs of a model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from tests.facts import Told, facts
from tests.unit.compiler.data.making import (
    IDS,
    PHOTO,
    X,
    load,
    load_hashed,
    pixels,
    save_tokenizer,
    write_lines,
)

from offramp.bundle import TensorSpec
from offramp.bundle.npz import is_mapped
from offramp.calibration.data import data_sources
from offramp.calibration.data.errors import DataError
from offramp.compiler.data import PreprocessingSpec, as_source
from offramp.compiler.data.tables import HuggingFaceSource

AGE = TensorSpec(name="age", dtype="int32", shape=("batch",))
MAP = TensorSpec(name="map", dtype="float32", shape=("batch", 1, 2, 2))
Columns = dict[str, list[Any]]
Save = Callable[[Path, Columns], Path]

datasets.disable_progress_bars()


def save_csv(folder: Path, columns: Columns) -> Path:
    rows = zip(*columns.values(), strict=True)
    return write_lines(
        folder / "t.csv", ",".join(columns), *(",".join(map(str, row)) for row in rows)
    )


def save_jsonl(folder: Path, columns: Columns) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return write_lines(folder / "t.jsonl", *rows)


def save_parquet(folder: Path, columns: Columns) -> Path:
    parquet.write_table(pyarrow.table(columns), folder / "t.parquet", row_group_size=2)
    return folder / "t.parquet"


def save_folder(folder: Path, columns: Columns) -> Path:
    """Save rows in two files of a folder."""
    (folder / "parts" / "b").mkdir(parents=True)
    table = pyarrow.table(columns)
    parquet.write_table(table.slice(0, 2), folder / "parts" / "a.parquet")
    parquet.write_table(table.slice(2), folder / "parts" / "b" / "a.parquet")
    return folder / "parts"


def save_datasets(folder: Path, columns: Columns) -> Path:
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "saved"))
    return folder / "saved"


EVERY = [save_csv, save_jsonl, save_parquet, save_folder, save_datasets]
TYPED = EVERY[1:]
"""Kinds that hold lists."""
ARROW = EVERY[2:]


@pytest.mark.parametrize("save", EVERY)
def test_columns_are_features_of_the_only_input(tmp_path: Path, save: Save) -> None:
    columns = {"a": [1, 2, 3], "label": [0, 1, 1], "b": [0.5, -1.5, 2.5], "c": [7, 8, 9]}
    arrays = load(save(tmp_path, columns), X)
    assert arrays["x"].dtype == np.float32
    assert arrays["x"].tolist() == [[1, 0.5, 7], [2, -1.5, 8], [3, 2.5, 9]]
    assert arrays["label"].tolist() == [0, 1, 1]


@pytest.mark.parametrize("save", EVERY)
def test_columns_are_inputs_by_name(tmp_path: Path, save: Save) -> None:
    columns = {"note": ["x", "y"], "age": [41, 42], "who": ["ann", "bob"], "score": [1.0, 2.0]}
    score = TensorSpec(name="score", dtype="float32", shape=("batch", 1))
    arrays = load(save(tmp_path, columns), AGE, score, keys=["who"])
    assert sorted(arrays) == ["age", "score", "who"]
    assert arrays["age"].dtype == np.int32
    assert arrays["age"].tolist() == [41, 42]
    assert arrays["score"].tolist() == [[1], [2]]
    assert arrays["who"].tolist() == ["ann", "bob"]


@pytest.mark.parametrize("save", TYPED)
def test_lists_take_the_shape_of_the_input(tmp_path: Path, save: Save) -> None:
    wanted = np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2)
    nested = save(tmp_path, {"map": wanted.tolist(), "labels": [1, 0, 2]})
    arrays, digest = load_hashed(nested, MAP)
    np.testing.assert_array_equal(arrays["map"], wanted)
    assert arrays["label"].tolist() == [1, 0, 2]
    flat = tmp_path / "flat"
    flat.mkdir()
    flat_path = save(flat, {"map": wanted.reshape(3, 4).tolist(), "labels": [1, 0, 2]})
    assert load_hashed(flat_path, MAP)[1] == digest


@pytest.mark.parametrize("save", TYPED)
def test_labels_may_be_several_for_each_sample(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, {"age": [1, 2], "label": [[0, 1], [1, 1]]})
    assert load(path, AGE)["label"].tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("save", EVERY)
def test_labels_as_pandas_writes_them(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, {"age": [1, 2], "label": [0.0, 3.0]})
    assert load(path, AGE)["label"].tolist() == [0, 3]


@pytest.mark.parametrize("save", EVERY)
def test_all_kinds_have_one_hash(tmp_path: Path, save: Save) -> None:
    columns: Columns = {"a": [1, 2, 3], "b": [0.5, 1, 2], "c": [7, 8, 9], "labels": [0, 1, 2]}
    arrays = {"x": np.array([columns[n] for n in "abc"], np.float32).T, "label": np.arange(3)}
    assert load_hashed(save(tmp_path, columns), X)[1] == load_hashed(as_source(arrays), X)[1]


def test_types_of_arrow(tmp_path: Path) -> None:
    """Fixed sizes, large lists, dictionaries, decimals, half precision, and arrays of datasets."""
    table = pyarrow.table(
        {
            "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)),
            "large": pyarrow.array([[1.5], [2.5]], pyarrow.large_list(pyarrow.float32())),
            "coded": pyarrow.array([7, 9]).dictionary_encode(),
            "money": pyarrow.array(["1.25", "2.50"]).cast(pyarrow.decimal128(5, 2)),
            "flag": pyarrow.array([True, False]),
            "half": pyarrow.array(np.array([0.5, 2], np.float16)),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    specs = [
        TensorSpec(name="fixed", dtype="int64", shape=("batch", 2)),
        TensorSpec(name="large", dtype="float32", shape=("batch", 1)),
        TensorSpec(name="coded", dtype="int64", shape=("batch",)),
        TensorSpec(name="money", dtype="float32", shape=("batch",)),
        TensorSpec(name="flag", dtype="int64", shape=("batch",)),
        TensorSpec(name="half", dtype="float16", shape=("batch",)),
    ]
    arrays = load(tmp_path / "t.parquet", *specs)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "fixed": [[1, 2], [3, 4]],
        "large": [[1.5], [2.5]],
        "coded": [7, 9],
        "money": [1.25, 2.5],
        "flag": [1, 0],
        "half": [0.5, 2],
    }
    features = datasets.Features({"map": datasets.Array2D((2, 2), "float32")})
    made = datasets.Dataset.from_dict({"map": [[[1, 2], [3, 4]]] * 2}, features)
    made.save_to_disk(str(tmp_path / "saved"))
    spec = TensorSpec(name="map", dtype="float32", shape=("batch", 2, 2))
    assert load(tmp_path / "saved", spec)["map"].tolist() == [[[1, 2], [3, 4]]] * 2


@pytest.mark.parametrize("save", ARROW)
def test_texts_in_columns(tmp_path: Path, save: Save) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    path = save(tmp_path, {"review": ["a good film", "bad", "bad"], "label": [1, 0, 0]})
    options: Any = {"tokenizer": tokenizer, "text_column": ("review",), "max_tokens": 5}
    arrays = load(path, IDS, **options)
    assert arrays["input_ids"].tolist() == [[2, 8, 4, 6, 3], [2, 5, 3, 1, 1], [2, 5, 3, 1, 1]]
    assert arrays["label"].tolist() == [1, 0, 0]


def encoded(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed=seed)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("save", ARROW)
def test_images_in_columns(tmp_path: Path, save: Save) -> None:
    images = [{"bytes": encoded(seed), "path": None} for seed in range(3)]
    path = save(tmp_path, {"photo": images, "label": [2, 0, 1]})
    arrays = load(path, PHOTO, scale=1.0)
    wanted = np.stack([pixels(seed=seed) for seed in range(3)]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(arrays["image"], wanted)
    assert arrays["label"].tolist() == [2, 0, 1]


def test_images_and_classes_as_datasets_saves_them(tmp_path: Path) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    images = [{"bytes": encoded(seed), "path": None} for seed in range(2)]
    made = datasets.Dataset.from_dict({"image": images, "label": ["dog", "cat"]}, features)
    made.save_to_disk(str(tmp_path / "saved"))
    saved, digest = load_hashed(tmp_path / "saved", PHOTO, scale=1.0)
    np.testing.assert_array_equal(saved["image"][1], pixels(seed=1).transpose(2, 0, 1))
    assert saved["label"].tolist() == [1, 0]
    spec = PreprocessingSpec(scale=1.0)
    assert load_hashed(as_source(made, spec), PHOTO)[1] == digest  # in a program
    shuffled = as_source(made.select([1, 0]), spec)
    assert load(shuffled, PHOTO)["label"].tolist() == [0, 1]


@pytest.mark.parametrize("save", EVERY)
def test_the_first_samples_alone(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, {"age": [*range(200)]})
    assert load(path, AGE, max_samples=130)["age"].tolist() == [*range(130)]


@pytest.mark.parametrize("save", EVERY)
def test_large_tables_are_read_in_parts(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows take 1 MB of memory at most, and would take 8 MB as objects of Python."""
    columns = {name: [*range(20_000)] for name in "abc"}
    path = save(tmp_path, columns)
    monkeypatch.setattr(data_sources, "HELD_BYTES", 2**10)
    load(path, X, max_samples=10)  # what is imported then is not counted
    del columns
    tracemalloc.start()
    try:
        array = load(path, X)["x"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert is_mapped(array)
    np.testing.assert_array_equal(array, np.arange(20_000)[:, None].repeat(3, axis=1))
    assert peak < 2**20


def test_a_large_row_group_is_read_in_parts(tmp_path: Path) -> None:
    """A few of the 32 MB of one row group are in Arrow's memory at a time."""
    values = np.random.default_rng(0).random(2**23, np.float32)
    table = pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(values, 2**10)})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2**13)
    del table
    code = (
        "import sys, pyarrow\n"
        "from offramp.bundle import TensorSpec\n"
        "from offramp.calibration.data.dataset import read_dataset\n"
        "from offramp.compiler.data import PreprocessingSpec, find_source\n"
        "source = find_source(sys.argv[1], PreprocessingSpec())\n"
        "spec = TensorSpec(name='x', dtype='float32', shape=('batch', 2**10))\n"
        "print(float(read_dataset(source, [spec]).inputs['x'].sum()))\n"
        "print(pyarrow.default_memory_pool().max_memory())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t.parquet")]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    total, most = done.stdout.split()
    assert float(total) == pytest.approx(float(values.sum()), rel=1e-3)
    assert int(most) < 8 * 2**20


WRONG_ROWS: list[tuple[Columns, TensorSpec, str]] = [
    ({"age": [1, 2.5]}, AGE, "'age' has the value 2.5, which int32 cannot hold; expected age:"),
    ({"age": [1, 2**40]}, AGE, "'age' has the value 1099511627776, which int32 cannot hold"),
]


@pytest.mark.parametrize("save", EVERY)
@pytest.mark.parametrize(("columns", "spec", "message"), WRONG_ROWS)
def test_a_value_that_does_not_fit_is_named(
    tmp_path: Path, save: Save, columns: Columns, spec: TensorSpec, message: str
) -> None:
    path = save(tmp_path, columns)
    place = r"t\.csv:3" if save is save_csv else r"t\.jsonl:2" if save is save_jsonl else "row 1"
    with pytest.raises(DataError, match=rf"{path.name}.*{place}: {message}|^{path}.*: {message}"):
        load(path, spec)
    with pytest.raises(DataError, match=place):
        load(path, spec)


@pytest.mark.parametrize(
    ("save", "columns", "message"),
    [
        (save_csv, {"age": [3, ""], "b": [1, 1]}, ("t.csv:3", "'age' is ''", "number")),
        (save_csv, {"age": [3, "ten"]}, ("t.csv:3", "'age' is 'ten'", "number")),
        (save_jsonl, {"age": [3, None]}, ("t.jsonl:2", "'age' is None", "number")),
        (save_jsonl, {"age": [3, {}]}, ("t.jsonl:2", "'age' is {}", "number")),
        (save_parquet, {"age": [3, None]}, ("t.parquet", "row 1", "'age'", "null")),
        (save_folder, {"age": [3, 4, 5, None]}, ("b/a.parquet", "row 1", "'age'", "no value")),
        (save_datasets, {"age": [3, None]}, ("saved", "row 1", "'age'", "null", "mend")),
        (save_parquet, {"age": ["3", "4"]}, ("'age'", "string", "expected numbers")),
    ],
)
def test_a_row_without_a_number_is_named(
    tmp_path: Path, save: Save, columns: Columns, message: Told
) -> None:
    with pytest.raises(DataError, match=facts(*message)):
        load(save(tmp_path, columns), AGE)


@pytest.mark.parametrize(
    ("save", "rows", "message"),
    [
        (save_jsonl, [[1, 2], [3]], ("t.jsonl:2", "'input_ids'", "[1]", "[2]")),
        (save_jsonl, [[1, 2], [3, [4]]], ("t.jsonl:2", "'input_ids' is [3, [4]]", "number")),
        (save_parquet, [[1, 2], [3]], ("row 1", "'input_ids'", "list of 1", "2 in", "pad all")),
        (save_parquet, [[1, 2], [3, None]], ("row 1", "'input_ids'", "null")),
        (save_parquet, [[1, 2], None], ("row 1", "'input_ids'", "null")),
        (save_datasets, [[1], [2], [3, 4]], ("saved", "row 2", "'input_ids'", "list of 2", "1")),
        (save_folder, [[1], [2], [3, 4]], ("b/a.parquet: row 0: 'input_ids' is int64 [2] for e",)),
    ],
)
def test_lists_of_several_lengths_are_named(
    tmp_path: Path, save: Save, rows: list[Any], message: Told
) -> None:
    with pytest.raises(DataError, match=facts(*message)):
        load(save(tmp_path, {"input_ids": rows}), IDS)


@pytest.mark.parametrize("save", EVERY)
def test_columns_that_are_not_the_inputs_are_listed(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, {"a": [1, 2], "b": [3, 4], "label": [0, 1]})
    for specs in ([X], [AGE, X]):
        with pytest.raises(DataError, match=facts("columns (a, b, label)", "inputs")):
            load(path, *specs)


@pytest.mark.parametrize("save", TYPED)
def test_a_list_is_no_feature(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, {"a": [[1, 2]], "b": [3], "c": [4]})
    with pytest.raises(DataError, match=facts("'a' is a list", "expected a number")):
        load(path, X)


def test_keys_have_to_be_texts_or_integers(tmp_path: Path) -> None:
    path = save_jsonl(tmp_path, {"age": [1, 2], "who": ["ann", None]})
    with pytest.raises(DataError, match=facts("t.jsonl:2", "--group who is None", "integer")):
        load(path, AGE, keys=["who"])


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    good = {"bytes": encoded(0), "path": "a.png"}
    for bad, message in [
        ({"bytes": None, "path": "b.png"}, ("row 1", "'photo' has no bytes", "save")),
        ({"bytes": b"no image", "path": None}, ("row 1", "'photo' cannot be read")),
    ]:
        path = save_parquet(tmp_path, {"photo": [good, bad]})
        with pytest.raises(DataError, match=facts(*message)):
            load(path, PHOTO, scale=1.0)
    path = save_parquet(tmp_path, {"photo": [good], "mask": [good]})
    with pytest.raises(DataError, match=facts("photo and mask", "images", "--image-column")):
        load(path, PHOTO, scale=1.0)
    assert load(path, PHOTO, scale=1.0, image_column="mask")["image"].shape == (1, 3, 4, 6)


def test_a_file_of_another_schema_is_named(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"age": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"years": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=facts("b.parquet", "'age'", "columns are")):
        load(tmp_path, AGE)


@pytest.mark.parametrize("content", [b"", b"PAR1 no parquet PAR1", b"text"])
def test_damaged_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.parquet cannot be read \(.*\); expected parquet; "):
        load(tmp_path / "t.parquet", AGE)


def test_damaged_and_split_data_sets_are_named(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"age": [1, 2]})
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=facts("train, test", "use one")):
        load(tmp_path / "both", AGE)
    assert load(tmp_path / "both" / "test", AGE)["age"].tolist() == [1, 2]
    (tmp_path / "both" / "test" / "state.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match=facts("test cannot be read", "expected a data set")):
        load(tmp_path / "both" / "test", AGE)


@pytest.mark.parametrize(
    ("save", "package", "extra"),
    [(save_parquet, "pyarrow", "parquet"), (save_datasets, "datasets", "datasets")],
)
def test_without_the_package_the_extra_is_named(
    tmp_path: Path, save: Save, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, {"age": [1]})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{package} .*pip install 'offramp\[{extra}\]'"):
        load(path, AGE)


def test_a_stream_of_hugging_face_does_not_know_its_number() -> None:
    made = datasets.Dataset.from_dict({"x": [[0.5, 1.5]] * 3})
    source = HuggingFaceSource(made.to_iterable_dataset(), PreprocessingSpec())
    assert source.known_samples is None
    assert HuggingFaceSource(made, PreprocessingSpec(max_samples=2)).known_samples == 2
