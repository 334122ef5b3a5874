"""Kinds of data by their text form; nothing is guessed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.compiler.data.making import X, load, load_hashed, pixels, save_image, write_lines

from offramp.calibration.data.data_sources import NpyFolderSource, NpzSource
from offramp.calibration.data.dataset import read_dataset
from offramp.calibration.data.errors import DataError
from offramp.compiler.data import PreprocessingSpec, as_source, find_source
from offramp.compiler.data.batches import FunctionSource
from offramp.compiler.data.data_flags import add_data_arguments, source_of, spec_of
from offramp.compiler.data.find_source import KINDS
from offramp.compiler.data.images import ImageFolderSource
from offramp.compiler.data.reading_options import OPTIONS, read_toml
from offramp.compiler.data.tables import HuggingFaceSource, ParquetSource, TextTableSource

NONE = PreprocessingSpec()
A = np.ones((4, 3), np.float32)


def npz(path: Path) -> None:
    np.savez(path, x=A)


def npy(path: Path) -> None:
    path.mkdir(exist_ok=True)
    np.save(path / "x.npy", A)


def image(path: Path) -> None:
    save_image(path / "a.png", pixels())


def saved(path: Path) -> None:
    path.mkdir(exist_ok=True)
    write_lines(path / "state.json", "{}")


def parquet(path: Path) -> None:
    path.mkdir(exist_ok=True)
    write_lines(path / "a.parquet", "")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("a.npz", npz, NpzSource),
        (
            "data.zip",
            lambda path: npz(path.with_suffix(".npz")) or path.with_suffix(".npz").rename(path),
            NpzSource,
        ),
        ("folder", npy, NpyFolderSource),
        ("folder", image, ImageFolderSource),
        ("folder", saved, HuggingFaceSource),
        ("folder", parquet, ParquetSource),
        ("a.parquet", empty, ParquetSource),
        ("A.CSV", empty, TextTableSource),
        ("a.tsv", empty, TextTableSource),
        ("a.jsonl", empty, TextTableSource),
        ("a.ndjson", empty, TextTableSource),
    ],
)
def test_kinds_are_told_apart(
    tmp_path: Path, name: str, make: Callable[[Path], object], kind: type
) -> None:
    make(tmp_path / name)
    source = find_source(str(tmp_path / name), NONE)
    assert isinstance(source, kind)
    assert source.name == str(tmp_path / name)
    assert isinstance(as_source(tmp_path / name), kind)


def test_a_function_is_one_where_there_is_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(find_source("my.data:batches", NONE), FunctionSource)
    Path("a b").mkdir()
    Path("a b/my.py").touch()
    assert isinstance(find_source("./a b/my.py:batches", NONE), FunctionSource)
    npy(Path("data:npy"))
    assert isinstance(find_source("data:npy", NONE), NpyFolderSource)


def test_a_folder_of_two_kinds_is_refused(tmp_path: Path) -> None:
    npy(tmp_path / "data")
    image(tmp_path / "data" / "photos")
    with pytest.raises(DataError, match=facts("data", "npy files", "images")):
        find_source(str(tmp_path / "data"), NONE)
    assert isinstance(find_source(str(tmp_path / "data/photos"), NONE), ImageFolderSource)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.npz", ("absent.npz: no such file",)),
        ("absent", ("absent", "no such file or folder", "FILE.npz")),
        ("absent:", ("no such file or folder",)),
        ("notes.txt", ("notes.txt", "no kind", "FILE.npz")),
        ("hollow", ("hollow", "no kind", "FILE.npz")),
    ],
)
def test_data_of_no_kind(tmp_path: Path, name: str, message: Told) -> None:
    write_lines(tmp_path / "notes.txt", "none")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match=facts(*message)) as caught:
        read_dataset(find_source(str(tmp_path / name), NONE), [X])
    if "expected" in message:
        assert all(kind.form in str(caught.value) for kind in KINDS)


@pytest.mark.parametrize("name", ["absent.npz", "absent.csv", "absent.parquet", "absent.py:rows"])
def test_an_absent_file_is_noticed_before_it_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=facts(name.partition(":")[0], "no such file")):
        find_source(str(tmp_path / name), NONE)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--data")
    add_data_arguments(parser)
    return parser.parse_args(argv)


FLAGS: list[tuple[str, str, Any]] = [
    ("image_size", "224,200", (224, 200)),
    ("mean", "0.5", (0.5,)),
    ("std", "1,2,3.5", (1, 2, 3.5)),
    ("scale", "1/255", 1 / 255),
    ("layout", "nhwc", "nhwc"),
    ("resize", "stretch", "stretch"),
    ("crop_share", "0.875", 0.875),
    ("resample", "bicubic", "bicubic"),
    ("image_column", "photo", "photo"),
    ("tokenizer", "/t.json", Path("/t.json")),
    ("text_column", "a,b", ("a", "b")),
    ("max_tokens", "64", 64),
    ("label_column", "class", "class"),
    ("max_samples", "1000", 1000),
]


def test_every_field_is_an_option() -> None:
    names = [field.name for field in fields(PreprocessingSpec)]
    assert names == [option.field for option in OPTIONS] == [name for name, _, _ in FLAGS]


@pytest.mark.parametrize(("name", "text", "value"), FLAGS)
def test_flags_and_files_say_the_same(tmp_path: Path, name: str, text: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    assert spec_of(parsed(flag, text)) == PreprocessingSpec(**{name: value})
    plain = text.split(",") if isinstance(value, tuple) else [text]
    quoted = [part if part.replace(".", "").isdecimal() else f'"{part}"' for part in plain]
    written = f"[{', '.join(quoted)}]" if len(quoted) > 1 else quoted[0]
    toml = write_lines(tmp_path / "p.toml", f"{name} = {written}")
    assert spec_of(parsed("--preprocessing", str(toml))) == PreprocessingSpec(**{name: value})


def test_flags_win_over_files_and_these_over_the_folders(tmp_path: Path) -> None:
    image(tmp_path)
    write_lines(tmp_path / "preprocessing.toml", "scale = 3", "mean = 3", "std = 3")
    toml = write_lines(tmp_path / "p.toml", "scale = 2", "mean = 2")
    options = parsed("--scale", "1", "--preprocessing", str(toml), "--data", str(tmp_path))
    source = source_of(options.data, options)
    assert isinstance(source, ImageFolderSource)
    assert source.options == PreprocessingSpec(scale=1, mean=(2,), std=(3,))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("image_size", "224", ("'224'", "height and width", "224,224")),
        ("image_size", "224,0", ("is not a size",)),
        ("mean", "1,2", ("'1,2'", "each channel", "one or three", "0.485")),
        ("mean", "nan", ("is not a number for each channel",)),
        ("std", "0", ("'0'", "standard deviation", "above 0")),
        ("scale", "1/0", ("'1/0'", "factor of pixels", "above 0", "1/255")),
        ("scale", "-1", ("is not a factor",)),
        ("layout", "chw", ("'chw'", "nchw, nhwc")),
        ("resize", "pad", ("'pad'", "crop, stretch")),
        ("crop_share", "1.5", ("'1.5'", "share", "up to 1")),
        ("resample", "box", ("'box'", "nearest, bilinear, bicubic, lanczos")),
        ("text_column", "a,b,c", ("'a,b,c'", "one column", "two")),
        ("max_tokens", "0", ("'0'", "1 or more")),
        ("max_samples", "many", ("'many'", "1 or more")),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, name: str, text: str, message: Told) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(argparse.ArgumentError, match=facts(f"argument {flag}:", *message)):
        parsed(f"{flag}={text}")
    toml = write_lines(tmp_path / "p.toml", f'{name} = "{text}"')
    with pytest.raises(DataError, match=facts(f"p.toml: {name}:", *message)):
        read_toml(toml)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("size = 3", ("p.toml", "'size'", "image_size, mean, std")),
        ("scale", ("p.toml", "TOML", "mend")),
        (None, ("p.toml", "No such file or directory", "check")),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, line: str | None, message: Told) -> None:
    if line is not None:
        write_lines(tmp_path / "p.toml", line)
    with pytest.raises(DataError, match=facts(*message)):
        read_toml(tmp_path / "p.toml")


def test_the_first_samples_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=A, label=np.arange(len(A)))
    npy(tmp_path / "arrays")
    whole, digest = load_hashed(tmp_path / "a.npz", X)
    first, other = load_hashed(tmp_path / "a.npz", X, max_samples=2)
    np.testing.assert_array_equal(first["x"], whole["x"][:2])
    np.testing.assert_array_equal(first["label"], [0, 1])
    assert digest != other
    assert load_hashed(tmp_path / "a.npz", X, max_samples=len(A))[1] == digest
    np.testing.assert_array_equal(load(tmp_path / "arrays", X, max_samples=1)["x"], A[:1])


USEFUL = [option for option in OPTIONS if option.family != "samples"]


@pytest.mark.parametrize("option", USEFUL, ids=lambda option: option.field)
def test_an_option_of_no_use_is_refused(tmp_path: Path, option: Any) -> None:
    npz(tmp_path / "a.npz")
    value = {name: value for name, _, value in FLAGS}[option.field]
    with pytest.raises(DataError, match=facts("a.npz", f"{option.flag}", f"{option.family}")):
        find_source(str(tmp_path / "a.npz"), PreprocessingSpec(**{option.field: value}))
