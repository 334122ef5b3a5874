"""Arrays and batches of a program's own become the inputs of a model."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.facts import Told, facts
from tests.unit.compiler.data.making import IDS, X, load, load_hashed

from offramp.bundle import TensorSpec
from offramp.bundle.npz import is_mapped
from offramp.calibration.data import data_sources
from offramp.calibration.data.dataset import read_dataset
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data import ArraySource, IterableSource, PreprocessingSpec, as_source

A = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 2, 1, 2], np.int32)
B = TensorSpec(name="b", dtype="float32", shape=("batch", 2))
LEFT, RIGHT = (TensorSpec(name=name, dtype="int64", shape=("batch",)) for name in "lr")


def same(arrays: dict[str, np.ndarray], **expected: Any) -> None:
    assert sorted(arrays) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)


def test_arrays_that_fit_are_not_copied() -> None:
    arrays = load(ArraySource({"x": A, "labels": Y}), X)
    assert arrays["x"] is A
    same(arrays, x=A, label=Y)


@pytest.mark.parametrize("given", [A, (A,), {"x": A}, {"x": A.tolist()}, torch.from_numpy(A)])
def test_one_array_is_the_only_input(given: object) -> None:
    same(load(ArraySource(given), X), x=A)


def test_a_data_set_is_checked_as_that_of_a_file_is() -> None:
    data = read_dataset(ArraySource({"x": A, "label": Y}), [X])
    assert data.labels is not None
    assert data.labels.tolist() == Y.tolist()
    with pytest.raises(DataError, match=facts("mine", "input 'z'", "x: float32")):
        read_dataset(ArraySource({"x": A, "z": A}, name="mine"), [X])
    with pytest.raises(DataError, match=r"^data: input 'x' is uint8 .*\.astype\('float32'\)"):
        read_dataset(ArraySource(A.astype(np.uint8)), [X])
    with pytest.raises(DataError, match=r"^data: arrays differ in length"):
        read_dataset(ArraySource({"x": A, "label": Y[:2]}), [X])


def test_large_arrays_are_converted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", 16)
    source = ArraySource({"x": A.astype(np.float64)})
    arrays, digest = source.load([X], ScratchSpace(tmp_path))
    assert is_mapped(arrays["x"])
    same(arrays, x=A)
    assert digest == load_hashed(ArraySource(A), X)[1]


BATCHES = [
    ("mappings", [{"x": A[:3], "label": Y[:3]}, {"x": A[3:], "label": Y[3:]}]),
    ("mappings of lists", [UserDict({"x": A.tolist(), "labels": Y.tolist()})]),
    ("tuples", [(A[:1], Y[:1]), (A[1:], Y[1:])]),
    ("lists", [[A[:1], Y[:1]], [A[1:], Y[1:]]]),
    ("tensors", [(torch.from_numpy(A).requires_grad_(), torch.from_numpy(Y))]),
    ("float64", [(A.astype(np.float64), Y.astype(np.int64))]),
]


@pytest.mark.parametrize("batches", [b for _, b in BATCHES], ids=[name for name, _ in BATCHES])
def test_batches_with_labels(batches: list[Any]) -> None:
    same(load(IterableSource(batches), X), x=A, label=Y)
    same(load(IterableSource(iter(batches), limit=2), X), x=A[:2], label=Y[:2])


def test_a_data_loader_of_torch() -> None:
    data = torch.utils.data.TensorDataset(torch.from_numpy(A), torch.from_numpy(Y))
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    same(load(as_source(loader), X), x=A, label=Y)
    same(load(as_source(loader, PreprocessingSpec(max_samples=1)), X), x=A[:1], label=Y[:1])


def test_tuples_are_in_the_order_of_the_inputs() -> None:
    b = np.ones((4, 2), np.float32)
    same(load(IterableSource([(A, b)]), X, B), x=A, b=b)
    same(load(IterableSource([(A, b, Y)]), X, B), x=A, b=b, label=Y)
    same(load(ArraySource((b, A)), B, X), x=A, b=b)


def test_two_integer_inputs_are_no_labels() -> None:
    same(load(IterableSource([(Y, Y + 1)]), LEFT, RIGHT), l=Y, r=Y + 1)


def test_batches_without_labels() -> None:
    same(load(IterableSource([A[:2], A[2:]]), X), x=A)
    same(load(IterableSource([(A,)]), X), x=A)


def test_an_endless_iterable_is_read_up_to_the_limit() -> None:
    counted = itertools.count()
    endless = (A + next(counted) for _ in itertools.count())
    arrays = load(IterableSource(endless, limit=10), X)
    assert len(arrays["x"]) == 10
    assert next(counted) == 3


def test_keys_are_passed_on() -> None:
    group = np.array(["a", "b", "a", "c"])
    batches = [{"x": A[:2], "who": group[:2]}, {"x": A[2:], "who": group[2:]}]
    arrays, digest = load_hashed(IterableSource(batches), X, keys=("who",))
    same(arrays, x=A, who=group)
    assert digest == load_hashed(IterableSource([A]), X)[1]
    assert digest == load_hashed(ArraySource({"x": A, "who": group}), X, keys=("who",))[1]


CONVERSIONS = [
    ("int64", "int32", [3, -4]),
    ("int32", "int64", [3, -4]),
    ("uint8", "int64", [3, 255]),
    ("bool", "int64", [True, False]),
    ("int64", "bool", [1, 0]),
    ("float64", "float32", [0.5, float("nan")]),
    ("float32", "float16", [0.5, float("inf")]),
]


@pytest.mark.parametrize(("found", "wanted", "values"), CONVERSIONS)
def test_conversions_that_lose_nothing(found: str, wanted: str, values: list[Any]) -> None:
    spec = TensorSpec(name="x", dtype=wanted, shape=("batch",))
    array = load(ArraySource(np.array(values, found)), spec)["x"]
    assert array.dtype == wanted
    np.testing.assert_array_equal(array, np.array(values, wanted))


@pytest.mark.parametrize(
    ("found", "wanted", "values", "value"),
    [
        ("int64", "int32", [1, 2**31], "2147483648"),
        ("int64", "uint8", [3, -1], "-1"),
        ("uint64", "int64", [0, 2**63], "9223372036854775808"),
        ("int64", "bool", [1, 2], "2"),
        ("float64", "float32", [1, 1e39], r"1e\+39"),
        ("float32", "float16", [1, 70000], "70000.0"),
    ],
)
def test_values_that_do_not_fit_are_named(
    found: str, wanted: str, values: list[Any], value: str
) -> None:
    spec = TensorSpec(name="x", dtype=wanted, shape=("batch",))
    message = rf"sample 1: 'x' has the value {value}, which {wanted} cannot hold; expected x: "
    with pytest.raises(DataError, match=rf"^data: {message}"):
        load(ArraySource(np.array(values, found)), spec)
    with pytest.raises(DataError, match=rf"^data: batch 0: {message}"):
        load(IterableSource([np.array(values, found)]), spec)


@pytest.mark.parametrize(
    ("found", "wanted"), [("uint8", "float32"), ("float32", "int64"), ("bool", "float32")]
)
def test_what_may_lose_meaning_is_not_converted(found: str, wanted: str) -> None:
    spec = TensorSpec(name="x", dtype=wanted, shape=("batch",))
    with pytest.raises(DataError, match=facts("batch 0", f"'x' is {found}", f"astype('{wanted}')")):
        load(IterableSource([np.zeros(2, found)]), spec)


def rows() -> Iterator[np.ndarray]:
    yield from A


def ragged() -> list[Any]:
    return [{"input_ids": [[1, 2], [3]]}]


@pytest.mark.parametrize(
    ("batches", "specs", "message"),
    [
        ([], [X], ("no batch", "read once", "fresh one")),
        ([A[:0]], [X], ("batch 0", "'x' is float32 [0, 3]", "dimension 0 (batch) is empty")),
        ([(A, A)], [X], ("batch 0", "2 arrays", "expected 1", "(x: float32 [batch, 3")),
        ([(A, A, A)], [X], ("batch 0", "3 arrays", "expected 1", "mapping from names")),
        ([(A,)], [X, B], ("batch 0", "1 arrays", "expected 2")),
        ([{"y": A}], [X], ("batch 0", "'x' is missing", "'y'", "x: float32")),
        ([{}], [X], ("batch 0", "'x' is missing", "nothing")),
        ([A, A[:, :2]], [X], ("batch 1", "'x' is float32 [2]", "expected float32")),
        (rows(), [X], ("batch 0", "single sample", "batch dimension")),
        (ragged(), [IDS], ("batch 0", "'input_ids'", "type list")),
        (["text"], [X], ("batch 0", "'x' is <U4 []", "x: float32")),
        ([{"x": object()}], [X], ("batch 0", "'x'", "type object", "dtype object")),
        ([torch.ones(2, 3, dtype=torch.bfloat16)], [X], ("batch 0", "'x'", "type Tensor", "BF")),
    ],
)
def test_batches_that_do_not_fit(batches: Any, specs: list[TensorSpec], message: Told) -> None:
    with pytest.raises(DataError, match=facts("data:", *message)):
        load(IterableSource(batches), *specs)
