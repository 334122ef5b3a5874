"""Texts in CSV and JSONL files become token ids by a tokenizer of Hugging Face."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts, tells
from tests.unit.compiler.data.making import (
    IDS,
    MASK,
    TYPES,
    VOCABULARY,
    X,
    load,
    load_hashed,
    save_tokenizer,
    write_lines,
)

from offramp.bundle import TensorSpec
from offramp.calibration.data.errors import DataError

FIXED = TensorSpec(name="input_ids", dtype="int32", shape=("batch", 6))
ROWS = [
    {"text": "a very good film", "label": 1, "who": "ann"},
    {"text": "bad, bad", "label": 0, "who": "bob"},
    {"text": "good", "label": 1, "who": "ann"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture(params=["jsonl", "csv", "tsv"])
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"texts.{request.param}"
    if request.param == "jsonl":
        return write_lines(path, *ROWS, "")
    between = "\t" if request.param == "tsv" else ","
    lines = [f'"{row["text"]}"{between}{row["label"]}{between}{row["who"]}' for row in ROWS]
    return write_lines(path, between.join(ROWS[0]), *lines)


def words(row: np.ndarray) -> str:
    return " ".join(VOCABULARY[number] for number in row)


def test_texts_labels_and_keys(texts: Path, tokenizer: Path) -> None:
    arrays = load(texts, IDS, MASK, TYPES, tokenizer=tokenizer, max_tokens=6, keys=["who"])
    assert [words(row) for row in arrays["input_ids"]] == [
        "[CLS] a very good film [SEP]",
        "[CLS] bad [UNK] bad [SEP] [PAD]",
        "[CLS] good [SEP] [PAD] [PAD] [PAD]",
    ]
    assert arrays["attention_mask"].sum(axis=1).tolist() == [6, 5, 3]
    assert not arrays["token_type_ids"].any()
    dtypes = {name: str(array.dtype) for name, array in arrays.items() if name != "who"}
    assert dtypes == {
        "input_ids": "int64",
        "attention_mask": "int64",
        "token_type_ids": "int32",
        "label": "int64",
    }
    assert arrays["label"].tolist() == [1, 0, 1]
    assert arrays["who"].tolist() == ["ann", "bob", "ann"]


def test_all_kinds_of_files_have_one_hash(tmp_path: Path, tokenizer: Path) -> None:
    jsonl = write_lines(tmp_path / "a.jsonl", *ROWS)
    csv = write_lines(
        tmp_path / "a.csv", "label,text", *(f'{row["label"]},"{row["text"]}"' for row in ROWS)
    )
    digests = {load_hashed(path, IDS, tokenizer=tokenizer)[1] for path in (jsonl, csv)}
    assert len(digests) == 1
    assert digests != {load_hashed(csv, IDS, tokenizer=tokenizer, max_samples=2)[1]}


def test_the_length_is_the_models(
    texts: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = load(texts, FIXED, tokenizer=tokenizer)["input_ids"]
    assert array.shape == (3, 6)
    assert array.dtype == np.int32
    short = TensorSpec(name="input_ids", dtype="int64", shape=("batch", 4))
    assert words(load(texts, short, tokenizer=tokenizer)["input_ids"][0]) == "[CLS] a very [SEP]"
    assert not caplog.records  # the model asks for that length


def test_a_free_length_is_128_and_cutting_is_told(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"text": "good " * 200}, {"text": "bad"})
    assert load(path, IDS, tokenizer=tokenizer)["input_ids"].shape == (2, 128)
    tells(caplog.text, "1 of 2 texts", "128 tokens", "--max-tokens")
    caplog.clear()
    assert load(path, IDS, tokenizer=tokenizer, max_tokens=7)["input_ids"].shape == (2, 7)
    assert not caplog.records


def test_the_tokenizers_own_padding_is_kept(tmp_path: Path, texts: Path) -> None:
    from tokenizers import Tokenizer

    path = save_tokenizer(tmp_path / "left.json", special=False)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding(direction="left", pad_id=8, pad_token="a", length=99)
    tokenizer.enable_truncation(77)
    tokenizer.save(str(path))
    array = load(texts, IDS, tokenizer=path, max_tokens=5)["input_ids"]
    assert words(array[2]) == "a a a a good"


def test_pairs_and_other_columns(tmp_path: Path, tokenizer: Path) -> None:
    path = write_lines(
        tmp_path / "pairs.jsonl", {"first": "good film", "second": "bad", "class": 2}
    )
    options = {"text_column": ("first", "second"), "label_column": "class", "max_tokens": 7}
    arrays = load(path, IDS, TYPES, tokenizer=tokenizer, **options)
    assert words(arrays["input_ids"][0]) == "[CLS] good film [SEP] bad [SEP] [PAD]"
    assert arrays["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert arrays["label"].tolist() == [2]


def test_the_only_input_may_have_any_name(texts: Path, tokenizer: Path) -> None:
    spec = TensorSpec(name="tokens", dtype="int64", shape=("batch", "length"))
    assert load(texts, spec, tokenizer=tokenizer)["tokens"].shape == (3, 128)


def test_labels_that_are_texts_are_left_aside(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "t.csv", "text,label", "good,positive", "bad,negative")
    assert "label" not in load(path, IDS, tokenizer=tokenizer)
    tells(caplog.text, "t.csv:2", "'label' is 'positive'", "class")
    with pytest.raises(DataError, match=facts("t.csv:2", "'label' is 'positive'", "number")):
        load(path, IDS, tokenizer=tokenizer, label_column="label")


def test_options_of_a_file(tmp_path: Path, texts: Path, tokenizer: Path) -> None:
    from offramp.compiler.data.reading_options import read_toml

    toml = write_lines(tmp_path / "p.toml", 'tokenizer = "tokenizer.json"', "max_tokens = 9")
    spec = read_toml(toml)
    assert spec.tokenizer == tokenizer
    arrays = load(texts, IDS, tokenizer=spec.tokenizer, max_tokens=spec.max_tokens)
    assert arrays["input_ids"].shape == (3, 9)


JSON_LINES = [
    ("{", "2 is not JSON: .*; mend or remove it"),
    ("[1]", r"2 is '\[1\]', expected an object such as"),
    ('{"txt": "a"}', "2: there is no 'text'; every line needs it, as the first one has it"),
    ('{"text": null}', "2: 'text' is None, expected a text; mend or remove the row"),
    ('{"text": "\\ud800"}', r"2: 'text' is '\\ud800', expected a text"),
    ('{"text": ["a"]}', r"2: 'text' is \['a'\], expected a text"),
    ('{"text": "a", "label": "x"}', "2: 'label' is 'x', expected a number"),
    ('{"text": "a", "label": 0.5}', "2: 'label' is 0.5, expected the number of a class"),
    ('{"text": "a"}', "2: there is no 'label'; every line needs it"),
]


@pytest.mark.parametrize(("line", "message"), JSON_LINES)
def test_a_wrong_line_is_named(tmp_path: Path, tokenizer: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"text": "good", "label": 1}, line)
    with pytest.raises(DataError, match=rf"t\.jsonl:{message}"):
        load(path, IDS, tokenizer=tokenizer)


CSV_LINES = [
    ("text,label\ngood,1\nbad\n", "3 has 1 cells, but the header has 2; mend it .* need quotes"),
    ('text,label\n"good\nfilm",1\nbad,1,2\n', "4 has 3 cells"),
    ('text,label\n"good,1\n', "2 is not CSV: unexpected end of data"),
    ("text,text\na,b\n", "1: two columns are named 'text'; rename one"),
    ("1.5,2\n3,4\n", r"1 has numbers \(1.5, 2\), expected the names of the columns; add a first"),
    ("", " there are no samples in it"),
    ("text,label\n", " there are no samples in it"),
]


@pytest.mark.parametrize(("content", "message"), CSV_LINES)
def test_a_wrong_csv(tmp_path: Path, tokenizer: Path, content: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=rf"t\.csv:{message}"):
        load(tmp_path / "t.csv", IDS, tokenizer=tokenizer)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_other_encodings_are_named(tmp_path: Path, tokenizer: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    first = b'{"text": "a"}' if suffix == "jsonl" else b"text"
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\ngood\xe9\n")  # the first line with a BOM
    with pytest.raises(DataError, match=facts(f"t.{suffix}:2", "UTF-8", "byte 4")):
        load(path, IDS, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([IDS], {"text_column": ("txt",)}, ("'txt'", "text, label")),
        ([IDS], {"label_column": "y"}, ("'y'", "--label-column")),
        ([X], {}, ("input_ids", "x: float32 [batch, 3]")),
        ([IDS, X], {}, ("x: float32",)),
        ([FIXED], {"max_tokens": 5}, ("--max-tokens 5", "6 tokens", "leave it")),
        ([IDS], {"max_tokens": 1}, ("1 tokens", "special")),
        ([IDS], {"mean": (1.0,)}, ("--mean", "images", "not used")),
    ],
)
def test_models_and_options_that_do_not_fit(
    texts: Path, tokenizer: Path, specs: list[TensorSpec], options: dict[str, Any], message: Told
) -> None:
    with pytest.raises(DataError, match=facts(f"{texts}:", *message)):
        load(texts, *specs, tokenizer=tokenizer, **options)


def test_tokenizers_that_cannot_be_used(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(DataError, match=facts("--tokenizer", "no.json: no such file", "token")):
        load(texts, IDS, tokenizer=tmp_path / "no.json")
    other = write_lines(tmp_path / "other.json", {"vocab": {}})
    with pytest.raises(DataError, match=facts("--tokenizer", "other.json", "Hugging Face")):
        load(texts, IDS, tokenizer=other)
    bare = save_tokenizer(tmp_path / "bare.json", pad=False)
    with pytest.raises(DataError, match=facts("bare.json", "pads", "enable")):
        load(texts, IDS, tokenizer=bare)


def test_texts_need_a_tokenizer(texts: Path) -> None:
    for options in ({"text_column": ("text",)}, {"max_tokens": 5}):
        with pytest.raises(DataError, match=facts("texts", "--tokenizer FILE")):
            load(texts, IDS, **options)
    with pytest.raises(DataError, match=facts("columns", "text", "inputs", "--tokenizer")):
        load(texts, IDS, MASK)


def test_without_tokenizers_the_extra_is_named(
    texts: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"tokenizers .*pip install 'offramp\[text\]'"):
        load(texts, IDS, tokenizer=tokenizer)
