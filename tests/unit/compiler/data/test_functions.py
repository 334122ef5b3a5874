"""A function of the user's own yields batches."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.compiler.data.making import X, load, load_hashed

from offramp.calibration.data.errors import DataError
from offramp.compiler.data import as_source

SOURCE = """
import dataclasses

import numpy as np

@dataclasses.dataclass
class Made:
    rows: int

def batches():
    for number in range(3):
        yield {"x": np.full((2, 3), number, np.float32), "label": [number] * 2}

def whole():
    return np.ones((5, 3), np.float32), np.arange(5)

def endless():
    while True:
        yield np.ones((4, 3))

def broken():
    yield np.ones((4, 3))
    raise KeyError("photo")

def needs(path):
    yield path

def nothing():
    return 3

value = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mydata.py").write_text(SOURCE)
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "deeper.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["mydata.py:batches", "nested/deeper.py:batches", "nested.deeper:batches"]
)
def test_batches_of_a_function(folder: Path, name: str) -> None:
    arrays, digest = load_hashed(name, X)
    assert arrays["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert arrays["label"].tolist() == [0, 0, 1, 1, 2, 2]
    assert load_hashed(str(folder / "mydata.py") + ":batches", X)[1] == digest


def test_arrays_of_a_function(folder: Path) -> None:
    arrays = load("mydata.py:whole", X)
    assert arrays["x"].shape == (5, 3)
    assert arrays["label"].tolist() == [*range(5)]


def test_an_endless_function_is_read_up_to_the_limit(folder: Path) -> None:
    assert len(load("mydata.py:endless", X, max_samples=6)["x"]) == 6


def test_functions_of_a_program(folder: Path) -> None:
    def batches():
        yield np.ones((4, 3), np.float32)

    for data in (batches, batches(), lambda: [np.ones((4, 3))], "mydata.py:whole"):
        assert load(as_source(data), X)["x"].shape[1] == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mydata.py:broken", ("mydata.py:23", "KeyError: 'photo'", "expected a function")),
        ("mydata.py:needs", ("TypeError", "missing 1 required positional argument")),
        ("mydata.py:nothing", ("type int", "mapping from the names")),
        ("mydata.py:value", ("'value'", "mydata.py", "expected one without arguments")),
        ("mydata.py:absent", ("'absent' in mydata.py",)),
        ("nested.deeper:absent", ("AttributeError", "absent")),
        ("absent.module:batches", ("ModuleNotFoundError", "'absent'")),
        ("absent.py:batches", ("absent.py: no such file", "FILE.py:FUNCTION")),
    ],
)
def test_functions_that_fail_are_named(folder: Path, name: str, message: Told) -> None:
    with pytest.raises(DataError, match=facts(*message)) as caught:
        load(name, X)
    assert str(caught.value).startswith(name.partition(":")[0])


def test_errors_of_data_are_passed_on(folder: Path) -> None:
    (folder / "other.py").write_text(
        textwrap.dedent(
            """
            def batches():
                yield {"y": [[1.0]]}
            """
        )
    )
    with pytest.raises(DataError, match=facts("other.py:batches", "batch 0", "'x' is missing")):
        load("other.py:batches", X)


@pytest.mark.parametrize("data", [3, None, "", 1.5])
def test_what_is_no_data(data: object) -> None:
    message = "no such file or folder" if isinstance(data, str) else "is not data; pass a mapping"
    with pytest.raises(DataError, match=message):
        as_source(data)
